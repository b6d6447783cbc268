"""A head that reaches names, coordinator and members over TCP: what it does when the names are cut, gone or silent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from engine.coordinator import remote_link
from engine.head import names_link
from lakefs.client.trio.reconnecting import ReconnectingEngine, connect_reconnecting
from lakefs.errors import EngineUnreachable
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.tcp_lake import TOKEN, TcpLake, tcp_lake
from tests.store_rig import ask, good, put, read

CONNECT_S = 0.5
"""Time to connect to names in these tests, which wait for real."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (names_link, remote_link):
        monkeypatch.setattr(module, "NAMES_CONNECT_S", CONNECT_S)
    monkeypatch.setattr(remote_link, "NAMES_PAUSE_S_MAX", 0.1)


@asynccontextmanager
async def client_of(lake: TcpLake, patience_s: float = 5.0) -> AsyncIterator[ReconnectingEngine]:
    async with connect_reconnecting(lake.head, token=TOKEN, patience_s=patience_s) as client:
        yield client


async def content_of(client: EngineClient, key: str) -> bytes:
    (stat,) = good(await ask(client, m.StatNames([("bkt", key)]), m.NameResults))
    return await read(client, stat.blob)


async def listed(client: EngineClient) -> list[str]:
    return [entry.key for entry in (await ask(client, m.ListNames("bkt"), m.Listed)).entries]


async def lake_uses(client: EngineClient, name: str) -> None:
    """Put, get, list; and the same with a key of a space."""
    await put(client, name, name.encode() * 30_000)
    assert await content_of(client, name) == name.encode() * 30_000
    assert name in await listed(client)
    space = (await ask(client, m.SpaceOpen("space"), m.SpaceStat)).number
    stored = await ask(client, m.KeyedPut(space, [name.encode()], [1], [4]), m.KeyedOutcomes, b"kept")
    assert not any(stored.failures)
    (chunk,) = (await ask(client, m.KeyedMatch(space, [name.encode()], lease=False), m.KeyedMatched)).chunks
    assert await read(client, chunk) == b"kept"


def test_names_objects_and_keys_of_a_lake_on_other_machines() -> None:
    async def main() -> None:
        async with tcp_lake() as lake, client_of(lake) as client:
            await lake_uses(client, "one")
            async with client_of(lake) as other:
                assert await content_of(other, "one") == b"one" * 30_000

    trio.run(main)


def test_a_connection_to_the_names_that_is_cut_ends_those_of_clients_who_connect_again_and_go_on() -> None:
    async def main() -> None:
        async with tcp_lake() as lake, client_of(lake) as client, client_of(lake) as watcher:
            await lake_uses(client, "one")
            async with watcher.watch("bkt") as events:
                lake.wire.cut()
                with trio.fail_after(5), pytest.raises(EngineUnreachable):
                    while True:
                        await anext(events)
            assert await content_of(client, "one") == b"one" * 30_000
            assert client.epoch == 2
            await lake_uses(client, "two")

    trio.run(main)


def test_while_names_are_away_clients_are_refused_with_the_reason_and_a_head_goes_on_when_they_return() -> None:
    async def main() -> None:
        async with tcp_lake() as lake, client_of(lake, patience_s=0.2) as client:
            await lake_uses(client, "one")
            await lake.names.stop()
            with trio.fail_after(3), pytest.raises(EngineUnreachable, match="names of this lake cannot be reached"):
                await content_of(client, "one")
            with trio.fail_after(3), pytest.raises(EngineUnreachable):
                await put(client, "two", b"2")
            await lake.names.start()
            await lake_uses(client, "three")
            async with client_of(lake) as other:
                assert await listed(other) == ["one", "three"]

    trio.run(main)


def test_names_that_are_silent_without_closing_are_given_up_in_bounded_time_and_found_again() -> None:
    async def main() -> None:
        async with tcp_lake() as lake, client_of(lake, patience_s=0.2) as client, client_of(lake) as idle:
            await lake_uses(client, "one")
            lake.wire.silence()
            began = trio.current_time()
            with trio.fail_after(6), pytest.raises(EngineUnreachable, match="names of this lake cannot be reached"):
                await content_of(client, "one")
            assert trio.current_time() - began < 4, "silence, and two connects"
            began = trio.current_time()
            with trio.fail_after(6), pytest.raises(EngineUnreachable, match="nothing answers at tcp"):
                async with client_of(lake):
                    pass
            assert trio.current_time() - began < 2
            lake.wire.restore()
            assert await content_of(idle, "one") == b"one" * 30_000
            await lake_uses(client, "two")

    trio.run(main)
