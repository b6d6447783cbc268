"""RDMA when things meet: cancellations, reconnections, connections that are lost on one side, clients that hold on."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import trio

from engine.fabric import bounce_memory
from lakefs.client.blocking import engine as blocking_engine
from lakefs.client.blocking.lake import Lake
from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.get import load as loading_steps
from lakefs.get.pools import Pool
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import BOUNCE_BYTES, CHUNK_BYTES, CLIENT_LANDINGS, MIB
from lakefs.transport.fabric import Fabric, Remote
from lakefs.wire import messages as m
from tests.fabric_liar import Liar, liar
from tests.fabric_rig import FabricWorld, RiggedLake, Run, posted
from tests.simulated_fabric import SimulatedFabric, SimulatedLink, Weather

SLOW_S = 0.05


def slowly(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Have a method of the simulation take its time, as an adapter does."""
    method = getattr(owner, name)

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return method(*args)

    monkeypatch.setattr(owner, name, slow)


async def within(scope: trio.CancelScope, call: Callable[..., Awaitable[object]], *args: Any) -> None:
    with scope:
        await call(*args)


class Own:
    """The fabric that a client opens."""

    def __init__(self, world: FabricWorld) -> None:
        self.fabric = world.wire.fabric()
        self.opened = 0

    def open(self, name: str) -> Fabric:
        self.opened += 1
        return self.fabric


