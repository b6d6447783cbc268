"""The stage of a scene: a small lake, its clients, and whatever may happen to them.

A scene (`tests.sim.cluster.scenes`) is a short history with a plot: few contents that meet in one partition, and one
thing that happens just then.  Its checks are those of every history: `Customer`, `Health`, `Quiet`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar
from unittest import mock

import trio

from engine.coordinator.lake_state import LakeState
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table
from lakefs.errors import LakeError
from lakefs.ids import MemberId, Partition, data_chunk_id
from lakefs.wire import messages as m
from tests.sim.cluster.bucket_customers import BucketRegisters
from tests.sim.cluster.customers import Customer, Pool, Step
from tests.sim.cluster.devices import Device
from tests.sim.cluster.etcd_names import EtcdNames
from tests.sim.cluster.forgetting import Forgetting
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.liars import Lie
from tests.sim.cluster.names_place import NamesPlace
from tests.sim.cluster.network import Connection, Way
from tests.sim.cluster.operating import Operator
from tests.sim.cluster.places import MEMBER_BYTES, HeadPlace, MemberPlace
from tests.sim.cluster.points import PointOf
from tests.sim.cluster.promises import Content, Promises
from tests.sim.cluster.putting_back import PuttingBack
from tests.sim.cluster.quiet import Quiet
from tests.sim.judges.history import SimFailure

T = TypeVar("T")
SIZES: Final = (900, 5_000, 70_000, 140_000)
HEARD_S: Final = 6.0
"""A link that was away has been tried again by then, and a look at the members has seen it."""
HELD_S: Final = 8.0
"""Requests to members are given up after 10 s."""
WAIT_S: Final = 120.0
FILLERS_MAX: Final = 40


class Stage:
    """A lake that is whole, and everything that a scene does with it."""

    def __init__(
        self, lake: SimLake, promises: Promises, pool: Pool, rng: random.Random, buckets: BucketRegisters
    ) -> None:
        self.lake = lake
        self.quiet = Quiet(lake, promises)
        self.rng = rng
        self.buckets = buckets
        self.heads: Sequence[HeadPlace] = lake.heads
        self._promises = promises
        self._pool = pool
        self._operator = Operator(lake)
        self._forgetting = Forgetting(lake, self._operator)
        self.putting_back = PuttingBack(lake, self._operator)
        self._clients = 0

    # --- places --------------------------------------------------------------------------------------

    @property
    def tables(self) -> Sequence[Table]:
        """The tables as the names' process knows them, the newest first."""
        upkeep = self.lake.names.upkeep
        assert upkeep is not None
        return upkeep._members.tables

    def place(self, member: MemberId) -> MemberPlace:
        """Return the place of a member."""
        return next(place for place in self.lake.members if place.id == member)

    def homes(self, payload: bytes) -> list[MemberPlace]:
        """Return the home of each shard that a chunk has; they are others as long as no member is home of several."""
        table = self.tables[0]
        code = ErasureCode(table.protection.data, table.protection.parity)
        homes = table.homes(data_chunk_id(payload))
        return [self.place(homes[number]) for number in code.shards(len(payload))]

    def holders(self, payload: bytes) -> list[MemberPlace]:
        """Return the members that hold shards of a chunk, by their own records; each as often as it holds one."""
        chunk, found = data_chunk_id(payload), []
        for place in self.lake.members:
            found += [place] * place.shard_count(chunk)
        return found

    def payload(self, *, beside: bytes = b"", home: MemberPlace | None = None, sizes: Sequence[int] = SIZES) -> bytes:
        """Return new bytes of a chunk: in the partition of another one, or of which a member is a home, if given."""
        while True:
            made = self.rng.randbytes(self.rng.choice(sizes))
            is_beside = not beside or self.partition(made) == self.partition(beside)
            if is_beside and (home is None or home in self.homes(made)):
                return made

    def partition(self, payload: bytes) -> Partition:
        """Return the partition of a chunk."""
        return self.tables[0].partition_of(data_chunk_id(payload))

    # --- clients -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def client(self, head: HeadPlace | None = None) -> AsyncIterator[Customer]:
        """Connect a client, at any head."""
        self._clients += 1
        rng = random.Random(self.rng.getrandbits(64))
        name = f"s{self._clients}"
        customer = Customer(name, rng, self._promises, self._pool, self.lake.health, self.lake.log)
        async with customer.at(head or self.rng.choice(self.heads)):
            yield customer
        self.lake.met["operations"] += 1

    async def put(self, name: str, *payloads: bytes, head: HeadPlace | None = None) -> None:
        """Put an object: of one chunk, or of several in a session."""
        async with self.client(head) as customer:
            if len(payloads) == 1:
                await customer.put_object(name, payloads[0])
            else:
                await customer.put_in_session(name, payloads)

    async def put_in_session(self, name: str, content: Content, *rests: Step, head: HeadPlace | None = None) -> None:
        """Put an object in a session, and do something behind the offer, and behind the store."""
        async with self.client(head) as customer:
            await customer.put_in_session(name, content, rests)

    async def remove(self, name: str, head: HeadPlace | None = None) -> None:
        """Remove an object."""
        async with self.client(head) as customer:
            await customer.remove_object(name)

    async def copy(self, source: str, target: str, head: HeadPlace | None = None) -> None:
        """Copy an object, without its content."""
        async with self.client(head) as customer:
            await customer.move_object("copy", source, target, removes=False)

    async def read_all(self) -> None:
        """Read every object at each head."""
        for head in self.heads:
            async with self.client(head) as customer:
                for name in sorted(self._promises.keys):
                    await customer.read(name)

    async def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; SimFailure when it does not come true for long."""
        with trio.move_on_after(WAIT_S) as bound:
            await until(condition)
        if bound.cancelled_caught:
            raise SimFailure(f"{what}: not in {WAIT_S:g} s")

    def is_bound(self, name: str) -> bool:
        """Return True if an object is known to have content."""
        return None not in self._promises.key(name).may_be

    # --- upkeep --------------------------------------------------------------------------------------

    async def collect(self, cycles: int = 1) -> None:
        """Run cycles of gc, one behind the other."""
        for _ in range(cycles):
            await self._operator.tell(m.RunGc(), "gc")

    async def check_shards(self, place: MemberPlace) -> None:
        """Have every shard checked, until a member was."""
        await self._operator._check(place)

    async def scrub(self) -> None:
        """Let every member read what it has, and the walker make anew what is damaged."""
        for restart in (True, False):
            await self._operator.tell(m.RunScrub(60.0, 0, restart=restart, damaged=True), "scrub")

    async def drain(self, place: MemberPlace, *, head: HeadPlace | None = None) -> None:
        """Drain a member."""
        assert place.id is not None
        self.lake.met["drain"] += 1
        async with (head or self.rng.choice(self.heads)).connect() as client:
            await client.call(m.Hello(1, "operator"))
            (await client.call(m.ChangeMember(place.id, m.MEMBER_DRAIN))).body.release()
        self.lake.log(f"operator: drain {place.name}: done")

    async def let_go(self, place: MemberPlace) -> None:
        """Let an operator remove a member that was drained; the lake has to agree."""
        assert place.id is not None
        with trio.move_on_after(WAIT_S) as bound:
            await self._operator.tell(m.ChangeMember(place.id, m.MEMBER_REMOVE), f"remove {place.name}")
        if bound.cancelled_caught:
            raise SimFailure(f"{place.name} is drained, and is not let go")
        await place.stop()
        self.lake.members.remove(place)

    @asynccontextmanager
    async def following_tables(self) -> AsyncIterator[list[Table]]:
        """Collect the tables that are made during the block, the present one first."""
        tables = [self.tables[0]]

        async def follow() -> None:
            while True:
                for table in reversed(self.tables):
                    if table.ring_epoch > tables[-1].ring_epoch:
                        tables.append(table)
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            yield tables
            nursery.cancel_scope.cancel()

    async def add(self) -> None:
        """Add a member."""
        await self._operator.add_member()

    async def lose(self, place: MemberPlace) -> None:
        """Lose a member's device, as `Operator.lose_device`."""
        await self._operator._lose(place)

    async def lose_for_good(self, place: MemberPlace) -> None:
        """Let an operator remove a member that is away; nothing takes its place."""
        assert place.id is not None
        await self._operator.remove_lost(place.id)
        self.lake.members.remove(place)

    def lose_soon(self, place: MemberPlace) -> None:
        """Lose a member's device now; return before an empty one has taken its place."""
        self.lake.world.network.nursery.start_soon(self.lose, place)

    async def healed(self) -> None:
        """Wait until the lake says that it is healed."""
        await self.quiet.wait_healed()
        self.lake.health.healed()

    async def is_clean(self) -> bool:
        """Return True if no partition is dirty."""
        upkeep = self.lake.names.upkeep
        if upkeep is None:
            return False
        try:
            return not await LakeState(upkeep._coordinator).dirty()
        except LakeError:
            return False

    async def clean(self, most_s: float = WAIT_S) -> None:
        """Wait until no partition is dirty, or for so long."""
        with trio.move_on_after(most_s):
            while not await self.is_clean():  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.2)

    # --- what happens --------------------------------------------------------------------------------

    @contextmanager
    def at(self, point: PointOf) -> Iterator[PointOf]:
        """Let something happen at a point during the block."""
        points = self.lake.world.network.points
        points[point] = None
        try:
            yield point
        finally:
            points.pop(point, None)

    @contextmanager
    def held(self, kind: type[m.Request], *, near: str = "", far: str = "", answers: bool = False) -> Iterator[PointOf]:
        """Let messages of a kind wait as long as the block lasts."""
        released = trio.Event()

        async def wait(_: Connection, __: m.Request) -> None:
            await released.wait()

        with self.at(PointOf(kind, wait, near=near, far=far, answers=answers, is_each=True)) as point:
            try:
                yield point
            finally:
                released.set()

    @contextmanager
    def deaf(self, head: HeadPlace) -> Iterator[None]:
        """Let a head hear of no change of the lake's records during the block."""
        deaf = self.lake.names.machines.nodes.deaf if isinstance(self.lake.names, EtcdNames) else set()
        with self.held(m.CoordinatorWatch, near=head.host, answers=True):
            deaf.add(head.host)
            yield
            deaf.discard(head.host)

    @asynccontextmanager
    async def away(self, *places: MemberPlace, power: bool = True, seen: bool = False) -> AsyncIterator[None]:
        """Let members be away during the block.  `seen`: until everybody knows."""
        lives = {place: place.lives for place in places}
        for place in places:
            self.lake.health.begin(place.name)
            self.lake.log(f"{place.name} crashes: {'power' if power else 'process'}")
            self.lake.met["crashes"] += 1
            place.is_wanted = False
            place.crash(power=power)
        await until(lambda: not any(place.is_up for place in places))
        if seen:
            await trio.sleep(HEARD_S)
        try:
            yield
        finally:
            for place in places:
                place.is_wanted = True
        for place, life in lives.items():
            await until(lambda place=place, life=life: place.is_up and place.lives > life)  # type: ignore[misc]
            self.lake.health.end(place.name)
        await trio.sleep(HEARD_S)

    @asynccontextmanager
    async def gone(self, place: MemberPlace) -> AsyncIterator[None]:
        """Let a member be gone for ever; the block has to tell the lake."""
        self.lake.health.begin(place.name)
        self.lake.health.lost.add(place.name)
        self.lake.met["lost"] += 1
        self.lake.log(f"{place.name} is gone")
        place.is_wanted = False
        place.crash(power=True)
        yield
        self.lake.health.end(place.name)

    async def restart(self, place: MemberPlace, *, power: bool = True) -> None:
        """Let a member crash and come back."""
        async with self.away(place, power=power):
            await trio.sleep(0.1)

    @contextmanager
    def cut(self, place: MemberPlace, *heads: HeadPlace) -> Iterator[None]:
        """Cut a member off from heads during the block."""
        network = self.lake.world.network
        self.lake.health.begin(place.name)
        self.lake.met["cut off: CUT"] += 1
        self.lake.log(f"{place.name} is cut off from {[head.name for head in heads]}")
        pairs = [pair for head in heads for pair in ((head.host, place.host), (place.host, head.host))]
        for pair in pairs:
            network.set_way(*pair, Way.CUT)
        try:
            yield
        finally:
            for pair in pairs:
                network.set_way(*pair, Way.GOOD)
            self.lake.log(f"{place.name} is not cut off any more")
            self.lake.health.end(place.name)

    @contextmanager
    def unheard(self, *places: MemberPlace) -> Iterator[None]:
        """Cut members off from the names' process alone during the block: heads reach them, so nobody is hurt."""
        network = self.lake.world.network
        self.lake.met["cut off: CUT"] += len(places)
        self.lake.log(f"{[place.name for place in places]} are cut off from the names")
        hosts = self.lake.names.hosts
        pairs = [pair for one in places for host in hosts for pair in ((host, one.host), (one.host, host))]
        for pair in pairs:
            network.set_way(*pair, Way.CUT)
        try:
            yield
        finally:
            for pair in pairs:
                network.set_way(*pair, Way.GOOD)
            self.lake.log("no member is cut off from the names any more")

    async def fill(self, place: MemberPlace) -> None:
        """Put objects until a member takes no more shards; its disk has to be full."""
        for number in range(FILLERS_MAX):
            payload = self.payload(home=place, sizes=SIZES[-1:])
            await self.put(f"filler{number}", payload)
            if place not in self.holders(payload):
                return
        raise AssertionError(f"{place.name} is full, and takes everything")

    @asynccontextmanager
    async def full(self, *places: MemberPlace) -> AsyncIterator[None]:
        """Let others take all room of members' disks during the block."""
        for place in places:
            self.lake.health.begin(place.name)
            self.lake.met["full"] += 1
            self.lake.log(f"{place.name} is full")
            place.disk.capacity_bytes = max(0, MEMBER_BYTES - place.disk.free_bytes())
        try:
            yield
        finally:
            for place in places:
                place.disk.capacity_bytes = MEMBER_BYTES
        await trio.sleep(HEARD_S)
        for place in places:
            self.lake.health.end(place.name)

    @contextmanager
    def before_sweeps(self, act: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Let something happen when the walk of gc has ended: the names' disk is slow before members sweep."""
        metadata = self.lake.names.metadata
        assert metadata is not None
        sync = metadata.sync

        async def sync_slowly() -> None:
            await act()
            await sync()

        with mock.patch.object(metadata, "sync", sync_slowly):
            yield

    def flip(self, place: MemberPlace) -> None:
        """Flip a bit of each shard of a member."""
        self.lake.health.begin(place.name)
        self.lake.health.lost.add(place.name)
        self.lake.met["rot"] += 1
        self.lake.log(f"bits flip on {place.name}")
        for path, offset in self._operator._shard_places(place):
            place.disk.flip_bit(path, offset, self.rng.randrange(8))
        self.lake.health.end(place.name)

    @contextmanager
    def lying(self, place: MemberPlace, lie: Lie) -> Iterator[None]:
        """Let a member lie to heads during the block."""
        self.lake.health.begin(place.name)
        place.lies = lie
        self.lake.met[f"lies: {lie.name}"] += 1
        self.lake.log(f"{place.name} lies: {lie.name}")
        try:
            yield
        finally:
            place.lies = Lie.NONE
            self.lake.log(f"{place.name} lies no more")
            self.lake.health.end(place.name)

    async def restart_head(self, head: HeadPlace) -> None:
        """Kill a head, and wait for the next."""
        lives = head.lives
        self.lake.health.begin_elsewhere()
        head.kill()
        await until(lambda: head.is_up and head.lives > lives)
        self.lake.health.end_elsewhere()

    def lies_about_syncs(self, place: MemberPlace) -> None:
        """Let a member's disk lie about syncs from now on."""
        self._forgetting.lie_about_syncs(place)

    async def lose_power(self, place: MemberPlace) -> None:
        """Let the power of a member with a lying disk fail; it returns, or is replaced when it cannot be opened."""
        await self._forgetting.lose_power(place)
        await trio.sleep(HEARD_S)
        self.lake.health.end(place.name)

    def break_names_device(self, name: str, *, is_broken: bool) -> None:
        """Break a device of the names, or let it work again."""
        assert isinstance(self.lake.names, NamesPlace)
        disk = self.lake.names.disks[name]
        assert isinstance(disk, Device)
        disk.is_broken = is_broken
        self.lake.log(f"the names' device {name} {'breaks' if is_broken else 'works'}")
