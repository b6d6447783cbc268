"""`lake.chunks` of the blocking client: chunks by their ids, without a round trip where place and bytes are at hand.

What the shared index does not know, and what is not cached, goes the way of every read: located by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final

from lakefs.direct.batch_reads import DirectBatch, Task, memories_of
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.direct.index_in_use import SharedIndexUser
from lakefs.direct.opening import open_shared_index
from lakefs.host.writable_memory import WritableBuffer, writable_memory
from lakefs.ids import ChunkId
from lakefs.limits import MIB
from lakefs.shared_index.table_format import Found

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver

SHARED_FROM_BYTES: Final = 2 * MIB
"""Of so much, a second thread reads and checks a part.  Of 1 MiB it costs as much CPU as it saves time."""
HELPERS: Final = 1
"""Threads beside the caller's own."""


class Chunks(SharedIndexUser):
    """Chunks of a lake by id.  Made by `Lake.chunks`; as safe for threads as its lake, which it does not outlive."""

    def __init__(self, lake: BlockingDriver) -> None:
        super().__init__(lake)
        self._lake = lake

    def get(self, chunk: bytes) -> bytes:
        """A chunk, checked.  ChunkNotFound, ChunkDamaged, InvalidArgument."""
        shared = self.direct_reads()
        if shared is not None:
            content = shared.read(ChunkId(chunk))
            if content is not None:
                if self.notes.note(chunk):
                    self.tell_notes()
                return content
        return self.get_many([chunk])[0]

    def get_many(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Chunks, checked, in order.  The first failure is raised."""
        contents = self._lake.run(self._lake.steps.get_chunks(chunks))
        self.renew()
        return contents

    def get_into(self, chunk: bytes, buffer: WritableBuffer) -> int:
        """A chunk straight into a buffer, array or tensor at least as long; its length.

        ChunkNotFound, ChunkDamaged, InvalidArgument; then the buffer may hold anything.
        """
        target = writable_memory(buffer, "a chunk")
        shared = self.direct_reads()
        if shared is not None:
            length = shared.read_into(ChunkId(chunk), target)
            if length != NOT_READ:
                if self.notes.note(chunk):
                    self.tell_notes()
                return length
        return self._ask_for([chunk], [target])[0]

    def get_many_into(self, chunks: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Chunks, each straight into a buffer, array or tensor at least as long; their lengths, in order.

        ChunkNotFound, ChunkDamaged, InvalidArgument; then the buffers may hold anything.
        """
        targets = memories_of(chunks, buffers)
        shared = self.direct_reads()
        lengths = [NOT_READ] * len(chunks) if shared is None else self.read_directly(shared, chunks, targets)
        if NOT_READ in lengths:
            left = [index for index, length in enumerate(lengths) if length == NOT_READ]
            found = self._ask_for([chunks[index] for index in left], [targets[index] for index in left])
            for index, length in zip(left, found, strict=True):
                lengths[index] = length
        elif self.notes.note_many(chunks):  # else the engine has heard of most of them
            self.tell_notes()
        return lengths

    def _ask_for(self, chunks: Sequence[bytes], targets: Sequence[memoryview]) -> list[int]:
        lengths = self._lake.run(self._lake.steps.get_chunks_into(chunks, targets))
        self.renew()
        return lengths

    def renew(self) -> None:
        """Ask the engine for its index where that is due."""
        if self.is_due:
            epoch = self._lake.epoch
            index = self._lake.run(open_shared_index())
            if self._lake.epoch == epoch:  # else it may be that of an engine that is gone: the next read asks
                self.use_shared_index(index, epoch)

    def read_directly(
        self,
        shared: DirectReads,
        chunks: Sequence[bytes],
        targets: list[memoryview],
        places: Sequence[Found] | None = None,
    ) -> list[int]:
        """Lengths of what was read at once, NOT_READ of the rest; much of it is shared between threads.

        `places` as of `DirectBatch`.
        """
        with DirectBatch(shared, chunks, targets, places) as batch:
            is_shared = sum(map(len, targets)) >= SHARED_FROM_BYTES and self._lake.is_own
            tasks = iter(found := batch.tasks(is_shared=is_shared))  # whoever is free takes the next
            helpers = [
                self._lake.work_threads().submit(_work_off, tasks)
                for _ in range(HELPERS if is_shared and len(found) > 1 else 0)
            ]
            try:
                _work_off(tasks)
            finally:  # who has not begun finds nothing left: other work has the threads, or a fork has none of them
                begun = [helper for helper in helpers if not helper.cancel()]
                wait(begun)
            for helper in begun:
                helper.result()
        return batch.lengths


def _work_off(tasks: Iterator[Task]) -> None:
    for task in tasks:
        task()
