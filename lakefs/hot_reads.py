"""Reading chunks without asking the engine: the hot index says where, the page cache has the bytes, the check decides.

    find in the hot index  ->  preadv(RWF_NOWAIT) from the segment  ->  CRC32C or BLAKE3  ->  done

What the engine has in memory is copied from there (`lakefs.hot_slabs`).

Whatever is odd (the index does not know, a page is not cached, no descriptor is held, the check fails) is no error:
the caller asks the engine, which knows.  Nothing here waits for a disk or talks to anybody.

Rules kept here:
- A hit is a hint.  Bytes are checked as the client's `Check` says; with `Check.NONE` the index is asked once more
  behind the read, and whether the engine still keeps it, so that bytes of a place that was given up meanwhile are not
  taken.
- What is no chunk's id is known nowhere: the engine says so.
- May be called from several threads; descriptors in use stay open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from blake3 import blake3

from lakefs.crc import crc32c
from lakefs.errors import StaleGrant
from lakefs.hot_slabs import is_read_in_slab
from lakefs.ids import Buffer, ChunkId, ChunkKind, SegmentId
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.movers import (
    BRING_IN_FROM,
    MEDIUM_DRAM,
    MEDIUM_SEGMENT,
    Check,
    SegmentDescriptors,
    check_granules,
)
from lakefs.new_bytes import NewBytes

Found = tuple[int, int, int, int, int]
"""(medium, segment, offset, stored_bytes, crc) of a chunk, as in a grant."""
NOT_READ: Final = -1
_DATA: Final = int(ChunkKind.DATA)


RUN_BYTES_MAX: Final = 512 * KIB
"""Of chunks that lie side by side, read by one call: so much is still worth to be shared between threads."""


class Job(NamedTuple):
    """A chunk of many to be read: its number among them, where it is, and memory as long as it."""

    number: int
    chunk: ChunkId
    found: Found
    target: memoryview


class HotIndex(Protocol):
    """What is asked of a `lakefs.hot_index.HotIndexReader`."""

    @property
    def find(self) -> Callable[[bytes], Found | None]:
        """Where a chunk is; None: not known."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether the engine still keeps it up to date."""
        ...

    def find_many(self, chunks: list[bytes]) -> list[Found | None]:
        """`find` of each, in order."""
        ...


class HotReads:
    """Reads of data chunks that the hot index knows and the page cache has."""

    def __init__(self, index: HotIndex, descriptors: SegmentDescriptors, check: Check) -> None:
        self.index = index
        self.find_many = index.find_many
        self._find = index.find
        self._descriptors = descriptors
        self._check = check

    def places_of(self, chunks: Sequence[bytes]) -> list[Found | None]:
        """Where chunks are, in order; None: not known."""
        try:
            return self.find_many(list(chunks))
        except ValueError:
            return [None] * len(chunks)

    def _place_of(self, chunk: ChunkId) -> Found | None:
        try:
            return self._find(chunk)
        except ValueError:
            return None

    def read_into(self, chunk: ChunkId, target: memoryview) -> int:
        """Fill the beginning of `target` with a chunk, checked; its length, or NOT_READ: then it may hold anything."""
        found = self._place_of(chunk)
        if found is None or found[3] > len(target):
            return NOT_READ
        return self.read_found(chunk, found, target[: found[3]])

    def read(self, chunk: ChunkId) -> bytes | None:
        """A chunk as bytes, checked; None when it was not read."""
        found = self._place_of(chunk)
        if found is None:
            return None
        new = NewBytes(found[3])
        length = self.read_found(chunk, found, new.view)
        content = new.take()
        return None if length == NOT_READ else content

    def read_found(self, chunk: ChunkId, found: Found, target: memoryview) -> int:
        """As `read_into`, of what `find` has answered; `target` is as long as the chunk."""
        medium, segment, offset, length, crc = found
        descriptors = self._descriptors
        if medium != MEDIUM_SEGMENT or chunk[0] != _DATA:
            if medium != MEDIUM_DRAM or chunk[0] != _DATA:
                return NOT_READ
            is_read = is_read_in_slab(descriptors.slabs, chunk, found, target, self._check)
            return length if is_read else NOT_READ
        if length >= BRING_IN_FROM and not descriptors.may_be_cached(SegmentId(segment), offset, length):
            return NOT_READ  # or the kernel would begin to fetch it, page by page
        check = self._check
        vector = _vector_of(length) if check is Check.CRC32C and length > GRANULE_BYTES else None
        held = descriptors.enter(SegmentId(segment))
        if held is None:
            return NOT_READ
        try:
            targets: list[Buffer] = [target] if vector is None else [target, vector]
            count = os.preadv(held.descriptor, targets, offset, held.nowait)
        except OSError:
            return NOT_READ  # not in the page cache, or not to be had
        finally:
            descriptors.leave(held)
        if vector is not None:
            is_right = count == length + len(vector) and _matches_vector(chunk, target, vector, crc)
        elif check is Check.BLAKE3:
            # Memory that another program shrank is not looked at past what arrived: that would be SIGBUS.
            is_right = count == length and blake3(target).digest() == chunk[1:]
        elif check is Check.CRC32C:
            is_right = count == length and crc32c(target) == crc
        else:
            is_right = count == length and self._find(chunk) == found and self.index.is_current
        return length if is_right else NOT_READ

    def read_run(self, run: Sequence[Job], lengths: list[int]) -> None:
        """Read the chunks of one of `runs_of`; where one was read and is right, its length goes to its number."""
        if len(run) == 1:
            job = run[0]
            lengths[job.number] = self.read_found(job.chunk, job.found, job.target)
            return
        held = self._descriptors.enter(SegmentId(run[0].found[1]))
        if held is None:
            return
        try:
            targets: list[Buffer] = [job.target for job in run]
            left = os.preadv(held.descriptor, targets, run[0].found[2], held.nowait)
        except OSError:
            return  # not in the page cache, or not to be had
        finally:
            self._descriptors.leave(held)
        again = self.find_many([job.chunk for job in run]) if self._check is Check.NONE else None
        if again is not None and not self.index.is_current:
            return
        for place, (number, chunk, found, target) in enumerate(run):
            left -= found[3]
            if left < 0:
                return
            if self._check is Check.BLAKE3:
                is_right = blake3(target).digest() == chunk[1:]
            elif self._check is Check.CRC32C:
                is_right = crc32c(target) == found[4]
            else:
                is_right = again is not None and again[place] == found
            if is_right:
                lengths[number] = found[3]


def runs_of(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs in order, those together that one call can read: data chunks of one granule, side by side."""
    runs: list[list[Job]] = []
    last_segment, end, room = -1, 0, 0
    for job in jobs:
        medium, segment, offset, length, _ = job.found
        is_plain = medium == MEDIUM_SEGMENT and length <= GRANULE_BYTES and job.chunk[0] == _DATA
        if is_plain and segment == last_segment and offset == end and length <= room:
            runs[-1].append(job)
        else:
            runs.append([job])
            room = RUN_BYTES_MAX
        last_segment, end, room = segment if is_plain else -1, offset + length, room - length
    return runs


def _vector_of(length: int) -> bytearray:
    return bytearray(4 * -(-length // GRANULE_BYTES))


def _matches_vector(chunk: ChunkId, payload: memoryview, vector: bytearray, crc: int) -> bool:
    """Whether the granules have the checksums behind them, and those their own."""
    if crc32c(vector) != crc:
        return False
    try:
        check_granules(chunk, payload, bytes(vector))
    except StaleGrant:
        return False
    return True
