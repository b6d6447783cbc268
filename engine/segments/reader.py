"""Reading segments: bytes as they lie there, and payloads that match their checksums.

Rules kept here:
- A checked read answers with the bytes that were written, or with ChunkDamaged naming segment and offset; never
  with other bytes.  On a mismatch, or when the disk fails the read, the extent is read once more past the page cache:
  rot in memory heals so, and what the disk fails once.
- The vector is checked by the record before a granule is checked by the vector.
- What is removed is StaleGrant (the chunk may have moved); what is missing or short is damage.

Whether the place is still this chunk's is not known here: freed extents read as zeros and do not match.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from engine.format.checksums import check_payload, check_vector, vector_of
from engine.format.extents import Place, page_down, page_up
from engine.format.layouts import ChunkRecord
from engine.segments.files import ReadFiles, SegmentRegister
from lakefs.content.verify import crcs_between, granules_around
from lakefs.errors import ChunkDamaged, CorruptionError, DiskFailed, LakeError, OperationalError, StoreDamaged
from lakefs.findings import Finding
from lakefs.ids import Buffer, SegmentId
from lakefs.ports import Disk, DiskFile, Offload

T = TypeVar("T")

READ_AT_ONCE_BYTES = 512 << 10
"""Copied and checked in the loop in one go: about 0.1 ms."""

RangeRead = tuple[int, memoryview, bytes]
"""(where the bytes begin in the chunk, the bytes, CRC32C of each granule of them: 4 bytes each, little-endian)"""

_ReadAt = Callable[[int, memoryview], int]
"""(offset in the segment, memory to fill) -> the count of bytes read, short at the file's end."""


