"""`lake.chunks` of the blocking client: chunks by their ids, without a round trip if they are indexed and cached.

The engine locates chunks that the shared index does not have, or that are not cached, and every chunk of `get_many`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from lakefs.direct.batch_reads import DirectBatch, Task, memories_of
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.grants.batch_plan import HELPED_FROM_BYTES
from lakefs.host.writable_memory import WritableBuffer, writable_memory
from lakefs.ids import ChunkId
from lakefs.limits import MIB
from lakefs.shared_index.table_format import Found

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver

SHARED_FROM_BYTES: Final = 2 * MIB
"""From this many bytes on, a second thread takes tasks: those that are not done natively, by a thread of Python.  For
1 MiB that costs as much CPU as it saves."""
HELPERS: Final = 1
"""Threads beside the caller's own."""


class Chunks:
    """Chunks of a lake by id, from `Lake.chunks`.  As safe for threads as its lake, which it does not outlive."""

    def __init__(self, driver: BlockingDriver) -> None:
        self._driver = driver
        self._hot = driver.shares.index

    def get(self, chunk: bytes) -> bytes:
        """Return a chunk, checked.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
        shared = self._hot.at_hand()
        if shared is not None:
            content = shared.read(ChunkId(chunk))
            if content is not None:
                if self._hot.notes.note(chunk):
                    self._hot.tell_notes()
                return content
        return self.get_many([chunk])[0]

    def get_many(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Return chunks, checked, in order.  The first failure is raised."""
        contents = self._driver.run(self._driver.steps.get_chunks(chunks))
        renew(self._driver)
        return contents

    def get_into(self, chunk: bytes, buffer: WritableBuffer) -> int:
        """Read a chunk straight into a buffer, array or tensor at least as long; return its length.

        ChunkNotFound, ChunkDamaged, InvalidArgument; after an error the buffer may hold anything.
        """
        target = writable_memory(buffer, "a chunk")
        shared = self._hot.at_hand()
        if shared is not None:
            length = shared.read_into(ChunkId(chunk), target)
            if length != NOT_READ:
                if self._hot.notes.note(chunk):
                    self._hot.tell_notes()
                return length
        return self._ask_for([chunk], [target])[0]

    def get_many_into(self, chunks: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Read chunks, each straight into a buffer, array or tensor at least as long; return their lengths, in order.

        ChunkNotFound, ChunkDamaged, InvalidArgument; after an error the buffers may hold anything.
        """
        targets = memories_of(chunks, buffers)
        shared = self._hot.at_hand()
        lengths = [NOT_READ] * len(chunks) if shared is None else read_directly(self._driver, shared, chunks, targets)
        if NOT_READ in lengths:
            left = [index for index, length in enumerate(lengths) if length == NOT_READ]
            found = self._ask_for([chunks[index] for index in left], [targets[index] for index in left])
            for index, length in zip(left, found, strict=True):
                lengths[index] = length
        elif self._hot.notes.note_many(chunks):  # else the request has named most of them to the engine
            self._hot.tell_notes()
        return lengths

    def _ask_for(self, chunks: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        lengths = self._driver.run(self._driver.steps.get_chunks_into(chunks, targets))
        renew(self._driver)
        return lengths


def renew(driver: BlockingDriver) -> None:
    """Request the engine's index if that is due."""
    index = driver.shares.index
    if index.is_due:
        driver.run(index.renewal())


def read_directly(
    driver: BlockingDriver,
    shared: DirectReads,
    chunks: Sequence[bytes],
    targets: list[memoryview],
    places: Sequence[Found] | bytearray | None = None,
    *,
    asks: bool = False,
) -> list[int]:
    """Read what needs no request; return the lengths, NOT_READ for the rest.  Two threads share a large read.

    `places` and `asks`: see `DirectBatch`.
    """
    size = sum(map(len, targets))
    helper = driver.helper_thread() if size >= HELPED_FROM_BYTES else None
    with DirectBatch(shared, chunks, targets, places, helper=helper, asks=asks) as batch:
        is_shared = size >= SHARED_FROM_BYTES and driver.is_own
        tasks = iter(found := batch.tasks(is_shared=is_shared))  # a free thread takes the next
        others = [
            driver.work_threads().submit(_work_off, tasks)
            for _ in range(HELPERS if is_shared and len(found) > 1 else 0)
        ]
        try:
            _work_off(tasks)
        finally:  # for a helper that has not begun nothing is left to do: drop it
            begun = [other for other in others if not other.cancel()]
            for other in begun:
                other.wait()
        for other in begun:
            other.result()
    return batch.lengths


def _work_off(tasks: Iterator[Task]) -> None:
    for task in tasks:
        task()
