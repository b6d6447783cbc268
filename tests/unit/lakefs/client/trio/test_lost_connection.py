"""A connection that the client gives up is shut down in the same step: its callers may use their memory again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outcome
import pytest
import trio
import trio.testing

from lakefs.client.trio.engine import connect_engine
from lakefs.errors import EngineUnreachable
from lakefs.ids import data_chunk_id
from lakefs.limits import MIB
from lakefs.ports import Network, Stream
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.messages import Ping, ReadChunks
from tests.contract.test_engine_client import served
from tests.fake_service import FakeClient, FakeService
from tests.sim.world.network import SimulatedNetwork


@pytest.mark.parametrize("network_of", [TrioNetwork, lambda: SimulatedNetwork(random.Random(3))])
def test_an_engine_sees_that_its_client_has_left_before_a_caller_goes_on(
    network_of: Callable[[], Network], tmp_path: Path
) -> None:
    async def main() -> None:
        network, service = network_of(), FakeService()
        address = f"unix:{tmp_path}/socket" if isinstance(network, TrioNetwork) else "tcp://simulated:0"
        async with (
            served(service, network, address) as real,
            connect_engine(real, token="secret", network=network) as engine,
        ):
            await engine.call(Ping())
            (client,) = service.clients
            assert isinstance(client, FakeClient)
            assert not client.has_left()
            engine.lose(EngineUnreachable("the engine has not answered for long"))
            assert client.has_left()
            with pytest.raises(EngineUnreachable, match="for long"):
                await engine.call(Ping())

    trio.run(main)


class HaltingNetwork(TrioNetwork):
    """Its streams receive so many bytes, and wait before more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.halted, self.may_go_on = trio.Event(), trio.Event()

    async def connect(self, address: str) -> Stream:
        stream: Any = await super().connect(address)
        receive_into = stream.receive_into

        async def halting(buffer: memoryview) -> int:
            if self.room <= 0:
                self.halted.set()
                await self.may_go_on.wait()
            count: int = await receive_into(buffer[: max(self.room, 1)])
            self.room -= count
            return count

        stream.receive_into = halting
        connected: Stream = stream
        return connected


def test_a_call_whose_reply_is_being_received_ends_when_nothing_is_written_to_its_memory_any_more(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        network, service, content = HaltingNetwork(room=MIB // 2), FakeService(), bytes([7]) * MIB
        chunk = data_chunk_id(content)
        service.chunks[chunk] = content
        async with (
            served(service, TrioNetwork(), f"unix:{tmp_path}/socket") as real,
            connect_engine(real, token="secret", network=network) as engine,
        ):
            memory, other = bytearray(MIB), list[outcome.Outcome[Any]]()
            results: list[outcome.Outcome[Any]] = []
            assert engine.begin(ReadChunks([chunk], [0], [0]), [memoryview(memory)], results.append)
            assert engine.begin(ReadChunks([chunk], [0], [0]), [], other.append)
            await network.halted.wait()
            assert 0 < memory.count(7) < MIB
            engine.lose(EngineUnreachable("lost"))
            assert len(other) == 1, "nothing is received for this one"
            assert not results, "its memory may still be written to"
            network.room = MIB
            network.may_go_on.set()
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(results[0], outcome.Error)
            memory[:] = bytes(MIB)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not any(memory), "a later user's bytes were overwritten"

    trio.run(main)
