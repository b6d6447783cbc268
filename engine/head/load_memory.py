"""Memory of a head for values that homes send, from which the kernel copies them to memory of clients.

One memfd, cut into buffers that are used again: its pages are allocated once, and `preadv` reads from it what a client
gets, so payload is copied twice on its way from a socket to a client, and no page is made for it.

Rules kept here:
- A buffer is released when nothing is received into it any more, and nobody reads from it.
- Nobody waits for a buffer.  Where there is none, or an answer is longer, new memory is used.

Used on the loop.
"""

from __future__ import annotations

from typing import Final

from engine.members.lent_area import LentArea
from lakefs.host.buffers import BufferPool, PooledBuffer
from lakefs.ids import Buffer
from lakefs.limits import MIB

LOAD_MEMORY_BYTES: Final = 64 * MIB
"""15 buffers, for five loads from three homes at a time.  Pages are allocated when a buffer is first used."""


class LoadMemory:
    """The memory of one head.  OSError when none can be had."""

    def __init__(self, size_bytes: int = LOAD_MEMORY_BYTES) -> None:
        self._area = LentArea(size_bytes)
        self._pool = BufferPool(size_bytes, memory=self._area.part(size_bytes))

    @property
    def descriptor(self) -> int:
        """That of the memory; it stays this object's."""
        return self._area.descriptor

    @property
    def in_use(self) -> int:
        """Buffers that are not released."""
        return self._pool.in_use

    @property
    def made(self) -> int:
        """Buffers whose memory was used, now or earlier."""
        return self._pool.made

    def try_take(self) -> PooledBuffer | None:
        """Return a buffer, None if all are in use."""
        return self._pool.try_acquire()

    def offset_of(self, payload: Buffer) -> int | None:
        """Return the offset of payload in the memory; None for other memory."""
        return self._area.offset_of(payload)
