"""Sends the frames of one stream, for both ends of a connection on trio.

`send` and `cork` are synchronous: they hand the frame to the socket at once, or, when that is full, to the one task
that runs `run`.  So the cancellation of a caller never cuts a frame, and two frames never mix.

Rules kept here:
- Frames leave in the order of the calls; corked ones before any later `send`.
- `sent` of a frame is called exactly once: when the kernel has its last byte, or when the frame is dropped.
- Nothing is raised to callers of `send`.  When the stream breaks or stalls, `run` raises; its owner calls `drop_all`.
- The users bound the queue: they check `queued` before they make more frames, and wait with `wait_room`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from lakefs.errors import DeadlineExceeded, EngineUnreachable, LakeError
from lakefs.host.descriptors import after
from lakefs.ids import Buffer
from lakefs.limits import FRAME_TIMEOUT_S
from lakefs.ports import Stream

_JOIN_BYTES: Final = 16 * 1024
"""Parts below this are copied into one buffer: cheaper than handing the kernel a list."""
_CORK_BYTES: Final = 64 * 1024
"""From so many corked bytes on they are sent without waiting for `flush`."""

Sent = Callable[[], None]


@dataclass
class _Queued:
    parts: Sequence[Buffer]
    descriptors: Sequence[int]
    sent: Sent | None


class FrameSender:
    """The sending half of a stream.  `on_room` is called whenever `queued` has decreased."""

    def __init__(self, stream: Stream, *, on_room: Callable[[], None] | None = None) -> None:
        self._stream = stream
        self._on_room = on_room
        self._queue: deque[_Queued] = deque()
        self._corked: list[bytes] = []
        self._corked_bytes = 0
        self._error: LakeError | None = None
        self._work = trio.Event()
        self._room: trio.Event | None = None

    @property
    def queued(self) -> int:
        """Count of frames that wait because the peer does not receive them."""
        return len(self._queue)

    @property
    def error(self) -> LakeError | None:
        """The error after which nothing is sent; None while the stream works."""
        return self._error

    def cork(self, frame: bytes) -> None:
        """Hold a small frame back until `flush`, so that many are sent with one system call."""
        self._corked.append(frame)
        self._corked_bytes += len(frame)
        if self._corked_bytes >= _CORK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the corked frames."""
        if self._corked:
            corked = self._corked[0] if len(self._corked) == 1 else b"".join(self._corked)
            self._corked.clear()
            self._corked_bytes = 0
            self._send([corked], len(corked), (), None)

    def send(
        self, frame: bytes, body: Sequence[Buffer] = (), descriptors: Sequence[int] = (), sent: Sent | None = None
    ) -> None:
        """Send a frame start and its body, large bodies without copying them.

        The body's memory is in use until `sent` is called, which may be before this returns.
        """
        self.flush()
        if not body:
            self._send([frame], len(frame), descriptors, sent)
            return
        total = len(frame) + sum(map(len, body))
        if total <= _JOIN_BYTES:
            self._send([b"".join((frame, *body))], total, descriptors, sent)
        else:
            self._send([frame, *body], total, descriptors, sent)

    async def wait_room(self) -> None:
        """Wait until a queued frame has been sent or dropped; returns at once when none is queued."""
        if self._queue:
            await self._wait_done()

    async def wait_sent(self) -> None:
        """Wait until nothing is queued."""
        self.flush()
        while self._queue:
            await self._wait_done()

    async def run(self) -> None:
        """Send the queued frames, until the stream breaks.

        EngineUnreachable when the stream broke, DeadlineExceeded when the peer did not take a frame within 30 s.
        """
        while self._error is None:
            if self._queue:
                await self._send_first()
            else:
                self._work = trio.Event()
                await self._work.wait()
        raise self._error

    def drop_all(self) -> None:
        """Drop all queued frames, and frames sent later; nothing more is sent, and the bodies' memory is free."""
        self._error = self._error or EngineUnreachable("the connection was closed")
        while self._queue:
            self._done(self._queue.popleft())

    def _send(self, parts: Sequence[Buffer], total: int, descriptors: Sequence[int], sent: Sent | None) -> None:
        if not self._queue and self._error is None:
            count = self._send_nowait(parts, descriptors)
            if count < total and self._error is None:
                left = after(parts, count) if count else parts
                self._queue.append(_Queued(left, () if count else descriptors, sent))
                self._work.set()
                return
        elif self._error is None:
            self._queue.append(_Queued(parts, descriptors, sent))
            return
        if sent is not None:
            sent()

    def _send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int]) -> int:
        try:
            return self._stream.send_nowait(parts, descriptors)
        except EngineUnreachable as error:
            self._error = error
            self._work.set()
            return 0

    async def _send_first(self) -> None:
        entry = self._queue[0]
        with trio.move_on_after(FRAME_TIMEOUT_S) as scope:
            try:
                await self._stream.send(entry.parts, entry.descriptors)
            except EngineUnreachable as error:
                self._error = error
        if scope.cancelled_caught:
            self._error = DeadlineExceeded(f"{self._stream.peer} did not take a frame within {FRAME_TIMEOUT_S:.0f} s")
        if self._queue and self._queue[0] is entry:
            self._done(self._queue.popleft())

    async def _wait_done(self) -> None:
        if self._room is None:
            self._room = trio.Event()
        await self._room.wait()

    def _done(self, entry: _Queued) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None
        if entry.sent is not None:
            entry.sent()
        if self._on_room is not None:
            self._on_room()
