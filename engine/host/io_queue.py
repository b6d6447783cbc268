"""Reads of many places at once through the `Offload` port, and the choice between that and io_uring.

Rules kept here:
- The queue is chosen once, when a store is opened: io_uring if it is wanted and the kernel allows it, else threads.
  Its `kind` and `reason` report the choice.
- Both give the same answers (`lakefs.ports.IoQueue`); only the cost differs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from engine.host.io_uring import opened_ring, running_ring_queue
from lakefs.errors import LakeError
from lakefs.ports import FilePlace, FileRead, IoQueue, Offload

SWITCHED_OFF: Final = "switched off by io_uring = off"


class OffloadQueue:
    """Does all reads of a call one after the other in one thread of the pool (`lakefs.ports.IoQueue`).

    A call to the pool for each would cost more than most reads take; many callers still keep many threads busy.
    """

    kind: Final = "threads"

    def __init__(self, offload: Offload, reason: str = "") -> None:
        self._offload = offload
        self.reason = reason

    async def read_many(self, reads: Sequence[FileRead]) -> list[int | LakeError]:
        """Return for each read the count of bytes or its error; always a checkpoint."""
        return await self._offload.run(_read_each, reads)

    async def read_packed(self, places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
        """Return for each place True if all of it was read; always a checkpoint."""
        return await self._offload.run(_read_packed, places, buffer)


@asynccontextmanager
async def open_io_queue(offload: Offload, *, wanted: bool = True) -> AsyncIterator[IoQueue]:
    """Open the queue that this machine allows; it is not used after the block ends."""
    threads = OffloadQueue(offload)
    opened = opened_ring() if wanted else SWITCHED_OFF
    if isinstance(opened, str):
        threads.reason = opened
        yield threads
        return
    async with running_ring_queue(opened, threads) as queue:
        yield queue


def _read_each(reads: Sequence[FileRead]) -> list[int | LakeError]:
    return [_read_one(read) for read in reads]


def _read_one(read: FileRead) -> int | LakeError:
    try:
        return read.file.pread_into(read.buffer, read.offset)
    except LakeError as error:
        return error


def _read_packed(places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
    """Fill `buffer` with the places, one behind the other; returns for each True if it was read whole."""
    whole: list[bool] = []
    at = 0
    for file, offset, length in places:
        whole.append(_read_one(FileRead(file, buffer[at : at + length], offset)) == length)
        at += length
    return whole
