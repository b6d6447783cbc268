"""Requests to a coordinator are answered by names that have one, and refused by all other services of a lake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from engine.process.embedded import EmbeddedEngine
from engine.requests.table import OF_THE_COORDINATOR, NamesService
from lakefs.errors import UnsupportedVersion
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import LAKE
from tests.head_rig import lake_of
from tests.names_rig import names_store
from tests.store_rig import client_of, run, simulated_store

SENT: dict[type[m.Request], m.Request] = {
    m.CoordinatorRange: m.CoordinatorRange(b"lake"),
    m.CoordinatorTransact: m.CoordinatorTransact([], [m.KeyChange(b"lake", b"")]),
    m.CoordinatorWatch: m.CoordinatorWatch(b"a", b"b", 1, 1.0),
    m.CoordinatorLease: m.CoordinatorLease(60),
    m.CoordinatorKeepAlive: m.CoordinatorKeepAlive(1),
    m.CoordinatorRevoke: m.CoordinatorRevoke(1),
}


@asynccontextmanager
async def engine_alone() -> AsyncIterator[EngineClient]:
    async with simulated_store() as store:
        yield client_of(store)


@asynccontextmanager
async def member() -> AsyncIterator[EngineClient]:
    async with simulated_store(cluster_id=LAKE) as store:
        yield client_of(store)


@asynccontextmanager
async def head() -> AsyncIterator[EngineClient]:
    async with lake_of() as lake:
        client = lake.client()
        yield client
        await client.aclose()


@asynccontextmanager
async def names_without_one() -> AsyncIterator[EngineClient]:
    async with names_store() as store:
        yield EmbeddedEngine(NamesService(store), descriptors=False)


@pytest.mark.parametrize("opened", [engine_alone, member, head, names_without_one])
def test_only_names_that_have_a_coordinator_answer_requests_to_it(
    opened: Callable[[], AbstractAsyncContextManager[EngineClient]],
) -> None:
    async def main() -> None:
        async with opened() as client:
            for request in OF_THE_COORDINATOR:
                with pytest.raises(UnsupportedVersion, match=request.__name__):
                    await client.call(SENT[request])

    run(main)
