"""Handlers of requests: each declares its answer, and none is missing, doubled or odd."""

from __future__ import annotations

import pytest

from engine.requests import handlers
from engine.requests.handlers import handles, require_handlers, table_of
from engine.sessions.references import Client
from lakefs.errors import BugError
from lakefs.wire import messages as m
from lakefs.wire.base import Request
from lakefs.wire.engine_port import Reply


class Unheard(Request, frozen=True):
    """A request that no engine knows."""


@pytest.fixture(autouse=True)
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_named", {})


def test_a_request_without_a_handler_is_an_error_that_names_it() -> None:
    class Part:
        @handles(m.Ping)
        async def ping(self) -> Reply:
            return Reply(m.Done())

    require_handlers([m.Ping])
    with pytest.raises(BugError, match=r"^requests without a handler: Unheard, Hello$"):
        require_handlers([m.Ping, Unheard, m.Hello])


def test_a_second_handler_of_one_request_is_an_error() -> None:
    async def first(self: object) -> Reply:
        return Reply(m.Done())

    handles(m.Ping)(first)
    with pytest.raises(BugError, match="Ping has two handlers"):
        handles(m.Ping)(first)


def test_a_handler_that_asks_for_something_else_is_an_error() -> None:
    async def odd(self: object, request: m.Ping, store: object) -> Reply:
        return Reply(m.Done())

    with pytest.raises(BugError, match="no handler takes request, store"):
        handles(m.Ping)(odd)


def test_the_table_calls_each_handler_with_what_it_names() -> None:
    given: list[object] = []

    class Part:
        @handles(m.Ping)
        async def ping(self) -> Reply:
            return Reply(m.Done())

        @handles(m.SessionEnd)
        async def end(self, client: Client, request: m.SessionEnd) -> Reply:
            given.extend((self, client, request))
            return Reply(m.Done())

    part, client, request = Part(), object(), m.SessionEnd(bytes(16))
    table = table_of([part])
    assert set(table) == {m.Ping, m.SessionEnd}
    with pytest.raises(StopIteration):
        table[m.SessionEnd](client, request, None, ()).__await__().send(None)  # type: ignore[arg-type]
    assert given == [part, client, request]
