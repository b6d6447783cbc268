"""Many small reads of segments at once: whole small payloads, and granules of larger ones.

Rules kept here:
- Every payload returned was checked exactly as `SegmentReader` checks it.  A payload that does not match, a failed read
  and a file that cannot be opened are left to that reader, in a thread: it reads again, past the page cache too, and
  reports damage.
- A few reads try the page cache first.  Many are submitted to the `IoQueue` together: io_uring copies cached bytes
  during the submission, at less than a system call for each.
- Payloads of at most one granule are read back to back into one buffer, without an object for each.
- At most READ_AT_ONCE_BYTES of several reads, or READ_STEP_BYTES of a long one, are read before other tasks may run, so
  that a long request does not delay the others.
- A long range that is in the page cache is read and checked on the loop, whose processor sends it next: handed over by
  a thread, the bytes would be fetched from another processor's cache.  Threads read what is not cached.
- Files stay open, and counted as used, while the kernel reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import compress
from typing import Final

import trio
from crc32c import crc32c

from engine.format.checksums import check_vector, vector_of
from engine.format.layouts import ChunkRecord
from engine.segments.files import HeldFiles, ReadFiles
from engine.segments.reader import READ_AT_ONCE_BYTES, READ_STEP_BYTES, RangeRead, SegmentReader
from lakefs.content.verify import crcs_between, granules_around
from lakefs.errors import LakeError, OperationalError, StoreDamaged
from lakefs.ids import SegmentId
from lakefs.limits import GRANULE_BYTES
from lakefs.ports import DiskFile, FilePlace, FileRead, IoQueue, Offload
from lakefs.shared_index.table_format import Found

FEW: Final = 4
"""Most reads for which one system call each costs no more than the queue."""

Range = tuple[ChunkRecord, int, int]
"""(record, offset of the range in the payload, its length)"""


class BatchReader:
    """Batches of small reads of one store's segments.  Any number at once."""

    def __init__(self, reader: SegmentReader, files: ReadFiles, queue: IoQueue, offload: Offload) -> None:
        self._reader = reader
        self._files = files
        self._queue = queue
        self._offload = offload
        self.from_cache = 0
        """Small payloads found in memory: not written yet, or in the page cache."""
        self.from_queue = 0
        """Small payloads and ranges that the queue read and that matched."""
        self.from_loop = 0
        """Long ranges that were in the page cache and that matched."""
        self.from_threads = 0
        """Small payloads and ranges that a thread read, or read again."""

    def statistics(self) -> dict[str, str | int]:
        """Kind of the queue, why it is not io_uring (empty when it is), and counts since the start; JSON-able."""
        return {
            "through": self._queue.kind,
            "reason": self._queue.reason,
            "cached": self.from_cache,
            "queue": self.from_queue,
            "loop": self.from_loop,
            "threads": self.from_threads,
        }

    def read_at_once(self, record: ChunkRecord) -> bytes | None:
        """Return the checked payload of a small chunk if it is in memory, else None; does not wait."""
        payload = self._reader.small_at_once(record)
        self.from_cache += payload is not None
        return payload

    async def read_small(self, records: Sequence[ChunkRecord], *, tried: bool = False) -> list[bytes | LakeError]:
        """Return the checked payload of each record, or its error; `tried`: `read_at_once` returned None for all."""
        found: list[bytes | LakeError | None] = [None] * len(records)
        if not tried:
            self._look_in_memory(records, found)
        missing = [index for index, payload in enumerate(found) if payload is None]
        read_now = await self._read_plain([records[index] for index in missing])
        for index, payload in zip(missing, read_now, strict=True):
            found[index] = None if payload is None else bytes(payload)
        rest = [index for index in missing if found[index] is None]
        if rest:
            read = await self._offload.run(self._reader.read_each_blocking, [records[index] for index in rest])
            self.from_threads += len(rest)
            for index, answer in zip(rest, read, strict=True):
                found[index] = answer
        answers = [payload for payload in found if payload is not None]
        assert len(answers) == len(records), "each record has an answer"
        return answers

    async def read_ranges(
        self, ranges: Sequence[Range], into: Sequence[memoryview | None] | None = None
    ) -> list[RangeRead | LakeError]:
        """Return ranges widened to granules and checked, as `SegmentReader.read_range` does, or the error of each.

        `into`: memory for each, as long as the range is wide, or None for new memory.  Bytes of chunks of at most a
        granule are not read into it.
        """
        found: list[RangeRead | LakeError | None] = [None] * len(ranges)
        targets = [None] * len(ranges) if into is None else into
        is_plain = [record.stored_bytes <= GRANULE_BYTES for record, _, _ in ranges]
        records = [record for record, _, _ in compress(ranges, is_plain)]
        plain = iter(await self._read_plain(records))
        pieces = [
            _Piece(*wanted, target)
            for wanted, target, plainly in zip(ranges, targets, is_plain, strict=True)
            if not plainly
        ]
        others = iter(await self._read_pieces(pieces) if pieces else ())
        for index, plainly in enumerate(is_plain):
            if not plainly:
                found[index] = next(others)
            elif (payload := next(plain)) is not None:
                found[index] = 0, payload, ranges[index][0].crc.to_bytes(4, "little")
        for index, wanted in enumerate(ranges):
            if found[index] is None:
                self.from_threads += 1
                try:
                    found[index] = await self._reader.read_range(*wanted, targets[index])
                except LakeError as error:
                    found[index] = error
        answers = [read for read in found if read is not None]
        assert len(answers) == len(ranges), "each range has an answer"
        return answers

    async def read_packed(self, places: Sequence[Found]) -> memoryview | None:
        """Return the whole payloads of chunks without vector, back to back; all lie durably at these places.

        At most READ_AT_ONCE_BYTES.  None unless the queue read every one and all match.
        """
        segments = {place[1] for place in places}
        held = await self._hold({SegmentId(segment) for segment in segments})
        try:
            files: dict[int, DiskFile] = {segment: entry.file for segment, entry in held.items()}
            if not segments.issubset(files):
                return None
            wanted = [(files[place[1]], place[2], place[3]) for place in places]
            memory = memoryview(bytearray(sum([place[3] for place in places])))
            whole = await self._queue.read_packed(wanted, memory)
        finally:
            self._files.leave_all(held)
        if not all(whole):
            return None
        end = 0
        for _, _, _, length, crc in places:
            begin, end = end, end + length
            if crc32c(memory[begin:end]) != crc:
                return None
        self.from_queue += len(places)
        return memory

    def _look_in_memory(self, records: Sequence[ChunkRecord], found: list[bytes | LakeError | None]) -> None:
        look = self._reader.small_at_once if len(records) <= FEW else self._reader.unwritten_payload
        for index, record in enumerate(records):
            payload = found[index] = look(record)
            self.from_cache += payload is not None

    async def _read_plain(self, records: Sequence[ChunkRecord]) -> list[memoryview | None]:
        """Return whole payloads of chunks without vector; None where the queue cannot read one or it does not match."""
        found: list[memoryview | None] = [None] * len(records)
        for count, group in enumerate(_groups([record.stored_bytes for record in records])):
            if count:
                await trio.lowlevel.checkpoint()
            await self._read_plain_group(records, group, found)
        self.from_queue += len(found) - found.count(None)
        return found

    async def _read_plain_group(
        self, records: Sequence[ChunkRecord], group: Sequence[int], found: list[memoryview | None]
    ) -> None:
        held = await self._hold({records[index].segment for index in group})
        try:
            chosen = [index for index in group if self._is_in_file(records[index], held)]
            places: list[FilePlace] = []
            for index in chosen:
                record = records[index]
                places.append((held[record.segment].file, record.offset, record.stored_bytes))
            memory = memoryview(bytearray(sum(place[2] for place in places)))
            whole = await self._queue.read_packed(places, memory) if places else []
        finally:
            self._files.leave_all(held)
        end = 0
        for index, is_whole in zip(chosen, whole, strict=True):
            record = records[index]
            begin, end = end, end + record.stored_bytes
            payload = memory[begin:end]
            if is_whole and crc32c(payload) == record.crc:
                found[index] = payload

    async def _read_pieces(self, pieces: Sequence[_Piece]) -> list[RangeRead | None]:
        """Return the ranges read; None where the queue cannot read one or it does not match."""
        found: list[RangeRead | None] = [None] * len(pieces)
        for count, group in enumerate(_groups([piece.length for piece in pieces])):
            if count:
                await trio.lowlevel.checkpoint()
            await self._read_group(pieces, group, found)
        self.from_queue += sum(read is not None for read in found)
        for index, piece in enumerate(pieces):
            if piece.length > READ_AT_ONCE_BYTES:
                found[index] = await self._read_long(piece)
                self.from_loop += found[index] is not None
        return found

    async def _read_long(self, piece: _Piece) -> RangeRead | None:
        """Return a range that is in the page cache; None if it is not, or does not match."""
        segment = piece.record.segment
        held = await self._hold({segment})
        try:
            return await piece.cached(held[segment].file) if segment in held else None
        except OperationalError:
            return None
        finally:
            self._files.leave_all(held)

    async def _read_group(self, pieces: Sequence[_Piece], group: Sequence[int], found: list[RangeRead | None]) -> None:
        held = await self._hold({pieces[index].record.segment for index in group})
        try:
            chosen = [index for index in group if self._is_in_file(pieces[index].record, held)]
            reads: list[FileRead] = []
            for index in chosen:
                reads += pieces[index].reads(held[pieces[index].record.segment].file)
            counts = iter(await self._queue.read_many(reads) if reads else ())
        finally:
            self._files.leave_all(held)
        for index in chosen:
            if pieces[index].is_filled(counts):
                found[index] = pieces[index].checked()

    def _is_in_file(self, record: ChunkRecord, held: HeldFiles) -> bool:
        return record.segment in held and not self._reader.is_unwritten(record)

    async def _hold(self, segments: Collection[SegmentId]) -> HeldFiles:
        """Return their files, in use until `leave_all`; files that cannot be opened are missing from it."""
        held = self._files.hold(segments)
        if len(held) < len(segments):
            self._files.leave_all(held)
            await self._offload.run(self._open_each, segments)
            held = self._files.hold(segments)
        return held

    def _open_each(self, segments: Collection[SegmentId]) -> None:
        for segment in segments:
            with suppress(OperationalError, StoreDamaged), self._files.using(segment):
                pass  # stays open for the next read; the read that needs the file reports an error


