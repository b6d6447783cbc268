"""Ingest: payloads are filled, hashed and written, so that one is written while another is hashed.

Large payloads go in runs, a few at once.  Two ways:
- *Hashed first*: each run, of about 1 MiB, is hashed by one call to a thread, and what is wanted of it written by
  another.
- *Written ahead* (from 1 MiB, in runs of about 4 MiB): one thread writes a run while another hashes it
  (`writing_ahead`), and what turns out to be there was written in vain.  That is done only while what comes turns out
  to be new.

Rules kept here:
- Hashed and written is the same memory, the engine's own, which nobody else can change any more once it is filled.
- What is wanted is decided when its id is known, in one step without a checkpoint.  Nothing is handed to the caller
  whose hash or write failed.
- An extent is settled exactly once: by the caller for what it was handed, here for all else, whatever fails or is
  cancelled.
- A write or sync that fails, but for want of room, makes the whole store read-only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Final, TypeVar

from crc32c import crc32c

from engine.chunks.filling import Filling
from engine.chunks.payload import Hashed, Payload, Written
from engine.chunks.write_ahead import AheadRun, write_beside_hash
from engine.format.checksums import seal_with, vector_of
from engine.format.extents import large_extent_bytes
from engine.host.tasks import run_all
from engine.segments.large import IsLast, not_last
from engine.segments.segment_store import Segments
from lakefs.errors import StoreFull
from lakefs.ids import chunk_id_of
from lakefs.limits import WRITE_AHEAD_RUN_BYTES, WRITE_RUN_BYTES, WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload

T = TypeVar("T")

_NEW_BEFORE_AHEAD: Final = 8
"""Requests with nothing but new payloads after one with others, before the next is written ahead of its hashes."""


Choose = Callable[[Seq[Hashed]], Seq[Hashed]]
"""Which of some payloads are to be written; asked once for each payload of a request, without a checkpoint."""


class Ingest:
    """Gets payloads hashed and onto the medium."""

    def __init__(
        self,
        segments: Segments,
        offload: Offload,
        stop_writing: Callable[[str], None],
        write_ahead_bytes: int,
    ) -> None:
        """`stop_writing` is told why nothing is written any more; `write_ahead_bytes`: see `lakefs.limits`."""
        self._segments = segments
        self._offload = offload
        self._stop_writing = stop_writing
        self._write_ahead_bytes = write_ahead_bytes
        self._new_still_wanted = 0
        """Requests whose payloads are new that have to come before one is written ahead of its hashes again."""

    async def take_in(self, payloads: Seq[Payload], choose: Choose) -> tuple[list[Hashed], list[Written]]:
        """Hash all payloads, in order, and write those that `choose` picks: synced, or placed when small.

        What was written is in flight until `settle`.  StoreFull, StoreReadOnly, DiskFailed, and what a fill raises;
        then, and when cancelled, everything is given up.
        """
        job = _Job(payloads, choose)
        with self._giving_up(job.written):
            small = await self._hash_small(job)
            if job.large:
                await self._take_in_large(job)
            await self._place_small(small, job.written)
            if job.large:
                await self._sync(job.written)
        return job.in_order(), job.written

    async def _take_in_large(self, job: _Job) -> None:
        is_long = job.large_bytes >= self._write_ahead_bytes
        if is_long and not self._new_still_wanted:
            await self._write_ahead(job)
        else:
            await self._hash_and_write(job)
        if is_long:
            self._learn(is_new=len(job.written) == len(job.large))

    async def hash(self, payloads: Seq[Payload]) -> list[Hashed]:
        """Ids and record checksums of payloads, in order; nothing is written."""
        job = _Job(payloads, lambda _: ())
        await self._hash_small(job)
        await self._hash_and_write(job)
        return job.in_order()

    async def write(self, items: Seq[Hashed], *, into_headroom: bool = False) -> list[Written]:
        """Write and sync payloads that were hashed, and place small ones; see `take_in`.

        `into_headroom`: small ones may take half of what payload leaves free, for who gives more room back at once.
        """
        written: list[Written] = []
        small = [item for item in items if item.payload.area is None]
        large = [item for item in items if item.payload.area is not None]

        async def write_run(run: Seq[Hashed]) -> None:
            await self._write_run(run, written)

        with self._giving_up(written):
            await self._place_small(small, written, into_headroom=into_headroom)
            await run_all(write_run, self._runs(large, _payload_of))
            await self._sync(written)
        return written

    def settle(self, items: Seq[Written]) -> None:
        """The extents are recorded, or given up."""
        for item in items:
            self._segments.in_flight.settle(item.place)

    @contextmanager
    def _giving_up(self, written: list[Written]) -> Iterator[None]:
        """What was written is settled when the block raises; the store learns of a disk that failed."""
        try:
            yield
        except BaseException:
            self.settle(written)
            self._note_failure()
            raise

    def _note_failure(self) -> None:
        if self._segments.gate.reason:
            self._stop_writing(self._segments.gate.reason)

    # --- runs --------------------------------------------------------------------------------------

    async def _hash_and_write(self, job: _Job) -> None:
        """Each run is hashed, then what is chosen of it is written, while others are."""
        left = deque(self._runs(job.large, job.payloads.__getitem__))
        job.runs_left = len(left)

        async def work(_: int) -> None:
            while left:
                await self._hash_and_write_run(job, left)

        await run_all(work, range(min(WRITE_RUNS_AT_ONCE, len(left))))

    async def _hash_and_write_run(self, job: _Job, runs: deque[list[int]]) -> None:
        run = runs.popleft()
        try:
            hashed = await self._offload.run(_hash_all, [job.payloads[index] for index in run])
            await self._write_run(job.note(run, hashed), job.written, job.is_last_run)
            job.runs_left -= 1
        except BaseException:
            runs.clear()  # the request has failed: the others begin nothing more
            raise

    async def _write_run(self, run: Seq[Hashed], written: list[Written], is_last: IsLast = not_last) -> None:
        areas = [(item.payload.area, item.payload.length) for item in run if item.payload.area is not None]
        if areas:
            places = await self._segments.large.write(areas, is_last=is_last)
            written.extend(Written(item, place) for item, place in zip(run, places, strict=True))

    def _runs(
        self, items: Iterable[T], payload_of: Callable[[T], Payload], most: int = WRITE_RUN_BYTES
    ) -> list[list[T]]:
        """The items in order, in runs of large payloads that `write_large` takes."""
        most = min(most, self._segments.large.run_bytes_max)
        runs: list[list[T]] = []
        room = 0
        for item in items:
            extent = large_extent_bytes(payload_of(item).length)
            if extent > room:
                runs.append([])
                room = most
            runs[-1].append(item)
            room -= extent
        return runs

    async def _hash_small(self, job: _Job) -> Seq[Hashed]:
        """Hash the small payloads: in place what is in memory, in a thread what has to be filled.  What is chosen."""
        payloads = [job.payloads[index] for index in job.small]
        if any(payload.fill is not None for payload in payloads):
            return job.note(job.small, await self._offload.run(_hash_all, payloads))
        return job.note(job.small, _hash_all(payloads)) if payloads else ()

    async def _place_small(
        self, items: Seq[Hashed], written: list[Written], *, into_headroom: bool = False
    ) -> None:
        payloads = [item.payload.small for item in items if item.payload.small is not None]
        if payloads:
            places = await self._segments.small.place(_kept(payloads), into_headroom=into_headroom)
            written.extend(Written(item, place) for item, place in zip(items, places, strict=True))

    async def _sync(self, written: Seq[Written]) -> None:
        await self._segments.large.sync(
            {item.place.segment for item in written if item.hashed.payload.area is not None}
        )

    # --- ahead of the hashes -----------------------------------------------------------------------

    def _learn(self, *, is_new: bool) -> None:
        """The large payloads of a request were new, or some were there already."""
        self._new_still_wanted = max(0, self._new_still_wanted - 1) if is_new else _NEW_BEFORE_AHEAD

    async def _write_ahead(self, job: _Job) -> None:
        """Write runs while they are hashed; what turns out to be there is given up.

        That a write failed, as for want of room, matters to the request only when a chunk of it is wanted; and where
        some are not, there may be room for those that are.
        """
        runs = self._runs(job.large, job.payloads.__getitem__, WRITE_AHEAD_RUN_BYTES)
        ahead = [AheadRun(run, [Filling(job.payloads[index]) for index in run]) for run in runs]
        try:
            await write_beside_hash(ahead, self._segments, self._offload, job.note)
            all_wanted = sum(len(run.chosen) for run in ahead) == len(job.large)
            for run in ahead:
                if isinstance(run.error, StoreFull) and not all_wanted:
                    for some in self._runs(run.chosen, _payload_of):
                        await self._write_run(some, job.written)
                else:
                    job.written.extend(run.take_chosen())
        finally:
            for run in ahead:
                for place in run.take_places():
                    self._segments.in_flight.settle(place)
            self._note_failure()


class _Job:
    """The payloads of one request on their way."""

    def __init__(self, payloads: Seq[Payload], choose: Choose) -> None:
        self.payloads = payloads
        self.small = [index for index, payload in enumerate(payloads) if payload.area is None]
        self.large = [index for index, payload in enumerate(payloads) if payload.area is not None]
        self.written: list[Written] = []
        """In flight, to be handed to the caller or given up."""
        self.large_bytes = sum(payloads[index].length for index in self.large)
        self.runs_left = 0
        """Runs that are not written yet, when they are hashed first."""
        self._choose = choose
        self._hashed: list[Hashed | None] = [None] * len(payloads)

    def note(self, indices: Seq[int], hashed: Seq[Hashed]) -> Seq[Hashed]:
        """These payloads are hashed; which of them are to be written."""
        for index, item in zip(indices, hashed, strict=True):
            self._hashed[index] = item
        return self._choose(hashed)

    def is_last_run(self) -> bool:
        """Whether nothing is written behind the run that is."""
        return self.runs_left == 1

    def in_order(self) -> list[Hashed]:
        """All of them, hashed."""
        return [item for item in self._hashed if item is not None]


def _kept(payloads: Seq[memoryview]) -> Seq[memoryview]:
    """Small payloads to be kept in memory until they are written; copies, where that is mostly others."""
    whole = {id(payload.obj): memoryview(payload.obj).nbytes for payload in payloads}
    if sum(whole.values()) <= 2 * sum(map(len, payloads)):
        return payloads
    return [memoryview(bytes(payload)) for payload in payloads]


def _payload_of(item: Hashed) -> Payload:
    return item.payload


def _hash_all(payloads: Seq[Payload]) -> list[Hashed]:
    return [_hash(payload) for payload in payloads]


def _hash(payload: Payload) -> Hashed:
    """Fill, digest, vector and padding in one call, while the bytes are in the cache."""
    memory = payload.small if payload.area is None else payload.area[: payload.length]
    assert memory is not None
    vector = None if payload.fill is None else payload.fill(memory, 0)
    chunk = chunk_id_of(payload.kind, memory)
    if payload.area is None:
        return Hashed(payload, chunk, crc32c(memory))
    return Hashed(payload, chunk, seal_with(payload.area, payload.length, vector or vector_of(memory)))
