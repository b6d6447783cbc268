"""Reads payloads from segments into memory that clients lend: the kernel copies; the engine does not touch the bytes.

Rules kept here:
- Cached bytes are copied from the page cache: on the loop without waiting for the medium (`read_cached`), or in
  threads.  Other bytes are read past the page cache where offset and address allow it, through io_uring where it
  exists: a client's pool is the cache.
- The rest of a last page, and the checksums behind a payload, are read into pages of the engine's own; the kernel
  copies the payload's part to its target.  Those pages are a memfd: user space never touches the mapping of a client's
  memory (`engine.memory.lent_memory`), and the client's file is never made longer.
- The kernel may write to the memory until `read` has returned, however it returns.
- Before each system call that writes to it a load asks if it may (`SlotLoad.ask`).

Nothing is checked here: the caller checks the bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

from engine.format.extents import page_down, page_up
from engine.format.layouts import ChunkRecord
from engine.host.io_queue import OffloadQueue
from engine.host.tasks import run_all
from engine.memory.lent_memory import copy_into, exhausted, memory_of_our_own
from engine.memory.while_lent import AskingFile, always
from engine.segments.files import ReadFile, ReadFiles
from lakefs.errors import CorruptionError, LakeError, OperationalError, StoreDamaged
from lakefs.findings import Finding
from lakefs.host.page_cache import is_cached
from lakefs.ids import SegmentId
from lakefs.limits import CHUNK_BYTES, PAGE_BYTES
from lakefs.ports import DiskFile, FileRead, IoQueue, Offload

LOADS_PER_ROUND: Final = 64
"""Most payloads read from the medium at a time for one request: 512 KiB for their last pages and checksums."""
_TAIL_BYTES: Final = 2 * PAGE_BYTES
"""Bytes for the rest of a last page and the checksums of a chunk (256 bytes at most)."""
_PARALLEL_READS: Final = 5
"""Most shares read by threads at once; the pool has one thread more."""
assert CHUNK_BYTES // (64 * 1024) * 4 <= 256


class SlotLoad:
    """One payload being read: `target` is a part of the mapping of lent memory, as long as the payload.

    `vector` is memory for the checksums behind the payload; empty when none are wanted or none exist.
    """

    __slots__ = ("ask", "error", "index", "is_aligned", "record", "target", "vector")

    def __init__(
        self,
        index: int,
        record: ChunkRecord,
        target: memoryview,
        *,
        is_aligned: bool,
        with_vector: bool,
        ask: Callable[[], None] = always,
    ) -> None:
        self.index = index
        self.record = record
        self.target = target
        self.is_aligned = is_aligned
        self.vector = memoryview(bytearray(record.vector_bytes)) if with_vector else memoryview(b"")
        self.ask = ask
        """Called before each system call that writes to the target; raises SessionLost if it may not."""
        self.error: LakeError | None = None


class SlotReader:
    """Reads of one store's segments into lent memory.  Any number at once."""

    def __init__(self, offload: Offload, queue: IoQueue, files: ReadFiles, direct_files: ReadFiles) -> None:
        self._offload = offload
        self._queue = queue
        self._threads = OffloadQueue(offload)
        self._files = files
        self._direct = direct_files

    def read_cached(self, load: SlotLoad, *, probe: bool) -> bool:
        """Read the payload if it is in memory and its file is open; True if it was.  SourceChanged, DiskFailed.

        `probe`: ask first if it is cached, which takes half the time of reading 64 KiB.  Without it, a read of bytes
        that are not cached makes the kernel fetch them.
        """
        record = load.record
        buffers = [load.target, load.vector] if load.vector else [load.target]
        return self.read_cached_run(record.segment, record.offset, buffers, probe=probe)

    def read_cached_run(self, segment: SegmentId, offset: int, targets: Sequence[memoryview], *, probe: bool) -> bool:
        """Do `read_cached` for adjacent bytes of a segment, into parts of lent memory."""
        entry = self._files.enter_open(segment)
        if entry is None:
            return False
        try:
            if probe and not _may_be_cached(entry, offset, sum(map(len, targets))):
                return False
            return entry.file.preadv_cached_into(targets, offset)
        finally:
            self._files.leave(entry)

    async def read(self, loads: Sequence[SlotLoad]) -> None:
        """Read payloads from the medium; sets the error of each load that fails."""
        for first in range(0, len(loads), LOADS_PER_ROUND):
            await self._read_round(loads[first : first + LOADS_PER_ROUND])

    async def _read_round(self, loads: Sequence[SlotLoad]) -> None:
        opened = _OpenFiles(self._files, self._direct)
        try:
            if not opened.open(loads, wait=False):
                await self._offload.run(opened.open, loads)
            with _Tails(len(loads)) as tails:
                reads: list[FileRead] = []
                owners: list[SlotLoad] = []
                for load in loads:
                    for read in _reads_of(load, opened, tails):
                        reads.append(read)
                        owners.append(load)
                await self._read_all(reads, owners)
                tails.copy_on()
        finally:
            opened.close()

    async def _read_all(self, reads: list[FileRead], owners: list[SlotLoad]) -> None:
        """Read at several places at once; sets the error of a load whose read fails or is short."""

        async def read_share(share: tuple[IoQueue, Sequence[int]]) -> None:
            queue, indices = share
            counts = await queue.read_many([reads[index] for index in indices])
            for index, count in zip(indices, counts, strict=True):
                if isinstance(count, LakeError):
                    owners[index].error = count
                elif count < len(reads[index].buffer):
                    owners[index].error = _short(owners[index].record)

        await run_all(read_share, self._shares(reads))

    def _shares(self, reads: Sequence[FileRead]) -> list[tuple[IoQueue, Sequence[int]]]:
        """Split the reads into shares that run at the same time.

        A ring gets all reads past the page cache.  Threads get those that may be copied from the cache, because a ring
        would copy megabytes while the loop waits.
        """
        shares: list[tuple[IoQueue, Sequence[int]]] = []
        for_threads: Sequence[int] = range(len(reads))
        if self._queue.kind != self._threads.kind:
            past_cache = [index for index, read in enumerate(reads) if read.file.direct]
            for_threads = [index for index, read in enumerate(reads) if not read.file.direct]
            if past_cache:
                shares.append((self._queue, past_cache))
        count = min(_PARALLEL_READS, len(for_threads))
        return [*shares, *((self._threads, for_threads[first::count]) for first in range(count))]


