"""One seed, one world: a disk, and lives of a store on it until the seed's rounds are over.

A life opens the store with the real engine, compares what it finds with the history, lets workloads work, and ends by a
clean stop, by the death of the process or by a power loss at some operation of the disk: also while it opens or stops.
The last lives are quiet: everything must be whole, gc must remove all garbage, and a clean stop must need no recovery.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import trio

from engine.process.shared_index_life import run_shared_index
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from engine.superblock.reserve import RESERVE_PATH
from lakefs.errors import CorruptionError, DiskFailed, OperationalError, StoreFull, StoreReadOnly
from lakefs.ids import Sequence
from lakefs.limits import KIB, MIB, UPLOAD_EXPIRY_S
from tests.shared_index_check import check_shared_index
from tests.sim.judges.damage import Place, check_honest, flip_anywhere, live_places
from tests.sim.judges.history import History, SimFailure
from tests.sim.judges.inspection import check_tidy, check_whole, names_of
from tests.sim.judges.model import Model
from tests.sim.judges.observer import Observer
from tests.sim.judges.repeater import Repeater
from tests.sim.judges.upload_model import unfinished
from tests.sim.judges.witness import Witness, WitnessedService
from tests.sim.workloads.keyed import KEYED_EVERY, KeyedCustomer
from tests.sim.workloads.lives import LESS, QUIET, Life, Result, draw_life, draw_relapse, draw_sizes
from tests.sim.workloads.names import BUCKETS
from tests.sim.workloads.upkeep import CLOCK_JUMPS_S, SETTLING_S, Upkeep, check_unharmed
from tests.sim.workloads.workloads import Weather, Workload
from tests.sim.world.clock import SIM_EPOCH_NS, SimClock
from tests.sim.world.contents import Contents
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.sim.world.gate import Gate
from tests.sim.world.network import SimulatedNetwork
from tests.sim.world.offload import SimOffload
from tests.sim.world.sim_time import SimTime
from tests.sim.world.standstill import watch_for_standstill

ROUNDS = 4
CAPACITY_BYTES = 256 * MIB
RELAPSES = 0.4
"""Share of crashes that are followed by another one at once."""
ORDEALS = 0.3
"""Share of seeds that end with a disk that lies or rots."""
HOT_INDEX_ENTRIES = 800
"""Entries of the shared index, which odd seeds run with: more than there are chunks."""
FAILING: dict[str, tuple[str, type[OperationalError]]] = {
    "sync": ("sync_data", DiskFailed),
    "write": ("pwrite", DiskFailed),
    "read": ("pread_into", DiskFailed),
    "room": ("pwrite", StoreFull),
}
"""The operation that fails once in a life with such a trouble, and its error."""
FAULTS = ("cancelled", "cut", "fill_up", "flipped", *(f"{trouble} failed" for trouble in FAILING))


class World:
    """The run of one seed."""

    def __init__(
        self, seed: int, rounds: int = ROUNDS, only: Collection[str] | None = None, without: Collection[str] = ()
    ) -> None:
        """`only`: the operations of workloads that are done (life.workload.number); None: all.

        `without`: rounds that are left out, or parts of one (`3.trouble`; see `LESS`); `ordeal`: what happens at the
        end.
        """
        self.seed = seed
        self.rounds = rounds
        self.only = only
        self.without = frozenset(without)
        self.done: list[str] = []
        """Operations that workloads reached."""
        self.parts: list[str] = []
        """Parts of the run that `without` could leave out."""
        self.rng = random.Random(seed)
        huge = self.rng.random() < 0.04
        self.sizes = draw_sizes(self.rng, huge=huge)
        self.disk = SimDisk(self._random(), capacity_bytes=CAPACITY_BYTES, supports_direct=self.rng.random() < 0.8)
        self.contents = Contents(self._random(), huge=huge)
        self.history = History()
        self.model = Model(self.contents.etag_of)
        self.result = Result()
        self._ids = self._random()
        self._round = ""
        self._relapses = 0
        self._stage = "opening"
        self._was_clean = self._crashed = False
        self._wall_ns = SIM_EPOCH_NS
        self._damaged = False
        self._refused = False
        self._must_find = False
        self._live_places: list[Place] = []
        self._repeater: Repeater | None = None
        self._customer: KeyedCustomer | None = None

    def _random(self) -> random.Random:
        """Make a source for a part of the world, so that the parts do not disturb each other."""
        return random.Random(self.rng.getrandbits(64))

    def run(self) -> Result:
        """Live all lives; raise SimFailure when the engine broke a promise."""
        if self.seed % KEYED_EVERY == 0 and self._has("keyed"):
            self._customer = KeyedCustomer(random.Random(f"{self.seed} keyed"))
        for number in range(self.rounds):
            self._round = str(number)
            if self._has(self._round):
                # A source of its own: a round that is left out does not disturb the others.
                self.rng = random.Random(f"{self.seed} {number}")
                self._live_on()
        self.rng, self._round, self._relapses = random.Random(f"{self.seed} end"), "end", 0
        self.disk.capacity_bytes = CAPACITY_BYTES
        self._live(QUIET)
        self._live(QUIET)
        if self.rng.random() < ORDEALS and self._has("ordeal"):
            self._suffer()
        self.result.met += self.disk.met
        self.result.operations = self.result.met["operations"]
        self.result.faults += sum(self.result.met[fault] for fault in FAULTS)
        self.result.trace = self.disk.trace.hexdigest()
        return self.result

    def _live_on(self) -> None:
        """Live a life, and those that end soon after its crash."""
        self._relapses = 0
        self._live(self._lessened(draw_life(self.rng)))
        while self._crashed and self.rng.random() < RELAPSES and self._has(f"{self._round}.relapse"):
            self._relapses += 1
            self._live(self._lessened(draw_relapse(self.rng)))

    def _lessened(self, life: Life) -> Life:
        """Return the life without its parts that are left out."""
        for what, fields in LESS.items():
            less = replace(life, **fields)  # type: ignore[arg-type]  # the table names fields of the class
            if less != life and not self._has(f"{self._round}.{what}"):
                life = less
        return life

    def _has(self, part: str) -> bool:
        """Return whether a part of the run takes place, and note the part."""
        self.parts.append(part)
        return part not in self.without

    def _suffer(self) -> None:
        """Let the disk lie or rot; from then on errors that say so are right, and wrong bytes are not."""
        self._damaged = True
        if self.rng.random() < 0.5:
            self.disk.lying_sync = self.rng.choice((1.0, 0.5, 0.1))
            self._live(replace(draw_life(self.rng), ending="crash"))
            self.history.floor = Sequence(0)
        else:
            self._rot()
        self._relapses = 1
        for life in (replace(draw_life(self.rng), trouble="none"), QUIET):
            if self._refused:
                break
            self._live(life)

    def _rot(self) -> None:
        """Flip bits after a clean stop: of a payload, or of any file."""
        if self._live_places and self.rng.random() < 0.5:
            path, offset = self.rng.choice(self._live_places)
            self.disk.flip_bit(path, offset, self.rng.randrange(8))
            self._must_find = True
        else:
            flip_anywhere(self.disk, self.rng)
        self.result.met["flipped"] += 1

    # --- one life ----------------------------------------------------------------------------------

    def _live(self, life: Life) -> None:
        self.disk.operation_count = 0
        self.disk.crash_at = life.crash_at
        self._stage = "opening"
        self.disk.forget_failures()
        if life.trouble in FAILING:
            self._plant(life)
        crashed = failed = False
        try:
            with self._determined():
                run_seeded(lambda: self._watched(life), self.rng.getrandbits(32), clock=SimTime())
        except SimCrashed:
            crashed = True
        except (BaseExceptionGroup, OperationalError, CorruptionError) as error:
            crashed, others = _knocked_on(error)
            failed = others is not None
            if others is not None and not self._is_excused(life, others):
                raise (self.history.broken or others) from None
        if self._repeater is not None:
            self._repeater.check_ended()
            self.result.met["answers repeated"] += self._repeater.repeated
            self._repeater = None
        self._note_end(life, crashed=crashed, failed=failed)
        if crashed or life.ending != "stop":
            self.disk = self.disk.kill() if life.ending == "kill" else self.disk.crash()

    def _plant(self, life: Life) -> None:
        """Plant one failure of the disk, somewhere in this life; of a read or for want of room only when it serves."""
        operation, failure = FAILING[life.trouble]
        while_serving = life.trouble in ("read", "room")
        if while_serving == (self._stage == "serving"):
            folder = "segments/" if while_serving else self.rng.choice(("segments/", "journal/", ""))
            error = failure(f"planted failure of {operation} in {folder}")
            self.disk.fail_next(operation, error, path=folder, skip=self.rng.randint(0, 30))

    def _is_excused(self, life: Life, error: BaseException) -> bool:
        """Return whether a life may end like this: the disk has failed it, or has not a page of room left."""
        if self._damaged and all(isinstance(cause, CorruptionError) for cause in causes_of(error)):
            self._refused = True
            self.result.met[f"refused while {self._stage}"] += 1
            return True
        if isinstance(error, StoreFull) and self._stage == "opening" and self._is_reserve_used_up():
            self.result.met["too full to open"] += 1
            self.disk.capacity_bytes = CAPACITY_BYTES
            return True
        if life.trouble not in FAILING or self.disk.faults_to_come:
            return False
        excused = (FAILING[life.trouble][1], StoreReadOnly)
        return all(isinstance(cause, excused) for cause in causes_of(error))

    def _is_reserve_used_up(self) -> bool:
        """Return whether others, or a power loss, have used up all room while some of the reserve was released."""
        if self.disk.capacity_bytes == CAPACITY_BYTES or self.disk.free_bytes() > 64 * KIB:
            return False
        file = self.disk.open(RESERVE_PATH, read_only=True)
        try:
            return min(file.size(), file.allocated_bytes()) < 64 * KIB
        finally:
            file.close()

    def _note_end(self, life: Life, *, crashed: bool, failed: bool) -> None:
        self.result.lives += 1
        self.result.disk_operations += self.disk.operation_count
        if crashed or life.ending != "stop":
            self.result.crashes += 1
            self.result.met[f"{life.ending} while {self._stage}"] += 1
        self.result.faults += self.disk.lies
        if life.trouble in FAILING and not self.disk.faults_to_come:
            self.result.met[f"{life.trouble} failed"] += 1
            failed = True
        self._crashed = crashed
        self._wall_ns = self.clock.last_ns
        self._was_clean = not (crashed or failed or life.ending != "stop")

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Take ids and times of the product's own making from the seed."""
        self.clock = SimClock(self._wall_ns + self._moved_clock_ns())
        with (
            mock.patch("engine.superblock.superblock.new_id16", self._new_id16),
            mock.patch("engine.sessions.references.new_id16", self._new_id16),
            mock.patch("engine.uploads.keys.new_id16", self._new_id16),
        ):
            yield

    def _moved_clock_ns(self) -> int:
        """Return how far the wall clock has moved between two lives, apart from going on."""
        if self.rng.random() < 0.8 or not self._has(f"{self._round}.clock"):
            return 0
        self.result.met["clock elsewhere"] += 1
        return int(self.rng.choice(CLOCK_JUMPS_S) * self.rng.choice((1e9, -1e9)))

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
            upload_expiry_s=UPLOAD_EXPIRY_S,
            sizes=self.sizes,
            index_committed=self.disk.note_index_sync,
        ) as store:
            self._stage = "checking"
            await self._compare(store)
            witness = Witness(store, self.history, self.model, self.contents)
            self._repeater = witness.repeater
            if life is QUIET and not self._damaged:
                await store.collector.run()
                await check_tidy(store)
                self._check_expired()
                self._live_places = live_places(store)
            elif life is QUIET:
                self.result.met["inspected"] += 1
            else:
                self._stage = "serving"
                if life.trouble in FAILING:
                    self._plant(life)
                await self._serve(life, store, offload, witness)
            self._note_state(store)
            self._stage = "stopping"
            if life.ending != "stop" and self.rng.random() < 0.5:
                self.disk.crash_at = self.disk.operation_count + self.rng.randint(1, 12)
        self._stage = "stopped"

    async def _compare(self, store: Store) -> None:
        """Check, after opening, that the names are those of a group that may be the last, and nothing is damaged."""
        rebuilt = store.metadata.rebuilt_because
        if rebuilt:
            self.result.met["index rebuilt"] += 1
        if rebuilt and self._was_clean and not self._damaged:
            raise SimFailure(f"after a clean stop the index was rebuilt: {rebuilt}")
        self.history.reopened(await names_of(store))
        if not self._damaged:
            await check_whole(store)
            return
        first = self.rng.choice(("reads", "scrub", "fsck"))
        lost = await check_honest(store, self.history.state, self.contents, sure=self._must_find, first=first)
        self.result.met["scrub met damage"] += store.scrubber.state.last_damaged > 0
        self._must_find = False  # the damaged chunk is in quarantine now, and may be stored again
        self.result.met["damage met"] += lost > 0

    def _check_expired(self) -> None:
        """Check, after gc, that no upload is left that is too old."""
        now_ns = self.clock.wall_ns()
        for upload in unfinished(self.history.state):
            if self.history.is_over(upload, now_ns):
                raise SimFailure(f"upload {upload.hex()} is over, and gc left it")

    async def _serve(self, life: Life, store: Store, offload: SimOffload, witness: Witness) -> None:
        service = WitnessedService(Service(store), witness)
        network = SimulatedNetwork(self._random(), latency_s=life.slowest_s)
        weather = self._weather_of(life)
        upkeep = Upkeep(
            store,
            self.disk,
            network,
            weather,
            self._random(),
            life.slowest_s * 20,
            fills_up=life.trouble == "full",
            room_bytes=CAPACITY_BYTES,
            clock=self.clock,
            sets_clock=life.sets_clock,
            fails_reads=life.trouble == "read",
            ends_in=life.ends_in,
        )
        gate = Gate(life.wire, service, network, offload, self._random())
        observers = [Observer(store, self.history, bucket) for bucket in BUCKETS]
        async with trio.open_nursery() as nursery:
            await gate.open(nursery)
            if self.seed % 2:
                await nursery.start(run_shared_index, store, "memory", HOT_INDEX_ENTRIES)
            nursery.start_soon(upkeep.run)
            for observer in observers:
                nursery.start_soon(observer.run)
            with trio.move_on_after(life.patience_s):
                async with trio.open_nursery() as workloads:
                    self._begin_work(workloads, gate, weather, life)
            await trio.sleep(SETTLING_S)  # by then requests that were cancelled, and their decisions, have ended
            if not store.read_only_because:
                for observer in observers:
                    observer.compare()
            check_unharmed(store, weather)
            if store.shared_index is not None and not self._damaged:
                self.result.met["shared index checked"] += check_shared_index(store)
            nursery.cancel_scope.cancel()
        self.result.decisions += len(self.history.points) - 1

    def _weather_of(self, life: Life) -> Weather:
        return Weather(
            self.disk,
            self.result.met,
            disk_full=self.disk.capacity_bytes < CAPACITY_BYTES or life.trouble == "room",
            reserve_lost=self._is_reserve_used_up(),
            disk_failing=life.trouble in FAILING,
            damaged=self._damaged,
            cuts=life.wire != "embedded",
            leases_end=life.wire == "reconnecting",
        )

    def _begin_work(self, workloads: trio.Nursery, gate: Gate, weather: Weather, life: Life) -> None:
        if self._customer is not None:
            workloads.start_soon(self._customer.live, gate.connect, weather, life.operations, life.slowest_s)
        for index in range(life.workloads):
            place = f"{self._round}{'r' * self._relapses}.{index}."
            workload = Workload(
                gate.connect,
                self.history,
                self.contents,
                weather,
                self._random(),
                slowest_s=life.slowest_s,
                is_wanted=partial(self._is_wanted, place),
            )
            workloads.start_soon(workload.work, life.operations)

    def _is_wanted(self, place: str, number: int) -> bool:
        """Return whether the shrinker has left this operation in the run."""
        where = f"{place}{number}"
        self.done.append(where)
        return self.only is None or where in self.only

    def _note_state(self, store: Store) -> None:
        """Note what this life has met, so that a test can check that lives meet everything."""
        met = self.result.met
        met["journal files"] += len(self.disk.list_folder("journal")) > 1
        met["segments"] += len(self.disk.list_folder("segments")) > 2
        met["checkpoint"] += store.metadata.stats()["checkpoint_sequence"] > 0
        met["reserve released"] += store.reserve.held_bytes < store.reserve.target_bytes
        met["read-only"] += bool(store.read_only_because)


def _knocked_on(error: BaseException) -> tuple[bool, BaseException | None]:
    """Return whether the power failed, and the error that this does not explain."""
    if not isinstance(error, BaseExceptionGroup):
        return False, error
    crash, others = error.split(SimCrashed)
    if crash is not None and others is not None:
        _, others = others.split(OperationalError)
    return crash is not None, others


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions inside of groups of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in causes_of(inner)]
    return [error]


def run_seed(seed: int, rounds: int = ROUNDS) -> Result:
    """Run a seed; a failure has the command that repeats it, on one line."""
    try:
        return World(seed, rounds).run()
    except Exception as error:
        error.add_note(f"again: python -m tests.sim {seed} --rounds {rounds}")
        raise