class SegmentReader:
    """Reads of one store's segments.  Any number at once; blocking parts run in the pool's threads."""

    def __init__(
        self,
        disk: Disk,
        offload: Offload,
        register: SegmentRegister,
        files: ReadFiles,
        unwritten: Mapping[Place, Buffer],
    ) -> None:
        """`unwritten` are small payloads whose bytes are not in their files yet."""
        self._unwritten = unwritten
        self._disk = disk
        self._offload = offload
        self._register = register
        self._files = files
        self.healed_reads = 0
        """Reads that matched only past the page cache: bad memory, a bad cable, or a read that failed once."""

    # --- bytes as they lie there ---------------------------------------------------------------------

    async def read(self, segment: SegmentId, offset: int, length: int) -> bytes:
        """`length` bytes, unchecked.  StoreDamaged when the file ends before."""
        buffer = bytearray(length)
        await self.read_into(segment, offset, memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, segment: SegmentId, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, unchecked.  StoreDamaged when the file ends before."""
        await self._offload.run(self.pread_into_blocking, segment, offset, buffer)

    def pread_into_blocking(self, segment: SegmentId, offset: int, buffer: memoryview) -> None:
        """`read_into` for callers that are in a thread of the pool already."""
        with self._files.using(segment) as file:
            count = file.pread_into(buffer, offset)
        if count < len(buffer):
            path = self._register.path(segment)
            raise StoreDamaged(
                f"{path} ends at {offset + count}, before {offset + len(buffer)}; run: lake fsck",
                subject=path,
                finding=Finding.CHUNK_PAST_END,
            )

    # --- payloads, checked ---------------------------------------------------------------------------

    async def read_chunk(self, record: ChunkRecord, buffer: memoryview | None = None) -> memoryview:
        """The payload, every granule checked; in `buffer` when given (of at least `record.extent_bytes`)."""
        return await self._offload.run(self._checked, record, _whole, buffer)

    def is_unwritten(self, record: ChunkRecord) -> bool:
        """Whether it is a small payload whose bytes are not in their file yet."""
        return bool(self._unwritten) and Place(record.segment, record.offset) in self._unwritten

    def unwritten_payload(self, record: ChunkRecord) -> bytes | None:
        """A small payload whose bytes are not in their file yet."""
        if not self._unwritten:
            return None
        held = self._unwritten.get(Place(record.segment, record.offset))
        return None if held is None else bytes(held)

    def small_at_once(self, record: ChunkRecord) -> bytes | None:
        """The payload, when it is in memory and matches; whatever else there is to say of it is a thread's to find."""
        held = self.unwritten_payload(record)
        if held is not None:
            return held
        extent = memoryview(bytearray(record.extent_bytes))
        try:
            if not self._files.read_cached(record.segment, record.offset, extent):
                return None
        except OperationalError:
            return None
        payload = extent[: record.stored_bytes]
        return bytes(payload) if check_payload(record, payload, extent[record.stored_bytes :]) else None

    async def read_range(self, record: ChunkRecord, offset: int, length: int) -> RangeRead:
        """A range of the payload, widened to granules and checked, with the checksums to send along."""
        assert 0 <= offset < offset + length <= record.stored_bytes
        return await self._offload.run(self._checked, record, _range, offset, length)

    def read_each_blocking(self, records: Sequence[ChunkRecord]) -> list[bytes | LakeError]:
        """The checked payload of each, or its error as `read_chunk` raises it; for a thread of the pool."""
        return [self._payload_or_error(record) for record in records]

    def _payload_or_error(self, record: ChunkRecord) -> bytes | LakeError:
        try:
            return bytes(self._checked(record, _whole, None))
        except (CorruptionError, OperationalError) as error:
            return error

    def _checked(self, record: ChunkRecord, attempt: Callable[..., T | None], *args: object) -> T:
        """`attempt(record, read_at, *args)` in memory or the page cache, and past it when that did not match."""
        held = self._unwritten.get(Place(record.segment, record.offset))
        if held is not None:
            found = attempt(record, lambda _, target: _copy(held, target), *args)
            if found is None:
                raise _damaged(record)
            return found
        try:
            with self._files.using(record.segment) as file:
                found = attempt(record, lambda offset, target: file.pread_into(target, offset), *args)
        except DiskFailed:  # the second attempt tells
            found = None
        if found is not None:
            return found
        try:
            direct = self._disk.open(self._register.path(record.segment), read_only=True, direct=True)
        except FileNotFoundError as error:
            raise _damaged(record) from error
        try:
            found = attempt(record, _past_cache(direct), *args)
        finally:
            direct.close()
        if found is None:
            raise _damaged(record)
        self.healed_reads += 1
        return found


def _copy(payload: Buffer, target: memoryview) -> int:
    count = min(len(payload), len(target))
    target[:count] = memoryview(payload)[:count]
    return count


def _whole(record: ChunkRecord, read_at: _ReadAt, buffer: memoryview | None) -> memoryview | None:
    """Payload and vector in one read, into `buffer` when given; None when they do not match."""
    length = record.extent_bytes
    extent = memoryview(bytearray(length)) if buffer is None else buffer[:length]
    if read_at(record.offset, extent) < length:
        return None
    payload = extent[: record.stored_bytes]
    return payload if check_payload(record, payload, extent[record.stored_bytes :]) else None


def _range(record: ChunkRecord, read_at: _ReadAt, offset: int, length: int) -> RangeRead | None:
    """The granules that the range touches; None when vector or granules do not match."""
    if not record.vector_bytes:
        payload = _whole(record, read_at, None)
        return None if payload is None else (0, payload, record.crc.to_bytes(4, "little"))
    vector = memoryview(bytearray(record.vector_bytes))
    count = read_at(record.offset + record.stored_bytes, vector)
    if count < len(vector) or not check_vector(record, vector):
        return None
    begin, stop = granules_around(offset, length, record.stored_bytes)
    payload = memoryview(bytearray(stop - begin))
    crcs = crcs_between(vector, begin, stop)
    if read_at(record.offset + begin, payload) < len(payload) or vector_of(payload) != crcs:
        return None
    return begin, payload, crcs


def _past_cache(file: DiskFile) -> _ReadAt:
    """Reads through O_DIRECT (where it was refused: as before), which wants whole pages."""

    def read_at(offset: int, target: memoryview) -> int:
        start = page_down(offset)
        pages = memoryview(mmap.mmap(-1, page_up(offset + len(target)) - start))
        count = max(0, min(file.pread_into(pages, start) - (offset - start), len(target)))
        target[:count] = pages[offset - start : offset - start + count]
        return count

    return read_at


def _damaged(record: ChunkRecord) -> ChunkDamaged:
    place = f"segment {record.segment:016x}, offset {record.offset}"
    return ChunkDamaged(
        f"the chunk of {record.stored_bytes} bytes in {place} does not match its checksum, "
        "past the page cache either",
        subject=place,
    )
