"""Writes small segments: payloads under 64 KiB, placed in memory, written and synced many at a time.

    place    gives each payload a place; from then on it can be read, from memory
    take     returns all placed and unwritten payloads as a batch  --  batch.write, in a thread: write, sync

Rules kept here:
- The journal's group that records a payload is appended after the batch that holds it (`engine.metadata.group_commit`
  takes a batch with every group, and writes it first).  So a record that survives never names a payload that did not.
- A payload stays in memory until its bytes are in the file, and reads look there first, so that a reader of its place
  finds it.  Before a client with a descriptor reads the file itself, the engine waits for `wait_written`.
- One batch is under way at a time; a failed one shuts the gate, and nothing is placed from then on.
- Zeros are written ahead of the cursor before payload is placed there; without room for them nothing is placed.
- A place that was given up is written all the same; it is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat

import trio

from engine.format.extents import Place, page_up
from engine.format.layouts import SEGMENT_DATA_OFFSET, SegmentKind
from engine.host.failpoints import reached
from engine.host.zeros import zeros
from engine.segments.files import grow
from engine.segments.maker import OpenSegment, SegmentMaker, WriteGate, close_segment_file
from lakefs.errors import DiskFailed, LakeError, StoreFull
from lakefs.ids import Buffer, SegmentId
from lakefs.limits import PAGE_BYTES, SMALL_PAYLOAD_BYTES, SMALL_UNWRITTEN_BYTES, SMALL_UNWRITTEN_BYTES_MAX
from lakefs.ports import DiskFile


@dataclass
class _Run:
    """Payloads that follow each other in one segment."""

    segment: OpenSegment
    start: int
    payloads: list[Buffer] = field(default_factory=list)


@dataclass
class SmallBatch:
    """The payloads placed before `take`.  Call `ended` on the loop, once, when `write` has returned or raised."""

    gate: WriteGate
    runs: list[_Run]
    full: list[OpenSegment]
    places: list[Place]
    on_end: Callable[[SmallBatch], None]
    is_written: bool = False

    def write(self) -> None:
        """Write and sync; then close the segments that are full.  Blocks.  StoreFull, DiskFailed, StoreReadOnly."""
        assert not self.is_written, "a batch is written once"
        self.gate.check()
        try:
            for run in self.runs:
                run.segment.file.pwritev(run.payloads, run.start)
            reached("small.written")
            for run in self.runs:
                run.segment.file.sync_data()
            self.is_written = True
            reached("small.synced")
            for segment in self.full:
                segment.is_closed = True
                reached("segment.full")
                close_segment_file(segment.file, page_up(segment.cursor))
        except LakeError as error:
            self.gate.shut(error)  # whatever the reason, pages may be lost
            raise

    def ended(self) -> None:
        """End the batch: `write` has returned or raised."""
        self.on_end(self)


class SmallWriter:
    """Packs payloads under 64 KiB."""

    def __init__(self, maker: SegmentMaker) -> None:
        self._maker = maker
        self._current: OpenSegment | None = None
        self._full: list[OpenSegment] = []
        self._runs: list[_Run] = []
        self._placed: list[Place] = []
        self._batch: SmallBatch | None = None
        self._batch_ended = trio.lowlevel.ParkingLot()
        self._making_room = trio.Lock()
        self._unwritten_bytes = 0
        self.unwritten: dict[Place, Buffer] = {}
        """Payloads whose bytes are not in their file yet; changed on the loop, read in threads too."""
        self.urge: Callable[[], None] = lambda: None
        """Requests that a batch is taken soon; does not wait.  Does nothing where the caller that places writes too."""

    @property
    def being_written(self) -> set[SegmentId]:
        """The segment that takes the next payload, and the full ones that are not closed yet."""
        current = [] if self._current is None else [self._current]
        return {segment.segment for segment in (*current, *self._full)}

    @property
    def filled(self) -> tuple[SegmentId, int] | None:
        """The segment that takes the next payload, and the bytes placed in it; None when there is none."""
        current = self._current
        return None if current is None else (current.segment, current.cursor - SEGMENT_DATA_OFFSET)

    async def retire(self, segment: SegmentId) -> None:
        """Stop placing payloads in this segment; it is written and closed on return.  StoreReadOnly.

        When cancelled, or when it is not the current segment any more, one of the next batches closes it.
        """
        async with self._making_room:
            current = self._current
            if current is None or current.segment != segment:
                return
            self._current = None
            self._full.append(current)
        while not current.is_closed:
            self._maker.gate.check()
            self.urge()
            await self._batch_ended.park()

    async def place(self, payloads: Sequence[Buffer], *, into_headroom: bool = False) -> list[Place]:
        """Give payloads of 1 to 65,535 bytes their places, packed, in order.  They can be read at once.

        Durable with the journal's next group: a batch is written before it.  The extents are in flight until
        `InFlight.settle`.  StoreFull, StoreReadOnly, DiskFailed; then, and when cancelled, all of them are given up.
        `into_headroom`: half of the room that payload leaves free may be taken, by callers that at once free more.
        No checkpoint when there is room already.
        """
        lengths = list(map(len, payloads))
        assert not lengths or 0 < min(lengths) <= max(lengths) < SMALL_PAYLOAD_BYTES
        places: list[Place] = []
        try:
            if len(lengths) > 1 and self._has_room(sum(lengths)) and self._fits_memory(sum(lengths)):
                self._maker.gate.check()
                return self._put_many(payloads, lengths)
            for payload, length in zip(payloads, lengths, strict=True):
                self._maker.gate.check()
                while not self._has_room(length):
                    await self._make_room(length, into_headroom)
                    self._maker.gate.check()
                places.append(self._put(payload, length))
        except BaseException:
            for place in places:
                self._maker.in_flight.settle(place)
            raise
        return places

    def take(self) -> SmallBatch | None:
        """Return all placed and unwritten payloads as a batch; None when there is nothing to write or close."""
        assert self._batch is None, "one batch at a time"
        if not (self._runs or self._full):
            return None
        self._batch = SmallBatch(self._maker.gate, self._runs, list(self._full), self._placed, self._ended)
        self._runs, self._placed = [], []
        return self._batch

    async def wait_written(self, places: Collection[Place]) -> None:
        """Wait until the payloads at these places are in their files; no checkpoint if they are.  StoreReadOnly."""
        while not self.unwritten.keys().isdisjoint(places):
            self._maker.gate.check()
            self.urge()
            await self._batch_ended.park()

    async def sync(self) -> None:
        """Make placed payloads durable; for callers that take no batches with a journal.  DiskFailed, ..."""
        while self._batch is not None:
            await self._batch_ended.park()
        self._maker.gate.check()
        batch = self.take()
        if batch is not None:
            with trio.CancelScope(shield=True):
                try:
                    await self._maker.offload.run(batch.write)
                finally:
                    batch.ended()

    def stop(self, error: LakeError) -> None:
        """Shut the gate because the journal takes no more groups; nothing is placed from then on."""
        self._maker.gate.shut(error)
        self._batch_ended.unpark_all()

    async def close(self) -> None:
        """Write placed payloads, trim and close the files.  No `place` is under way."""
        current, self._current = self._current, None
        if current is not None:
            self._full.append(current)
        if not self._maker.gate.reason:
            await self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files as they are, untrimmed."""
        current, self._current = self._current, None
        for segment in self._full if current is None else [*self._full, current]:
            if not segment.is_closed:
                segment.file.close()
        self._full.clear()

    # --- room ----------------------------------------------------------------------------------------

    def _has_room(self, length: int) -> bool:
        current = self._current
        return (
            current is not None
            and current.cursor + length <= min(current.limit, current.extended)
            and self._unwritten_bytes < SMALL_UNWRITTEN_BYTES_MAX
        )

    def _fits_memory(self, length: int) -> bool:
        return self._unwritten_bytes + length <= SMALL_UNWRITTEN_BYTES_MAX

    async def _make_room(self, length: int, into_headroom: bool) -> None:
        """Make room for a payload: begin a segment, write zeros ahead, or wait for memory."""
        async with self._making_room:
            self._maker.gate.check()  # it may have been shut while another caller held the lock: no batch follows
            if self._has_room(length):
                return
            current = self._current
            if self._unwritten_bytes >= SMALL_UNWRITTEN_BYTES_MAX:
                self.urge()
                await self._batch_ended.park()
            elif current is None or current.cursor + length > current.limit:
                assert SEGMENT_DATA_OFFSET + length <= self._maker.sizes.small_segment
                made = await self._maker.create(SegmentKind.SMALL, into_headroom=into_headroom)
                if current is not None:
                    self._full.append(current)
                self._current = made
            else:
                await self._extend(current, length, into_headroom)

    async def _extend(self, segment: OpenSegment, length: int, into_headroom: bool) -> None:
        """Write zeros ahead.  Raises StoreFull when not even those for this payload fit."""
        need = page_up(segment.cursor + length) - segment.extended
        try:
            with trio.CancelScope(shield=True):
                segment.extended += await self._maker.offload.run(self._fill, segment, need, into_headroom)
        except LakeError as error:
            self._maker.gate.note(error)
            raise

    def _fill(self, segment: OpenSegment, need: int, into_headroom: bool) -> int:
        """Write zeros and return their length.  Blocks.  Takes no more of the headroom than `need`."""
        disk, sizes = self._maker.disk, self._maker.sizes
        want = max(need, min(sizes.small_fill, page_up(segment.limit) - segment.extended))
        take = partial(_write_zeros, segment.file)
        try:
            return grow(disk, take, segment.extended, need, want, self._maker.left_free_bytes())
        except StoreFull:
            if not into_headroom:
                raise
            left_free = self._maker.left_free_bytes(into_headroom=True)
            return grow(disk, take, segment.extended, need, need, left_free)

    def _put(self, payload: Buffer, length: int) -> Place:
        """Give out a place; there is room for it."""
        segment = self._begin_run()
        place = segment.take(length)
        self._maker.in_flight.begin(place)
        self._runs[-1].payloads.append(payload)
        self._placed.append(place)
        self.unwritten[place] = payload
        self._note_unwritten(length)
        return place

    def _put_many(self, payloads: Sequence[Buffer], lengths: list[int]) -> list[Place]:
        """Give out places, one behind the other; there is room for all."""
        segment, total = self._begin_run(), sum(lengths)
        offsets = list(accumulate(lengths[:-1], initial=segment.take(total).offset))
        places = list(map(Place, repeat(segment.segment), offsets))
        self._maker.in_flight.begin_many(segment.segment, set(offsets))
        self._runs[-1].payloads += payloads
        self._placed += places
        self.unwritten.update(zip(places, payloads, strict=True))
        self._note_unwritten(total)
        return places

    def _begin_run(self) -> OpenSegment:
        """Return the segment that takes the next payload; it has a run."""
        segment = self._current
        assert segment is not None
        if not self._runs or self._runs[-1].segment is not segment:
            self._runs.append(_Run(segment, segment.cursor))
        return segment

    def _note_unwritten(self, length: int) -> None:
        self._unwritten_bytes += length
        if self._unwritten_bytes >= SMALL_UNWRITTEN_BYTES:
            self.urge()

    def _ended(self, batch: SmallBatch) -> None:
        """Forget a written batch's payloads.  Those of a failed one stay in memory: they are visible until restart."""
        assert self._batch is batch, "one batch at a time, ended once"
        self._batch = None
        self._full = [segment for segment in self._full if not segment.is_closed]
        if batch.is_written:
            for place in batch.places:
                self._unwritten_bytes -= len(self.unwritten.pop(place))
            assert self._unwritten_bytes >= 0
        else:
            self._maker.gate.shut(DiskFailed("small payloads could not be written"))
        self._batch_ended.unpark_all()


def _write_zeros(file: DiskFile, offset: int, length: int) -> None:
    """Write zeros ahead, so that later synced writes meet written blocks."""
    assert offset % PAGE_BYTES == 0
    file.pwritev(zeros(length), offset)
    reached("small.zeroed")
