"""A coordinator on a simulated etcd when one thing happens: to a node, a way, a lease, a watch, its room."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
import trio

from engine.coordinator.coordinator import Changes, Coordinator, Delete, IsAbsent, Put, ReadAnew, Watch
from engine.etcd import etcd_messages as e
from engine.etcd.etcd_bounds import ETCD_CALL_S, ETCD_REFUSED_S, ETCD_SESSION_S, ETCD_TRY_S
from engine.etcd.etcd_coordinator import EtcdCoordinator
from engine.etcd.etcd_link import KEEP_ALIVE, RANGE
from engine.etcd.etcd_status import Status
from lakefs.errors import EngineUnreachable, StoreFull
from lakefs.ids import LeaseId, Revision
from lakefs.limits import ETCD_IN_FLIGHT
from tests.contract.coordinators import as_values, entry_of, next_changes, put
from tests.sim.cluster.etcd_nodes import HOSTS, PROGRESS_S, RESET, EtcdNodes
from tests.sim.cluster.far_etcd import far_etcd
from tests.sim.cluster.network import Way
from tests.sim.cluster.process import SimProcess
from tests.sim.etcd_world import World, noticed, play
from tests.sim.world.sim_time import pause


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_late_try_of_a_transaction_is_done_only_if_it_may_be_repeated(is_repeatable: bool) -> None:
    """A log's part is appended, answered and removed; then the first try of the append arrives."""

    async def scenario(world: World) -> None:
        async with world.process("one") as coordinator, world.process("two") as other:
            await put(coordinator, b"other")
            begun, node = trio.current_time(), coordinator._link.endpoint.address
            world.network.set_way("one", node, Way.SILENT)
            append = [IsAbsent(b"part")], [Put(b"part", b"")]
            assert (await coordinator.transact(*append, is_repeatable=is_repeatable)).succeeded
            assert trio.current_time() > begun + ETCD_TRY_S
            await other.transact([], [Delete(b"part")])
            world.network.heal()
            await pause(1.0)
            assert ((await other.get(b"part")).entry is not None) == is_repeatable

    play(scenario)


async def _stopped_leader(world: World) -> None:
    """The leader stands still, another is elected, and a lease ends; then the old one goes on, and is asked."""
    nodes, old = world.nodes, world.nodes.leader
    assert old is not None
    world.separate("holder")
    for way in (("holder", old), (old, "holder")):
        world.network.set_way(*way, Way.GOOD)
    async with world.process("holder") as holder, world.process("beside") as beside:
        lease = await holder.lease(2)
        await put(beside, b"mine", b"", lease)
        assert await holder.keep_alive(lease)
        nodes.stop(old)
        while (await beside.get(b"mine")).entry is not None:
            await pause(0.2)
        assert nodes.state.term > 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_resumed_soon, nodes, old)
            with suppress(EngineUnreachable):
                assert not await holder.keep_alive(lease), "others have seen the end of the lease"


async def _resumed_soon(nodes: EtcdNodes, host: str) -> None:
    await pause(0.3)
    nodes.resume(host)


def test_a_leader_that_stood_still_keeps_no_lease_alive() -> None:
    for seed in range(5):
        play(_stopped_leader, seed)


async def _believing(self: EtcdCoordinator, lease: LeaseId) -> bool:
    return bool((await self._ask(KEEP_ALIVE, e.KeepAliveRequest(id=lease))).ttl > 0)


def test_a_client_that_believes_such_a_leader_is_noticed() -> None:
    with mock.patch.object(EtcdCoordinator, "keep_alive", _believing):
        noticed([partial(play, _stopped_leader, seed) for seed in range(5)], "others have seen the end of the lease")