class _OpenFiles:
    """The files of a round's segments, held open; for aligned payloads both the buffered and the direct one."""

    def __init__(self, files: ReadFiles, direct_files: ReadFiles) -> None:
        self._kinds = (files, direct_files)
        self._opened: dict[tuple[SegmentId, bool], ReadFile | LakeError] = {}

    def open(self, loads: Sequence[SlotLoad], *, wait: bool = True) -> bool:
        """Open the files that the loads need; sets the error of each load whose file cannot be opened.

        Without `wait` it does not block, and returns False if a file is not open yet.
        """
        for load in loads:
            for direct in (False, True) if load.is_aligned else (False,):
                found = self._enter(load.record.segment, direct=direct, wait=wait)
                if isinstance(found, LakeError):
                    load.error = found
                elif found is None:
                    return False
        return True

    def of(self, load: SlotLoad) -> DiskFile:
        """Return the file to read a load from; the load has no error."""
        buffered = self._opened[load.record.segment, False]
        assert isinstance(buffered, ReadFile), "the load has no error"
        if not load.is_aligned or _may_be_cached(buffered, load.record.offset, load.record.stored_bytes):
            return buffered.file
        direct = self._opened[load.record.segment, True]
        assert isinstance(direct, ReadFile), "the load has no error"
        return direct.file

    def close(self) -> None:
        """Leave all files."""
        for (_, direct), entry in self._opened.items():
            if isinstance(entry, ReadFile):
                self._kinds[direct].leave(entry)
        self._opened.clear()

    def _enter(self, segment: SegmentId, *, direct: bool, wait: bool) -> ReadFile | LakeError | None:
        found = self._opened.get((segment, direct))
        if found is None:
            files = self._kinds[direct]
            try:
                found = files.enter(segment) if wait else files.enter_open(segment)
            except (OperationalError, CorruptionError) as error:
                found = error
            if found is not None:
                self._opened[segment, direct] = found
        return found


class _Tails:
    """Pages of the engine's own, as a memfd, for the bytes behind the last whole page of payloads."""

    def __init__(self, count: int) -> None:
        self._descriptor = memory_of_our_own("lake tails", count * _TAIL_BYTES)
        try:
            self._pages = memoryview(mmap.mmap(self._descriptor, count * _TAIL_BYTES))
        except OSError as error:  # a mapping takes a descriptor of its own
            os.close(self._descriptor)
            raise exhausted(error) from error
        self._taken: list[tuple[SlotLoad, int]] = []

    def __enter__(self) -> _Tails:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def take(self, load: SlotLoad, length: int) -> memoryview:
        """Return pages for the tail of a load."""
        at = len(self._taken) * _TAIL_BYTES
        self._taken.append((load, at))
        return self._pages[at : at + length]

    def copy_on(self) -> None:
        """Copy payload to the loads' targets, and checksums to their vectors."""
        for load, at in self._taken:
            if load.error is not None:
                continue
            body = page_down(len(load.target))
            rest = len(load.target) - body
            try:
                if rest:
                    load.ask()
                    copy_into(load.target[body:], self._descriptor, at)
            except LakeError as error:
                load.error = error.with_traceback(None)  # a traceback would keep the memory mapped
            if load.vector:
                load.vector[:] = self._pages[at + rest : at + rest + len(load.vector)]


def _reads_of(load: SlotLoad, opened: _OpenFiles, tails: _Tails) -> list[FileRead]:
    if load.error is not None:
        return []
    file, offset, length = opened.of(load), load.record.offset, len(load.target)
    if not file.direct:
        reads = [FileRead(AskingFile(file, load.ask), load.target, offset)]
        if load.vector:
            reads.append(FileRead(file, load.vector, offset + length))
        return reads
    body, end = page_down(length), length + len(load.vector)
    reads = [FileRead(AskingFile(file, load.ask), load.target[:body], offset)] if body else []
    if end > body:
        reads.append(FileRead(file, tails.take(load, page_up(end) - body), offset + body))
    return reads


def _may_be_cached(entry: ReadFile, offset: int, length: int) -> bool:
    return entry.in_memory or is_cached(entry.file.fileno(), offset, length) is not False


def _short(record: ChunkRecord) -> StoreDamaged:
    return StoreDamaged(
        f"segment {record.segment:016x} ends inside the chunk at offset {record.offset}; run: lake fsck",
        finding=Finding.CHUNK_PAST_END,
    )
