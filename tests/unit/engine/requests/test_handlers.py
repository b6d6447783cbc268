"""Handlers of requests: each declares its answer, and none is missing, doubled or odd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from engine.requests.handlers import Handlers, handles
from engine.sessions.references import Client
from lakefs.errors import BugError
from lakefs.wire import messages as m
from lakefs.wire.base import Request
from lakefs.wire.engine_port import Reply


class Unheard(Request, frozen=True):
    """A request that no engine knows."""


class Pings:
    """Answers one request."""

    @handles(m.Ping)
    async def ping(self) -> Reply:
        return Reply(m.Done())


def test_a_request_without_a_handler_is_an_error_that_names_it() -> None:
    Handlers([Pings()], [m.Ping])
    with pytest.raises(BugError, match=r"^requests without a handler: Unheard, Hello$"):
        Handlers([Pings()], [m.Ping, Unheard, m.Hello])


def test_a_second_handler_of_one_request_is_an_error() -> None:
    class Others:
        @handles(m.Ping)
        async def answer(self) -> Reply:
            return Reply(m.Done())

    with pytest.raises(BugError, match="Ping has two handlers"):
        Handlers([Pings(), Others()], [])


def test_two_services_in_one_process_answer_a_request_each_in_its_way() -> None:
    class Others:
        @handles(m.Ping)
        async def answer(self) -> Reply:
            return Reply(m.StatusReply("{}"))

    async def answers() -> list[object]:
        tables = Handlers([Pings()], []), Handlers([Others()], [])
        return [(await table.by_request[m.Ping](None, m.Ping(), None, ())).message for table in tables]  # type: ignore[arg-type]

    assert trio.run(answers) == [m.Done(), m.StatusReply("{}")]


def test_a_handler_that_asks_for_something_else_is_an_error() -> None:
    async def odd(self: object, request: m.Ping, store: object) -> Reply:
        return Reply(m.Done())

    with pytest.raises(BugError, match="no handler takes request, store"):
        handles(m.Ping)(odd)


def test_the_table_calls_each_handler_with_what_it_names() -> None:
    given: list[object] = []

    class Ends:
        @handles(m.SessionEnd)
        async def end(self, client: Client, request: m.SessionEnd) -> Reply:
            given.extend((self, client, request))
            return Reply(m.Done())

    part, client, request = Ends(), object(), m.SessionEnd(bytes(16))
    table = Handlers([Pings(), part], [m.Ping, m.SessionEnd])
    assert set(table.by_request) == {m.Ping, m.SessionEnd}
    with pytest.raises(StopIteration):
        table.by_request[m.SessionEnd](client, request, None, ()).__await__().send(None)  # type: ignore[arg-type]
    assert given == [part, client, request]


def test_the_table_knows_which_requests_take_descriptors() -> None:
    class Lends:
        @handles(m.LendMemory)
        async def lend(self, client: Client, request: m.LendMemory, descriptors: Sequence[int]) -> Reply:
            return Reply(m.Done())

    table = Handlers([Pings(), Lends()], [])
    assert table.takes_descriptors == {m.LendMemory}