def test_a_host_that_is_cut_off_gives_up_and_others_go_on() -> None:
    async def refused_s(coordinator: Coordinator) -> float:
        begun = trio.current_time()
        with pytest.raises(EngineUnreachable):
            await coordinator.transact([], [Put(b"a", b"never")])
        return trio.current_time() - begun

    async def scenario(world: World) -> None:
        async with world.process("one") as one, world.process("two") as two:
            await put(one, b"a")
            world.separate("one")
            assert ETCD_REFUSED_S <= await refused_s(one) < ETCD_REFUSED_S + 0.5
            world.separate("one", way=Way.SILENT)
            assert ETCD_CALL_S <= await refused_s(one) < ETCD_CALL_S + 0.5
            await put(two, b"a", b"two")
            world.network.heal()
            assert (await entry_of(one, b"a")).value != b"v"

    play(scenario)


def test_nodes_that_are_fewer_than_half_do_nothing_and_the_others_elect_a_leader() -> None:
    async def scenario(world: World) -> None:
        nodes, old = world.nodes, world.nodes.leader
        assert old is not None
        async with world.process("one") as one, world.process(old) as beside_old:
            await put(one, b"a")
            world.separate(old, way=Way.SILENT)
            begun = trio.current_time()
            await put(one, b"a", b"new")
            assert trio.current_time() < begun + 5
            assert nodes.leader != old
            with pytest.raises(EngineUnreachable):
                await beside_old.get(b"a")
            for other in HOSTS:
                nodes.kill(other)
            with pytest.raises(EngineUnreachable):
                await one.get(b"a")
            for other in HOSTS:
                nodes.start(other)
            world.network.heal()
            await pause(3.0)
            assert (await entry_of(beside_old, b"a")).value == b"new"

    play(scenario)


async def _next(watch: Watch) -> Changes | ReadAnew:
    """Return the next event, however often nobody can be asked before it."""
    while True:
        with suppress(EngineUnreachable):
            return await anext(watch)


def test_a_watch_that_was_silent_misses_nothing_and_one_that_was_away_during_a_compaction_says_so() -> None:
    async def scenario(world: World) -> None:
        async with world.process("one") as one, world.process("two") as two:
            first = await put(one, b"a", b"0")
            async with two.watch(b"a", b"b", first) as watch:
                assert (await next_changes(watch)).revision == first
                for silence_s in (5.0, 20.0):  # the stream goes on; it is begun again
                    world.separate("two", way=Way.SILENT)
                    for number in range(3):
                        await put(one, b"a", b"%d" % number)
                    await pause(silence_s)
                    world.network.heal()
                    seen = [await _next(watch) for _ in range(3)]
                    assert [isinstance(event, Changes) and as_values(event)[b"a"] for event in seen] == [
                        b"0",
                        b"1",
                        b"2",
                    ]
                world.separate("two", way=Way.CUT)
                await pause(1.0)
                for number in range(3):
                    last = await put(one, b"a", b"%d" % number)
                await one.compact(last)
                world.network.heal()
                assert await _next(watch) == ReadAnew()

    play(scenario)


@pytest.mark.parametrize("which", ["leader", "other"])
def test_a_watch_at_a_node_that_stands_still_goes_on_at_another_though_nothing_else_is_asked(which: str) -> None:
    async def scenario(world: World) -> None:
        nodes = world.nodes
        async with world.process("one") as one, world.process("two") as two:
            async with two.watch(b"a", b"b", Revision(2)) as watch:
                await put(one, b"a")
                await next_changes(watch)
                [stream] = nodes.streams
                if (stream.host == nodes.leader) != (which == "leader"):
                    return
                await pause(20.0)
                nodes.stop(stream.host)
                begun = trio.current_time()
                await put(one, b"a", b"new")
                assert as_values(await next_changes(watch)) == {b"a": b"new"}
                assert trio.current_time() < begun + 5.0, "an election, a look and a try"
                world.figures["stopped"] += 1

    assert sum(play(scenario, seed).figures["stopped"] for seed in range(10)) > 1


