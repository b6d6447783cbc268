"""Ingest: fills, hashes and writes payloads, so that one is written while another is hashed.

Large payloads are handled in runs, a few at once, in one of two ways:
- *Hashed first*: one call in a thread hashes a run, of about 1 MiB; another writes the payloads wanted of it.
- *Written ahead* (from 1 MiB, in runs of about 4 MiB): one thread writes a run while another hashes it
  (`engine.chunks.write_ahead`); chunks that prove to be in the store were written in vain.  So this is done only while
  payloads prove to be new.

Rules kept here:
- The bytes hashed and written are in the same memory, the engine's own; once filled, nothing else can change it.
- A payload is chosen or not when its id is known, in one step without `await`.  No payload whose hash or write
  failed is returned.
- A written extent is in flight, so that its room is not freed, until it is settled, exactly once: by the caller if it
  was returned, else here, whatever fails or is cancelled.
- A failed write or sync makes the whole store read-only, except for lack of room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from engine.chunks.hashing import hash_all
from engine.chunks.payload import Hashed, Payload, Written
from engine.chunks.write_ahead import AheadRun, Filling, write_beside_hash
from engine.format.extents import large_extent_bytes
from engine.host.tasks import run_all
from engine.segments.large import IsLast, not_last
from engine.segments.segment_store import Segments
from lakefs.errors import StoreFull
from lakefs.limits import WRITE_AHEAD_RUN_BYTES, WRITE_RUN_BYTES, WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload

T = TypeVar("T")

_NEW_BEFORE_AHEAD: Final = 8
"""Requests of only new payloads that must follow one with present chunks before writing ahead resumes."""


Choose = Callable[[Seq[Hashed]], Seq[Hashed]]
"""Picks the payloads to write; called once for each payload of a request, without a checkpoint."""
Seal = Callable[[Seq[int]], Seq[Hashed]]
"""Fills and checks payloads, named by their numbers, and adds what is written behind them.  Blocks."""


class Ingest:
    """Hashes payloads and writes them to the medium."""

    def __init__(
        self, segments: Segments, offload: Offload, stop_writing: Callable[[str], None], write_ahead_bytes: int
    ) -> None:
        """`stop_writing` is called with the reason once a write fails; `write_ahead_bytes`: see `lakefs.limits`."""
        self._segments = segments
        self._offload = offload
        self._stop_writing = stop_writing
        self._write_ahead_bytes = write_ahead_bytes
        self._new_still_wanted = 0
        """Requests of only new payloads that must still follow before writing ahead resumes."""

    async def take_in(self, payloads: Seq[Payload], choose: Choose) -> tuple[list[Hashed], list[Written]]:
        """Hash all payloads, in order, and write those that `choose` picks: synced, or placed when small.

        Written payloads are in flight until `settle`.  StoreFull, StoreReadOnly, DiskFailed, and errors of a fill;
        then, and when cancelled, all of them are given up.
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
            all_new = len(job.written) == len(job.large)
            self._new_still_wanted = max(0, self._new_still_wanted - 1) if all_new else _NEW_BEFORE_AHEAD

    async def hash(self, payloads: Seq[Payload]) -> list[Hashed]:
        """Return ids and record checksums of payloads, in order; nothing is written."""
        job = _Job(payloads, lambda _: ())
        await self._hash_small(job)
        await self._hash_and_write(job)
        return job.in_order()

    async def write(self, items: Seq[Hashed], *, into_headroom: bool = False) -> list[Written]:
        """Write and sync payloads that were hashed, and place small ones; see `take_in`.

        `into_headroom`: small ones may take half of the room that payload leaves free; for callers that at once free
        more.
        """
        written: list[Written] = []
        small = [item for item in items if item.payload.area is None]
        large = [item for item in items if item.payload.area is not None]
        with self._giving_up(written):
            await self._place_small(small, written, into_headroom=into_headroom)
            await run_all(lambda run: self._write_run(run, written), self._runs(large, _length_of))
            await self._sync(written)
        return written

    async def seal_and_write(self, payloads: Seq[Payload], seal: Seal) -> list[Written]:
        """Write and sync payloads as `write` does, each sealed in the thread that writes it: one call to a thread, at
        most, where few are large.  Errors of `seal`, too; the room of what it refuses is given up."""
        written: list[Written] = []
        small = [index for index, payload in enumerate(payloads) if payload.area is None]
        large = [index for index, payload in enumerate(payloads) if payload.area is not None]
        with self._giving_up(written):
            if small:
                to_fill = any(payloads[index].fill is not None for index in small)
                await self._place_small(await self._offload.run(seal, small) if to_fill else seal(small), written)
            runs = self._runs(large, lambda index: payloads[index].length, self._segments.large.run_bytes_max)
            for run in runs:
                await self._seal_run([payloads[index] for index in run], partial(seal, run), written, run is runs[-1])
            await self._sync(written)
        return written

    async def _seal_run(
        self, payloads: Seq[Payload], seal: Callable[[], Seq[Hashed]], written: list[Written], is_last: bool
    ) -> None:
        """Seal and write one run, and sync it if no other is written meanwhile."""
        sealed: list[Hashed] = []
        areas = [(payload.area, payload.length) for payload in payloads if payload.area is not None]

        def coming() -> Iterator[int]:
            sealed.extend(seal())
            yield sum(large_extent_bytes(length) for _, length in areas)

        places = await self._segments.large.write(areas, coming, lambda: is_last)
        written.extend(Written(item, place) for item, place in zip(sealed, places, strict=True))

    def settle(self, items: Seq[Written]) -> None:
        """End the flight of extents that are recorded or given up."""
        for item in items:
            self._segments.in_flight.settle(item.place)

    @contextmanager
    def _giving_up(self, written: list[Written]) -> Iterator[None]:
        """Settle written payloads when the block raises, and stop writing if the disk has failed."""
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
        """Hash each run, then write its chosen payloads, a few runs at once."""
        left = deque(self._runs(job.large, job.length_of))
        unwritten = len(left)

        def is_last() -> bool:
            return unwritten == 1

        async def work(_: int) -> None:
            nonlocal unwritten
            while left:
                run = left.popleft()
                try:
                    hashed = await self._offload.run(hash_all, [job.payloads[index] for index in run])
                    await self._write_run(job.note(run, hashed), job.written, is_last)
                    unwritten -= 1
                except BaseException:
                    left.clear()  # the request has failed: the other tasks begin no more runs
                    raise

        await run_all(work, range(min(WRITE_RUNS_AT_ONCE, len(left))))

    async def _write_run(self, run: Seq[Hashed], written: list[Written], is_last: IsLast = not_last) -> None:
        areas = [(item.payload.area, item.payload.length) for item in run if item.payload.area is not None]
        if areas:
            places = await self._segments.large.write(areas, is_last=is_last)
            written.extend(Written(item, place) for item, place in zip(run, places, strict=True))

    def _runs(self, items: Iterable[T], length_of: Callable[[T], int], most: int = WRITE_RUN_BYTES) -> list[list[T]]:
        """Split items, in order, into runs of large payloads that `LargeWriter.write` takes."""
        most = min(most, self._segments.large.run_bytes_max)
        runs: list[list[T]] = []
        room = 0
        for item in items:
            extent = large_extent_bytes(length_of(item))
            if extent > room:
                runs.append([])
                room = most
            runs[-1].append(item)
            room -= extent
        return runs

    async def _hash_small(self, job: _Job) -> Seq[Hashed]:
        """Hash the small payloads, in a thread if one has to be filled; returns those chosen."""
        payloads = [job.payloads[index] for index in job.small]
        if any(payload.fill is not None for payload in payloads):
            return job.note(job.small, await self._offload.run(hash_all, payloads))
        return job.note(job.small, hash_all(payloads)) if payloads else ()

    async def _place_small(self, items: Seq[Hashed], written: list[Written], *, into_headroom: bool = False) -> None:
        payloads = [item.payload.small for item in items if item.payload.small is not None]
        if payloads:
            places = await self._segments.small.place(_kept(payloads), into_headroom=into_headroom)
            written.extend(Written(item, place) for item, place in zip(items, places, strict=True))

    async def _sync(self, written: Seq[Written]) -> None:
        await self._segments.large.sync(
            {item.place.segment for item in written if item.hashed.payload.area is not None}
        )

    # --- ahead of the hashes -----------------------------------------------------------------------

    async def _write_ahead(self, job: _Job) -> None:
        """Write runs while they are hashed; give up payloads that are in the store already.

        A failed write, as for lack of room, fails the request only if a chunk of that run is wanted.  After StoreFull,
        if some chunks are not wanted, there may be room for those that are: they are written again.
        """
        runs = self._runs(job.large, job.length_of, WRITE_AHEAD_RUN_BYTES)
        ahead = [AheadRun(run, [Filling(job.payloads[index]) for index in run]) for run in runs]
        try:
            await write_beside_hash(ahead, self._segments, self._offload, job.note)
            all_wanted = sum(len(run.chosen) for run in ahead) == len(job.large)
            for run in ahead:
                if isinstance(run.error, StoreFull) and not all_wanted:
                    for some in self._runs(run.chosen, _length_of):
                        await self._write_run(some, job.written)
                else:
                    job.written.extend(run.take_chosen())
        finally:
            for run in ahead:
                for place in run.places:
                    self._segments.in_flight.settle(place)
            self._note_failure()


