"""The blocking client of an engine, of which one thread closes what another is making."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from lakefs.client.blocking import engine as engine_module
from lakefs.client.blocking.engine import BlockingEngine
from lakefs.client.blocking.link import Link, Ticket
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.wire.base import Done
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import BucketRemove, Request, Status
from lakefs.wire.repeat import GREETINGS_MAX


class FakeLink:
    """A connection without a socket; `during` is what other threads do while it is made."""

    made: list[FakeLink]
    during: list[str]
    refusals = 0
    """So many connections are refused."""
    engine: BlockingEngine
    hello = SimpleNamespace(features=0)
    carries_descriptors = False

    def __init__(self, *_: object) -> None:
        self.error: LakeError | None = None
        self.draining = False
        self.open_count = 0
        self.epoch = 0
        self.answer: LakeError | Reply = Reply(Done())
        self.says_goodbye = False
        if FakeLink.refusals:
            FakeLink.refusals -= 1
            raise EngineBusy("the engine is shutting down; connect again in a moment")
        FakeLink.made.append(self)
        for step in FakeLink.during:
            getattr(FakeLink.engine, step)()

    def lose(self, error: LakeError) -> None:
        self.error = error

    def look(self) -> None:
        """It was heard a moment ago."""

    def submit(self, ticket: Ticket) -> None:
        ticket.link, ticket.error, ticket.lost = cast(Link, self), None, False
        ticket.attempts += 1

    def wait(self, ticket: Ticket) -> Reply | None:
        self.draining = self.draining or self.says_goodbye
        if isinstance(self.answer, Reply):
            return self.answer
        ticket.error = self.answer
        return None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> BlockingEngine:
    monkeypatch.setattr(engine_module, "Link", FakeLink)
    monkeypatch.setattr(engine_module, "_RETRY_S", 0.0)
    FakeLink.made, FakeLink.during, FakeLink.refusals = [], [], 0
    FakeLink.engine = BlockingEngine("unix:/nowhere")
    return FakeLink.engine


@pytest.mark.parametrize("open_count", [0, 1])
def test_a_drained_connection_that_is_replaced_ends_with_its_last_ticket(
    engine: BlockingEngine, open_count: int
) -> None:
    engine.connect()
    [first] = FakeLink.made
    first.draining, first.open_count = True, open_count
    engine.connect()
    assert len(FakeLink.made) == 2
    assert (first.error is None) is bool(open_count)


def test_a_connection_that_was_being_made_while_another_thread_closed_the_client_is_closed(
    engine: BlockingEngine,
) -> None:
    FakeLink.during = ["close"]
    with pytest.raises(EngineUnreachable, match="was closed"):
        engine.connect()
    assert [link.error is None for link in FakeLink.made] == [False]
    FakeLink.during = []
    engine.connect()
    assert [link.error is None for link in FakeLink.made] == [False, True]


def test_a_connection_that_was_lost_while_another_was_made_is_made_anew(engine: BlockingEngine) -> None:
    engine.connect()
    FakeLink.made[0].lose(EngineUnreachable("lost"))
    engine.connect()
    engine.connect()
    assert [link.error is None for link in FakeLink.made] == [False, True]


@pytest.mark.parametrize("request_", [Status(), BucketRemove("bkt")])
def test_a_request_that_an_engine_refuses_as_it_shuts_down_goes_to_the_next_one(
    engine: BlockingEngine, request_: Request
) -> None:
    """Nothing of it was done; the goodbye was on its way as it was sent."""
    engine.connect()
    [first] = FakeLink.made
    first.says_goodbye, first.answer = True, EngineBusy("the engine is shutting down")
    assert engine.call(request_).message == Done()
    assert len(FakeLink.made) == 2


def test_a_request_that_an_engine_refuses_for_another_reason_has_failed(engine: BlockingEngine) -> None:
    engine.connect()
    [first] = FakeLink.made
    first.answer = EngineBusy("the engine has no room for it")
    with pytest.raises(EngineBusy):
        engine.call(Status())
    assert len(FakeLink.made) == 1


def test_engines_that_all_shut_down_are_not_asked_for_ever(
    engine: BlockingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(link: FakeLink, ticket: Ticket) -> None:
        link.draining, ticket.error = True, EngineBusy("the engine is shutting down")

    monkeypatch.setattr(FakeLink, "wait", refuse)
    with pytest.raises(EngineBusy):
        engine.call(Status())
    assert 1 < len(FakeLink.made) < 20


def test_a_client_that_an_engine_refuses_as_it_shuts_down_connects_to_the_next_one(engine: BlockingEngine) -> None:
    FakeLink.refusals = 3
    engine.connect()
    assert len(FakeLink.made) == 1


def test_a_client_that_is_refused_for_long_says_so(engine: BlockingEngine) -> None:
    FakeLink.refusals = 1000
    with pytest.raises(EngineBusy):
        engine.connect()
    assert FakeLink.refusals == 1000 - GREETINGS_MAX
