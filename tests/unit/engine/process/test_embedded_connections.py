"""A client in the process of a service that ends its connection, as a head does when other names lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from lakefs.errors import EngineUnreachable
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineService, Reply


class EndingService:
    """A service whose connections are numbers; the test ends them."""

    def __init__(self) -> None:
        self.connections: dict[int, Callable[[], None]] = {}
        self.left: list[int] = []
        self.asked: list[int] = []
        self.fails = False
        self.waits: trio.Event | None = None

    def connected(self, peer: str, *, end: Callable[[], None], **_: Any) -> int:
        number = len(self.connections)
        self.connections[number] = end
        return number

    async def disconnected(self, client: int) -> None:
        await trio.lowlevel.checkpoint()
        self.left.append(client)

    async def serve(self, client: int, *_: Any) -> Reply:
        await trio.lowlevel.checkpoint()
        self.asked.append(client)
        if self.waits is not None:
            await self.waits.wait()
        if self.fails:
            raise EngineUnreachable("the names of this lake cannot be reached")
        return Reply(m.Done())


def client_of(service: EndingService) -> EmbeddedEngine:
    return EmbeddedEngine(cast(EngineService, service), descriptors=False)


def test_a_connection_that_was_ended_is_followed_by_another_one() -> None:
    async def scenario() -> None:
        service = EndingService()
        client = client_of(service)
        await client.call(m.Ping())
        service.connections[0]()
        await client.call(m.Ping())
        assert (service.asked, service.left, client.epoch) == ([0, 1], [0], 1)
        service.fails = True
        with pytest.raises(EngineUnreachable):
            await client.call(m.Ping())
        service.fails = False
        await client.call(m.Ping())
        assert (service.asked, service.left, client.epoch) == ([0, 1, 1, 2], [0, 1], 2)
        await client.aclose()
        assert service.left == [0, 1, 2]

    trio.run(scenario)


def test_a_connection_with_a_request_under_way_is_left_when_that_is_answered() -> None:
    async def scenario() -> None:
        service = EndingService()
        client = client_of(service)
        service.waits = waits = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call, m.Ping())
            await trio.testing.wait_all_tasks_blocked()
            service.connections[0]()
            service.waits = None
            await client.call(m.Ping())
            assert (service.asked, service.left) == ([0, 1], [])
            waits.set()
        service.connections[1]()
        await client.call(m.Ping())
        assert sorted(service.left) == [0, 1]

    trio.run(scenario)