def test_what_was_lost_with_a_leader_is_sent_again_as_soon_as_another_leads() -> None:
    """A node that follows has sent it on to the leader that stands still, or it was sent there itself."""

    async def scenario(world: World) -> None:
        nodes, old = world.nodes, world.nodes.leader
        assert old is not None

        async def ask(coordinator: Coordinator, key: bytes, *, is_repeatable: bool) -> None:
            done = await coordinator.transact([IsAbsent(key)], [Put(key, b"")], is_repeatable=is_repeatable)
            assert done.succeeded or (is_repeatable and done.seen[0] is not None), "it is done once"
            assert trio.current_time() < world.elected_at + 0.8, "a look, and a try at a node that is well"

        async with world.process("one") as one, world.process("two") as two:
            for coordinator in (one, two):
                await put(coordinator, b"first")
            nodes.stop(old)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.note_election, old)
                nursery.start_soon(partial(ask, one, b"marked", is_repeatable=False))
                nursery.start_soon(partial(ask, two, b"unmarked", is_repeatable=True))

    for seed in range(20):
        play(scenario, seed)


def test_an_etcd_that_is_full_refuses_what_grows_until_room_was_made() -> None:
    async def scenario(world: World) -> None:
        async with world.process("one") as one:
            lease = await one.lease(600)
            with pytest.raises(StoreFull):
                for number in range(100):
                    await put(one, b"%d" % number, bytes(1000))
            assert (await one.transact([], [Delete(b"0")])).succeeded
            assert await one.keep_alive(lease)
            with pytest.raises(StoreFull):
                await put(one, b"0", b"small")
            for number in range(50):
                await one.transact([], [Delete(b"%d" % number)], is_repeatable=True)
            await one.compact((await one.get(b"0")).revision)
            assert world.nodes.state.size_bytes < 2000
            with pytest.raises(StoreFull):
                await put(one, b"0", b"small")
            world.nodes.kill(HOSTS[0])
            await one.make_room()
            await put(one, b"0", b"small")
            for host in HOSTS:
                world.nodes.kill(host)
            with pytest.raises(EngineUnreachable):
                await one.make_room()

    play(scenario, quota_bytes=20_000)


def test_a_process_has_a_bounded_number_of_transactions_under_way() -> None:
    async def scenario(world: World) -> None:
        for host in HOSTS:
            world.nodes.stop(host)
        async with world.process("one") as one, trio.open_nursery() as nursery:
            for number in range(2 * ETCD_IN_FLIGHT):
                ask = partial(one.transact, [], [Put(b"%d" % number, b"")], is_repeatable=True)
                nursery.start_soon(ask)
            await pause(0.25)
            assert len(one._link._calls) == ETCD_IN_FLIGHT
            nursery.cancel_scope.cancel()

    play(scenario)


def test_a_quiet_watch_comes_along_and_needs_not_read_anew_behind_a_compaction() -> None:
    async def scenario(world: World) -> None:
        async with (
            world.process("one") as one,
            one.watch(b"a", b"b", Revision(2)) as watch,
            trio.open_nursery() as nursery,
        ):
            seen: list[object] = []

            async def follow() -> None:
                seen.append(await _next(watch))

            nursery.start_soon(follow)
            last = await put(one, b"x")
            await pause(2 * PROGRESS_S)
            assert watch.resumes_at == last + 1
            await one.compact(last)
            for stream in list(world.nodes.streams):
                stream.break_off(RESET)
            await pause(5.0)
            assert await put(one, b"a") == last + 1
            await pause(1.0)
            assert [isinstance(event, Changes) for event in seen] == [True]

    play(scenario)


def test_a_process_that_dies_sends_nothing_more() -> None:
    async def scenario(world: World) -> None:
        process = SimProcess("names", "one")
        opened = trio.Event()

        async def body() -> None:
            async with far_etcd(world.nodes, "one", process=process) as coordinator:
                await put(coordinator, b"a")
                opened.set()
                await trio.sleep_forever()

        def markers() -> int:
            sent = e.RangeRequest(key=b"/lake/lake/sent/", range_end=b"/lake/lake/sent0")
            answer = world.nodes.state.answer(RANGE, sent)
            assert not isinstance(answer, Status)
            return len(answer.kvs)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.run, body)
            await opened.wait()
            process.kill()
            await process.ended.wait()
            await pause(10.0)
            assert markers(), "nobody has ended its session"
            await pause(ETCD_SESSION_S)
            assert not markers()

    play(scenario)
