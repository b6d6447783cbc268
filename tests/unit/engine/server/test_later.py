"""Replies that a service gives in a later step: sent, given up and counted as those that a task waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from engine.server.connection import ServerLimits
from lakefs.errors import DeadlineExceeded
from lakefs.wire.connection import FailureReceived, ReplyReceived, StreamEnded
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Done, Ping, Status, StatusReply
from tests.fake_service import FakeService
from tests.raw_client import Running, simulated
from tests.store_rig import run


class Given:
    """A service whose answers are given by a test; `given_up` are the numbers of those that were given up."""

    def __init__(self, service: FakeService, *, at_once: bool = False) -> None:
        self.takes: list[Callable[[Reply], None]] = []
        self.given_up: list[int] = []
        self._at_once = at_once
        service.waits, service.later = (), self.later

    def later(self, take: Callable[[Reply], None]) -> Callable[[], None]:
        number = len(self.takes)
        self.takes.append(take)
        if self._at_once:
            self.give(number)
        return lambda: self.given_up.append(number)

    def give(self, number: int) -> None:
        self.takes[number](Reply(StatusReply(str(number))))

    async def until(self, count: int) -> None:
        """Wait until so many requests have arrived."""
        with trio.fail_after(100):
            while len(self.takes) < count:  # noqa: ASYNC110 - as a service sees it
                await trio.sleep(0.1)


@pytest.mark.parametrize("at_once", [True, False])
def test_replies_are_sent_when_they_are_given_in_any_order(at_once: bool) -> None:
    async def test(served: Running) -> None:
        given = Given(served.service, at_once=at_once)
        async with served.client() as client:
            asked = [await client.ask(Status()) for _ in range(3)]
            if not at_once:
                assert await client.is_served()
                for number in (2, 0, 1):
                    given.give(number)
            for number in (0, 1, 2) if at_once else (2, 0, 1):
                assert await client.answer() == ReplyReceived(asked[number], StatusReply(str(number)), 0, 0)
            assert await client.is_served()
        assert not given.given_up

    simulated(test)


def test_a_reply_is_given_up_once_when_its_client_cancels_or_leaves() -> None:
    async def test(served: Running) -> None:
        given = Given(served.service)
        async with served.client() as client:
            asked = [await client.ask(Status()) for _ in range(3)]
            await given.until(3)
            given.give(0)
            assert isinstance(await client.answer(), ReplyReceived)
            await client.send(client.wire.cancel(asked[1]), client.wire.cancel(asked[0]))
            assert await client.answer() == StreamEnded(asked[1])
            assert await client.is_served()
            assert given.given_up == [1]
        await trio.sleep(1)
        assert given.given_up == [1, 2]

    simulated(test)


def test_a_deadline_ends_what_is_given_too_late() -> None:
    async def test(served: Running) -> None:
        given = Given(served.service)
        async with served.client() as client:
            late = await client.ask(Status(), deadline_ms=500)
            failed = await client.answer()
            assert isinstance(failed, FailureReceived)
            assert failed.stream_id == late
            assert isinstance(failed.error, DeadlineExceeded)
            assert given.given_up == [0]
            intime = await client.ask(Status(), deadline_ms=500_000)
            await given.until(2)
            given.give(1)
            assert await client.answer() == ReplyReceived(intime, StatusReply("1"), 0, 0)

    simulated(test)


def test_a_server_that_drains_waits_for_replies_that_are_given_later() -> None:
    async def test(served: Running) -> None:
        given = Given(served.service)
        async with served.client() as client, trio.open_nursery() as nursery:
            await client.ask(Status())
            await given.until(1)
            nursery.start_soon(served.server.drain, 100)
            await trio.sleep(50)
            given.give(0)
            await client.answer()  # the goodbye
            assert isinstance(await client.answer(), ReplyReceived)

    simulated(test)


def test_requests_that_are_answered_later_count_as_in_flight() -> None:
    async def test(served: Running) -> None:
        given = Given(served.service)
        async with served.client() as client:
            for _ in range(2):
                await client.ask(Status())
            ping = await client.ask(Ping())
            await given.until(2)
            with trio.move_on_after(100) as waited:
                await client.receiver.next_event()
            assert waited.cancelled_caught
            given.give(1)
            assert isinstance(await client.answer(), ReplyReceived)
            assert await client.answer() == ReplyReceived(ping, Done(), 0, 0)

    simulated(test, limits=ServerLimits(inflight_max=2))


def test_a_client_in_the_process_waits_for_a_reply_that_is_given_later() -> None:
    async def main() -> None:
        service = FakeService()
        given = Given(service)
        engine = EmbeddedEngine(service)
        answers: list[Reply] = []

        async def ask() -> None:
            answers.append(await engine.call(Status()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await given.until(1)
            given.give(0)
        with trio.move_on_after(1):
            await engine.call(Status())
        assert [answer.message for answer in answers] == [StatusReply("0")]
        assert given.given_up == [1]
        await engine.aclose()

    run(main)
