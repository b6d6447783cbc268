"""Bugs for `tests.sim.planted` in gc, compaction, scrub, and in what depends on clocks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any
from unittest import mock

import trio

from engine.format.extents import Extent
from engine.format.layouts import ChunkRecord
from engine.segments.pins import Pins
from engine.segments.room import SegmentRoom
from engine.sessions.references import References
from engine.upkeep.compaction import Compactor
from engine.upkeep.gc import Collector, _Cycle
from engine.upkeep.scrub import Scrubber
from engine.uploads.expiry import UploadExpiry
from engine.uploads.lifecycle import unpack_upload
from lakefs.ids import Birth, Sequence


def punch_a_live_extent() -> AbstractContextManager[Any]:
    """Let gc forget every fifth live extent."""
    original = _Cycle.note_live

    def note_live(self: _Cycle, record: ChunkRecord) -> None:
        if record.birth % 5:
            original(self, record)

    return mock.patch.object(_Cycle, "note_live", note_live)


def punch_too_much() -> AbstractContextManager[Any]:
    """Punch the page after a freed extent, too."""
    original = SegmentRoom.punch

    async def punch(self: SegmentRoom, extents: Iterable[Extent]) -> None:
        await original(self, [(segment, offset, length + 4096) for segment, offset, length in extents])

    return mock.patch.object(SegmentRoom, "punch", punch)


def forget_session_holds() -> AbstractContextManager[Any]:
    def held_sets(self: References) -> Iterable[Any]:
        return ()

    return mock.patch.object(References, "held_sets", held_sets)


def drop_the_barrier() -> AbstractContextManager[Any]:
    def keep(self: References, birth: Birth) -> None:
        return

    return mock.patch.object(References, "keep", keep)


def forget_sessions_that_ended() -> AbstractContextManager[Any]:
    """Let gc mark nothing that sessions hold; it asks only the sessions left when it is about to free something."""
    original = Collector._free

    async def nothing(self: Collector, cycle: _Cycle) -> None:
        return

    async def free(self: Collector, cycle: _Cycle, proposed: list[tuple[bytes, ChunkRecord]]) -> None:
        held = list(self._references.held_sets())
        left: list[tuple[bytes, ChunkRecord]] = []
        for key, record in proposed:
            if any(record.birth in births for births in held):
                cycle.note_live(record)
            else:
                left.append((key, record))
        await original(self, cycle, left)

    return mock.patch.multiple(Collector, _mark_held=nothing, _free=free)


def forget_leases() -> AbstractContextManager[Any]:
    def leased_blobs(self: References) -> Iterable[Any]:
        return ()

    return mock.patch.object(References, "leased_blobs", leased_blobs)


def forget_pins() -> AbstractContextManager[Any]:
    def nothing(self: Pins, record: ChunkRecord) -> None:
        return

    return mock.patch.multiple(Pins, _enter=nothing, _leave=nothing)


def forget_parts() -> AbstractContextManager[Any]:
    async def mark_parts(self: Collector, cycle: _Cycle, visit: object) -> None:
        await trio.lowlevel.checkpoint()

    return mock.patch.object(Collector, "_mark_parts", mark_parts)


def free_the_old_place_at_once() -> AbstractContextManager[Any]:
    async def free(self: Compactor, moved: Any, sequence: Sequence) -> None:
        await self._segments.room.punch(
            [(item.record.segment, item.record.offset, item.record.extent_bytes) for item in moved]
        )

    return mock.patch.object(Compactor, "_free", free)


def remove_a_segment_with_what_stayed() -> AbstractContextManager[Any]:
    """Forget what was not moved, as when a chunk cannot be read."""
    original = Compactor._move

    async def move(self: Compactor, batch: Any, report: Any) -> int:
        await original(self, batch[: len(batch) - 1], report)
        return len(batch)

    return mock.patch.object(Compactor, "_move", move)


def name_the_copy_before_it_is_written() -> AbstractContextManager[Any]:
    """Change the records of large chunks before their copies are synced."""
    original = Compactor._record

    async def record(self: Compactor, copies: Any, report: Any) -> int:
        async def no_sync(segments: Any) -> None:
            await trio.lowlevel.checkpoint()

        with mock.patch.object(self._segments.large, "sync", no_sync):
            return await original(self, copies, report)

    return mock.patch.object(Compactor, "_record", record)


def scrub_finds_nothing() -> AbstractContextManager[Any]:
    async def is_damaged(self: Scrubber, mismatch: Any, area: memoryview) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    return mock.patch.object(Scrubber, "_is_damaged", is_damaged)


def scrub_believes_one_failed_read() -> AbstractContextManager[Any]:
    async def is_damaged(self: Scrubber, mismatch: Any, area: memoryview) -> bool:
        stored = mismatch.stored
        await self._quarantine.note(stored.chunk, stored.record, mismatch.error)
        return True

    return mock.patch.object(Scrubber, "_is_damaged", is_damaged)


def scrub_releases_what_is_damaged() -> AbstractContextManager[Any]:
    """Let every chunk that was read out of quarantine, good or not."""
    original = Scrubber._check_batch

    async def check_batch(self: Scrubber, batch: Any, area: memoryview, rate: int) -> int:
        damaged = await original(self, batch, area, rate)
        for item in chain.from_iterable(batch):
            await self._quarantine.release(item.chunk, item.record)
        return damaged

    return mock.patch.object(Scrubber, "_check_batch", check_batch)


def sessions_go_by_the_wall_clock() -> AbstractContextManager[Any]:
    """End sessions that are in use when the clock is set forward."""
    original = References.expire

    def expire(self: References) -> int:
        now_ns = self._clock.wall_ns()
        last_ns = getattr(self, "last_expire_ns", now_ns)
        self.last_expire_ns = now_ns  # type: ignore[attr-defined]
        if now_ns - last_ns > 3_000e9:
            for session in list(self._sessions.values()):
                self._drop(session)
        return original(self)

    return mock.patch.object(References, "expire", expire)


def expire_uploads_too_early() -> AbstractContextManager[Any]:
    """Take the age of an upload without its sign: a clock that is set back makes it old."""
    original = UploadExpiry._is_over

    def is_over(self: UploadExpiry, view: Any, key: bytes, value: bytes) -> bool:
        age_ns = self._clock.wall_ns() - unpack_upload(value).created_ns
        return original(self, view, key, value) or abs(age_ns) >= self._expiry_ns

    return mock.patch.object(UploadExpiry, "_is_over", is_over)


def keep_uploads_for_ever() -> AbstractContextManager[Any]:
    return mock.patch.object(UploadExpiry, "_is_over", return_value=False)
