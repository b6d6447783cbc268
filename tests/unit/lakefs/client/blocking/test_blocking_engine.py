"""The blocking client of an engine, of which one thread closes what another is making."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lakefs.client.blocking import engine as engine_module
from lakefs.client.blocking.engine import BlockingEngine
from lakefs.errors import EngineUnreachable, LakeError


class FakeLink:
    """A connection without a socket; `during` is what other threads do while it is made."""

    made: list[FakeLink]
    during: list[str]
    engine: BlockingEngine
    hello = SimpleNamespace(features=0)
    carries_descriptors = False

    def __init__(self, *_: object) -> None:
        self.error: LakeError | None = None
        self.draining = False
        self.open_count = 0
        self.epoch = 0
        FakeLink.made.append(self)
        for step in FakeLink.during:
            getattr(FakeLink.engine, step)()

    def lose(self, error: LakeError) -> None:
        self.error = error


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> BlockingEngine:
    monkeypatch.setattr(engine_module, "Link", FakeLink)
    FakeLink.made, FakeLink.during = [], []
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
