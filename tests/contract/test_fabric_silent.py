"""RDMA to an engine that falls silent: memory that it was given is the client's again when the call has ended."""

from __future__ import annotations

import os

import pytest
import trio

from engine.server.connection import ServedConnection
from lakefs.client.blocking import engine as blocking_engine
from lakefs.errors import EngineUnreachable
from lakefs.limits import MIB
from tests.contract.test_fabric_loads import POOL, both_kinds, laid_out, pool_of, put_all
from tests.fabric_rig import FabricWorld, Run, posted
from tests.simulated_fabric import Weather

TIMEOUT_S = 0.5


def fall_silent(world: FabricWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine send nothing any more, on no connection, and greet nobody."""

    async def greet(self: ServedConnection) -> bool:
        with trio.CancelScope() as scope:
            await trio.sleep_forever()
        return scope.cancelled_caught

    monkeypatch.setattr(ServedConnection, "_greet", greet)
    for connection in world.server._connections:
        monkeypatch.setattr(connection._sender, "_send", lambda *_: None)
        monkeypatch.setattr(connection._sender, "cork", lambda *_: None)


@both_kinds
def test_a_load_that_was_given_up_writes_nothing_when_the_engine_goes_on(
    kind: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(blocking_engine, "ENGINE_WAIT_S", 0.0)

    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(MIB) for _ in range(4)]
        async with world.lake(kind, timeout_s=TIMEOUT_S, patience_s=0.0) as lake, pool_of(lake) as pool:
            chunks = await put_all(lake, contents)
            offsets = laid_out(contents)
            await lake.call("load_many", chunks, pool, offsets)
            world.wire.hold()
            failed: list[EngineUnreachable] = []

            async def load() -> None:
                try:
                    await lake.call("load_many", chunks, pool, offsets)
                except EngineUnreachable as error:
                    failed.append(error)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                await posted(world)
                fall_silent(world, monkeypatch)
            assert failed
            pool.buffer[:] = b"\x55" * POOL
            world.wire.release()
            while any(link.operations for link in list(world.wire._links.values())):  # noqa: ASYNC110 - in a thread
                await trio.sleep(0.001)
            assert bytes(pool.buffer) == b"\x55" * POOL

    run(body, weather=Weather(silence_s=30.0))
