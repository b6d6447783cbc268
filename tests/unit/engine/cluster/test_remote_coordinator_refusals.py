"""A coordinator that is asked over a network: others at its address, odd requests, and bounds."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio

from engine.coordinator.coordinator import IsAbsent, Put
from engine.host.user_shares import user_of
from engine.requests.table import NamesService, Service
from engine.server.listener import Server
from lakefs.client.trio.engine import connect_engine
from lakefs.errors import (
    EngineBusy,
    EngineUnreachable,
    InvalidArgument,
    PermissionDenied,
    PreconditionFailed,
    UnsupportedVersion,
)
from lakefs.ids import Revision
from lakefs.limits import COORDINATOR_PAGE_MAX, WATCHES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from tests.contract.coordinators import keys_of, put
from tests.names_rig import names_store
from tests.store_rig import simulated_store
from tests.unit.engine.cluster.remote_rig import (
    ADDRESS,
    FIRST_REVISION,
    TOKEN,
    FrozenNetwork,
    RemoteNames,
    names_and_remote,
    remote_of,
)
from tests.unit.support.metadata_rig import run

# --- others at the address -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "lake", "error", "says"),
    [("another token", None, PermissionDenied, "token"), (TOKEN, bytes(16), PreconditionFailed, "those of lake")],
)
def test_a_wrong_token_and_another_lake_are_said_at_the_start_and_calls_cannot_reach_the_coordinator(
    token: str, lake: bytes | None, error: type[Exception], says: str
) -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, _), remote_of(names.network, token=token, lake=lake) as remote:
            with pytest.raises(error, match=says):
                await remote.connect()
            with pytest.raises(EngineUnreachable, match=says):
                await remote.transact([IsAbsent(b"a")], [Put(b"a", b"")])
            async with remote.watch(b"a", b"b", Revision(1)) as watch:
                with pytest.raises(EngineUnreachable, match=says):
                    await anext(watch)
            assert b"a" not in await keys_of(names.inner)

    run(scenario)


def test_an_engine_at_the_address_is_said_to_be_none_of_the_names() -> None:
    async def scenario() -> None:
        network = FrozenNetwork()
        async with simulated_store() as store, trio.open_nursery() as nursery:
            await nursery.start(Server(Service(store), network, token=TOKEN).listen_and_serve, ADDRESS)
            for lake in (None, bytes(16)):
                async with remote_of(network, lake=lake) as remote:
                    with pytest.raises(UnsupportedVersion, match="does not offer CoordinatorRange"):
                        await remote.connect()
                    with pytest.raises(EngineUnreachable):
                        await remote.get(b"a")
            nursery.cancel_scope.cancel()

    run(scenario)


def test_it_connects_when_it_is_first_used_and_the_names_may_come_later() -> None:
    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            network = FrozenNetwork()
            async with remote_of(network) as remote:
                for call in (remote.connect, partial(remote.get, b"a")):
                    with pytest.raises(EngineUnreachable, match="no engine answers"):
                        await call()
                names = RemoteNames(nursery, network)
                await names.start()
                await trio.sleep(3)
                await remote.connect()
                assert (await remote.get(b"a")).entry is None
                await names.stop()
                names.token = "another one"
                await names.start()
                await trio.sleep(3)
                with pytest.raises(PermissionDenied):
                    await remote.connect()
                with pytest.raises(EngineUnreachable):
                    await remote.get(b"a")
            await names.stop()

    run(scenario)


def test_after_its_block_calls_end_and_nothing_connects_again() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, _):
            async with remote_of(names.network) as remote:
                await remote.get(b"a")
            streams = len(names.network.streams)
            with pytest.raises(EngineUnreachable, match="was closed"):
                await remote.get(b"a")
            assert len(names.network.streams) == streams

    run(scenario)


# --- bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_the_lake", "places"), [(False, 2), (True, 6)])
def test_processes_of_the_lake_have_three_quarters_of_the_places_at_its_names_and_other_clients_over_tcp_a_quarter(
    of_the_lake: bool, places: int
) -> None:
    async def scenario() -> None:
        network = FrozenNetwork()
        async with names_store() as store, trio.open_nursery() as nursery, AsyncExitStack() as stack:
            server = Server(NamesService(store), network, token=TOKEN, connections_max=8, of_the_lake=of_the_lake)
            await nursery.start(server.listen_and_serve, ADDRESS)
            for _ in range(places):
                await stack.enter_async_context(connect_engine(ADDRESS, token=TOKEN, network=network))
            with pytest.raises(EngineBusy):
                await stack.enter_async_context(connect_engine(ADDRESS, token=TOKEN, network=network))
            with pytest.raises(PermissionDenied):
                await stack.enter_async_context(connect_engine(ADDRESS, token="another", network=network))
            users = {client.user for client in store.references._clients.values()}
            assert users == {user_of(os.geteuid() if of_the_lake else None)}
            await stack.aclose()
            nursery.cancel_scope.cancel()

    run(scenario)


def test_a_process_has_a_bounded_number_of_watches_and_a_connection_of_requests_that_wait() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            async with AsyncExitStack() as stack:
                for _ in range(WATCHES_PER_CONNECTION_MAX):
                    await stack.enter_async_context(remote.watch(b"a", b"b", Revision(1)))
                with pytest.raises(EngineBusy, match="16 watches"):
                    await stack.enter_async_context(remote.watch(b"a", b"b", Revision(1)))
            async with remote.watch(b"a", b"b", Revision(1)):
                pass
            engine = connect_engine(ADDRESS, token=TOKEN, network=names.network)
            async with engine as client, trio.open_nursery() as nursery:
                wait = m.CoordinatorWatch(b"a", b"b", 1, 30.0)
                for _ in range(WATCHES_PER_CONNECTION_MAX):
                    nursery.start_soon(client.call, wait)
                await trio.sleep(1)
                with pytest.raises(EngineBusy, match="16 requests of this connection"):
                    await client.call(wait)
                assert (await remote.get(b"a")).entry is None, "others are served"
                nursery.cancel_scope.cancel()

    run(scenario)


def test_senseless_requests_are_refused_before_anything_is_done_and_the_connection_goes_on() -> None:
    refused: list[m.Request] = [
        m.CoordinatorRange(b"a", b"b", COORDINATOR_PAGE_MAX + 1),
        m.CoordinatorRange(b"a", b"b", 0),
        m.CoordinatorRange(b""),
        m.CoordinatorRange(b"a", after=b"a"),
        m.CoordinatorRange(b"b", b"a"),
        m.CoordinatorTransact([m.KeyComparison(b"a", 1, b"")], [m.KeyChange(b"a", b"")]),
        m.CoordinatorTransact([m.KeyComparison(b"a", -1)], [m.KeyChange(b"a", b"")]),
        m.CoordinatorTransact([], [m.KeyChange(b"a", b""), m.KeyChange(b"b", None, 1)]),
        m.CoordinatorTransact([], [m.KeyChange(b"a", b"", -1)]),
        m.CoordinatorTransact([], [m.KeyChange(b"a", b""), m.KeyChange(b"a")]),
        m.CoordinatorWatch(b"a", b"a", 1, 1.0),
        m.CoordinatorWatch(b"a", b"b", -1, 1.0),
        m.CoordinatorWatch(b"a", b"b", 1, -1.0),
        m.CoordinatorWatch(b"a", b"b", 1, 61.0),
        m.CoordinatorWatch(b"a", b"b", 1, float("nan")),
        m.CoordinatorLease(1),
        m.CoordinatorKeepAlive(-1),
        m.CoordinatorRevoke(1 << 63),
    ]

    async def scenario() -> None:
        async with names_and_remote() as (names, _):
            async with connect_engine(ADDRESS, token=TOKEN, network=names.network) as client:
                for request in refused:
                    with pytest.raises(InvalidArgument):
                        await client.call(request)
                last = (await client.call(m.CoordinatorRange(b"a"))).message
            assert last == m.CoordinatorPage([], FIRST_REVISION - 1)

    run(scenario)


def test_a_request_of_a_watch_that_waited_in_vain_says_where_the_next_goes_on() -> None:
    async def scenario() -> None:
        async with names_and_remote() as (names, remote):
            async with connect_engine(ADDRESS, token=TOKEN, network=names.network) as client:
                for _ in range(3):
                    await put(remote, b"x")
                began = trio.current_time()
                waited = (await client.call(m.CoordinatorWatch(b"a", b"b", 1, 20.0))).message
                assert waited == m.CoordinatorChanges(FIRST_REVISION + 3)
                assert 20 <= trio.current_time() - began < 21
                await put(remote, b"a", b"1")
                found = (await client.call(m.CoordinatorWatch(b"a", b"b", FIRST_REVISION + 3, 20.0))).message
                assert found == m.CoordinatorChanges(FIRST_REVISION + 4, FIRST_REVISION + 3, [m.KeyChange(b"a", b"1")])

    run(scenario)
