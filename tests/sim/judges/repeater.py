"""A client that keeps answers with their stamps, and repeats them while they stand, as a door of a gateway does.

It keeps what the service answered to others.  At each change and each answer, every kept answer that stands must be the
one that the model gives now: a repeated answer is an answer of this moment, and as durable as any other.  When the
engine has ended, in any way, nothing stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from engine.metadata.stamps import Stamps
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m
from tests.sim.judges.history import History, SimFailure
from tests.sim.judges.state import State

KEPT_MAX: Final = 100


class _Kept(NamedTuple):
    what: str
    stamps: bytes
    fits: Callable[[State], bool]


class Repeater:
    """Keeps answers for one life of the store."""

    def __init__(self, stamps: Stamps | None, history: History) -> None:
        if stamps is None:
            raise SimFailure("the engine has no stamps")
        self._reader = StampReader(stamps.descriptor)
        self._history = history
        self._kept: list[_Kept] = []
        self._requests = 0
        self.repeated = 0
        """Answers that stood when they were repeated."""

    def with_stamps(self, request: m.Request) -> m.Request:
        """Return the request as it is sent on: three of four that look at names ask for stamps."""
        if isinstance(request, (m.StatNames, m.OpenObjects)):
            self._requests += 1
            if self._requests % 4:
                return msgspec.structs.replace(request, stamps=True)
        return request

    def keep(self, what: str, stamps: bytes, fits: Callable[[State], bool]) -> None:
        """Keep an answer that is about to be sent, and that `fits` a state."""
        if stamps:
            self._kept.append(_Kept(what, stamps, fits))
            del self._kept[:-KEPT_MAX]

    def check(self) -> None:
        """Check that the answers that stand are true now; forget the others."""
        self._kept = [kept for kept in self._kept if self._reader.stand(kept.stamps)]
        for kept in self._kept:
            if not kept.fits(self._history.state):
                raise SimFailure(f"{kept.what} was repeated, and is not true any more")

    def repeat(self) -> None:
        """Give the oldest answer that stands once more: it must be true now, and survive every crash."""
        self.check()
        if self._kept:
            kept = self._kept.pop(0)
            self._kept.append(kept)
            self._history.observed(self._history.here, kept.fits, f"{kept.what}, repeated")
            self.repeated += 1

    def check_ended(self) -> None:
        """Check, when the engine has ended, that no answer stands."""
        if self._reader.is_live or any(self._reader.stand(kept.stamps) for kept in self._kept):
            raise SimFailure("stamps stand, and their engine has ended")
