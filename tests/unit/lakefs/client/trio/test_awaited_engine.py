"""A client whose engine may be absent: at the start, and later."""

from __future__ import annotations

import pytest
import trio

from lakefs.client.trio.awaited import AwaitedEngine
from lakefs.errors import EngineUnreachable, PermissionDenied
from lakefs.limits import ENGINE_WAIT_S
from lakefs.wire.messages import Ping
from tests.engines import SIMULATED, Restarting, in_simulated_time, restarting
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork


def is_ready(awaited: AwaitedEngine) -> bool:
    return awaited.not_ready is None


def test_it_starts_without_its_engine_and_calls_fail_at_once_until_it_is_there() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with trio.open_nursery() as nursery:
            awaited = AwaitedEngine(SIMULATED, "secret", network)
            await nursery.start(awaited.run)
            assert not is_ready(awaited)
            assert awaited.epoch == 0
            began = trio.current_time()
            with pytest.raises(EngineUnreachable) as caught:
                await awaited.call(Ping())
            assert trio.current_time() == began
            assert "simulated" not in caught.value.message
            engine = Restarting(nursery, network, SIMULATED)
            await engine.start(FakeService())
            await trio.sleep(2)
            assert is_ready(awaited)
            await awaited.call(Ping())
            assert awaited.epoch == 1
            await engine.stop()
            nursery.cancel_scope.cancel()

    in_simulated_time(main)


def test_a_lost_engine_is_waited_for_once_and_then_calls_fail_at_once() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with restarting(network, SIMULATED, FakeService()) as engine, trio.open_nursery() as nursery:
            awaited = AwaitedEngine(SIMULATED, "secret", network)
            await nursery.start(awaited.run)
            assert is_ready(awaited)
            await engine.stop()
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await awaited.call(Ping())
            assert ENGINE_WAIT_S - 1 <= trio.current_time() - began <= ENGINE_WAIT_S + 1
            await trio.sleep(ENGINE_WAIT_S + 2)
            assert not is_ready(awaited)
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await awaited.call(Ping())
            assert trio.current_time() == began
            await engine.start(FakeService())
            await trio.sleep(2)
            await awaited.call(Ping())
            assert is_ready(awaited)
            assert awaited.epoch == 2
            nursery.cancel_scope.cancel()

    in_simulated_time(main)


def test_what_waiting_does_not_mend_is_raised_at_the_first_contact() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with restarting(network, SIMULATED, FakeService()):
            with pytest.RaisesGroup(PermissionDenied):
                async with trio.open_nursery() as nursery:
                    await nursery.start(AwaitedEngine(SIMULATED, "wrong", network).run)

    in_simulated_time(main)
