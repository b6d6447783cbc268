"""A connection that the client gives up is shut down in the same step: its callers may use their memory again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from lakefs.client.trio.engine import connect_engine
from lakefs.errors import EngineUnreachable
from lakefs.ports import Network
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.messages import Ping
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
