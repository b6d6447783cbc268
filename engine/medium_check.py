"""Payloads checked as they lie on the medium, past the page cache: what scrub does to every chunk.

Neighbours in a segment are read together, one run at a time, into memory that the caller owns.  Each payload is
compared with its CRC32C per granule and with its id (BLAKE3).

Rules kept here:
- The page cache is neither trusted nor filled: where the file system takes O_DIRECT, the medium answers.
- A run is bounded (`AREA_BYTES`, `RUN_RECORDS`): so is the memory, and the time that a thread holds the interpreter.
- What is not written yet, because its group is not, is passed over; it is checked when it is written.

A mismatch here is no verdict: the chunk may have been freed meanwhile.  Who asks judges.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.checksums import check_payload
from engine.extents import Place, page_down, page_up
from engine.format import ChunkRecord
from engine.segment_files import SegmentRegister
from lakefs.errors import ChunkDamaged, LakeError, StoreDamaged
from lakefs.ids import Buffer, ChunkId, chunk_id_of, id_text, kind_of
from lakefs.limits import CHUNK_BYTES, KIB, PAGE_BYTES
from lakefs.ports import Disk

AREA_BYTES: Final = CHUNK_BYTES + 2 * PAGE_BYTES
"""The longest run: a chunk of 4 MiB with its vector, in whole pages."""
RUN_RECORDS: Final = 64
_GAP_BYTES: Final = 64 * KIB
"""Room between neighbours that is read along with them."""


@dataclass(frozen=True)
class Stored:
    """A chunk and the record by which it was found."""

    chunk: ChunkId
    record: ChunkRecord


@dataclass(frozen=True)
class Mismatch:
    """A chunk that is not on the medium as its record says, and how."""

    stored: Stored
    error: LakeError


def new_area() -> memoryview:
    """Page-aligned memory for one run."""
    return memoryview(mmap.mmap(-1, AREA_BYTES))


def runs_of(stored: Sequence[Stored]) -> Iterator[list[Stored]]:
    """The chunks in the order of their places, neighbours together."""
    run: list[Stored] = []
    start = end = 0
    for item in sorted(stored, key=_place_of):
        record = item.record
        behind = page_up(record.offset + record.extent_bytes)
        fits = (
            run
            and run[0].record.segment == record.segment
            and len(run) < RUN_RECORDS
            and record.offset <= end + _GAP_BYTES
            and behind - start <= AREA_BYTES
        )
        if not fits:
            if run:
                yield run
            run, start = [], page_down(record.offset)
        run.append(item)
        end = behind
    if run:
        yield run


class MediumCheck:
    """Checks runs of chunks.  Blocks: call it through `Offload`."""

    def __init__(self, disk: Disk, register: SegmentRegister, unwritten: Mapping[Place, Buffer]) -> None:
        self._disk = disk
        self._register = register
        self._unwritten = unwritten

    def check(self, run: Sequence[Stored], area: memoryview) -> list[Mismatch]:
        """Read one run into `area`, and compare; those that do not match, with ChunkDamaged, StaleGrant, ..."""
        written = [
            item for item in run if Place(item.record.segment, item.record.offset) not in self._unwritten
        ]
        if not written:
            return []
        try:
            start, count = self._read(written, area)
        except LakeError as error:
            return [Mismatch(item, error) for item in written]
        found: list[Mismatch] = []
        for item in written:
            problem = _compared(item, area, item.record.offset - start, count)
            if problem is not None:
                found.append(Mismatch(item, problem))
        return found

    def _read(self, run: Sequence[Stored], area: memoryview) -> tuple[int, int]:
        """Where in the file the area begins, and how much of it was read."""
        first, last = run[0].record, run[-1].record
        start = page_down(first.offset)
        stop = page_up(last.offset + last.extent_bytes)
        if stop - start > len(area):
            raise ChunkDamaged(f"its record says {last.extent_bytes} bytes", subject=id_text(run[-1].chunk))
        path = self._register.path(first.segment)
        try:
            file = self._disk.open(path, read_only=True, direct=True)
        except FileNotFoundError as error:
            raise StoreDamaged(f"{path} is missing; put its file back", subject=path) from error
        try:
            return start, file.pread_into(area[: stop - start], start)
        finally:
            file.close()


def _compared(item: Stored, area: memoryview, at: int, count: int) -> LakeError | None:
    record = item.record
    end = at + record.extent_bytes
    place = f"segment {record.segment:016x}, offset {record.offset}"
    if end > count:
        return ChunkDamaged(
            f"its bytes are not there: {place} is behind the file's end", subject=id_text(item.chunk)
        )
    payload = area[at : at + record.stored_bytes]
    if not check_payload(record, payload, area[at + record.stored_bytes : end]):
        return ChunkDamaged(f"its bytes in {place} do not match their checksum", subject=id_text(item.chunk))
    if chunk_id_of(kind_of(item.chunk), payload) != item.chunk:
        return ChunkDamaged(
            f"its bytes in {place} match their checksum and do not hash to its id",
            subject=id_text(item.chunk),
        )
    return None


def _place_of(item: Stored) -> tuple[int, int]:
    return item.record.segment, item.record.offset
