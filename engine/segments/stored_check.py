"""Checks payloads on the medium, past the page cache, as scrub does for every chunk.

Neighbours in a segment are read together, one run at a time, into memory that the caller owns; short runs share one
call in a thread.  Each payload is compared with its CRC32C per granule, and a whole chunk's with its id (BLAKE3).

Rules kept here:
- The page cache is neither trusted nor filled: where the file system takes O_DIRECT, the medium answers.
- A run is bounded (`AREA_BYTES`, `RUN_RECORDS`), and so is a batch of runs (`BATCH_BYTES`, `RUN_RECORDS`).  That bounds
  the memory, and the time for which a thread is taken.
- A payload that is not written yet, because its group is not, is skipped; a later pass checks it.

A mismatch here is no verdict: the chunk may have been freed since its record was read.  The caller decides.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from engine.format.checksums import check_payload
from engine.format.extents import Place, page_down, page_up
from engine.format.layouts import ChunkRecord
from engine.segments.files import SegmentRegister
from lakefs.content.verify import matches_id
from lakefs.errors import ChunkDamaged, LakeError, StoreDamaged
from lakefs.findings import Finding
from lakefs.ids import WHOLE_CHUNK, Buffer, ChunkId, SegmentId, ShardNumber, shard_text
from lakefs.limits import CHUNK_BYTES, KIB, PAGE_BYTES
from lakefs.ports import Disk, DiskFile, Offload

AREA_BYTES: Final = CHUNK_BYTES + 2 * PAGE_BYTES
"""Bytes of the longest run: a chunk of 4 MiB with its vector, in whole pages."""
BATCH_BYTES: Final = CHUNK_BYTES
"""Most payload bytes in the runs of a batch."""
RUN_RECORDS: Final = 256
"""Most chunks of a run or batch: at 4 KiB each 1 MiB, a millisecond of a thread; the hand-over costs far less."""
_GAP_BYTES: Final = 64 * KIB
"""Widest gap between neighbours that is read with them."""


class Stored(NamedTuple):
    """A chunk or a shard, and its record."""

    chunk: ChunkId
    record: ChunkRecord
    shard: ShardNumber = WHOLE_CHUNK


@dataclass(frozen=True)
class Mismatch:
    """A chunk that is not on the medium as its record says, and the error."""

    stored: Stored
    error: LakeError


def new_area() -> memoryview:
    """Return page-aligned memory for one run."""
    return memoryview(mmap.mmap(-1, AREA_BYTES))


def runs_of(stored: Sequence[Stored]) -> Iterator[list[Stored]]:
    """Yield the chunks in the order of their places, neighbours together."""
    run: list[Stored] = []
    segment, start, furthest, full = -1, 0, 0, 0
    for item in sorted(stored, key=_place_of):
        record = item.record
        offset = record.offset
        behind = page_up(offset + record.extent_bytes)
        if record.segment != segment or offset > furthest or behind > full or len(run) == RUN_RECORDS:
            if run:
                yield run
            start = page_down(offset)
            run, segment, full = [], record.segment, start + AREA_BYTES
        run.append(item)
        furthest = behind + _GAP_BYTES
    if run:
        yield run


def batches_of(runs: Iterable[list[Stored]]) -> Iterator[list[list[Stored]]]:
    """Yield the runs in their order, short ones together; one call in a thread checks a batch."""
    batch: list[list[Stored]] = []
    records = size = 0
    for run in runs:
        run_bytes = bytes_of(run)
        if batch and (records + len(run) > RUN_RECORDS or size + run_bytes > BATCH_BYTES):
            yield batch
            batch, records, size = [], 0, 0
        batch.append(run)
        records += len(run)
        size += run_bytes
    if batch:
        yield batch


def bytes_of(run: Sequence[Stored]) -> int:
    """Return the payload bytes of a run."""
    return sum([item.record.stored_bytes for item in run])


class StoredCheck:
    """Checks runs of chunks."""

    def __init__(
        self, disk: Disk, offload: Offload, register: SegmentRegister, unwritten: Mapping[Place, Buffer]
    ) -> None:
        """`unwritten`: small payloads whose bytes are not in their files yet."""
        self._disk = disk
        self._offload = offload
        self._register = register
        self._unwritten = unwritten

    async def check(self, runs: Sequence[Sequence[Stored]], area: memoryview) -> list[Mismatch]:
        """Read a batch of `batches_of` into `area`, in a thread, and compare each payload with its checksums and id.

        Returns the payloads that do not match, each with ChunkDamaged, StaleGrant, ...
        """
        return await self._offload.run(self._check, runs, area)

    def _check(self, runs: Iterable[Sequence[Stored]], area: memoryview) -> list[Mismatch]:
        written = [run for run in map(self._written, runs) if run]
        found: list[Mismatch] = []
        for segment, group in groupby(written, lambda run: run[0].record.segment):
            try:
                file = self._open(segment)
            except LakeError as error:
                found += [Mismatch(item, error) for run in group for item in run]
                continue
            try:
                for run in group:
                    found += _check_run(file, run, area)
            finally:
                file.close()
        return found

    def _written(self, run: Sequence[Stored]) -> Sequence[Stored]:
        if not self._unwritten:
            return run
        return [item for item in run if Place(item.record.segment, item.record.offset) not in self._unwritten]

    def _open(self, segment: SegmentId) -> DiskFile:
        path = self._register.path(segment)
        try:
            return self._disk.open(path, read_only=True, direct=True)
        except FileNotFoundError as error:
            message = f"{path} is missing; put its file back"
            raise StoreDamaged(message, subject=path, finding=Finding.SEGMENT_MISSING) from error


def _check_run(file: DiskFile, run: Sequence[Stored], area: memoryview) -> list[Mismatch]:
    try:
        start, count = _read(file, run, area)
    except LakeError as error:
        return [Mismatch(item, error) for item in run]
    found: list[Mismatch] = []
    for item in run:
        problem = _compared(item, area, item.record.offset - start, count)
        if problem is not None:
            found.append(Mismatch(item, problem))
    return found


def _read(file: DiskFile, run: Sequence[Stored], area: memoryview) -> tuple[int, int]:
    """Read a run into `area`; returns the file offset where it begins, and the bytes read."""
    first, last = run[0].record, run[-1].record
    start = page_down(first.offset)
    stop = page_up(last.offset + last.extent_bytes)
    if stop - start > len(area):
        message = f"its record says {last.extent_bytes} bytes"
        subject = shard_text(run[-1].chunk, run[-1].shard)
        raise ChunkDamaged(message, subject=subject, finding=Finding.CHUNK_RECORD_WRONG)
    return start, file.pread_into(area[: stop - start], start)


def _compared(item: Stored, area: memoryview, at: int, count: int) -> LakeError | None:
    record = item.record
    behind = at + record.stored_bytes
    end = at + record.extent_bytes
    payload = area[at:behind]
    checked = end <= count and check_payload(record, payload, area[behind:end])
    if checked and (item.shard != WHOLE_CHUNK or matches_id(item.chunk, payload)):
        return None
    place = f"segment {record.segment:016x}, offset {record.offset}"
    if end > count:
        finding = Finding.CHUNK_PAST_END
        problem = f"its bytes are not there: {place} is behind the file's end"
    elif checked:
        finding = Finding.CHUNK_HASH_WRONG
        problem = f"its bytes in {place} match their checksum and do not hash to its id"
    else:
        finding = Finding.CHUNK_DAMAGED
        problem = f"its bytes in {place} do not match their checksum"
    return ChunkDamaged(problem, subject=shard_text(item.chunk, item.shard), finding=finding)


_place_of: Final = attrgetter("record.segment", "record.offset")
