"""Links to members: made when used, closed when idle, tried again while away, and never waited for for long."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord, MemberState
from engine.members import member_links
from engine.members.member_link import MemberClient
from engine.members.member_links import MemberLinks, connect_member, open_member_links
from engine.requests.table import Service
from engine.server.listener import Server
from lakefs.cluster.table_format import pack
from lakefs.errors import CoordinatorLost, EngineBusy, EngineUnreachable, StaleEpoch, StoreUnusable
from lakefs.ids import Buffer, GcGeneration, MemberId, RingEpoch
from lakefs.limits import AWAY_PAUSE_S_MAX, MEMBER_ANSWER_S, MEMBER_CONNECT_S, MEMBER_IDLE_S, MEMBER_SILENCE_S
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.shards import Shard, chunk_at, store_request
from tests.sim.world.network import SimulatedNetwork
from tests.store_rig import run, simulated_store
from tests.unit.engine.cluster.stripe_rig import LAKE, id_of, table_of

ONE, TWO, THREE = id_of(0), id_of(1), id_of(2)
OFFER = m.OfferShards(1, 1, [chunk_at(1)], [0])


class Connection:
    """A connection to a member that only notes what it is asked."""

    def __init__(self, network: Pretended) -> None:
        self.network = network
        self.draining = False
        self.ended = trio.Event()
        self.requests: list[m.Request] = []

    async def call(self, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()) -> Reply:
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        if self.ended.is_set():
            raise EngineUnreachable("the connection was lost")
        if self.draining:
            raise EngineBusy("shutting down")
        if self.network.is_silent:
            await trio.sleep_forever()
        if isinstance(request, m.SetEpoch):
            return Reply(m.EpochKnown(max(request.epoch, self.network.epoch), self.network.table))
        if isinstance(request, m.OfferShards) and request.epoch < self.network.epoch:
            raise StaleEpoch("there is a newer one")
        if isinstance(request, m.OfferShards) and self.network.takes_nothing:
            raise CoordinatorLost("its lease was not renewed")
        return Reply(m.ShardsOffered([1], [1]))

    async def wait_ended(self) -> None:
        await self.ended.wait()


class Pretended:
    """Members to connect to."""

    def __init__(self) -> None:
        self.away: set[MemberId] = set()
        self.is_silent = self.takes_nothing = False
        self.epoch = 1
        self.table = b""  # that members have
        self.connecting = self.connects = 0
        self.open: dict[MemberId, Connection] = {}
        self.addresses: list[str] = []

    @asynccontextmanager
    async def connect(self, record: MemberRecord) -> AsyncIterator[Connection]:
        self.connects += 1
        self.connecting += 1
        self.addresses += record.addresses
        assert self.connecting == 1, "one connect at a time"
        try:
            await trio.sleep(0.01)
            if record.member in self.away:
                raise EngineUnreachable("nobody listens; start one with: lake serve")
        finally:
            self.connecting -= 1
        connection = self.open[record.member] = Connection(self)
        try:
            yield connection
        finally:
            del self.open[record.member]


class World:
    """A lake's coordinator, pretended members, and links to them."""

    def __init__(self, coordinator: MemoryCoordinator, network: Pretended, links: MemberLinks) -> None:
        self.coordinator = coordinator
        self.state = LakeState(coordinator)
        self.network = network
        self.links = links

    def sent(self, member: MemberId) -> list[m.Request]:
        return self.network.open[member].requests


def record_of(member: MemberId) -> MemberRecord:
    return MemberRecord(member, (f"tcp://host{member[0]}:1",), 1 << 30, ())


async def recorded(coordinator: MemoryCoordinator) -> LakeState:
    """Record a lake of three members."""
    state = LakeState(coordinator)
    assert await state.next_epoch(RingEpoch(0), pack(table_of("2+1", 3)))
    for member in (ONE, TWO, THREE):
        await state.register(record_of(member))
    return state


def in_world(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator:
            await recorded(coordinator)
            network = Pretended()
            async with open_member_links(coordinator, network.connect) as links:
                await body(World(coordinator, network, links))
            assert network.open == {}, "connections end with the links"
            with pytest.raises(EngineUnreachable, match="closed"):
                await links.call(ONE, OFFER)

    run(main)


async def ask(world: World, member: MemberId = ONE, epoch: int = 1) -> None:
    (await world.links.call(member, msgspec.structs.replace(OFFER, epoch=epoch))).body.release()


def test_a_member_is_connected_when_it_is_used_and_gets_the_epoch_first() -> None:
    async def body(world: World) -> None:
        assert world.links.is_up(ONE)
        assert world.network.open == {}
        await world.state.advance_generation(GcGeneration(0))
        await ask(world)
        assert world.sent(ONE) == [m.SetEpoch(1, pack(table_of("2+1", 3)), 1), OFFER]
        assert world.links.tables == (table_of("2+1", 3),)

    in_world(body)


def test_many_callers_wait_for_one_connect() -> None:
    async def body(world: World) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask, world)
        assert world.network.connects == 1

    in_world(body)


