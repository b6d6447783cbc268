"""Times that members take to answer reads: they say from when on an answer is late."""

from __future__ import annotations

from collections import deque
from typing import Final

from lakefs.ids import MemberId
from lakefs.limits import CLUSTER_MEMBERS_MAX, HEDGE_S_MAX, HEDGE_S_MIN

_KEPT: Final = 20
"""The second slowest of 20 answers is their p95."""
_FEW: Final = 5


class AnswerTimes:
    """The last times of each member.  At most CLUSTER_MEMBERS_MAX members, 20 numbers each."""

    def __init__(self) -> None:
        self._times: dict[MemberId, deque[float]] = {}

    def note(self, member: MemberId, seconds: float) -> None:
        """Note the time of an answer, or the time for which one was waited for in vain."""
        times = self._times.get(member)
        if times is None:
            if len(self._times) >= CLUSTER_MEMBERS_MAX:
                self._times.clear()
            times = self._times[member] = deque(maxlen=_KEPT)
        times.append(seconds)

    def late_after_s(self, member: MemberId) -> float:
        """Return the seconds after which an answer of the member is late: the p95 of the last, within bounds."""
        times = self._times.get(member)
        if times is None or len(times) < _FEW:
            return HEDGE_S_MAX / 2
        return min(max(sorted(times)[-2], HEDGE_S_MIN), HEDGE_S_MAX)
