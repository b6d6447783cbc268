"""One seed, one world: a disk, and lives of a store on it until the seed's rounds are over.

A life opens the store with the real engine, compares what it finds with the history, lets customers work, and ends by
a clean stop, by the death of the process or by a power loss at some operation of the disk: also while it opens or
stops.  The last lives are quiet: everything must be whole, garbage must go, and a clean stop must need no recovery.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import trio
from trio.testing import MockClock

from engine.reserve import RESERVE_PATH
from engine.service import Service
from engine.store import Store, open_store
from lakefs.errors import DiskFailed, OperationalError, StoreFull, StoreReadOnly
from lakefs.limits import KIB, MIB
from tests.sim.clock import SimClock
from tests.sim.contents import Contents
from tests.sim.customers import Customer, Weather
from tests.sim.determinism import run_seeded
from tests.sim.disk import SimCrashed, SimDisk
from tests.sim.gate import Gate
from tests.sim.history import History, SimFailure
from tests.sim.inspection import check_tidy, check_whole, names_of
from tests.sim.lives import QUIET, Life, Result, draw_life, draw_sizes
from tests.sim.model import Model
from tests.sim.name_customers import BUCKETS
from tests.sim.network import SimulatedNetwork
from tests.sim.offload import SimOffload
from tests.sim.onlooker import Onlooker
from tests.sim.standstill import watch_for_standstill
from tests.sim.upkeep import SETTLING_S, Upkeep
from tests.sim.witness import Witness, WitnessedService

ROUNDS = 4
CAPACITY_BYTES = 256 * MIB


class World:
    """The run of one seed."""

    def __init__(self, seed: int, rounds: int = ROUNDS) -> None:
        self.rounds = rounds
        self.rng = random.Random(seed)
        huge = self.rng.random() < 0.04
        self.sizes = draw_sizes(self.rng, huge=huge)
        self.disk = SimDisk(
            self._random(), capacity_bytes=CAPACITY_BYTES, supports_direct=self.rng.random() < 0.8
        )
        self.contents = Contents(self._random(), huge=huge)
        self.history = History()
        self.model = Model(self.contents.etag_of)
        self.result = Result()
        self._ids = self._random()
        self._stage = "opening"
        self._was_clean = False

    def _random(self) -> random.Random:
        """A source of its own for a part of the world, so that the parts do not disturb each other."""
        return random.Random(self.rng.getrandbits(64))

    def run(self) -> Result:
        """Live all lives; SimFailure when the engine broke a promise."""
        for _ in range(self.rounds):
            self._live(draw_life(self.rng))
        self.disk.capacity_bytes = CAPACITY_BYTES
        self._live(QUIET)
        self._live(QUIET)
        self.result.trace = self.disk.trace.hexdigest()
        return self.result

    # --- one life ----------------------------------------------------------------------------------

    def _live(self, life: Life) -> None:
        self.disk.operation_count = 0
        self.disk.crash_at = life.crash_at
        self._plant(life)
        self._stage = "opening"
        crashed = failed = False
        try:
            with self._determined():
                run_seeded(
                    lambda: self._watched(life),
                    self.rng.getrandbits(32),
                    clock=MockClock(autojump_threshold=0),
                )
        except SimCrashed:
            crashed = True
        except (BaseExceptionGroup, OperationalError) as error:
            crashed, others = _knocked_on(error)
            failed = others is not None
            if others is not None and not self._is_excused(life, others):
                raise others from None
        self._note_end(life, crashed=crashed, failed=failed)
        if crashed or life.ending != "stop":
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
        """Whether a life may end like this: the disk has failed it, or has not a page of room left."""
        if isinstance(error, StoreFull) and self._stage == "opening" and self._is_reserve_used_up():
            self.result.met["too full to open"] += 1
            self.disk.capacity_bytes = CAPACITY_BYTES
            return True
        if life.trouble not in ("sync", "write") or self.disk.faults_to_come:
            return False
        return all(isinstance(cause, (DiskFailed, StoreReadOnly)) for cause in causes_of(error))

    def _is_reserve_used_up(self) -> bool:
        """Others took all room each time that some was released, until nothing was left to release."""
        if self.disk.capacity_bytes == CAPACITY_BYTES or self.disk.free_bytes() > 64 * KIB:
            return False
        file = self.disk.open(RESERVE_PATH, read_only=True)
        try:
            return file.size() < 64 * KIB
        finally:
            file.close()

    def _note_end(self, life: Life, *, crashed: bool, failed: bool) -> None:
        self.result.lives += 1
        self.result.disk_operations += self.disk.operation_count
        if crashed or life.ending != "stop":
            self.result.crashes += 1
            self.result.met[f"{life.ending} while {self._stage}"] += 1
        if life.trouble in ("sync", "write") and not self.disk.faults_to_come:
            self.result.met[f"{life.trouble} failed"] += 1
            failed = True
        self._was_clean = not (crashed or failed or life.ending != "stop")

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Ids and times of the product's own making come from the seed."""
        self.clock = SimClock()
        with (
            mock.patch("engine.superblock.new_id16", self._new_id16),
            mock.patch("engine.holds.new_id16", self._new_id16),
            mock.patch("engine.upload_requests.new_id16", self._new_id16),
            mock.patch("lakefs.lake.time", SimpleNamespace(time_ns=self.clock.wall_ns)),
        ):
            yield

    def _new_id16(self) -> bytes:
        return self._ids.randbytes(16)

    async def _watched(self, life: Life) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_for_standstill)
            await self._main(life)
            nursery.cancel_scope.cancel()

    async def _main(self, life: Life) -> None:
        offload = SimOffload(self._random(), slowest_s=life.slowest_s)
        async with open_store(
            self.disk,
            self.clock,
            offload,
            grace_s=life.grace_s,
            sizes=self.sizes,
            index_committed=self.disk.note_index_sync,
        ) as store:
            self._stage = "checking"
            await self._compare(store)
            if life is QUIET:
                await store.collector.run()
                await check_tidy(store)
            else:
                self._stage = "serving"
                await self._serve(life, store, offload)
            self._note_state(store)
            self._stage = "stopping"
            if life.ending != "stop" and self.rng.random() < 0.5:
                self.disk.crash_at = self.disk.operation_count + self.rng.randint(1, 12)
        self._stage = "stopped"

    async def _compare(self, store: Store) -> None:
        """After opening: the names are those of a group that may be the last, and nothing is damaged."""
        rebuilt = store.metadata.rebuilt_because
        if rebuilt:
            self.result.met["index rebuilt"] += 1
        if rebuilt and self._was_clean:
            raise SimFailure(f"after a clean stop the index was rebuilt: {rebuilt}")
        self.history.reopened(await names_of(store))
        await check_whole(store)

    async def _serve(self, life: Life, store: Store, offload: SimOffload) -> None:
        service = WitnessedService(Service(store), Witness(store, self.history, self.model, self.contents))
        network = SimulatedNetwork(self._random(), latency_s=life.slowest_s)
        weather = Weather(
            self.disk,
            self.result.met,
            disk_full=self.disk.capacity_bytes < CAPACITY_BYTES,
            disk_failing=life.trouble in ("sync", "write"),
            cuts=life.wire != "embedded",
            leases_end=life.wire == "reconnecting",
        )
        upkeep = Upkeep(
            store,
            self.disk,
            network,
            weather,
            self._random(),
            life.slowest_s * 20,
            fills_up=life.trouble == "full",
            room_bytes=CAPACITY_BYTES,
        )
        gate = Gate(life.wire, service, network, offload, self._random())
        onlookers = [Onlooker(store, self.history, bucket) for bucket in BUCKETS]
        async with trio.open_nursery() as nursery:
            await gate.open(nursery)
            nursery.start_soon(upkeep.run)
            for onlooker in onlookers:
                nursery.start_soon(onlooker.run)
            with trio.move_on_after(life.patience_s):
                async with trio.open_nursery() as customers:
                    for _ in range(life.customers):
                        customer = Customer(
                            gate.connect,
                            self.history,
                            self.contents,
                            weather,
                            self._random(),
                            slowest_s=life.slowest_s,
                        )
                        customers.start_soon(customer.work, life.operations)
            await trio.sleep(SETTLING_S)  # what was given up on the way, and what it decided, has ended
            if not store.read_only_because:
                for onlooker in onlookers:
                    onlooker.compare()
            nursery.cancel_scope.cancel()
        self.result.decisions += len(self.history.points) - 1

    def _note_state(self, store: Store) -> None:
        """What this life has come across, so that a test can tell that lives come across everything."""
        met = self.result.met
        met["journal files"] += len(self.disk.list_folder("journal")) > 1
        met["segments"] += len(self.disk.list_folder("segments")) > 2
        met["checkpoint"] += store.metadata.stats()["checkpoint_sequence"] > 0
        met["reserve released"] += store.reserve.held_bytes < store.reserve.target_bytes
        met["read-only"] += bool(store.read_only_because)


def _knocked_on(error: BaseException) -> tuple[bool, BaseException | None]:
    """Whether the power failed, and what cannot be explained by that."""
    if not isinstance(error, BaseExceptionGroup):
        return False, error
    crash, others = error.split(SimCrashed)
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