def test_idle_connections_are_closed_and_made_again() -> None:
    async def body(world: World) -> None:
        await ask(world)
        await trio.sleep(MEMBER_IDLE_S - 1)
        await ask(world)
        await trio.sleep(MEMBER_IDLE_S - 1)
        assert ONE in world.network.open
        await trio.sleep(2)
        assert world.network.open == {}
        assert world.links.is_up(ONE)
        await ask(world)
        assert world.network.connects == 2

    in_world(body)


def test_a_member_that_is_away_answers_at_once_and_is_found_again() -> None:
    async def body(world: World) -> None:
        world.network.away.add(ONE)
        with pytest.raises(EngineUnreachable, match="nobody listens") as raised:
            await ask(world)
        assert raised.value.subject == ONE.hex()
        assert raised.value.message == f"member {ONE.hex()[:12]}: nobody listens"  # a lake starts its members itself
        began = trio.current_time()
        for _ in range(10):
            assert not world.links.is_up(ONE)
            with pytest.raises(EngineUnreachable):
                await ask(world)
        assert trio.current_time() == began
        await trio.sleep(600)
        assert 100 < world.network.connects < 140, "pauses grow, and end growing"
        world.network.away.clear()
        await trio.sleep(AWAY_PAUSE_S_MAX + 0.1)
        assert world.links.is_up(ONE)
        await ask(world)
        await ask(world, TWO)

    in_world(body)


def test_a_lost_connection_is_made_again_soon() -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.open[ONE].ended.set()
        with pytest.raises(EngineUnreachable):
            await ask(world)
        await trio.sleep(0.2)
        await ask(world)
        world.network.open[ONE].draining = True
        with pytest.raises(EngineUnreachable, match="shutting down"):
            await ask(world)
        await trio.sleep(0.2)
        await ask(world)

    in_world(body)


def test_silence_makes_a_member_away_and_holds_up_one_request_at_most_so_long() -> None:
    async def body(world: World) -> None:
        await ask(world)
        world.network.is_silent = True
        began = trio.current_time()
        with pytest.raises(EngineUnreachable, match="not answered within"):
            await ask(world)
        assert trio.current_time() - began == pytest.approx(MEMBER_ANSWER_S)
        with pytest.raises(EngineUnreachable):
            await ask(world)
        with pytest.raises(EngineUnreachable, match="does not answer"):
            await ask(world, TWO)
        assert trio.current_time() - began < MEMBER_ANSWER_S + MEMBER_CONNECT_S + 1
        world.network.is_silent = False
        await trio.sleep(MEMBER_CONNECT_S + AWAY_PAUSE_S_MAX)
        await ask(world)

    in_world(body)


def test_a_newer_table_is_read_before_stale_epoch_is_raised_and_sent_to_connected_members() -> None:
    async def body(world: World) -> None:
        await ask(world)
        await trio.sleep(1)
        table = pack(replace(table_of("2+1", 3), ring_epoch=RingEpoch(2)))
        await world.state.next_epoch(RingEpoch(1), table)
        world.network.epoch = 2
        with pytest.raises(StaleEpoch):
            await ask(world)
        assert [known.ring_epoch for known in world.links.tables] == [2, 1]
        await trio.sleep(1)
        assert m.SetEpoch(2, table, 0) in world.sent(ONE)
        await world.state.retire_epoch(RingEpoch(1))
        await world.state.advance_generation(GcGeneration(0))
        await trio.sleep(1)
        assert [known.ring_epoch for known in world.links.tables] == [2]
        assert world.links.generation == 1

    in_world(body)


def test_members_come_move_and_go() -> None:
    async def body(world: World) -> None:
        four = id_of(3)
        assert not world.links.is_up(four)
        with pytest.raises(EngineUnreachable, match="not of this lake"):
            await ask(world, four)
        await world.state.register(record_of(four))
        await trio.sleep(1)
        await ask(world, four)
        world.network.away.add(four)
        world.network.open[four].ended.set()
        moved = msgspec.structs.replace(record_of(four), addresses=("tcp://elsewhere:1",))
        await world.state.register(moved)
        await trio.sleep(1)
        world.network.away.clear()
        await trio.sleep(AWAY_PAUSE_S_MAX)
        await ask(world, four)
        assert "tcp://elsewhere:1" in world.network.addresses
        assert await world.state.set_state(four, MemberState.UP, MemberState.REMOVED)
        await trio.sleep(1)
        assert four not in world.network.open
        assert not world.links.is_up(four)

    in_world(body)


def test_the_link_that_was_unused_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_links, "MEMBER_LINKS_MAX", 2)

    async def body(world: World) -> None:
        for member in (ONE, TWO, THREE):
            await ask(world, member)
            await trio.sleep(1)
        assert world.network.open.keys() == {TWO, THREE}
        assert world.links.is_up(ONE)

    in_world(body)


