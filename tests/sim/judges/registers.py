"""Names as registers: notes what clients did with each, and judges whether one order explains it (`tests.linear`).

    begun = registers.begin()
    found = await ...                                   a read: registers.done(key, begun, found)
    await ...                                           a write: registers.done(key, begun, writes=value)
    PreconditionFailed, that said nothing more          registers.done(key, begun, Not(required))
    EngineUnreachable                                   registers.lost(key, begun, required, writes=value)

Time is the order of these calls: simulated time stands still while much happens.  Each value is written once.
An operation on two names is noted at each of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Final

from tests.linear import NOTHING, UNKNOWN, Found, Nothing, Operation, Value, contradiction
from tests.sim.judges.history import SimFailure

_SHOWN: Final = 12
"""Operations that are shown before one that no order explains."""


class Registers:
    """The operations of all clients of one world, by name."""

    def __init__(self) -> None:
        self.operations: defaultdict[str, list[Operation]] = defaultdict(list)
        self._clock = itertools.count()

    def begin(self) -> int:
        """Return the time at which an operation is called."""
        return next(self._clock)

    def done(
        self, key: str, begun: int, found: Found = NOTHING, *, writes: Value | Nothing = NOTHING, who: str = ""
    ) -> None:
        """Note an operation that has just ended: what it found, and what it wrote."""
        self.operations[key].append(Operation(begun, next(self._clock), found, writes, who))

    def lost(
        self, key: str, begun: int, found: Found = NOTHING, *, writes: Value | Nothing = NOTHING, who: str = ""
    ) -> None:
        """Note an operation whose outcome nobody knows; if it was done, or will be, it finds this value."""
        self.operations[key].append(Operation(begun, UNKNOWN, found, writes, who))

    def check(self) -> None:
        """Raise SimFailure if no order explains the history of a name."""
        for key, operations in self.operations.items():
            written = [one.writes for one in operations if one.writes is not None and one.writes is not NOTHING]
            assert len(written) == len(set(written)), "each value is written once"
            wrong = contradiction(operations)
            if wrong is not None:
                before = [one for one in operations if one.called <= wrong.ended and one is not wrong]
                around = [*before[-_SHOWN:], wrong]
                raise SimFailure("\n".join([f"{key!r} is no register; the last one shows it:", *map(str, around)]))
