"""Bounce memory: registered buffers of an engine or a head, through which loads and puts over RDMA move their bytes.

Rules kept here:
- At most BOUNCE_BUFFERS exist, less than 64 MiB; the heads of one machine divide them, and each has two at least.  Each
  is made and registered when it is first needed, and kept.
- No peer has a right to a buffer: only this engine's own READs and WRITEs touch it.
- A buffer belongs to one user until it is given back.  `TrioMover` has ended everything that touches it by then.

Used on the loop.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from lakefs.limits import BOUNCE_BUFFERS, BOUNCE_BYTES
from lakefs.ports import Offload
from lakefs.transport.fabric import Fabric, Piece, Region, Remote

_SHARE_MIN: Final = 2
"""Least buffers of a process: one stays for others while a client does not answer."""


class Bounce:
    """One registered buffer, page-aligned; a memory that slots of a load are filled in (`SlotMemory`)."""

    size_bytes: Final = BOUNCE_BYTES

    def __init__(self, fabric: Fabric) -> None:
        """Blocks.  FabricFailed when no more memory may be registered."""
        self._memory = mmap.mmap(-1, BOUNCE_BYTES)
        self.mapping: Final = memoryview(self._memory)
        self.region: Final[Region] = fabric.register(self._memory, Remote.NONE)

    def has_range(self, offset: int, length: int) -> bool:
        """Return True if [offset, offset + length) is inside the buffer."""
        return 0 <= offset <= offset + length <= BOUNCE_BYTES

    def close(self) -> None:
        """End the registration; the memory is freed with the last slice of it."""
        self.region.close()


class BounceMemory:
    """The buffers of one fabric; users wait for them in turn."""

    def __init__(self, fabric: Fabric, sharers: int = 1) -> None:
        """`sharers`: the processes that divide the buffers."""
        self._fabric = fabric
        self.count_max: Final = BOUNCE_BUFFERS if sharers == 1 else max(BOUNCE_BUFFERS // sharers, _SHARE_MIN)
        self._turns = trio.Semaphore(BOUNCE_BUFFERS)
        for _ in range(BOUNCE_BUFFERS - self.count_max):
            self._turns.acquire_nowait()  # for ever: they are other heads'
        self._free: list[Bounce] = []
        self._count = 0

    @property
    def registered_bytes(self) -> int:
        """Bytes of all buffers made so far."""
        return self._count * BOUNCE_BYTES

    @asynccontextmanager
    async def taken(self, offload: Offload) -> AsyncIterator[Bounce]:
        """Yield a buffer that nobody else uses until the block ends; waits for one.  FabricFailed."""
        async with self._turns:
            if not self._free:
                made = await offload.run(Bounce, self._fabric)
                self._count += 1
                assert self._count <= self.count_max, "a buffer is made when all others are taken"
                self._free.append(made)
            bounce = self._free.pop()
            try:
                yield bounce
            finally:
                self._free.append(bounce)

    def close(self) -> None:
        """Give the memory up; nobody uses it."""
        assert len(self._free) == self._count, "every buffer was given back"
        while self._free:
            self._free.pop().close()
        self._count = 0


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece; one that follows the last on both sides becomes part of it."""
    if pieces:
        last = pieces[-1]
        if last.offset + last.length == piece.offset and last.remote_address + last.length == piece.remote_address:
            pieces[-1] = last._replace(length=last.length + piece.length)
            return
    pieces.append(piece)