def test_operations_that_meet_a_new_connection_at_once_make_one_queue_pair(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(2 * MIB) for _ in range(6)]
        own = Own(world)
        async with world.lake("trio", open_fabric=own.open) as lake:
            for number, content in enumerate(contents):
                await lake.put(f"bkt/{number}", content)
            slowly(monkeypatch, SimulatedLink, "close")
            for connection in list(world.server._connections):
                connection.close()
            await lake.call("stat", "bkt/0")  # over the new connection
            made = world.fabric.statistics()["queue_pairs_made"]
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(lake.put, f"bkt/{number}", os.urandom(2 * MIB))
            await lake.put("bkt/last", os.urandom(2 * MIB))
            assert world.fabric.statistics()["queue_pairs_made"] == made + 1
            assert len(own.fabric.links) == 1
            assert not lake.rdma.reason

    run(body)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(SimulatedFabric, "open_link"), (SimulatedFabric, "register"), (SimulatedLink, "connect"), (Own, "open")],
)
def test_operations_cancelled_at_each_moment_of_connecting_leave_nothing_behind(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        own = Own(world)
        async with world.lake("trio", open_fabric=own.open) as lake:
            async with world.lake("trio", open_fabric=lambda name: "none") as other:
                await other.put("bkt/first", content)
            with monkeypatch.context() as patch:
                slowly(patch, owner, name)
                for turn in range(4):
                    async with lake.lake.pool(size_bytes=2 * MIB) as pool:  # type: ignore[union-attr]
                        async with trio.open_nursery() as nursery:
                            for part in range(3):  # the others begin while a thread still does what was cancelled
                                scope = trio.CancelScope()
                                nursery.start_soon(within, scope, lake.put, f"bkt/{turn}-{part}", content)
                                await trio.sleep(SLOW_S / 4 + turn * SLOW_S / 8)
                                scope.cancel()
                        with trio.move_on_after(SLOW_S / 2):
                            await lake.call("load_many", [data_chunk_id(content)], pool, [0])
                    for connection in list(world.server._connections):
                        connection.close()
                    with suppress(LakeError):
                        await lake.call("stat", "bkt/0")
            await lake.put("bkt/last", content)
            assert own.opened == 1
            assert len(own.fabric.links) <= 1
            assert own.fabric.registered_bytes <= 8 * MIB, "more than the memory that puts are READ from"

    run(body)


def test_puts_that_are_cancelled_are_no_failures_of_the_queue_pair(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake("trio") as lake:
            await lake.put("bkt/first", os.urandom(2 * MIB))
            for number in range(4):
                world.wire.hold()
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lake.put, f"bkt/{number}", os.urandom(2 * MIB))
                        await posted(world)
                        scope.cancel()
                world.wire.release()
                before = lake.rdma.bytes
                await lake.put("bkt/next", content := os.urandom(2 * MIB))
                assert lake.rdma.bytes == before + 2 * MIB, lake.rdma.reason
                assert await lake.get("bkt/next") == content
            assert not lake.rdma.reason

    run(body)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_operations_cancelled_and_connections_lost_at_random_move_the_right_bytes_and_leave_nothing(
    seed: int, run: Run
) -> None:
    """Each task has a pool, which nothing writes to between its loads."""
    dice = random.Random(seed)
    contents = [os.urandom(dice.choice((MIB, 2 * MIB, 3 * MIB))) for _ in range(6)]

    async def load(lake: RiggedLake, pool: Pool, chunks: list[ChunkId]) -> None:
        offsets = [number * 3 * MIB for number in range(len(chunks))]
        assert bytes(pool.buffer) == b"\x55" * pool.size_bytes, "the engine wrote behind a load's end"
        try:
            with trio.move_on_after(dice.random() * 0.1), suppress(EngineUnreachable, SessionLost):
                lengths = await lake.call("load_many", chunks, pool, offsets)
                for offset, length, chunk in zip(offsets, lengths, chunks, strict=True):
                    assert data_chunk_id(pool.buffer[offset : offset + length]) == chunk
        finally:
            pool.buffer[:] = b"\x55" * pool.size_bytes

    async def work(world: FabricWorld, lake: RiggedLake, name: str) -> None:
        chunks = [data_chunk_id(content) for content in contents]
        async with lake.lake.pool(size_bytes=9 * MIB) as pool:  # type: ignore[union-attr]
            pool.buffer[:] = b"\x55" * pool.size_bytes
            for turn in range(12):
                await load(lake, pool, dice.sample(chunks, 3))
                with trio.move_on_after(dice.random() * 0.1), suppress(EngineUnreachable):
                    index = dice.randrange(6)
                    assert await lake.get(f"bkt/{index}") == contents[index]
                with trio.move_on_after(dice.random() * 0.1), suppress(EngineUnreachable):
                    await lake.put(f"bkt/{name}", content := os.urandom(2 * MIB))
                    assert await lake.get(f"bkt/{name}") == content
                if turn % 4 == 3 and dice.random() < 0.5:
                    for connection in list(world.server._connections):
                        connection.close()

    async def body(world: FabricWorld) -> None:
        own = Own(world)
        for number, content in enumerate(contents):
            await world.warm(content, f"bkt/{number}")
        async with world.lake("trio", open_fabric=own.open) as lake:
            async with trio.open_nursery() as nursery:
                for name in "abc":
                    nursery.start_soon(work, world, lake, name)
            assert len(own.fabric.links) <= 3, "the pair, and those that the next one ends"
            assert own.fabric.registered_bytes <= 8 * MIB + 2 * BOUNCE_BYTES + CLIENT_LANDINGS * CHUNK_BYTES
            assert len(own.fabric.regions) <= 3 + CLIENT_LANDINGS

    run(body, slabs=8, weather=Weather(loss=0.01, shuffle=True, delay_s=0.002))


class HalfDead:
    """A TCP connection to the engine that ends for the client only, and behind which no engine is found any more."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition("/")[2].rpartition(":")
        self._engine = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._clients: list[socket.socket] = []
        self._engines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                engine = socket.create_connection(self._engine)
                self._clients.append(client)
                self._engines.append(engine)
                for source, target in ((client, engine), (engine, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while found := source.recv(1 << 16):
                target.sendall(found)

    def cut(self) -> None:
        """End the clients' side."""
        for ended in (self._listener, *self._clients):
            with suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)
            ended.close()

    def close(self) -> None:
        """End the engine's side, too."""
        self.cut()
        for engine in self._engines:
            with suppress(OSError):
                engine.shutdown(socket.SHUT_RDWR)
            engine.close()


