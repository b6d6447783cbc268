"""A client that is refused as busy when it connects: by an engine that shuts down, while another is about to listen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from lakefs.client.trio import reconnecting
from lakefs.client.trio.engine import connect_engine
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import EngineBusy
from lakefs.wire.messages import Ping
from lakefs.wire.repeat import GREETINGS_MAX
from tests.engines import SIMULATED, in_simulated_time, restarting
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork


def refuse(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let so many connections be refused; returns when each was made."""
    made: list[float] = []

    @asynccontextmanager
    async def connect(*args: Any, **named: Any) -> AsyncIterator[Any]:
        made.append(trio.current_time())
        if len(made) <= times:
            raise EngineBusy("the engine is shutting down; connect again in a moment")
        async with connect_engine(*args, **named) as engine:
            yield engine

    monkeypatch.setattr(reconnecting, "connect_engine", connect)
    return made


def test_a_client_that_an_engine_refuses_as_it_shuts_down_connects_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = refuse(monkeypatch, 3)

    async def main(network: SimulatedNetwork) -> None:
        async with (
            restarting(network, SIMULATED, FakeService()),
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            await engine.call(Ping())

    in_simulated_time(main)
    assert len(made) == 4


def test_a_client_that_is_refused_for_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = refuse(monkeypatch, 1000)

    async def main(network: SimulatedNetwork) -> None:
        async with restarting(network, SIMULATED, FakeService()):
            with pytest.raises(EngineBusy):
                async with connect_reconnecting(SIMULATED, token="secret", network=network):
                    pass

    in_simulated_time(main)
    assert len(made) == GREETINGS_MAX
    assert made[-1] - made[0] < 1.0
