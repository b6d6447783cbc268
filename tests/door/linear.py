"""Is the history of a register linearizable?  Is there one order of its operations that explains what each returned?

The order must respect time: an operation that returned before another was called is before it.  A register holds one
value, None when the object is missing.  An operation may say which value it found (`found`), and may write one.

The search is that of Wing and Gong, with Lowe's memory of configurations that were tried ("Testing for
linearizability", 2016): it takes operations in the order of their calls, takes back what leads nowhere, and never
tries the same set of taken operations with the same value twice.

An operation whose outcome nobody knows (a lost connection) has no end.  It may have happened at any time after its
call, or not at all.  Two things keep many of them cheap:
- one that wrote a value which somebody found happened before that somebody's operation ended;
- one that wrote a value which nobody found is left out: leaving it out explains at least as much.
What remains are removals.  They are all alike, so they happen in the order of their calls; and only where there is
something to remove, and where nothing else leads on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

Value = int | None


class Nothing:
    """Stands for no value, not even None."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING: Final = Nothing()
UNKNOWN: Final = math.inf
"""End of an operation whose outcome nobody knows."""


@dataclass(frozen=True)
class Operation:
    """One operation of a register; times in any unit."""

    called: float
    ended: float
    found: Value | Nothing = NOTHING
    """The value that it found; NOTHING if it does not say."""
    writes: Value | Nothing = NOTHING
    who: str = ""

    def __str__(self) -> str:
        said = [] if isinstance(self.found, Nothing) else [f"found {self.found}"]
        said += [] if isinstance(self.writes, Nothing) else [f"wrote {self.writes}"]
        return f"{self.called:.6f} to {self.ended:.6f}: {self.who} {', '.join(said)}"


class _Taken(NamedTuple):
    """An operation that was taken, and what it changed."""

    number: int
    before: Value


def contradiction(history: Sequence[Operation]) -> Operation | None:
    """Return the first operation that no order explains, for people to begin with; None if the history is linearizable.

    Values that are written are unique in the history, except None.
    """
    certain, removals = _useful(history)
    return _Search(certain, removals).run()


def _useful(history: Sequence[Operation]) -> tuple[list[Operation], list[float]]:
    """Return the operations with an end in the order of their calls, and the calls of removals without one."""
    seen_at: dict[Value, float] = {}
    for operation in history:
        if not isinstance(operation.found, Nothing) and operation.found is not None:
            assert operation.ended != UNKNOWN, "nobody knows what it found"
            seen_at[operation.found] = min(operation.ended, seen_at.get(operation.found, UNKNOWN))
    certain, removals = [], []
    for operation in history:
        if operation.ended != UNKNOWN:
            certain.append(operation)
        elif operation.writes is None:
            removals.append(operation.called)
        elif isinstance(operation.writes, int) and operation.writes in seen_at:
            certain.append(replace(operation, ended=seen_at[operation.writes]))
    certain.sort(key=lambda operation: (operation.called, operation.ended))
    return certain, sorted(removals)


class _Search:
    """Looks for an order of `operations`, among which some of the `removals` happened."""

    def __init__(self, operations: Sequence[Operation], removals: Sequence[float]) -> None:
        self._operations = operations
        self._removals = removals
        self._is_taken = [False] * len(operations)
        self._first = 0
        """All operations before it are taken."""
        self._removed = 0
        """So many of the removals are taken."""
        self._value: Value = None
        self._mask = 0
        self._order: list[_Taken] = []
        self._tried: set[tuple[int, int, Value]] = set()
        self._furthest = (-1, 0)
        """Most operations that were taken, and the one that could not be taken then."""

    def run(self) -> Operation | None:
        """Return None, or the operation that could not be explained when most others were."""
        start = 0
        while self._first < len(self._operations):
            number = self._next(start)
            if number is not None:
                self._take(number)
                start = 0
                continue
            if len(self._order) > self._furthest[0]:
                self._furthest = (len(self._order), self._earliest_end()[1])
            if not self._order:
                return self._operations[self._furthest[1]]
            start = self._take_back() + 1
        return None

    def _next(self, start: int) -> int | None:
        """Return an operation from `start` on that can be the next in the order and was not tried here yet.

        The number behind all operations stands for a removal.
        """
        end = self._earliest_end()[0]
        for number in range(max(start, self._first), len(self._operations)):
            operation = self._operations[number]
            if operation.called > end:
                break
            if self._is_taken[number]:
                continue
            if not isinstance(operation.found, Nothing) and operation.found != self._value:
                continue
            value = self._value if isinstance(operation.writes, Nothing) else operation.writes
            if self._is_new(self._mask | 1 << number, self._removed, value):
                return number
        behind = len(self._operations)
        is_due = self._removed < len(self._removals) and self._removals[self._removed] <= end
        can_remove = start <= behind and is_due and self._value is not None
        return behind if can_remove and self._is_new(self._mask, self._removed + 1, None) else None

    def _is_new(self, mask: int, removed: int, value: Value) -> bool:
        configuration = (mask, removed, value)
        if configuration in self._tried:
            return False
        self._tried.add(configuration)
        return True

    def _earliest_end(self) -> tuple[float, int]:
        """Return the end of the operation that must be taken first of those that are left, and its number."""
        end, found = UNKNOWN, self._first
        for number in range(self._first, len(self._operations)):
            operation = self._operations[number]
            if operation.called > end:
                break
            if not self._is_taken[number] and operation.ended < end:
                end, found = operation.ended, number
        return end, found

    def _take(self, number: int) -> None:
        self._order.append(_Taken(number, self._value))
        if number == len(self._operations):
            self._removed += 1
            self._value = None
            return
        self._is_taken[number] = True
        self._mask |= 1 << number
        writes = self._operations[number].writes
        if not isinstance(writes, Nothing):
            self._value = writes
        while self._first < len(self._operations) and self._is_taken[self._first]:
            self._first += 1

    def _take_back(self) -> int:
        number, self._value = self._order.pop()
        if number == len(self._operations):
            self._removed -= 1
            return number
        self._is_taken[number] = False
        self._mask &= ~(1 << number)
        self._first = min(self._first, number)
        return number
