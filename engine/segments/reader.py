"""Reads payloads of segments that match their checksums.

Rules kept here:
- A checked read returns the bytes that were written, or raises ChunkDamaged naming segment and offset; it never
  returns other bytes.  On a mismatch, or when the disk fails the read, the extent is read once more past the page
  cache: this heals bit rot in memory, and reads that the disk fails once.
- The vector is checked against the record before a granule is checked against the vector.
- A removed segment is StaleGrant (the chunk may have moved); a missing or short one is damage.

This module does not know if the place is still this chunk's: a freed extent has its old bytes until it is punched, then
zeros, which do not match.
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
from lakefs.errors import ChunkDamaged, CorruptionError, DiskFailed, LakeError, OperationalError
from lakefs.ids import Buffer
from lakefs.ports import Disk, DiskFile, Offload

T = TypeVar("T")

READ_AT_ONCE_BYTES = 512 << 10
"""Most bytes of several reads copied and checked on the loop between two checkpoints: about 0.1 ms."""
READ_STEP_BYTES = 1 << 20
"""Bytes of one long read copied and checked on the loop between two checkpoints: 0.16 ms, less than sending them."""

RangeRead = tuple[int, memoryview, bytes]
"""(offset of the bytes in the chunk, the bytes, CRC32C of each of their granules: 4 bytes each, little-endian)"""

_ReadAt = Callable[[int, memoryview], int]
"""(offset in the segment, memory to fill) -> number of bytes read, short at the file's end."""


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
        """`unwritten`: small payloads whose bytes are not in their files yet."""
        self._unwritten = unwritten
        self._disk = disk
        self._offload = offload
        self._register = register
        self._files = files
        self.healed_reads = 0
        """Reads that matched only past the page cache: bad memory, a bad cable, or a read that failed once."""

    async def read_chunk(self, record: ChunkRecord, buffer: memoryview | None = None) -> memoryview:
        """Return the payload, every granule checked; in `buffer` if given (at least `record.extent_bytes` long)."""
        return await self._offload.run(self._checked, record, _whole, buffer)

    def is_unwritten(self, record: ChunkRecord) -> bool:
        """Return True for a small payload whose bytes are not in their file yet."""
        return bool(self._unwritten) and Place(record.segment, record.offset) in self._unwritten

    def unwritten_payload(self, record: ChunkRecord) -> bytes | None:
        """Return a small payload whose bytes are not in their file yet, else None."""
        if not self._unwritten:
            return None
        held = self._unwritten.get(Place(record.segment, record.offset))
        return None if held is None else bytes(held)

    def small_at_once(self, record: ChunkRecord) -> bytes | None:
        """Return the payload if it is in memory and matches, else None; a thread then finds any error."""
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

    async def read_range(
        self, record: ChunkRecord, offset: int, length: int, into: memoryview | None = None
    ) -> RangeRead:
        """Return a range of the payload, widened to granules and checked, with the checksums to send.

        The bytes are in `into` if it is given (exactly as long) and the payload is longer than a granule.
        """
        assert 0 <= offset < offset + length <= record.stored_bytes
        return await self._offload.run(self._checked, record, _range, offset, length, into)

    def read_each_blocking(self, records: Sequence[ChunkRecord]) -> list[bytes | LakeError]:
        """Return the checked payload of each, or the error that `read_chunk` raises; for a thread of the pool."""
        return [self._payload_or_error(record) for record in records]

    def _payload_or_error(self, record: ChunkRecord) -> bytes | LakeError:
        try:
            return bytes(self._checked(record, _whole, None))
        except (CorruptionError, OperationalError) as error:
            return error

    def _checked(self, record: ChunkRecord, attempt: Callable[..., T | None], *args: object) -> T:
        """Run `attempt(record, read_at, *args)` on memory or the page cache, then past it if that did not match."""
        held = self._unwritten.get(Place(record.segment, record.offset))
        if held is not None:
            found = attempt(record, lambda _, target: _copy(held, target), *args)
            if found is None:
                raise _damaged(record)
            return found
        try:
            with self._files.using(record.segment) as file:
                found = attempt(record, lambda offset, target: file.pread_into(target, offset), *args)
        except DiskFailed:  # the second attempt raises it
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
    """Read payload and vector in one read, into `buffer` if given; None when they do not match."""
    length = record.extent_bytes
    extent = memoryview(bytearray(length)) if buffer is None else buffer[:length]
    if read_at(record.offset, extent) < length:
        return None
    payload = extent[: record.stored_bytes]
    return payload if check_payload(record, payload, extent[record.stored_bytes :]) else None


def _range(
    record: ChunkRecord, read_at: _ReadAt, offset: int, length: int, into: memoryview | None
) -> RangeRead | None:
    """Read the granules that the range touches; None when vector or granules do not match."""
    if not record.vector_bytes:
        payload = _whole(record, read_at, None)
        return None if payload is None else (0, payload, record.crc.to_bytes(4, "little"))
    vector = memoryview(bytearray(record.vector_bytes))
    count = read_at(record.offset + record.stored_bytes, vector)
    if count < len(vector) or not check_vector(record, vector):
        return None
    begin, stop = granules_around(offset, length, record.stored_bytes)
    payload = memoryview(bytearray(stop - begin)) if into is None else into
    assert len(payload) == stop - begin
    crcs = crcs_between(vector, begin, stop)
    if read_at(record.offset + begin, payload) < len(payload) or vector_of(payload) != crcs:
        return None
    return begin, payload, crcs


def _past_cache(file: DiskFile) -> _ReadAt:
    """Return a reader of whole pages through O_DIRECT, or through the page cache where the file system refuses it."""

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
        f"the chunk of {record.stored_bytes} bytes in {place} does not match its checksum, past the page cache either",
        subject=place,
    )
