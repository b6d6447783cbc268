"""Sends and receives the frames of one stream, for both ends of a connection on trio.

Sending is synchronous (`send`, `cork`): a frame is handed to the socket at once, or, when that is full, to the one task
that runs `FrameSender.run`.  So the cancellation of a caller never cuts a frame, and two frames never mix.

Rules of sending:
- Frames leave in the order of the calls; corked ones before any later `send`.
- `sent` of a frame is called exactly once: when the kernel has its last byte, or when the frame is dropped.
- Nothing is raised to callers of `send`.  When the stream breaks or stalls, `run` raises; its owner calls `drop_all`.
- The users bound the queue: they check `queued` before they make more frames, and wait with `wait_room`.

Rules of receiving:
- One task at a time receives.
- A frame that has begun has to end within `frame_timeout_s`; between frames the wait has no limit.
- Descriptors arrive with the first byte of the frame that announces them, so the oldest belong to that frame;
  descriptors that no frame announced are closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import trio

from lakefs.errors import DeadlineExceeded, EngineUnreachable, LakeError, ProtocolError
from lakefs.host.descriptors import after, close_later
from lakefs.ids import Buffer
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX, FRAME_TIMEOUT_S
from lakefs.ports import Stream
from lakefs.wire.frames import FrameReader

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
        self.queued = 0
        """Count of frames that wait because the peer does not receive them."""
        self._corked: list[bytes] = []
        self._corked_bytes = 0
        self.error: LakeError | None = None
        """The error after which nothing is sent; None while the stream works."""
        self.taken = 0
        """Times that the peer has taken bytes for which there was no room before."""
        self._work = trio.Event()
        self._room: trio.Event | None = None

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
        while self.error is None:
            if self._queue:
                await self._send_first()
            else:
                self._work = trio.Event()
                await self._work.wait()
        raise self.error

    def drop_all(self) -> None:
        """Drop all queued frames, and frames sent later; nothing more is sent, and the bodies' memory is free."""
        self.error = self.error or EngineUnreachable("the connection was closed")
        while self._queue:
            self._done(self._take_next())

    def _send(self, parts: Sequence[Buffer], total: int, descriptors: Sequence[int], sent: Sent | None) -> None:
        if not self._queue and self.error is None:
            count = self._send_nowait(parts, descriptors)
            if count < total and self.error is None:
                left = after(parts, count) if count else parts
                self._hold(_Queued(left, () if count else descriptors, sent))
                self._work.set()
                return
        elif self.error is None:
            self._hold(_Queued(parts, descriptors, sent))
            return
        if sent is not None:
            sent()

    def _send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int]) -> int:
        try:
            return self._stream.send_nowait(parts, descriptors)
        except EngineUnreachable as error:
            self.error = error
            self._work.set()
            return 0

    async def _send_first(self) -> None:
        entry = self._queue[0]
        with trio.move_on_after(FRAME_TIMEOUT_S) as scope:
            try:
                await self._send_rest(entry)
            except EngineUnreachable as error:
                self.error = error
        if scope.cancelled_caught:
            self.error = DeadlineExceeded(f"{self._stream.peer} did not take a frame within {FRAME_TIMEOUT_S:.0f} s")
        if self._queue and self._queue[0] is entry:
            self._done(self._take_next())

    async def _send_rest(self, entry: _Queued) -> None:
        left = [part for part in entry.parts if len(part)]
        descriptors = entry.descriptors
        had_no_room = False
        while left:
            count = self._stream.send_nowait(left, descriptors)
            if count:
                left, descriptors = after(left, count), ()
                self.taken += had_no_room  # a stream may take a frame in pieces while it has room
            else:
                await self._stream.wait_writable()
                had_no_room = True

    async def _wait_done(self) -> None:
        if self._room is None:
            self._room = trio.Event()
        await self._room.wait()

    def _hold(self, entry: _Queued) -> None:
        self._queue.append(entry)
        self.queued += 1

    def _take_next(self) -> _Queued:
        self.queued -= 1
        return self._queue.popleft()

    def _done(self, entry: _Queued) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None
        if entry.sent is not None:
            entry.sent()
        if self._on_room is not None:
            self._on_room()


E_co = TypeVar("E_co", covariant=True)


class _Wire(Protocol[E_co]):
    """Either end of a connection."""

    @property
    def reader(self) -> FrameReader: ...

    def next_event(self) -> E_co | None: ...


class FrameReceiver(Generic[E_co]):
    """The receiving half of a stream.  `before_wait` is called whenever a frame needs more bytes."""

    def __init__(
        self, stream: Stream, wire: _Wire[E_co], *, frame_timeout_s: float, before_wait: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._wire = wire
        self._reader = wire.reader
        self._frame_timeout_s = frame_timeout_s
        self._before_wait = before_wait
        self._frame_deadline = math.inf
        self._descriptors: list[int] = []
        self.arrivals = 0
        """Times that bytes have arrived."""

    async def next_event(self) -> E_co | None:
        """Return the peer's next event, or None when the peer has closed.  A raised LakeError ends the connection."""
        reader = self._reader
        while (event := self._wire.next_event()) is None:
            self._before_wait()
            if self._descriptors and not reader.mid_frame:
                self.close()
            count = await self._receive(reader.space())
            if not count:
                return None
            self.arrivals += 1
            reader.received(count)
            self._descriptors += self._stream.take_descriptors()
            if len(self._descriptors) > 2 * DESCRIPTORS_PER_FRAME_MAX:
                raise ProtocolError("more descriptors came than frames announced")
        self._frame_deadline = math.inf
        return event

    def claim(self, count: int) -> list[int]:
        """Hand over the descriptors of the frame just received, fewer if some were lost; the caller closes them."""
        if not count:
            return []
        claimed = self._descriptors[:count]
        del self._descriptors[:count]
        return claimed

    async def fill(self, parts: Sequence[Buffer]) -> None:
        """Receive the body of the frame just received, directly into writable `parts`.

        EngineUnreachable when the peer closed, DeadlineExceeded when it stalled; both end the connection.
        """
        missing = self._reader.take_body(parts)
        if not missing:
            return
        with trio.move_on_after(self._frame_timeout_s):
            for view in missing:
                while len(view):
                    count = await self._stream.receive_into(view)
                    if not count:
                        raise EngineUnreachable(f"{self._stream.peer} went in the middle of a body")
                    self.arrivals += 1
                    view = view[count:]
            return
        raise self._stalled()

    def close(self) -> None:
        """Close the descriptors that were not claimed."""
        close_later(self.claim(len(self._descriptors)))

    async def _receive(self, buffer: memoryview) -> int:
        if not self._reader.mid_frame:
            return await self._stream.receive_into(buffer)
        self._frame_deadline = min(self._frame_deadline, trio.current_time() + self._frame_timeout_s)
        with trio.move_on_at(self._frame_deadline):
            return await self._stream.receive_into(buffer)
        raise self._stalled()

    def _stalled(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"a frame from {self._stream.peer} did not end within {self._frame_timeout_s:g} s")
