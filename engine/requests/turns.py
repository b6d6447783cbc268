"""Requests of heads that repeat the stamps of the names that lead (`engine.metadata.head_turns`).

Rules kept here:
- A connection follows turns once.  What it follows ends with it.
- Only heads may reach these handlers, as those of `engine.requests.bind`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from engine.metadata.head_turns import WAIT_NS_MAX, Followed, FollowingHead, HeadTurns
from engine.requests.handlers import handles
from engine.sessions.references import Client
from lakefs.errors import InvalidArgument, SessionLost
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_NS: Final = 1e9
_NO_ANSWER_YET: Final = m.Done()


class TurnRequests:
    """Handlers of OpenTurns, FollowTurns, CloseTurns and JoinTurns."""

    def __init__(self, turns: HeadTurns) -> None:
        self._turns = turns
        self._heads: dict[Client, FollowingHead] = {}
        self._by_id: dict[bytes, FollowingHead] = {}

    async def disconnected(self, client: Client) -> None:
        """End what a connection follows; the head's right lasts until it runs out."""
        self._end(client)

    @handles(m.OpenTurns)
    async def open_turns(self, client: Client, request: m.OpenTurns) -> Reply:
        if client in self._heads:
            raise InvalidArgument("this connection follows turns already")
        head = self._turns.open(request.base)
        self._heads[client] = self._by_id[head.id] = head
        return Reply(m.TurnsOpened(head.id))

    @handles(m.FollowTurns)
    async def follow_turns(self, client: Client, request: m.FollowTurns) -> Reply:
        head = self._heads.get(client)
        if head is None:
            raise SessionLost("this connection follows no turns")
        if head.answer is not None:
            raise InvalidArgument("turns are followed by one request at a time")
        if not 0 <= request.wait_ns <= WAIT_NS_MAX:
            raise InvalidArgument(f"turns are waited for {WAIT_NS_MAX} ns at most")
        if request.said < head.sent:
            raise SessionLost("an answer with turns was lost; follow them anew")
        self._turns.say(head, request.said)
        return Reply(_NO_ANSWER_YET, later=partial(self._follow, head, request.wait_ns / _NS))

    def _follow(self, head: FollowingHead, wait_s: float, take: Callable[[Reply], None]) -> Callable[[], None]:
        def answer(followed: Followed) -> None:
            right_ns = int(followed.right_s * _NS)
            take(Reply(m.TurnsFollowed(followed.number, followed.stamps, right_ns, self._turns.is_over)))

        return self._turns.follow(head, wait_s, answer)

    @handles(m.CloseTurns)
    async def close_turns(self, client: Client) -> Reply:
        self._end(client, has_right=False)
        return Reply(m.Done())

    @handles(m.JoinTurns)
    async def join_turns(self, client: Client, request: m.JoinTurns) -> Reply:
        head = self._by_id.get(request.turns)
        if head is None:
            raise SessionLost("these turns have ended")
        client.stamps_of = head.stamps_of
        return Reply(m.Done())

    def _end(self, client: Client, *, has_right: bool = True) -> None:
        head = self._heads.pop(client, None)
        if head is not None:
            del self._by_id[head.id]
            self._turns.leave(head, has_right=has_right)
