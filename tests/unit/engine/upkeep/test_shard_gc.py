"""Gc of shards against a model: what a member frees and drops is what the rules of generations say, and no more."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from engine.chunks.shards import Shards
from engine.chunks.touched import KEPT, Touched
from engine.format.shards import partition_of_key
from engine.tables.number_set import NumberSet
from engine.upkeep import shard_gc
from engine.upkeep.shard_gc import ShardCollector
from lakefs.errors import PreconditionFailed
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import LAKE
from tests.shards import Shard, chunk_at, drop, listed, offer, set_epoch, store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, run, simulated_store

STEPS = 60
LIVES = 4
PARTITIONS = (0, 1, 100, 4095)
NAMES = [(partition, number) for partition in PARTITIONS for number in (0, 1, 5)]


@dataclass
class Cycle:
    """A cycle that the driver has begun."""

    generation: int
    walk: bytes
    present: set[Shard]
    """Shards that existed when it began, and have not been stored anew since."""
    marked: set[bytes] = field(default_factory=set)
    batches: int = 0
    is_whole: bool = True
    """No batch was left out, and the member has run since the beginning."""


@dataclass
class Model:
    """The member as the rules have it, with an exact memory."""

    generation: int = 1
    """The coordinator's."""
    touched: dict[Shard, int] = field(default_factory=dict)
    """Shards that exist, with the highest generation since the start of this life, 0 for none."""
    at_start: int | None = 0
    """The generation in which all count as touched; None: not known yet."""
    newest: int = 0
    """The newest generation that the member has seen in this life."""
    cycle: Cycle | None = None

    def bound(self, shard: Shard) -> int:
        if self.at_start is None:
            return m.TOUCHED_UNKNOWN
        return max(self.touched[shard], self.at_start, self.newest - KEPT)

    def touch(self, shard: Shard, generation: int) -> None:
        self.newest = max(self.newest, generation)
        self.touched[shard] = max(self.touched.get(shard, 0), generation)

    def restart(self) -> None:
        self.touched = dict.fromkeys(self.touched, 0)
        self.at_start, self.newest = None, 0
        if self.cycle is not None:
            self.cycle.is_whole = False


class History:
    """One history: random steps at a member and at the model; what differs is an AssertionError."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = Model()
        self.disk = SimDisk(random.Random(seed))
        self.client: EngineClient

    async def run(self) -> None:
        for _ in range(LIVES):
            async with simulated_store(self.disk, cluster_id=LAKE) as opened:
                self.client = client_of(opened)
                for _ in range(STEPS):
                    await self.rng.choice(self.steps)()
                await self.check()
            self.model.restart()

    @property
    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self.store, self.offer] * 2
        return [*often, self.drop, self.advance, self.begin, self.mark, self.sweep, self.sweep, self.tell, self.check]

    def some(self, count: int) -> list[Shard]:
        names = self.rng.sample(NAMES, count)
        return [Shard(chunk_at(partition), number, b"%d of %d" % (number, partition)) for partition, number in names]

    def session(self) -> int:
        """The generation of a session, which its head may have learnt a while ago."""
        return max(1, self.model.generation - self.rng.choice((0, 0, 1, 2, 3)))

    async def store(self) -> None:
        shards, generation = self.some(self.rng.randint(1, 4)), self.session()
        fresh = await store(self.client, *shards, generation=generation)
        assert fresh == [shard not in self.model.touched for shard in shards]
        for shard, is_new in zip(shards, fresh, strict=True):
            if is_new and self.model.cycle is not None:
                self.model.cycle.present.discard(shard)
            self.model.touch(shard, generation)

    async def offer(self) -> None:
        shards, generation = self.some(self.rng.randint(1, 4)), self.session()
        lengths = await offer(self.client, *shards, generation=generation)
        assert lengths == [len(shard.payload) * (shard in self.model.touched) for shard in shards]
        for shard in shards:
            if shard in self.model.touched:
                self.model.touch(shard, generation)

    async def drop(self) -> None:
        shards, given = self.some(3), self.session()
        kept = await drop(self.client, *shards, touched=given)
        for shard, left in zip(shards, kept, strict=True):
            if shard not in self.model.touched:
                assert left == 0
            elif self.model.bound(shard) > given:
                assert left == self.model.bound(shard), "kept for the generation that it was touched in"
            else:
                assert left == 0, "nothing keeps it"
                del self.model.touched[shard]

    async def advance(self) -> None:
        self.model.generation += 1

    async def begin(self) -> None:
        walk = self.rng.randbytes(16)
        self.model.cycle = Cycle(self.model.generation, walk, set(self.model.touched))
        await ask(self.client, m.GcBegin(self.model.generation, walk), m.Done)
        self.model.newest = max(self.model.newest, self.model.generation)

    async def mark(self) -> None:
        cycle = self.model.cycle
        if cycle is None:
            return
        if self.rng.random() < 0.1:  # a batch that is lost on its way
            cycle.batches += 1
            cycle.is_whole = False
            return
        chunks = {shard.chunk for shard in self.some(2)}
        request = m.GcMark(cycle.walk, cycle.batches, list(chunks))
        cycle.batches += 1
        try:
            for _ in range(self.rng.choice((1, 1, 2))):
                await ask(self.client, request, m.Done)
        except PreconditionFailed:
            assert not cycle.is_whole, "the marks were there"
        cycle.marked |= chunks

    async def sweep(self) -> None:
        cycle, self.model.cycle = self.model.cycle, None
        if cycle is None:
            return
        homes = bytearray(512)
        for partition in self.rng.sample(PARTITIONS, 3):
            homes[partition >> 3] |= 1 << (partition & 7)
        before = set(self.model.touched)
        try:
            swept = await ask(self.client, m.GcSweep(cycle.walk, cycle.batches, bytes(homes)), m.ShardsSwept)
        except PreconditionFailed:
            assert not cycle.is_whole, "the marks were there"
            return
        for shard in before:
            if self.is_garbage(cycle, shard, bytes(homes)):
                del self.model.touched[shard]
        assert swept.freed_shards == len(before) - len(self.model.touched)
        assert bool(swept.kept_because) == (not cycle.is_whole or self.model.at_start is None)
        await self.check()

    def is_garbage(self, cycle: Cycle, shard: Shard, homes: bytes) -> bool:
        partition = int.from_bytes(shard.chunk[1:3], "big") >> 4
        return (
            cycle.is_whole
            and shard in cycle.present
            and shard.chunk not in cycle.marked
            and self.model.bound(shard) < cycle.generation - 1
            and bool(homes[partition >> 3] >> (partition & 7) & 1)
        )

    async def tell(self) -> None:
        """Somebody connects, reads the coordinator's generation, and brings it."""
        if self.model.at_start is None:
            self.model.at_start = self.model.generation
        await set_epoch(self.client, generation=self.model.generation)

    async def check(self) -> None:
        """The member has what the model has, and tells the same of each."""
        expected = {(shard.chunk, shard.number): self.model.bound(shard) for shard in self.model.touched}
        found = await listed(self.client, limit=5)
        assert {(shard.chunk, shard.number): touched for shard, touched in found.items()} == expected


SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_member_frees_and_drops_exactly_what_the_rules_allow(seed: int) -> None:
    run(History(seed).run)


def _plant_sweep_without_touched(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(shard_gc.ShardCollector, "_is_garbage", _garbage_without("touched"))


def _plant_sweep_of_young(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(shard_gc.ShardCollector, "_is_garbage", _garbage_without("birth"))


def _plant_sweep_outside_its_partitions(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(shard_gc.ShardCollector, "_is_garbage", _garbage_without("partition"))


def _plant_sweep_of_marked(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(shard_gc.ShardCollector, "_is_garbage", _garbage_without("mark"))


def _garbage_without(left_out: str) -> Callable[..., bool]:
    def is_garbage(self: ShardCollector, cycle: shard_gc._Cycle, key: bytes, record: object, homes: bytes) -> bool:
        birth = record.birth  # type: ignore[attr-defined]
        partition = partition_of_key(key, 12)
        reasons_to_keep = {
            "birth": birth >= cycle.born_before,
            "mark": birth in cycle.marked,
            "touched": self._shards.touched.of(birth) >= cycle.generation - 1,
            "partition": not homes[partition >> 3] >> (partition & 7) & 1,
        }
        return not any(keeps for reason, keeps in reasons_to_keep.items() if reason != left_out)

    return is_garbage


def _plant_drop_without_touched(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Shards, "_kept_for", lambda self, birth, given, *, is_good: 0)


def _plant_present_is_not_touched(plant: pytest.MonkeyPatch) -> None:
    def is_kept(self: Shards, view: object, item: object, generation: int) -> bool:
        return self._find_good(view, item.key) is not None  # type: ignore[arg-type, attr-defined]

    plant.setattr(Shards, "_is_kept", is_kept)


def _plant_restart_forgets(plant: pytest.MonkeyPatch) -> None:
    opened = Touched.opened
    plant.setattr(Touched, "opened", lambda self, generation: opened(self, 0))


def _plant_unknown_is_zero(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Touched, "__init__", _known(Touched.__init__))


def _known(made: Callable[..., None]) -> Callable[..., None]:
    def init(self: Touched) -> None:
        made(self)
        self._is_known = True

    return init


def _plant_lost_marks_do_not_count(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(shard_gc.ShardCollector, "_why_not", lambda self, cycle, batches: "")


def _plant_one_generation_is_kept(plant: pytest.MonkeyPatch) -> None:
    def note(self: Touched, birth: int, generation: int) -> None:
        self.seen(generation)
        if generation == self._newest:
            self._sets.setdefault(generation, NumberSet()).add(birth)

    plant.setattr(Touched, "note", note)


PLANTED = [found for name, found in sorted(globals().items()) if name.startswith("_plant_")]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__.removeprefix("_plant_"))
def test_each_weaker_rule_is_noticed(planted: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as plant:
        planted(plant)
        with pytest.raises(AssertionError):
            for seed in SEEDS:
                run(History(seed).run)