def test_a_load_that_fails_while_only_its_connection_is_lost_is_written_no_more(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The engine knows nothing of the loss, and goes on with the first of two requests."""
    monkeypatch.setattr(blocking_engine, "ENGINE_WAIT_S", 0.0)

    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(MIB) for _ in range(16)]
        chunks = [data_chunk_id(content) for content in contents]
        half_dead = HalfDead(world.address)
        async with dataclasses.replace(world, address=half_dead.address).lake("blocking") as lake:
            for number, content in enumerate(contents):
                await lake.put(f"bkt/{number}", content)
            assert isinstance(lake.lake, Lake)
            closing = ExitStack()
            pool = closing.enter_context(lake.lake.pool(size_bytes=16 * MIB))
            await lake.call("load_many", chunks, pool, [number * MIB for number in range(16)])
            pool.buffer[:] = b"\x55" * (16 * MIB)
            world.wire.hold()
            requests: list[Sequence[int]] = []
            request_of = loading_steps._Loading._request

            def then_cut(loading: loading_steps._Loading, indexes: Sequence[int]) -> m.LoadSlots:
                requests.append(indexes)
                if len(requests) == 2:
                    while not any(link.operations for link in list(world.wire._links.values())):
                        time.sleep(0.001)
                    half_dead.cut()
                    while lake.fabric._engine.is_connected():  # as another thread may ask at any time
                        time.sleep(0.01)
                return request_of(loading, indexes)

            monkeypatch.setattr(loading_steps._Loading, "_request", then_cut)
            with pytest.raises(EngineUnreachable):
                await lake.call("load_many", chunks, pool, [number * MIB for number in range(16)])
            world.wire.release()
            await trio.sleep(0.2)
            assert bytes(pool.buffer) == b"\x55" * (16 * MIB), "the engine wrote behind the load's end"
            closing.close()
        half_dead.close()

    run(body)


# --- clients that hold on to what others need ----------------------------------------------------------


async def unjoined(client: Liar) -> None:
    """Open a queue pair whose own end is never joined: what the engine moves is not answered."""
    await client.engine.call(m.FabricOpen(client.fabric.open_link(Remote.READ | Remote.WRITE).end))


async def ignored(call: Callable[..., Awaitable[object]], *args: Any) -> None:
    with suppress(LakeError):
        await call(*args)


def test_a_client_that_opens_queue_pairs_all_the_time_takes_no_more_than_its_own_turns(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(bounce_memory, "BOUNCE_BUFFERS", 3)

    async def body(world: FabricWorld) -> None:
        content = os.urandom(MIB)
        chunk: ChunkId = data_chunk_id(content)
        async with world.lake("trio") as lake:
            await lake.put("bkt/object", content)
        async with liar(world) as client, trio.open_nursery() as nursery:
            await unjoined(client)
            for _ in range(2):
                for _ in range(2):
                    nursery.start_soon(ignored, client.load, [chunk], [0], client.named())
                await posted(world)
                await trio.sleep(0.05)
                nursery.start_soon(ignored, unjoined, client)
                await trio.sleep(0.05)
                with trio.move_on_after(0.3):  # one that does not wait for the end of the pair before it
                    await unjoined(client)
            with trio.fail_after(5):
                async with world.lake("trio") as lake, lake.lake.pool(size_bytes=MIB) as pool:  # type: ignore[union-attr]
                    assert await lake.call("load_many", [chunk], pool, [0]) == [MIB]
                    assert not lake.rdma.reason
            assert world.fabric.statistics()["queue_pairs"] <= 2
            nursery.cancel_scope.cancel()

    run(body, weather=Weather(silence_s=30.0))


def test_a_client_whose_puts_are_not_answered_keeps_no_other_client_s_memory(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with liar(world) as client, trio.open_nursery() as nursery:
            opened = (await client.engine.call(m.SessionOpen())).message
            assert isinstance(opened, m.SessionOpened)
            await unjoined(client)
            memory = client.named(size_bytes=16 * MIB)
            request = m.StoreSlots(opened.session, 0, [0, 4 * MIB], [4 * MIB, 4 * MIB], memory)
            for _ in range(32):
                nursery.start_soon(ignored, client.engine.call, request)
            await posted(world)
            await trio.sleep(0.1)
            with trio.fail_after(5):
                async with world.lake("trio", open_fabric=lambda name: "none") as lake:
                    await lake.put("bkt/object", os.urandom(9 * MIB))
            nursery.cancel_scope.cancel()

    run(body, weather=Weather(silence_s=30.0))
