"""Memory for receiving the payloads of PUTs: pooled, bounded; a stalled client cannot keep it from others.

Rules kept here:
- Payloads of more than 64 KiB take buffers of one chunk from a pool that all requests share; if none is free the
  request waits, and its client with it.  Filling a fresh buffer costs as much as an MD5 of its content, a used one
  nearly nothing.
- While a request waits, the connection that has sent nothing for longest, and for `STALLED_S` at least, is ended.
- No request waits for a second buffer while it keeps the first from being released: the content of the first is being
  stored, or copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio

from gateway.http.messages import RequestBody
from lakefs.host.buffers import BUFFER_BYTES, BufferPool, PooledBuffer, PooledPayload
from lakefs.ids import Buffer

STALLED_S: Final = 5.0
_LOOK_AGAIN_S: Final = 1.0
_PLAIN_BYTES_MAX: Final = 64 << 10
_log: Final = structlog.get_logger(__name__)


class Received:
    """Memory with payload in it, released when its last user has let go."""

    __slots__ = ("_buffer", "_release", "_users", "memory")

    def __init__(
        self, memory: memoryview, buffer: PooledBuffer | None = None, release: Callable[[], None] | None = None
    ) -> None:
        """`buffer`: what the memory is the front of, if it is pooled."""
        self.memory = memory
        self._buffer = buffer
        self._release = release
        self._users = 1

    def body(self, chunk: memoryview) -> Sequence[Buffer]:
        """Return a part of the memory as the body of a request that stores it; see `PooledPayload`.

        Only a chunk that has the buffer to itself may be stored from there: behind another lies the next one.
        """
        if self._buffer is None or len(chunk) < len(self.memory):
            return [chunk]
        return PooledPayload(self._buffer, len(chunk))

    def retain(self) -> None:
        """Add a user."""
        self._users += 1

    def release(self) -> None:
        """Remove a user; the last one releases the memory."""
        self._users -= 1
        if not self._users and self._release is not None:
            self._release()


class ReceiveMemory:
    """The receive memory of one gateway."""

    def __init__(self, total_bytes: int) -> None:
        self._pool = BufferPool(total_bytes)
        self._holders: dict[PooledBuffer, RequestBody] = {}

    @property
    def in_use(self) -> int:
        """Number of pooled buffers that hold payload."""
        return self._pool.in_use

    async def take(self, body: RequestBody, length: int) -> Received:
        """Return memory for `length` bytes of this body, at most a chunk; waits its turn."""
        assert length <= BUFFER_BYTES
        if length <= _PLAIN_BYTES_MAX:
            return Received(memoryview(bytearray(length)))
        buffer = self._pool.try_acquire()
        while buffer is None:
            with trio.move_on_after(_LOOK_AGAIN_S):
                buffer = await self._pool.acquire()
            if buffer is None:
                await self._end_stalled()
        self._holders[buffer] = body
        taken = buffer

        def release() -> None:
            del self._holders[taken]
            taken.release()

        return Received(buffer.view[:length], buffer, release)

    async def _end_stalled(self) -> None:
        """End the connection whose buffer has waited longest for its bytes."""
        now = trio.current_time()
        stalled = [body for body in self._holders.values() if now - body.waits_since >= STALLED_S]
        if stalled:
            _log.warning("upload_ended", reason="it stalled while others waited for memory")
            await min(stalled, key=lambda body: body.waits_since).end()
