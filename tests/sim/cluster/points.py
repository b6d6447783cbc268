"""Points of scenes: something happens in the middle of a request, while the message that met the point waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from lakefs.wire import messages as m
from tests.sim.cluster.network import Connection
from tests.sim.cluster.places import NAMES_HOST, REPLICA_HOSTS, REPLICAS_A_SHARD

Act = Callable[[Connection, m.Request], Awaitable[None]]


class PointOf:
    """A point: `act` happens at the first message of a kind between two hosts, or at each; messages wait for its end.

    `near`: NAMES_HOST for whichever host serves the names.  `answers`: at the answer, where it arrives.
    """

    def __init__(
        self,
        kind: type[m.Request],
        act: Act,
        *,
        near: str = "",
        far: str = "",
        answers: bool = False,
        is_each: bool = False,
    ) -> None:
        self._kind = kind
        self._act = act
        self._near = near
        self._far = far
        self._answers = answers
        self._is_each = is_each
        self.is_met = False

    def _fits(self, connection: Connection, request: m.Request, *, is_answer: bool) -> bool:
        if getattr(request, "only_damaged", False):
            return False  # of gc, not of a walk
        near = NAMES_HOST if connection.near in REPLICA_HOSTS[:REPLICAS_A_SHARD] else connection.near
        is_there = self._near in ("", near) and self._far in ("", connection.far)
        return is_there and isinstance(request, self._kind) and is_answer == self._answers

    async def met(self, connection: Connection, request: m.Request, *, is_answer: bool) -> None:
        """See `Point`."""
        if (self._is_each or not self.is_met) and self._fits(connection, request, is_answer=is_answer):
            self.is_met = True
            await self._act(connection, request)


def names_to_members(kind: type[m.Request], act: Act) -> PointOf:
    """Return a point: the first message of a kind from the names' process to a member."""
    return PointOf(kind, act, near=NAMES_HOST)
