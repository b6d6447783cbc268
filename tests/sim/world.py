"""One seed, one world: a disk, and lives of a store on it until the seed's rounds are over.

A life opens the store with the real engine, compares what it finds with the history, lets customers work, and ends by
a clean stop, by the death of the process or by a power loss at some operation of the disk: also while it opens or
stops.  The last lives are quiet: everything must be whole, garbage must go, and a clean stop must need no recovery.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import trio
from trio.testing import MockClock

from engine.embedded import EmbeddedEngine
from engine.format import SegmentKind, Table, unpack_chunk_record
from engine.service import Service
from engine.sizes import MetadataSizes, SegmentSizes, StoreSizes
from engine.store import Store, open_store
from lakefs.client.trio_lake import TrioLake
from lakefs.errors import DiskFailed, LakeError, OperationalError, StoreReadOnly
from lakefs.ids import BlobId
from lakefs.limits import KIB, MIB, PAGE_BYTES
from tests.sim.clock import SimClock
from tests.sim.contents import Contents
from tests.sim.customers import Customer, Weather
from tests.sim.determinism import run_seeded
from tests.sim.disk import SimCrashed, SimDisk
from tests.sim.gate import Gate
from tests.sim.history import History, SimFailure
from tests.sim.model import Model, State
from tests.sim.network import SimulatedNetwork
from tests.sim.offload import SimOffload
from tests.sim.standstill import watch_for_standstill
from tests.sim.upkeep import Upkeep
from tests.sim.witness import Witness, WitnessedService

ROUNDS = 4
CAPACITY_BYTES = 256 * MIB


@dataclass(frozen=True)
class Life:
    """What one life of the store is like."""

    ending: str
    """stop, kill or crash"""
    trouble: str
    """none, full, sync or write: a disk that fills up, or fails once"""
    wire: str
    """embedded, remote or reconnecting"""
    crash_at: int | None
    customers: int
    operations: int
    slowest_s: float
    grace_s: float


@dataclass
class Result:
    """What a run was: its trace, and counts for people."""

    trace: str = ""
    lives: int = 0
    crashes: int = 0
    disk_operations: int = 0
    decisions: int = 0
    notes: list[str] = field(default_factory=list)


class World:
    """The run of one seed."""

    def __init__(self, seed: int, rounds: int = ROUNDS) -> None:
        self.seed = seed
        self.rounds = rounds
        self.rng = random.Random(seed)
        self.huge = self.rng.random() < 0.04
        self.disk = SimDisk(
            random.Random(self.rng.getrandbits(64)),
            capacity_bytes=CAPACITY_BYTES,
            supports_direct=self.rng.random() < 0.8,
        )
        self.sizes = self._draw_sizes()
        self.contents = Contents(random.Random(self.rng.getrandbits(64)), huge=self.huge)
        self.history = History()
        self.model = Model(self.contents.etag_of)
        self.result = Result()
        self._ids = random.Random(self.rng.getrandbits(64))

    def _draw_sizes(self) -> StoreSizes:
        rng = self.rng
        return StoreSizes(
            metadata=MetadataSizes(
                group_bytes=rng.choice((16 * KIB, 64 * KIB)),
                journal_file=rng.choice((32 * KIB, 128 * KIB)),
                journal_fill=rng.choice((16 * KIB, 64 * KIB)),
                overlay_entries_apply=rng.choice((10, 60, 1000)),
                overlay_entries_max=rng.choice((100, 10_000)),
                checkpoint_journal=rng.choice((32 * KIB, 256 * KIB)),
            ),
            segments=SegmentSizes(
                large_segment=6 * MIB if self.huge else rng.choice((400 * KIB, 2 * MIB)),
                small_segment=rng.choice((96 * KIB, 256 * KIB)),
                large_extend=rng.choice((64 * KIB, 256 * KIB)),
                small_fill=rng.choice((4 * KIB, 64 * KIB)),
            ),
            gc_batch=rng.choice((3, 10, 2048)),
            buffer_bytes=rng.choice((37, 64)) * MIB,
        )

    def run(self) -> Result:
        """Live all lives; SimFailure when the engine broke a promise."""
        for _ in range(self.rounds):
            self._live(self._draw_life())
        quiet = Life("stop", "none", "embedded", None, 0, 0, 0.001, 0.0)
        self.disk.capacity_bytes = CAPACITY_BYTES
        self._live(quiet, quiet=True)
        self._live(quiet, quiet=True)
        self.result.trace = self.disk.trace.hexdigest()
        return self.result

    def _draw_life(self) -> Life:
        rng = self.rng
        ending = rng.choices(("stop", "kill", "crash"), (3, 1, 6))[0]
        crash_at = None
        if ending != "stop":
            crash_at = rng.choice((rng.randint(1, 40), rng.randint(20, 200), rng.randint(100, 1200)))
        return Life(
            ending,
            rng.choices(("none", "full", "sync", "write"), (12, 2, 1, 1))[0],
            rng.choices(("embedded", "remote", "reconnecting"), (8, 1, 1))[0],
            crash_at,
            customers=rng.randint(1, 4),
            operations=rng.randint(5, 40),
            slowest_s=rng.choice((0.0005, 0.02, 0.3)),
            grace_s=rng.choice((0.0, 0.0, 5.0)),
        )

    # --- one life ----------------------------------------------------------------------------------

    def _live(self, life: Life, *, quiet: bool = False) -> None:
        self.result.lives += 1
        self.disk.operation_count = 0
        self.disk.crash_at = life.crash_at
        self._plant(life)
        crashed = False
        try:
            with self._determined():
                run_seeded(
                    lambda: self._watched(life, quiet),
                    self.rng.getrandbits(32),
                    clock=MockClock(autojump_threshold=0),
                )
        except SimCrashed:
            crashed = True
        except BaseExceptionGroup as group:
            crashed, others = _knocked_on(group)
            if others is not None and not self._is_excused(life, others):
                raise others from None
        except OperationalError as error:
            if not self._is_excused(life, error):
                raise
        self.result.disk_operations += self.disk.operation_count
        if crashed or life.ending != "stop":
            self.result.crashes += 1
            self.disk = self.disk.kill() if life.ending == "kill" else self.disk.crash()

    def _plant(self, life: Life) -> None:
        """One failure of the disk, somewhere in this life."""
        self.disk.forget_failures()
        if life.trouble in ("sync", "write"):
            operation = "sync_data" if life.trouble == "sync" else "pwrite"
            folder = self.rng.choice(("segments/", "journal/", ""))
            error = DiskFailed(f"planted failure of {operation} in {folder}")
            self.disk.fail_next(operation, error, path=folder, skip=self.rng.randint(0, 30))

    def _is_excused(self, life: Life, error: BaseException) -> bool:
        """Whether a life may end like this: the disk has failed it."""
        if life.trouble not in ("sync", "write") or self.disk.faults_to_come:
            return False
        return all(isinstance(cause, (DiskFailed, StoreReadOnly)) for cause in causes_of(error))

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Ids and times of the products' own making come from the seed."""
        clock = self.clock = SimClock()
        with (
            mock.patch("engine.superblock.new_id16", self._new_id16),
            mock.patch("engine.holds.new_id16", self._new_id16),
            mock.patch("lakefs.lake.time", SimpleNamespace(time_ns=clock.wall_ns)),
        ):
            yield

    def _new_id16(self) -> bytes:
        return self._ids.randbytes(16)

    async def _watched(self, life: Life, quiet: bool) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_for_standstill)
            await self._main(life, quiet)
            nursery.cancel_scope.cancel()

    async def _main(self, life: Life, quiet: bool) -> None:
        offload = SimOffload(random.Random(self.rng.getrandbits(64)), slowest_s=life.slowest_s)
        async with open_store(
            self.disk,
            self.clock,
            offload,
            grace_s=life.grace_s,
            sizes=self.sizes,
            index_committed=self.disk.note_index_sync,
        ) as store:
            service = WitnessedService(Service(store), Witness(store, self.history, self.model))
            await self._compare(store)
            if quiet:
                await self._tidy(store)
                return
            await self._serve(life, store, service, offload)
        self.result.decisions += len(self.history.points)

    async def _serve(self, life: Life, store: Store, service: WitnessedService, offload: SimOffload) -> None:
        network = SimulatedNetwork(random.Random(self.rng.getrandbits(64)), latency_s=life.slowest_s)
        weather = Weather(self.disk, disk_failing=life.trouble in ("sync", "write"))
        weather.cuts = life.wire != "embedded"
        weather.leases_end = life.wire == "reconnecting"
        weather.disk_full = self.disk.capacity_bytes < CAPACITY_BYTES
        gate = Gate(life.wire, service, network, offload, random.Random(self.rng.getrandbits(64)))
        upkeep = Upkeep(
            store,
            self.disk,
            network,
            weather,
            random.Random(self.rng.getrandbits(64)),
            life.slowest_s * 20,
            fills_up=life.trouble == "full",
            cuts=weather.cuts,
            room_bytes=CAPACITY_BYTES,
        )
        async with trio.open_nursery() as nursery:
            await gate.open(nursery)
            nursery.start_soon(upkeep.run)
            async with trio.open_nursery() as customers:
                for _ in range(life.customers):
                    rng = random.Random(self.rng.getrandbits(64))
                    customer = Customer(
                        gate.connect, self.history, self.contents, weather, rng, slowest_s=life.slowest_s
                    )
                    customers.start_soon(customer.work, life.operations)
            nursery.cancel_scope.cancel()

    # --- what must hold ----------------------------------------------------------------------------

    async def _compare(self, store: Store) -> None:
        """After opening: the names are those of a group that may be the last, and nothing is damaged."""
        found = await names_of(store)
        self.history.reopened(found)
        await check_whole(store)

    async def _tidy(self, store: Store) -> None:
        """With nobody there, gc leaves no garbage, and no room that nothing lives in."""
        await store.collector.run()
        report = await check_whole(store)
        if report["notes"]:
            raise SimFailure(f"after gc there are notes: {report['findings']}")
        await check_room(store)