def test_links_go_on_while_the_coordinator_is_away() -> None:
    async def body(world: World) -> None:
        world.coordinator.closed = True
        world.coordinator.changed.unpark_all()
        await ask(world)
        assert world.sent(ONE)[0] == m.SetEpoch(1, pack(table_of("2+1", 3)), 0)
        await trio.sleep(100)
        world.coordinator.closed = False
        await world.state.advance_generation(GcGeneration(0))
        await trio.sleep(10)
        await ask(world)
        await ask(world, TWO)
        assert m.SetEpoch(1, pack(table_of("2+1", 3)), 1) in world.sent(TWO)

    in_world(body)


def test_a_lake_without_a_table_has_no_links() -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator:
            with pytest.raises(StoreUnusable, match="no ring table"):
                async with open_member_links(coordinator, Pretended().connect):
                    pass

    run(main)


def test_a_call_that_is_cancelled_anywhere_leaves_the_link_usable() -> None:
    async def body(world: World) -> None:
        for steps in range(8):
            with trio.move_on_after(0.004 * steps):
                await ask(world)
            await ask(world)
            world.network.open[ONE].ended.set()
            await trio.sleep(1)
            link = world.links._links[ONE]
            assert link.in_flight == 0

    in_world(body)


# --- over a network ------------------------------------------------------------------------------------


def over_network(
    body: Callable[[MemberLinks, SimulatedNetwork, MemberId], Awaitable[None]], latency_s: float = 0.0
) -> None:
    """Run a test with links to one member over a simulated network."""

    async def main() -> None:
        network = SimulatedNetwork(random.Random(3), latency_s=latency_s)
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(memory_coordinator())
            store = await stack.enter_async_context(simulated_store(cluster_id=LAKE))
            state = await recorded(coordinator)
            member = MemberId(store.superblock.store_id)
            server = Server(Service(store), network, token="secret")
            nursery = await stack.enter_async_context(trio.open_nursery())
            address = await nursery.start(server.listen_and_serve, "tcp://sim:1")
            for known in (member, TWO):
                await state.register(msgspec.structs.replace(record_of(known), addresses=("tcp://no:1", address)))

            def connect(record: MemberRecord) -> AbstractAsyncContextManager[MemberClient]:
                return connect_member(record, token="secret", network=network)

            async with open_member_links(coordinator, connect) as links:
                await body(links, network, member)
            await server.drain(5)
            nursery.cancel_scope.cancel()
            assert store.buffers.in_use == 0

    run(main)


def test_a_member_answers_over_a_network_at_the_first_address_that_works() -> None:
    async def body(links: MemberLinks, network: SimulatedNetwork, member: MemberId) -> None:
        assert isinstance((await links.call(member, OFFER)).message, m.ShardsOffered)
        network.cut_all()
        with pytest.raises(EngineUnreachable):
            await links.call(member, OFFER)
        await trio.sleep(0.5)
        await links.call(member, OFFER)

    over_network(body)


def test_another_engine_at_a_members_address_is_found_out() -> None:
    async def body(links: MemberLinks, _: SimulatedNetwork, member: MemberId) -> None:
        with pytest.raises(EngineUnreachable, match="another one"):
            await links.call(TWO, OFFER)
        await links.call(member, OFFER)

    over_network(body)


def test_a_call_that_is_cancelled_while_its_answer_arrives_ends_at_once() -> None:
    async def body(links: MemberLinks, _: SimulatedNetwork, member: MemberId) -> None:
        shard = Shard(chunk_at(1), 0, bytes(1 << 20))
        await links.call(member, store_request([shard], epoch=1), [shard.payload])
        request = m.ReadChunks([shard.chunk], [0], [0], [0])
        memory = memoryview(bytearray(b"x" * (1 << 20)))
        with trio.move_on_after(1.0) as scope:
            await links.call(member, request, into=[memory])
        assert scope.cancelled_caught
        assert trio.current_time() == scope.deadline, "it did not wait for the rest of the answer"
        assert 0 < bytes(memory).count(0) < len(memory), "a part had arrived"
        reply = await links.call(member, request)
        assert reply.body.joined() == shard.payload

    over_network(body, latency_s=0.2)


def test_a_network_that_swallows_bytes_makes_a_member_away_in_seconds() -> None:
    async def body(links: MemberLinks, network: SimulatedNetwork, member: MemberId) -> None:
        await links.call(member, OFFER)
        for stream in network.streams:
            stream._outgoing.held = _Swallows()
        began = trio.current_time()
        with pytest.raises(EngineUnreachable):
            await links.call(member, OFFER)
        assert MEMBER_SILENCE_S / 2 < trio.current_time() - began < 2 * MEMBER_SILENCE_S
        assert not links.is_up(member)

    over_network(body)


class _Swallows(bytearray):
    """Drops all that is put in."""

    def __iadd__(self, _: object) -> _Swallows:
        return self
