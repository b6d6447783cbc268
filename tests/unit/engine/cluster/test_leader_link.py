"""Processes find the replica of the names that leads, and lose their connections when another one does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from engine.coordinator.coordinator import Delete
from engine.coordinator.names_leader import NamesLeader, open_names_leader
from engine.coordinator.records import LEADER_KEY, LeaderRecord, encode
from engine.head.leader_link import address_of, leader_at, names_led_by
from engine.head.names_link import ConnectNames, NamesConnection
from lakefs.errors import EngineUnreachable
from lakefs.limits import NAMES_CONNECT_S
from tests.contract.coordinators import put
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator

ONE = LeaderRecord(b"1" * 16, "machine 1", ("unix:/run/names", "tcp://10.0.0.1:9100"))
TWO = LeaderRecord(b"2" * 16, "machine 2", ("tcp://10.0.0.2:9100",))


class FakeNames:
    """Names at any leader's address; those in `away` refuse connections, those in `silent` do not answer."""

    def __init__(self) -> None:
        self.away: set[bytes] = set()
        self.silent: set[bytes] = set()
        self.connected: list[bytes] = []
        self.lost = trio.Event()

    def connect_to(self, record: LeaderRecord) -> ConnectNames:
        @asynccontextmanager
        async def connect() -> AsyncIterator[NamesConnection]:
            await trio.sleep(0.01)
            if record.replica in self.away:
                raise EngineUnreachable("it does not listen yet")
            if record.replica in self.silent:
                await trio.sleep_forever()
            self.connected.append(record.replica)
            try:
                yield NamesConnection(cast(Any, None), cast(Any, None), self.lost.wait)
            finally:
                self.connected.remove(record.replica)

        return connect


def run(scenario: Callable[[MemoryCoordinator, NamesLeader, FakeNames], Awaitable[None]]) -> None:
    async def main() -> None:
        async with memory_coordinator() as coordinator, open_names_leader(coordinator) as leader:
            await scenario(coordinator, leader, FakeNames())

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def lead(coordinator: MemoryCoordinator, record: LeaderRecord) -> None:
    await put(coordinator, LEADER_KEY, encode(record))


def test_a_connection_ends_when_another_replica_leads_or_none_or_it_is_lost() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        async def another_leads() -> None:
            await lead(coordinator, TWO)

        async def it_leads_again() -> None:
            await lead(coordinator, ONE)

        async def none_leads() -> None:
            await coordinator.transact([], [Delete(LEADER_KEY)])

        async def it_breaks() -> None:
            names.lost.set()

        for happens in (another_leads, none_leads, it_leads_again, it_breaks):
            await lead(coordinator, ONE)
            await wait_all_tasks_blocked()
            async with names_led_by(leader, names.connect_to)() as connection, trio.open_nursery() as nursery:
                assert names.connected == [ONE.replica]
                nursery.start_soon(connection.wait_ended)
                await trio.sleep(100)
                assert nursery.child_tasks, "it lasts"
                await happens()
            assert names.connected == []

    run(scenario)


def test_a_client_waits_for_a_leader_and_until_it_listens_but_not_for_ever() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        failures: list[str] = []
        connect = names_led_by(leader, names.connect_to, lambda: "".join(failures))

        async def ends_unreachable(reason: str) -> None:
            began = trio.current_time()
            with pytest.raises(EngineUnreachable, match=reason):
                async with connect():
                    pass
            assert 0.9 * NAMES_CONNECT_S <= trio.current_time() - began <= NAMES_CONNECT_S + 0.1

        async def lead_later() -> None:
            await trio.sleep(2)
            await lead(coordinator, TWO)
            await trio.sleep(1)
            names.away.clear()

        assert leader.current() is None
        await ends_unreachable("no replica of the names leads$")
        failures.append("etcd is away")
        await ends_unreachable("no replica of the names leads; and who leads is not known: etcd is away")
        failures.clear()
        names.away = {TWO.replica}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead_later)
            async with connect():
                assert names.connected == [TWO.replica]
        names.away = {TWO.replica}
        await ends_unreachable("does not listen yet")

    run(scenario)


def test_a_connect_to_a_leader_that_is_cut_off_is_given_up_when_another_leads() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        async def lead_later() -> None:
            await trio.sleep(2)
            await lead(coordinator, TWO)

        await lead(coordinator, ONE)
        names.silent = {ONE.replica}
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead_later)
            async with names_led_by(leader, names.connect_to)():
                assert names.connected == [TWO.replica]
                assert trio.current_time() - began < 2.5
                await lead(coordinator, ONE)
                await trio.sleep(1)
                assert names.connected == [TWO.replica], "its holder ends a connection, not its making"
        names.silent = {TWO.replica}
        await lead(coordinator, TWO)
        with pytest.raises(EngineUnreachable, match="no replica of the names leads"):
            async with names_led_by(leader, names.connect_to)():
                pass

    run(scenario)


def test_each_leader_that_is_deposed_is_said_once() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        deposed: list[bytes] = []
        leader.was_deposed = lambda found: deposed.append(found.record.replica)
        await lead(coordinator, ONE)
        await wait_all_tasks_blocked()
        assert deposed == []
        await lead(coordinator, TWO)
        await wait_all_tasks_blocked()
        await coordinator.transact([], [Delete(LEADER_KEY)])
        await wait_all_tasks_blocked()
        await lead(coordinator, ONE)
        await wait_all_tasks_blocked()
        assert deposed == [ONE.replica, TWO.replica]

    run(scenario)


def test_the_leader_s_own_machine_uses_its_socket_and_others_its_port() -> None:
    assert address_of(ONE, "machine 1") == "unix:/run/names"
    assert address_of(ONE, "machine 2") == "tcp://10.0.0.1:9100"
    assert address_of(TWO, "machine 2") == "tcp://10.0.0.2:9100"
    alone = LeaderRecord(b"1" * 16, "machine 1", ("unix:/run/names",))
    with pytest.raises(EngineUnreachable, match="no other machine"):
        leader_at("machine 2")(alone)


def test_while_the_coordinator_is_away_the_leader_stays_and_what_changed_is_seen_behind_it() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        await lead(coordinator, ONE)
        found = await leader.wait()
        coordinator.close()
        await trio.sleep(60)
        assert leader.current() == found
        coordinator.closed = False
        await lead(coordinator, TWO)
        with trio.fail_after(10):
            await leader.wait_deposed(found)
            assert (await leader.wait()).record == TWO

    run(scenario)


def test_a_record_of_a_later_release_is_no_leader() -> None:
    async def scenario(coordinator: MemoryCoordinator, leader: NamesLeader, names: FakeNames) -> None:
        await lead(coordinator, ONE)
        await leader.wait()
        await put(coordinator, LEADER_KEY, b"\x92\x63\x90")
        await wait_all_tasks_blocked()
        assert leader.current() is None
        await lead(coordinator, TWO)
        assert (await leader.wait()).record == TWO

    run(scenario)
