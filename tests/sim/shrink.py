"""Cuts a failing seed down to the fewest rounds, operations of workloads, and faults with which it fails the same way.

It first leaves out whole rounds, then operations, in halves, quarters and so on, then the faults in the rounds that are
left; and begins again, until nothing more can be left out or the time is over.  Every round draws from a source of its
own, so what is left out does not change what the others do.  But it shifts the operations of the disk, and with them
the moment of a crash: not every seed gets short.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tests.sim.world.world import World, causes_of

SECONDS: float = 120.0
_MET = re.compile(r"SimFailure: [a-z_ ]+: (\w+)\(")
_Say = Callable[[str], None]


@dataclass(frozen=True)
class Shrunk:
    """The smallest failing part of a seed."""

    seed: int
    rounds: int
    operations: list[str]
    without: list[str]
    of: int
    """Number of operations of the whole run."""
    failure: str

    def command(self) -> str:
        """The command line that runs what is left."""
        without = f" --without {','.join(self.without)}" if self.without else ""
        return (
            f"python -m tests.sim {self.seed} --rounds {self.rounds}{without} --only {','.join(self.operations) or '-'}"
        )


def shrink(seed: int, rounds: int, say: _Say, *, seconds: float = SECONDS) -> Shrunk | None:
    """Return the smallest part of a run found to fail in the same way; None when the seed does not fail."""
    whole = _run(seed, rounds, None, ())
    if whole is None:
        return None
    search = _Search(seed, rounds, say, whole, time.monotonic() + seconds)
    while search.goes_on:
        search.goes_on = False
        search.leave_out([part for part in search.failing.parts if part.isdecimal()])
        search.leave_out_operations()
        search.leave_out([part for part in search.failing.parts if not part.isdecimal()])
    found = search.failing
    return Shrunk(seed, rounds, found.operations, sorted(search.without), len(whole.operations), found.failure)


def kind_of(failure: str) -> str:
    """Return the failure without what changes from run to run: numbers, names, contents, the first to meet an error."""
    met = _MET.match(failure)
    if met is not None:
        return met.group(1)
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", ":".join(re.split(r"[:(\[{]", failure)[:2]))


@dataclass(frozen=True)
class _Failing:
    """A run that failed: its failure, and the operations and parts that it reached."""

    failure: str
    operations: list[str]
    parts: list[str]


@dataclass
class _Search:
    seed: int
    rounds: int
    say: _Say
    failing: _Failing
    until: float
    without: set[str] = field(default_factory=set)
    goes_on: bool = True
    """True when something more was left out in this turn."""

    def leave_out(self, parts: list[str]) -> None:
        """Leave out rounds or faults, one by one, as many as possible."""
        for part in dict.fromkeys(parts):
            if part not in self.without and self._try(self.failing.operations, {*self.without, part}):
                self.without.add(part)

    def leave_out_operations(self) -> None:
        """Leave out half of the operations, a quarter, and so on."""
        step = max(1, len(self.failing.operations) // 2)
        while True:
            before = len(self.failing.operations)
            for start in range(before - step, -step, -step):
                kept = self.failing.operations
                left = kept[: max(0, start)] + kept[max(0, start) + step :]
                if len(left) < len(kept):
                    self._try(left, self.without)
            if step == 1 and len(self.failing.operations) == before:
                return
            step = max(1, min(step, len(self.failing.operations)) // 2)
            if time.monotonic() > self.until:
                return

    def _try(self, operations: list[str], without: Collection[str]) -> bool:
        """Return whether that part fails in the same way; if so, it is what is left from now on."""
        if time.monotonic() > self.until:
            return False
        found = _run(self.seed, self.rounds, operations, without)
        if found is None or kind_of(found.failure) != kind_of(self.failing.failure):
            return False
        reached = set(found.operations)
        left = [one for one in operations if one in reached]
        self.failing = _Failing(found.failure, left, found.parts)
        self.goes_on = True
        self.say(f"{len(left)} operations, without {len(without)} rounds and faults: {found.failure[:120]}")
        return True


def _run(seed: int, rounds: int, only: Collection[str] | None, without: Collection[str]) -> _Failing | None:
    """Run a part of a run; None when it does not fail."""
    world = World(seed, rounds, None if only is None else frozenset(only), without)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes_of(error))
        return _Failing(causes, world.done, world.parts)
    return None
