"""An engine that ends and starts again: requests that may be sent again are, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs.client.connect_trio import connect_trio
from lakefs.client.trio.reconnecting import ReconnectingEngine, connect_reconnecting
from lakefs.errors import EngineUnreachable, LakeError, SessionLost
from lakefs.wire.messages import (
    BucketCreate,
    Ping,
    Request,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    Status,
    StatusReply,
    StoreFromSource,
)
from tests.e2e.served import Served
from tests.engines import SIMULATED, in_simulated_time, restarting
from tests.fake_service import FakeService
from tests.sim.world.network import SimulatedNetwork


def test_an_engine_that_was_never_there_is_not_waited_for() -> None:
    async def main(network: SimulatedNetwork) -> None:
        began = trio.current_time()
        with pytest.raises(EngineUnreachable):
            async with connect_reconnecting(SIMULATED, network=network):
                raise AssertionError("nobody is there")
        assert trio.current_time() == began

    in_simulated_time(main)


def test_a_lost_engine_is_waited_for_five_seconds() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with (
            restarting(network, SIMULATED, FakeService()) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            await served.stop()
            began = trio.current_time()
            with pytest.raises(EngineUnreachable):
                await engine.call(Ping())
            assert trio.current_time() - began == pytest.approx(5, abs=0.1)

    in_simulated_time(main)


def test_a_call_behind_the_end_of_its_client_fails_and_connects_no_more() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with restarting(network, SIMULATED, FakeService()):
            async with connect_reconnecting(SIMULATED, token="secret", network=network) as engine:
                await engine.call(Ping())
            with pytest.raises(EngineUnreachable, match="closed"):
                await engine.call(Ping())
            assert engine.epoch == 1

    in_simulated_time(main)


def test_a_call_that_waits_for_a_lost_engine_ends_with_its_client() -> None:
    """A driver keeps a call from being cancelled if its answer has descriptors."""

    async def main(network: SimulatedNetwork) -> None:
        async with restarting(network, SIMULATED, FakeService()) as served, trio.open_nursery() as nursery:
            async with connect_reconnecting(SIMULATED, token="secret", network=network) as engine:
                await served.stop()
                began = trio.current_time()
                nursery.start_soon(fails, engine)
                await trio.sleep(1)
            await trio.sleep(1)
            assert failed_at[0] - began == pytest.approx(1, abs=0.1)

    async def fails(engine: ReconnectingEngine) -> None:
        with pytest.raises(EngineUnreachable, match="closed"):
            await engine.call(Ping())
        failed_at.append(trio.current_time())

    failed_at: list[float] = []
    in_simulated_time(main)


def test_a_restarted_engine_is_asked_again_only_what_may_be_asked_again() -> None:
    first, second = FakeService(boot_id=b"1" * 16), FakeService(boot_id=b"2" * 16)
    first.waits = (Status, BucketCreate, StoreFromSource)
    outcomes: dict[str, object] = {}

    async def call(engine: ReconnectingEngine, request: Request) -> None:
        try:
            outcomes[type(request).__name__] = (await engine.call(request)).message
        except LakeError as error:
            outcomes[type(request).__name__] = error

    async def main(network: SimulatedNetwork) -> None:
        second.gate.set()
        async with (
            restarting(network, SIMULATED, first) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            sessions = [(await engine.call(SessionOpen())).message for _ in range(2)]
            kept, ended = [message.session for message in sessions if isinstance(message, SessionOpened)]
            await engine.call(SessionEnd(ended))
            assert (engine.epoch, engine.hello.boot_id) == (1, b"1" * 16)
            async with trio.open_nursery() as nursery:
                for request in (Status(), BucketCreate("bkt"), StoreFromSource(kept, 1, [0], [1])):
                    nursery.start_soon(call, engine, request)
                await trio.testing.wait_all_tasks_blocked()
                network.cut_all()
                await served.stop()
                await trio.sleep(2)
                await served.start(second)
            assert (engine.epoch, engine.hello.boot_id) == (2, b"2" * 16)
            assert second.joined == [kept]

    in_simulated_time(main)
    assert outcomes["Status"] == StatusReply("{}")
    assert isinstance(outcomes["BucketCreate"], EngineUnreachable)
    assert "may or may not" in str(outcomes["BucketCreate"])
    assert isinstance(outcomes["StoreFromSource"], SessionLost)


def test_nothing_is_lost_when_an_engine_drains_and_another_takes_over() -> None:
    async def main(network: SimulatedNetwork) -> None:
        answered = 0

        async def ask(engine: ReconnectingEngine) -> None:
            nonlocal answered
            for _ in range(30):
                await engine.call(BucketCreate("bkt"))
                answered += 1
                await trio.sleep(0.1)

        async with (
            restarting(network, SIMULATED, FakeService()) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(ask, engine)
                for _ in range(3):
                    await trio.sleep(0.7)
                    await served.stop(within_s=10)
                    await served.start(FakeService())
            assert engine.epoch == 4
        assert answered == 300

    in_simulated_time(main)


def test_a_request_that_ends_the_engine_each_time_is_given_up() -> None:
    async def main(network: SimulatedNetwork) -> None:
        service = FakeService()
        async with restarting(network, SIMULATED, service) as served:
            async with connect_reconnecting(SIMULATED, token="secret", network=network) as engine:

                async def cut() -> None:
                    while True:
                        await trio.testing.wait_all_tasks_blocked()
                        if service.served[-1] == "Status":
                            network.cut_all()
                        await trio.sleep(0.2)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cut)
                    with pytest.raises(EngineUnreachable):
                        await engine.call(Status())
                    nursery.cancel_scope.cancel()
                assert service.served.count("Status") == 3
            await served.stop()

    in_simulated_time(main)


def test_a_trio_lake_outlives_its_engine_and_takes_nothing_over_from_it(folder: Path) -> None:
    """The engine that starts has another store, with segments of the same numbers."""
    content = os.urandom(300_000)
    other = os.urandom(300_000)
    served = Served(folder)

    async def main() -> None:
        async with connect_trio(served.server) as lake:
            await lake.put("bkt/x", content, create_bucket=True)
            assert await lake.get("bkt/x") == content
            served.kill()
            served.data.rename(folder / "old")
            served.start()
            await lake.put("bkt/x", other, create_bucket=True)
            assert await lake.get("bkt/x") == other

    trio.run(main)
    assert served.stop() == 0


@pytest.mark.parametrize("part_max", [1, 7, 1 << 20])
def test_an_engine_that_is_silent_is_lost_and_one_that_is_only_slow_is_not(
    monkeypatch: pytest.MonkeyPatch, part_max: int
) -> None:
    # A Ping that the network takes in parts is no sign of the engine's life.
    monkeypatch.setattr(SimulatedNetwork, "piece", lambda _, count: min(count, part_max))

    async def main(network: SimulatedNetwork) -> None:
        service = FakeService()  # Status waits for its gate
        async with (
            restarting(network, SIMULATED, service),
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
            trio.open_nursery() as nursery,
        ):
            slow = trio.Event()

            async def wait_long() -> None:
                await engine.call(Status())
                slow.set()

            nursery.start_soon(wait_long)
            await trio.sleep(600)
            assert engine.epoch == 1
            service.gate.set()
            await slow.wait()
            service.gate = trio.Event()
            service.waits = (BucketCreate, Ping)
            began = trio.current_time()
            with pytest.raises(EngineUnreachable, match="does not answer, for 30 s"):
                await engine.call(BucketCreate("bkt"))
            assert trio.current_time() - began <= 45
            service.gate.set()
            assert isinstance((await engine.call(Status())).message, StatusReply)
            assert engine.epoch == 2

    in_simulated_time(main)


def test_an_engine_that_takes_no_more_requests_is_given_longer() -> None:
    async def main(network: SimulatedNetwork) -> None:
        service = FakeService(waits=(BucketCreate, Ping))
        async with (
            restarting(network, SIMULATED, service),
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
            trio.open_nursery() as nursery,
        ):
            failed: list[float] = []

            async def wait_long(number: int) -> None:
                with pytest.raises(EngineUnreachable):
                    await engine.call(BucketCreate(f"b{number}"))
                failed.append(trio.current_time())

            for number in range(engine.hello.inflight_max):
                nursery.start_soon(wait_long, number)
            await trio.sleep(100)
            assert failed == []
            await trio.sleep(50)
            assert len(failed) == engine.hello.inflight_max

    in_simulated_time(main)


def test_all_who_wait_for_a_lost_engine_wait_once() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with (
            restarting(network, SIMULATED, FakeService()) as served,
            connect_reconnecting(SIMULATED, token="secret", network=network) as engine,
        ):
            await served.stop()
            began = trio.current_time()

            async def call() -> None:
                with pytest.raises(EngineUnreachable):
                    await engine.call(Ping())

            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(call)
            assert trio.current_time() - began < 6
            with pytest.raises(EngineUnreachable):
                await engine.call(Ping())
            assert trio.current_time() - began > 9, "who comes later waits, too"
            await served.start(FakeService())
            await engine.call(Ping())

    in_simulated_time(main)