async def names_of(store: Store) -> State:
    """All names of the store and the blobs they are bound to."""
    lake = TrioLake(EmbeddedEngine(Service(store), descriptors=False), store.offload)
    state: dict[str, dict[str, BlobId]] = {}
    for bucket in await lake.buckets():
        state[bucket.name] = {entry.key: BlobId(entry.blob) async for entry in lake.ls(bucket.name)}
    return state


async def check_whole(store: Store) -> dict[str, object]:
    """fsck of every byte finds no damage; its report."""
    try:
        report = await store.check(full=True)
    except LakeError as error:
        if isinstance(store.disk, SimDisk) and store.disk.is_dead:
            raise
        raise SimFailure(f"fsck failed: {error!r}") from error
    if report["damage"]:
        raise SimFailure(f"fsck found damage: {report['findings']}")
    return report


async def check_room(store: Store) -> None:
    """Sealed segments take the pages that live extents touch, their headers, and at most a page at their ends."""
    pages: set[tuple[int, int]] = set()
    with store.metadata.view() as view:
        for _, value in view.scan(Table.CHUNKS, b"", b"\xff"):
            record = unpack_chunk_record(value)
            end = record.offset + record.extent_bytes
            pages.update(
                (record.segment, at) for at in range(record.offset // PAGE_BYTES, -(-end // PAGE_BYTES))
            )
    segments = store.segments.all_ids()
    bound = (len(pages) + 2 * len(segments)) * PAGE_BYTES
    taken = await store.segments.allocated_bytes()
    if taken > bound:
        kinds = [SegmentKind(store.segments.kind(segment)).name for segment in segments]
        raise SimFailure(f"segments take {taken} bytes, live extents need {bound}; {kinds}")


def _knocked_on(group: BaseExceptionGroup[BaseException]) -> tuple[bool, BaseException | None]:
    """Whether the power failed, and what cannot be explained by that."""
    crash, others = group.split(SimCrashed)
    if crash is not None and others is not None:
        _, others = others.split(OperationalError)
    return crash is not None, others


def causes_of(error: BaseException) -> list[BaseException]:
    """What is inside of groups of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes_of(inner)]
    return [error]


def run_seed(seed: int, rounds: int = ROUNDS) -> Result:
    """The run of a seed; a failure names the command that repeats it."""
    try:
        return World(seed, rounds).run()
    except Exception as error:
        error.add_note(f"again: python -m tests.sim --seed {seed} --rounds {rounds}")
        raise
