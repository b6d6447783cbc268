"""Receives the frames of one stream, for both ends of a connection on trio: events, bodies, descriptors.

One task at a time uses it.  A frame that has begun has to end within `frame_timeout_s`; between frames the wait has no
limit.  Descriptors arrive with the first byte of the frame that announces them, so the oldest belong to that frame;
descriptors that no frame announced are closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import trio

from lakefs.errors import DeadlineExceeded, EngineUnreachable, ProtocolError
from lakefs.host.descriptors import close_later
from lakefs.ids import Buffer
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX
from lakefs.ports import Stream
from lakefs.wire.frames import FrameReader

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