class _Piece:
    """The granules that a range touches, in a chunk with a vector, and that vector."""

    __slots__ = ("_begin", "_end", "_into", "_payload", "_vector", "record")

    def __init__(self, record: ChunkRecord, offset: int, length: int, into: memoryview | None = None) -> None:
        self.record = record
        self._begin, self._end = granules_around(offset, length, record.stored_bytes)
        self._into = into
        assert into is None or len(into) == self.length

    @property
    def length(self) -> int:
        """Bytes of payload to read."""
        return self._end - self._begin

    def reads(self, file: DiskFile) -> list[FileRead]:
        """Return the reads, into memory that was given or is allocated here."""
        record = self.record
        self._allocate()
        return [
            FileRead(file, self._payload, record.offset + self._begin),
            FileRead(file, self._vector, record.offset + record.stored_bytes),
        ]

    def is_filled(self, counts: Iterator[int | LakeError]) -> bool:
        """Take the answers to `reads`; True if each is whole."""
        filled = next(counts) == len(self._payload)
        return next(counts) == len(self._vector) and filled

    def checked(self) -> RangeRead | None:
        """Return the range that was read; None when it does not match."""
        if not check_vector(self.record, self._vector):
            return None
        crcs = crcs_between(self._vector, self._begin, self._end)
        return (self._begin, self._payload, crcs) if vector_of(self._payload) == crcs else None

    async def cached(self, file: DiskFile) -> RangeRead | None:
        """Read the range step by step, each checked at once; None if bytes are not cached, or do not match."""
        record = self.record
        self._allocate()
        if not file.preadv_cached_into([self._vector], record.offset + record.stored_bytes):
            return None
        if not check_vector(record, self._vector):
            return None
        crcs = crcs_between(self._vector, self._begin, self._end)
        for at in range(0, self.length, READ_STEP_BYTES):
            if at:
                await trio.lowlevel.checkpoint()
            step = self._payload[at : at + READ_STEP_BYTES]
            if not file.preadv_cached_into([step], record.offset + self._begin + at):
                return None
            if vector_of(step) != crcs_between(crcs, at, at + len(step)):
                return None
        return self._begin, self._payload, crcs

    def _allocate(self) -> None:
        self._payload = memoryview(bytearray(self.length)) if self._into is None else self._into
        self._vector = memoryview(bytearray(self.record.vector_bytes))


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices in groups of at most READ_AT_ONCE_BYTES; a longer read is in no group."""
    group: list[int] = []
    room = READ_AT_ONCE_BYTES
    for index, length in enumerate(lengths):
        if length > READ_AT_ONCE_BYTES:
            continue
        if length > room:
            yield group
            group, room = [], READ_AT_ONCE_BYTES
        group.append(index)
        room -= length
    if group:
        yield group