class _Job:
    """The payloads of one request being taken in."""

    def __init__(self, payloads: Seq[Payload], choose: Choose) -> None:
        self.payloads = payloads
        self.small = [index for index, payload in enumerate(payloads) if payload.area is None]
        self.large = [index for index, payload in enumerate(payloads) if payload.area is not None]
        self.written: list[Written] = []
        """Payloads in flight, to be returned to the caller or given up."""
        self.large_bytes = sum(payloads[index].length for index in self.large)
        self._choose = choose
        self._hashed: list[Hashed | None] = [None] * len(payloads)

    def note(self, indices: Seq[int], hashed: Seq[Hashed]) -> Seq[Hashed]:
        """Record these payloads as hashed; returns those to write."""
        for index, item in zip(indices, hashed, strict=True):
            self._hashed[index] = item
        return self._choose(hashed)

    def length_of(self, index: int) -> int:
        """Return the length of a payload."""
        return self.payloads[index].length

    def in_order(self) -> list[Hashed]:
        """Return all payloads, hashed."""
        hashed = [item for item in self._hashed if item is not None]
        assert len(hashed) == len(self.payloads), "each payload is hashed"
        return hashed


def _kept(payloads: Seq[memoryview]) -> Seq[memoryview]:
    """Return small payloads to keep in memory until they are written; copies if their memory is mostly others'."""
    whole = {id(payload.obj): memoryview(payload.obj).nbytes for payload in payloads}
    if sum(whole.values()) <= 2 * sum(map(len, payloads)):
        return payloads
    return [memoryview(bytes(payload)) for payload in payloads]


def _length_of(item: Hashed) -> int:
    return item.payload.length
