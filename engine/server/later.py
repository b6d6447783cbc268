"""Replies that a service gives in a later step, for which no task waits (`lakefs.wire.engine_port.Reply.later`).

Rules kept here:
- Each such request counts as one in flight until its reply is sent, is given up by the client, or the connection ends.
- The service gives a reply at most once, and none that was given up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from lakefs.wire.engine_port import Later, Reply, nothing


class LaterReplies:
    """The expected replies of one connection.

    `send` takes a reply for its stream; `ended` is called when a request counts no more.
    """

    def __init__(self, send: Callable[[int, Reply], None], ended: Callable[[], None]) -> None:
        self._send = send
        self._ended = ended
        self._awaited: dict[int, Callable[[], None]] = {}

    def expect(self, stream_id: int, later: Later) -> None:
        """Send the reply on this stream when it is given, which may be in this step."""
        self._awaited[stream_id] = nothing
        give_up = later(partial(self._given, stream_id))
        if stream_id in self._awaited:
            self._awaited[stream_id] = give_up

    def give_up(self, stream_id: int) -> bool:
        """Let a reply not be given; False if none is expected on this stream."""
        give_up = self._awaited.pop(stream_id, None)
        if give_up is None:
            return False
        give_up()
        self._ended()
        return True

    def give_up_all(self) -> None:
        """Let no reply be given: the connection has ended."""
        for stream_id in list(self._awaited):
            self.give_up(stream_id)

    def _given(self, stream_id: int, reply: Reply) -> None:
        del self._awaited[stream_id]
        self._send(stream_id, reply)
        self._ended()


async def given(later: Later) -> Reply:
    """Wait for a reply that is given later; when cancelled, it is given up."""
    replies: list[Reply] = []
    arrived = trio.Event()

    def take(reply: Reply) -> None:
        replies.append(reply)
        arrived.set()

    give_up = later(take)
    try:
        await arrived.wait()
    finally:
        if not replies:
            give_up()
    return replies[0]
