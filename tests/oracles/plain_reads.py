"""The plan of reads in Python: the same runs, reads and copies as `lakefs.grants.batch_plan.ReadPlan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

from lakefs.content.verify import Check, matches, room_for_vector
from lakefs.grants.batch_plan import (
    ASK_FROM_BYTES,
    CHECKED_BYTES_MAX,
    CHECKED_RUN_BYTES_MAX,
    RUN_BYTES_MAX,
    RUN_CHUNKS_MAX,
    SEGMENTS_MAX,
    Arrived,
    Descriptor,
)
from lakefs.grants.dram_slabs import generation_number
from lakefs.host.page_cache import is_cached
from lakefs.ids import ChunkKind
from lakefs.limits import GRANULE_BYTES
from lakefs.shared_index.table_format import PLACE, unpack_place
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT

_DATA: Final = bytes([ChunkKind.DATA])


class _Run(NamedTuple):
    segment: int
    offset: int
    numbers: list[int]
    lengths: list[int]


class TwinPlan:
    """A plan to read `chunks` into `targets`, by `places`: a `PLACE` for each chunk, packed one after the other.

    Chunks longer than `longest` are left out; with `is_checked` those in segments are taken up to `CHECKED_BYTES_MAX`,
    for `read_checked`.  With `asks` nothing is read that is not all cached.  The plan keeps the targets borrowed as
    long as it lives.  Raises ValueError when chunks, targets and places do not fit together, and BufferError when a
    target is not writable memory.
    """

    def __init__(
        self,
        chunks: list[bytes],
        targets: list[memoryview],
        places: bytes | bytearray,
        longest: int,
        is_checked: bool = False,
        asks: bool = False,
    ) -> None:
        if len(targets) != len(chunks) or len(places) < len(chunks) * PLACE.size:
            raise ValueError("chunks, targets and places do not go together")
        self.segments: list[int] = []
        """Segments whose descriptors `read` needs, in this order."""
        self._places = [PLACE.unpack_from(places, at * PLACE.size) for at in range(len(chunks))]
        self._targets = targets
        self._runs: list[_Run] = []
        self._in_slots = [
            number
            for number, (_, _, length, _, tier) in enumerate(self._places)
            if tier == MEDIUM_DRAM and chunks[number][:1] == _DATA and 0 < length <= longest
        ]
        self._ask_from = 1 if asks else ASK_FROM_BYTES
        longest, run_bytes = (CHECKED_BYTES_MAX, CHECKED_RUN_BYTES_MAX) if is_checked else (longest, RUN_BYTES_MAX)
        known: dict[int, int] = {}
        last, end, room = -1, -1, 0
        for number, (chunk, target) in enumerate(zip(chunks, targets, strict=True)):
            segment, offset, length, _, tier = self._places[number]
            if tier != MEDIUM_SEGMENT or chunk[:1] != _DATA or not 0 < length <= longest:
                continue
            if target.readonly:
                raise BufferError("a target is read-only")
            if length > len(target) or (segment not in known and len(known) == SEGMENTS_MAX):
                continue
            index = known.setdefault(segment, len(known))
            joins = number == last + 1 and bool(self._runs) and self._runs[-1].segment == index
            if joins and offset == end and length <= min(room, GRANULE_BYTES):
                self._runs[-1].numbers.append(number)
                self._runs[-1].lengths.append(length)
            else:
                self._runs.append(_Run(index, offset, [number], [length]))
                room = run_bytes
            is_full = length > GRANULE_BYTES or len(self._runs[-1].numbers) == RUN_CHUNKS_MAX
            last, end, room = number, -1 if is_full else offset + length, room - length
        self.segments.extend(known)

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self._runs)

    @property
    def others(self) -> list[int]:
        """Numbers of the chunks whose place is known, but which are in no run and not for `copy`."""
        planned = {number for run in self._runs for number in run.numbers} | set(self._in_slots)
        return [number for number, place in enumerate(self._places) if place[4] and number not in planned]

    @property
    def slots(self) -> int:
        """Number of chunks for `copy`: they lie in the DRAM tier and are no longer than `longest`."""
        return len(self._in_slots)

    def copy(
        self, first: int, stop: int, generations: memoryview, slabs: Mapping[int, memoryview], slab_bytes: int
    ) -> list[Arrived]:
        """Copy the chunks of [first, stop) that lie in slots; return those whose slot held the same before and after.

        `generations` and `slabs` are as in `lakefs.grants.dram_slabs.Slabs`.  A chunk whose slab is not among them is
        left out.
        """
        arrived: list[Arrived] = []
        for number in self._in_slots:
            if not first <= number < stop:
                continue
            place, offset, length, crc, _ = self._places[number]
            slab, generation = unpack_place(place)
            memory, at = slabs.get(slab), generation_number(slab, offset, slab_bytes)
            if memory is None or generation & 1 or at >= len(generations) or offset + length > len(memory):
                continue
            if length > len(self._targets[number]) or generations[at] != generation:
                continue
            self._targets[number][:length] = memory[offset : offset + length]
            if generations[at] == generation:
                arrived.append((number, length, crc))
        return arrived

    def parts(self, part_bytes: int) -> list[tuple[int, int]]:
        """Cut the runs into parts of at most `part_bytes`, or of one run; return each part's first run and its end."""
        parts: list[tuple[int, int]] = []
        first = size = 0
        for at, run in enumerate(self._runs):
            if at > first and size + sum(run.lengths) > part_bytes:
                parts.append((first, at))
                first, size = at, 0
            size += sum(run.lengths)
        return [*parts, (first, len(self._runs))] if self._runs else []

    def read(self, first: int, stop: int, descriptors: Sequence[Descriptor | None]) -> list[Arrived]:
        """Read the runs [first, stop) by the descriptors of `segments`; return the chunks that arrived, unchecked.

        Runs of a segment without a descriptor are not read.  Raises IndexError when there are no such runs.
        """
        if not 0 <= first <= stop <= len(self._runs) or len(descriptors) != len(self.segments):
            raise IndexError("no such runs, or not a descriptor for each segment")
        arrived: list[Arrived] = []
        for run in self._runs[first:stop]:
            held = descriptors[run.segment]
            left = 0 if held is None else self._read_run(run, *held)
            for number, length in zip(run.numbers, run.lengths, strict=True):
                left -= length
                if left < 0:
                    break
                arrived.append((number, length, self._places[number][3]))
        return arrived

    def read_lengths(self, first: int, stop: int, descriptors: Sequence[Descriptor | None], lengths: list[int]) -> None:
        """Like `read`, but write the lengths of what arrived into `lengths`, which has one item for each chunk.

        Raises ValueError when it has not.
        """
        if len(lengths) != len(self._places):
            raise ValueError("chunks and lengths do not go together")
        for number, length, _ in self.read(first, stop, descriptors):
            lengths[number] = length

    def read_checked(self, descriptors: Sequence[Descriptor | None], lengths: list[int], helper: object = None) -> None:
        """Read all runs, and write the lengths of the chunks that match their CRC32C."""
        for at, run in enumerate(self._runs):
            if run.lengths[0] > GRANULE_BYTES:
                self._read_long(run, descriptors[run.segment], lengths)
                continue
            for number, length, crc in self.read(at, at + 1, descriptors):
                if matches(_DATA, self._targets[number][:length], Check.CRC32C, crc):
                    lengths[number] = length

    def _read_long(self, run: _Run, held: Descriptor | None, lengths: list[int]) -> None:
        [number], [length] = run.numbers, run.lengths
        vector, target = room_for_vector(length), self._targets[number][:length]
        size = length + len(vector)
        if held is None or (held[1] and length >= self._ask_from and is_cached(held[0], run.offset, size) is False):
            return
        if os.preadv(held[0], [target, vector], run.offset, held[1]) != size:
            return
        if matches(_DATA, target, Check.CRC32C, self._places[number][3], vector):
            lengths[number] = length

    def _read_run(self, run: _Run, descriptor: int, flags: int) -> int:
        """Read one run; return the number of bytes that arrived, or -1 for none."""
        if flags and run.lengths[0] >= self._ask_from and is_cached(descriptor, run.offset, sum(run.lengths)) is False:
            return -1
        into = [self._targets[number][:length] for number, length in zip(run.numbers, run.lengths, strict=True)]
        try:
            return os.preadv(descriptor, into, run.offset, flags)
        except OSError:
            return -1  # not in the page cache, or the read failed


def twin_are_bytes(targets: list[Any]) -> TypeGuard[list[memoryview]]:
    """Return whether all are flat, contiguous views of writable bytes: `ReadPlan` and checks take only those."""
    return all(
        type(view) is memoryview and view.format == "B" and view.ndim == 1 and not view.readonly and view.contiguous
        for view in targets
    )
