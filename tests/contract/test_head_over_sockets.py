"""Heads and names in processes of their own, as sockets connect them: names restart, clients and heads go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from engine.head.head import open_head
from engine.head.names_link import names_at
from engine.host.clock import SystemClock
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.server.listener import Server
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import BucketNotFound, EngineUnreachable
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import GcGeneration
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient, EngineService
from tests.memory_stripes import KnownState, MemoryStripes
from tests.names_rig import names_store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, good, put, read, session_of, store_chunks


@asynccontextmanager
async def served(service: EngineService, address: str) -> AsyncIterator[None]:
    """Serve until the block ends; the connections are then cut."""
    server = Server(service, TrioNetwork(), token="t")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.listen_and_serve, address)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def names_served(disk: SimDisk, address: str) -> AsyncIterator[NamesService]:
    async with names_store(disk) as store:
        service = NamesService(store, gate=BindGate(GcGeneration(1)))
        async with served(service, address):
            yield service


class RestartedNames:
    """Names on a disk, started and stopped by a test."""

    def __init__(self, nursery: trio.Nursery, address: str) -> None:
        self._nursery = nursery
        self._address = address
        self._disk = SimDisk()

    async def start(self) -> None:
        """Start; returns when they listen."""
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        await self._nursery.start(self._serve)

    async def stop(self) -> None:
        """End all connections and stop."""
        self._scope.cancel()
        await self._ended.wait()

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self._scope:
            async with names_served(self._disk, self._address):
                task_status.started()
                await trio.sleep_forever()
        self._ended.set()


@asynccontextmanager
async def head_served(names: str, address: str) -> AsyncIterator[None]:
    async with (
        open_head(
            names_at(names),
            MemoryStripes(),
            KnownState(),
            offload=InlineOffload(),
            clock=SystemClock(),
            buffers=BufferPool(64 << 20),
        ) as head,
        served(head, address),
    ):
        yield


async def store_one(client: EngineClient) -> bytes:
    (chunk,) = await store_chunks(client, await session_of(client), [b"stored"])
    return chunk


def test_names_that_restart_end_what_clients_had_and_the_clients_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/head"
        async with trio.open_nursery() as nursery, head_served(f"unix:{tmp_path}/names", address):
            names = RestartedNames(nursery, f"unix:{tmp_path}/names")
            await names.start()
            async with connect_reconnecting(address) as client, connect_reconnecting(address) as writer:
                boot_id = client.hello.boot_id
                await put(client, "k", b"content")
                chunk = await store_one(writer)
                async with client.watch("bkt") as events:
                    await put(writer, "other", b"1")
                    assert (await anext(events)).key == "other"
                    await names.stop()
                    with pytest.raises(EngineUnreachable):
                        await anext(events)
                await names.start()
                (stat,) = good(await ask(client, m.StatNames([("bkt", "k")]), m.NameResults))
                assert client.epoch == 2, "the head has ended the connection with that to the names"
                assert client.hello.boot_id != boot_id
                assert await read(client, stat.blob) == b"content"
                assert await read(writer, chunk) == b"stored"
            await names.stop()

    trio.run(main)


def test_a_put_that_is_in_progress_goes_on_when_names_have_restarted(tmp_path: Path) -> None:
    """Its session is the head's, and lingers as one does whose connection was lost."""

    async def main() -> None:
        address = f"unix:{tmp_path}/head"
        async with trio.open_nursery() as nursery, head_served(f"unix:{tmp_path}/names", address):
            names = RestartedNames(nursery, f"unix:{tmp_path}/names")
            await names.start()
            async with connect_reconnecting(address) as client:
                session = await session_of(client)
                (chunk,) = await store_chunks(client, session, [b"stored"])
                await names.stop()
                await names.start()
                change = m.NameChange("bkt", "k", chunk, m.ObjectAttributes(), create_bucket=True)
                assert good(await ask(client, m.Commit(session, [change]), m.NameResults))[0].size_bytes == 6
            await names.stop()

    trio.run(main)


def test_a_head_without_names_takes_no_clients_and_does_once_they_are_there(tmp_path: Path) -> None:
    async def main() -> None:
        names, address = f"unix:{tmp_path}/names", f"unix:{tmp_path}/head"
        async with head_served(names, address):
            with pytest.raises(EngineUnreachable, match="names of this lake"):
                async with connect_reconnecting(address):
                    pass
            async with names_served(SimDisk(), names), connect_reconnecting(address) as client:
                await put(client, "k", b"1")
                with pytest.raises(BucketNotFound):
                    async with client.watch("none"):
                        pass

    trio.run(main)


def test_a_client_that_leaves_takes_along_its_connection_to_the_names(tmp_path: Path) -> None:
    async def main() -> None:
        names, address = f"unix:{tmp_path}/names", f"unix:{tmp_path}/head"
        async with names_served(SimDisk(), names) as service, head_served(names, address):
            statistics = service._names.references.statistics
            async with connect_reconnecting(address) as client:
                await put(client, "k", bytes(100_000))
                await ask(client, m.OpenObjects([("bkt", "k")]), m.OpenResults)
                assert (statistics()["connections"], statistics()["leases"]) == (2, 1)  # one is the head's own
            with trio.fail_after(10):
                while True:
                    if (statistics()["connections"], statistics()["leases"]) == (1, 0):
                        return
                    await trio.sleep(0.001)

    trio.run(main)


def test_a_client_in_the_heads_process_needs_no_hello(tmp_path: Path) -> None:
    async def main() -> None:
        names = f"unix:{tmp_path}/names"
        async with (
            names_served(SimDisk(), names),
            open_head(
                names_at(names),
                MemoryStripes(),
                KnownState(),
                offload=InlineOffload(),
                clock=SystemClock(),
                buffers=BufferPool(64 << 20),
            ) as head,
        ):
            client = EmbeddedEngine(head, descriptors=False)
            await put(client, "k", b"1")
            await client.aclose()

    trio.run(main)
