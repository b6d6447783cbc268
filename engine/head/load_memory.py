"""Memory of a head for values that homes send, from which the kernel copies them to memory of clients.

One memfd, cut into buffers that are used again: its pages are allocated once, and `preadv` reads from it what a client
gets, so payload is copied twice on its way from a socket to a client, and no page is made for it.

Rules kept here:
- A buffer is released when nothing is received into it any more, and nobody reads from it.
- Nobody waits for a buffer.  Where there is none, or an answer is longer, new memory is used.

Used on the loop.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.members.lent_area import LentArea
from lakefs.host.buffers import BufferPool, PooledBuffer
from lakefs.ids import Buffer
from lakefs.limits import MIB

LOAD_MEMORY_BYTES: Final = 64 * MIB
"""15 buffers, for five loads from three homes at a time.  Pages are allocated when a buffer is first used."""


class LoadMemory:
    """The memory of one head, made when it is first used."""

    def __init__(self, size_bytes: int = LOAD_MEMORY_BYTES) -> None:
        self._size_bytes = size_bytes
        self._made: _Made | None = None
        self._is_closed = False

    @property
    def in_use(self) -> int:
        """Buffers that are not released."""
        return 0 if self._made is None else self._made.pool.in_use

    @property
    def made(self) -> int:
        """Buffers whose memory was used, now or earlier."""
        return 0 if self._made is None else self._made.pool.made

    def close(self) -> None:
        """Let the memory go, when its last buffer is released; there are no others."""
        self._made, self._is_closed = None, True

    def try_take(self) -> PooledBuffer | None:
        """Return a buffer, None if all are in use.  OSError when no memory can be had."""
        if self._is_closed:
            return None
        if self._made is None:
            area = LentArea(self._size_bytes)
            self._made = _Made(area, BufferPool(self._size_bytes, memory=area.part(self._size_bytes)))
        return self._made.pool.try_acquire()

    def place_of(self, payload: Buffer) -> tuple[LentArea | None, int]:
        """Return the area and the offset of payload in it; (None, 0) for other memory."""
        offset = None if self._made is None else self._made.area.offset_of(payload)
        return (None, 0) if self._made is None or offset is None else (self._made.area, offset)


class _Made(NamedTuple):
    area: LentArea
    pool: BufferPool
