"""Is the history of a register linearizable?  Is there one order of its operations that explains what each returned?

The order must respect time: an operation that returned before another was called is before it.  A register holds one
value, None when the object is missing.  An operation may say which value it found (`found`), or which one it did not
find (`Not`), and may write one.  So a conditional write that was done found what it required, and writes; one that was
refused found something else, and writes nothing.

The search is that of Wing and Gong, with Lowe's memory of configurations that were tried ("Testing for
linearizability", 2016): it takes operations in the order of their calls, takes back what leads nowhere, and never
tries the same set of taken operations with the same value twice.  Two rules keep it short:
- One that may be next and writes nothing is next: whatever follows can follow it, too.
- A value is not replaced while others are left that found it, for it is written once.

An operation whose outcome nobody knows (a lost connection) has no end.  It may have happened at any time after its
call, or not at all; with `found`, only where the register held that.  What keeps many of them cheap:
- One that wrote a value which somebody found happened before that somebody's operation ended.
- All values that nobody speaks of are alike (`_UNSEEN`).  Where nobody says what he did not find, it is of no use that
  one of them was written: leaving it out explains at least as much.
- What remains happens only where it changes something, and where nothing else leads on.  Those that require and write
  the same happen in the order of their calls.  Of those that require the same value only the first is of use: values
  are written once, so that one is gone then.  What led nowhere with some of them leads nowhere with more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import Final, NamedTuple

Value = int | str | bytes | None


class Nothing:
    """Stands for no value, not even None."""

    def __repr__(self) -> str:
        return "nothing"


@dataclass(frozen=True)
class Not:
    """Any value but this one."""

    value: Value

    def __str__(self) -> str:
        return f"something else than {self.value!r}"


NOTHING: Final = Nothing()
PRESENT: Final = Not(None)
UNKNOWN: Final = math.inf
"""End of an operation whose outcome nobody knows."""
Found = Value | Not | Nothing


@dataclass(frozen=True)
class Operation:
    """One operation of a register; times in any unit."""

    called: float
    ended: float
    found: Found = NOTHING
    """The value that it found; NOTHING if it does not say."""
    writes: Value | Nothing = NOTHING
    who: str = ""

    def __str__(self) -> str:
        said = [] if isinstance(self.found, Nothing) else [f"found {self.found!r}"]
        said += [] if isinstance(self.writes, Nothing) else [f"wrote {self.writes!r}"]
        return f"{self.called:.6f} to {self.ended:.6f}: {self.who} {', '.join(said)}"


class _Unseen:
    """Stands for all values that nobody speaks of."""


_UNSEEN: Final = _Unseen()
_Held = Value | _Unseen


class _Change(NamedTuple):
    """The requirement of an operation without an end, and the value that it leaves."""

    requires: Found
    leaves: _Held


class _Taken(NamedTuple):
    """An operation, or behind all of them a change, that was taken, and the value before it."""

    number: int
    before: _Held
    is_free: bool
    """It writes nothing, so there was no choice."""


def contradiction(history: Sequence[Operation]) -> Operation | None:
    """Return the operation with whose end the history stopped being linearizable; None if it is to its end.

    Values that are written are unique in the history, except None.
    """
    if _is_explained(history):
        return None
    ended = sorted((operation for operation in history if operation.ended != UNKNOWN), key=lambda one: one.ended)
    at = bisect_left(ended, True, key=lambda one: not _is_explained(_until(history, one.ended)))
    return ended[at]


def _until(history: Sequence[Operation], time: float) -> list[Operation]:
    """Return a history as it was at that time: what had not ended may have happened."""
    begun = (operation for operation in history if operation.called <= time)
    return [operation if operation.ended <= time else replace(operation, ended=UNKNOWN) for operation in begun]


def _is_explained(history: Sequence[Operation]) -> bool:
    certain, lost = _happened(history)
    return _Search(certain, _changes(certain, lost)).run()


def _happened(history: Sequence[Operation]) -> tuple[list[Operation], list[Operation]]:
    """Return the operations that have happened in the order of their calls, with ends, and those that may have."""
    seen_at: dict[Value, float] = {}
    certain = [operation for operation in history if operation.ended != UNKNOWN]
    lost = [op for op in history if op.ended == UNKNOWN and not isinstance(op.writes, Nothing)]
    news = certain
    while news:
        for operation in news:
            found = _once(operation.found)
            if not isinstance(found, Nothing):
                seen_at[found] = min(operation.ended, seen_at.get(found, UNKNOWN))
        news = [
            replace(op, ended=seen_at[op.writes])
            for op in lost
            if not isinstance(op.writes, Nothing) and op.writes in seen_at
        ]
        certain = certain + news
        lost = [op for op in lost if isinstance(op.writes, Nothing) or op.writes not in seen_at]
    return sorted(certain, key=lambda operation: (operation.called, operation.ended)), lost


def _changes(certain: Sequence[Operation], lost: Sequence[Operation]) -> dict[_Change, list[float]]:
    """Return what may have changed the register unknown to anybody, with the calls of each."""
    spoken: set[Value] = set()
    has_not = False
    for operation in (*certain, *lost):
        if not isinstance(operation.found, Nothing):
            has_not = has_not or isinstance(operation.found, Not)
            spoken.add(operation.found.value if isinstance(operation.found, Not) else operation.found)
    changes: dict[_Change, list[float]] = {}
    for operation in sorted(lost, key=lambda operation: operation.called):
        assert not isinstance(operation.writes, Nothing), "a read that is lost has no effect"
        is_spoken = operation.writes is None or operation.writes in spoken
        if not is_spoken and not has_not:
            continue
        calls = changes.setdefault(_Change(operation.found, operation.writes if is_spoken else _UNSEEN), [])
        if not calls or _once(operation.found) is NOTHING:
            calls.append(operation.called)
    return changes


def _is_held(found: Found, value: _Held) -> bool:
    """Return True if an operation may find a value."""
    if isinstance(found, Nothing):
        return True
    return found.value != value if isinstance(found, Not) else found == value


def _once(found: Found | _Unseen) -> Value | Nothing:
    """Return a value that a register holds once, if at all; NOTHING for any other."""
    return NOTHING if found is None or isinstance(found, Nothing | Not | _Unseen) else found


class _Search:
    """Looks for an order of `operations`, among which some of the `changes` happened."""

    def __init__(self, operations: Sequence[Operation], changes: dict[_Change, list[float]]) -> None:
        self._operations = operations
        self._changes = list(changes)
        self._calls = list(changes.values())
        self._is_taken = [False] * len(operations)
        self._first = 0
        """All operations before it are taken."""
        self._changed = (0,) * len(changes)
        """So many of each change are taken."""
        self._value: _Held = None
        self._mask = 0
        self._order: list[_Taken] = []
        self._tried: dict[tuple[int, _Held], list[tuple[int, ...]]] = {}
        self._left = Counter(_once(operation.found) for operation in operations)
        """Operations that are left of those that found a value."""

    def run(self) -> bool:
        """Return True if there is such an order."""
        start = 0
        while self._first < len(self._operations):
            end = self._earliest_end()
            free = self._free(end) if start == 0 else None
            number = self._next(start, end) if free is None else free
            if number is not None:
                self._take(number, is_free=free is not None)
                start = 0
                continue
            while self._order and self._order[-1].is_free:
                self._take_back()
            if not self._order:
                return False
            start = self._take_back() + 1
        return True

    def _able(self, start: int, end: float) -> Iterator[int]:
        """Yield the operations from `start` on that can be the next in the order."""
        for number in range(max(start, self._first), len(self._operations)):
            if self._operations[number].called > end:
                break
            if not self._is_taken[number] and _is_held(self._operations[number].found, self._value):
                yield number

    def _free(self, end: float) -> int | None:
        """Return an operation that can be the next and writes nothing."""
        for number in self._able(0, end):
            if isinstance(self._operations[number].writes, Nothing):
                return number
        return None

    def _next(self, start: int, end: float) -> int | None:
        """Return an operation from `start` on that can be the next, and was not tried here yet.

        Numbers behind all operations stand for changes.
        """
        kept = _once(self._value)
        kept_for = 0 if kept is NOTHING else self._left[kept]
        for number in self._able(start, end):
            operation = self._operations[number]
            assert not isinstance(operation.writes, Nothing), "it is not free"
            if kept_for - (kept_for > 0 and operation.found == self._value):
                continue
            if self._is_new(self._mask | 1 << number, self._changed, operation.writes):
                return number
        if kept_for:
            return None
        return self._next_change(range(max(0, start - len(self._operations)), len(self._changes)), end)

    def _next_change(self, numbers: Iterable[int], end: float) -> int | None:
        for number in numbers:
            change, calls, taken = self._changes[number], self._calls[number], self._changed[number]
            if taken == len(calls) or calls[taken] > end or change.leaves == self._value:
                continue
            if not _is_held(change.requires, self._value):
                continue
            if self._is_new(self._mask, self._with_change(number, 1), change.leaves):
                return len(self._operations) + number
        return None

    def _with_change(self, number: int, count: int) -> tuple[int, ...]:
        changed = self._changed
        return (*changed[:number], changed[number] + count, *changed[number + 1 :])

    def _is_new(self, mask: int, changed: tuple[int, ...], value: _Held) -> bool:
        tried = self._tried.setdefault((mask, value), [])
        if any(all(map(le, before, changed)) for before in tried):
            return False
        tried.append(changed)
        return True

    def _earliest_end(self) -> float:
        """Return the end of the operation that must be taken first of those that are left."""
        end = UNKNOWN
        for number in range(self._first, len(self._operations)):
            operation = self._operations[number]
            if operation.called > end:
                break
            if not self._is_taken[number]:
                end = min(end, operation.ended)
        return end

    def _take(self, number: int, *, is_free: bool) -> None:
        self._order.append(_Taken(number, self._value, is_free))
        change = number - len(self._operations)
        if change >= 0:
            self._changed = self._with_change(change, 1)
            self._value = self._changes[change].leaves
            return
        self._is_taken[number] = True
        self._mask |= 1 << number
        self._left[_once(self._operations[number].found)] -= 1
        writes = self._operations[number].writes
        if not isinstance(writes, Nothing):
            self._value = writes
        while self._first < len(self._operations) and self._is_taken[self._first]:
            self._first += 1

    def _take_back(self) -> int:
        number, self._value, _ = self._order.pop()
        change = number - len(self._operations)
        if change >= 0:
            self._changed = self._with_change(change, -1)
            return number
        self._is_taken[number] = False
        self._mask &= ~(1 << number)
        self._left[_once(self._operations[number].found)] += 1
        self._first = min(self._first, number)
        return number
