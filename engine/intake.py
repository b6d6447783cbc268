"""Intake: payloads are filled, hashed and written, so that one is written while another is hashed.

Large payloads go in runs of about 1 MiB, each hashed in one call to a thread and written in another; a few runs are
under way at once, so the disk has its next one while the processor is at the one behind.  A large payload that comes
alone has no other to be hashed beside: it is written while it is hashed itself, and in vain when its chunk turns out
to be there.  That is done only while such payloads turn out to be new.

Rules kept here:
- Hashed and written is the same memory, the engine's own, which nobody else can change any more once it is filled.
- What is written is decided when its id is known, in one step without a checkpoint; what was written ahead and is not
  wanted is given up then.  Nothing is handed to the caller whose hash or write failed.
- An extent is settled exactly once: by the caller for what it was handed, here for all else, whatever fails or is
  cancelled.
- A write or sync that fails, but for want of room, makes the whole store read-only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import trio
from crc32c import crc32c

from engine.extents import large_extent_bytes
from engine.segments import Place, Segments, seal_payload
from engine.tasks import run_all
from lakefs.errors import LakeError
from lakefs.ids import ChunkId, ChunkKind, chunk_id_of
from lakefs.limits import SMALL_PAYLOAD_BYTES, WRITE_RUN_BYTES, WRITE_RUNS_AT_ONCE
from lakefs.ports import Offload

T = TypeVar("T")

_NEW_BEFORE_AHEAD: Final = 8
"""New ones in a row after one that was not, before the next is written ahead: one write in nine is in vain at most."""


@dataclass
class Payload:
    """Bytes to store, in memory of the engine's own: `area` (65,536 bytes and more) or `small`.

    An area is page-aligned and has room for what is written behind the payload (`large_extent_bytes`).

    `fill`, when given, blocks and brings the bytes; it is called once, in a thread, before they are hashed.
    """

    kind: ChunkKind
    length: int
    area: memoryview | None = None
    small: memoryview | None = None
    fill: Callable[[memoryview], None] | None = None


@dataclass(frozen=True)
class Hashed:
    """A payload with the id and record checksum that the engine computed."""

    payload: Payload
    chunk: ChunkId
    crc: int


@dataclass(frozen=True)
class Written:
    """A payload on the medium, synced, or small and placed, and not yet recorded; in flight until settled."""

    hashed: Hashed
    place: Place


Choose = Callable[[Seq[Hashed]], Seq[Hashed]]
"""Which of some payloads are to be written; asked once for each payload of a request, without a checkpoint."""


class Intake:
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
        """New payloads that have to come alone before one is written ahead of its hash again."""

    async def take_in(self, payloads: Seq[Payload], choose: Choose) -> tuple[list[Hashed], list[Written]]:
        """Hash all payloads, in order, and write those that `choose` picks: synced, or placed when small.

        What was written is in flight until `settle`.  StoreFull, StoreReadOnly, DiskFailed, and what a fill raises;
        then, and when cancelled, everything is given up.
        """
        job = _Job(payloads, choose)
        with self._giving_up(job.written):
            small = await self._hash_small(job)
            alone = len(job.large) == 1 and payloads[job.large[0]].length >= self._write_ahead_bytes
            if alone and not self._new_still_wanted:
                await self._hash_beside_write(job)
            else:
                await self._hash_and_write(job)
                if alone:
                    self._learn(is_new=bool(job.written))
            await self._place_small(small, job.written)
            await self._sync(job.written)
        return job.in_order(), job.written

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
            await run_all(write_run, self._runs(large, lambda item: item.payload))
            await self._sync(written)
        return written

    def settle(self, items: Seq[Written]) -> None:
        """The extents are recorded, or given up."""
        for item in items:
            self._segments.settle(item.place)

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
        if self._segments.failure:
            self._stop_writing(self._segments.failure)

    # --- runs --------------------------------------------------------------------------------------

    async def _hash_and_write(self, job: _Job) -> None:
        """Each run is hashed, then what is chosen of it is written, while others are."""
        runs = deque(self._runs(job.large, lambda index: job.payloads[index]))

        async def work(_: int) -> None:
            while runs:
                await self._hash_and_write_run(job, runs)

        await run_all(work, range(min(WRITE_RUNS_AT_ONCE, len(runs))))

    async def _hash_and_write_run(self, job: _Job, runs: deque[list[int]]) -> None:
        run = runs.popleft()
        try:
            hashed = await self._offload.run(_hash_all, [job.payloads[index] for index in run])
            await self._write_run(job.note(run, hashed), job.written)
        except BaseException:
            runs.clear()  # the request has failed: the others begin nothing more
            raise

    async def _write_run(self, run: Seq[Hashed], written: list[Written]) -> None:
        areas = [(item.payload.area, item.payload.length) for item in run if item.payload.area is not None]
        if areas:
            places = await self._segments.write_large(areas)
            written.extend(Written(item, place) for item, place in zip(run, places, strict=True))

    def _runs(self, items: Iterable[T], payload_of: Callable[[T], Payload]) -> list[list[T]]:
        """The items in order, in runs of large payloads that `write_large` takes."""
        most = min(WRITE_RUN_BYTES, self._segments.run_bytes_max)
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
            places = await self._segments.place_small(payloads, into_headroom=into_headroom)
            written.extend(Written(item, place) for item, place in zip(items, places, strict=True))

    async def _sync(self, written: Seq[Written]) -> None:
        await self._segments.sync(
            {item.place.segment for item in written if item.hashed.payload.area is not None}
        )

    # --- one that comes alone ----------------------------------------------------------------------

    def _learn(self, *, is_new: bool) -> None:
        """A long payload that came alone was new, or there already."""
        self._new_still_wanted = max(0, self._new_still_wanted - 1) if is_new else _NEW_BEFORE_AHEAD

    async def _hash_beside_write(self, job: _Job) -> None:
        """Checksums first, which lie behind the payload; then it is written while it is hashed.

        That the write failed, as for want of room, matters to the request only when the chunk is wanted.
        """
        payload = job.payloads[job.large[0]]
        assert payload.area is not None
        area = payload.area
        crc = await self._offload.run(_fill_and_seal, payload)
        places: list[Place] = []
        errors: list[LakeError] = []

        async def write() -> None:
            try:
                places.extend(await self._segments.write_large([(area, payload.length)]))
            except LakeError as error:
                errors.append(error)

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                chunk = await self._offload.run(chunk_id_of, payload.kind, area[: payload.length])
            wanted = job.note(job.large, [Hashed(payload, chunk, crc)])
            self._learn(is_new=bool(wanted))
            if wanted and errors:
                raise errors[0]
            job.written.extend(Written(item, places.pop()) for item in wanted)
        finally:
            for place in places:
                self._segments.settle(place)
            self._note_failure()


class _Job:
    """The payloads of one request on their way."""

    def __init__(self, payloads: Seq[Payload], choose: Choose) -> None:
        self.payloads = payloads
        self.small = [index for index, payload in enumerate(payloads) if payload.area is None]
        self.large = [index for index, payload in enumerate(payloads) if payload.area is not None]
        self.written: list[Written] = []
        """In flight, to be handed to the caller or given up."""
        self._choose = choose
        self._hashed: list[Hashed | None] = [None] * len(payloads)

    def note(self, indices: Seq[int], hashed: Seq[Hashed]) -> Seq[Hashed]:
        """These payloads are hashed; which of them are to be written."""
        for index, item in zip(indices, hashed, strict=True):
            self._hashed[index] = item
        return self._choose(hashed)

    def in_order(self) -> list[Hashed]:
        """All of them, hashed."""
        return [item for item in self._hashed if item is not None]


def _hash_all(payloads: Seq[Payload]) -> list[Hashed]:
    return [_hash(payload) for payload in payloads]


def _hash(payload: Payload) -> Hashed:
    """Fill, digest, vector and padding in one call, while the bytes are in the cache."""
    memory = _filled(payload)
    chunk = chunk_id_of(payload.kind, memory)
    crc = crc32c(memory) if payload.area is None else seal_payload(payload.area, payload.length)
    return Hashed(payload, chunk, crc)


def _fill_and_seal(payload: Payload) -> int:
    """Fill, vector and padding; the CRC for the record."""
    assert payload.area is not None
    _filled(payload)
    return seal_payload(payload.area, payload.length)


def _filled(payload: Payload) -> memoryview:
    """The payload's bytes, brought by its fill when it has one."""
    if payload.area is not None:
        memory = payload.area[: payload.length]
    else:
        assert payload.small is not None
        memory = payload.small
    if payload.fill is not None:
        payload.fill(memory)
    return memory


def is_small(length: int) -> bool:
    """Whether a payload is packed into a small segment."""
    return length < SMALL_PAYLOAD_BYTES
