"""Sessions and gc: what a put in progress needs is never freed, however the two interleave."""

from __future__ import annotations

import pytest

from engine.holds import Client, Holds
from engine.number_set import NumberSet
from lakefs.errors import EngineBusy
from lakefs.ids import EMPTY_BLOB, Birth
from lakefs.limits import SESSION_LINGER_S


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall_ns(self) -> int:
        return 0


def connected() -> tuple[Holds, Client, HandClock]:
    clock = HandClock()
    holds = Holds(clock)
    return holds, holds.connect("test", descriptors=False, trusted=True), clock


def test_a_session_that_ends_while_gc_runs_leaves_what_it_held_to_the_cycle() -> None:
    holds, client, _ = connected()
    session = holds.begin_session(client)
    holds.hold(session, Birth(7))
    holds.barrier = NumberSet()
    holds.end_session(client, session.identifier)
    assert not holds.is_held(Birth(7))
    assert Birth(7) in holds.barrier


def test_a_session_that_expires_while_gc_runs_leaves_what_it_held_to_the_cycle() -> None:
    holds, client, clock = connected()
    session = holds.begin_session(client)
    holds.hold(session, Birth(7))
    holds.disconnect(client)
    holds.barrier = NumberSet()
    clock.now = SESSION_LINGER_S
    assert holds.expire() == 1
    assert Birth(7) in holds.barrier


def test_a_session_is_open_until_it_is_ended_by_anybody() -> None:
    holds, client, _ = connected()
    session = holds.begin_session(client)
    assert holds.is_open(session)
    holds.end_session(holds.connect("other", descriptors=False, trusted=True), session.identifier)
    assert not holds.is_open(session)


def test_leases_of_all_connections_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.holds.LEASES_MAX", 3)
    holds, first, _ = connected()
    second = holds.connect("test", descriptors=False, trusted=True)
    held = [holds.lease(first, EMPTY_BLOB), holds.lease(first, EMPTY_BLOB)]
    holds.lease(second, EMPTY_BLOB)
    with pytest.raises(EngineBusy):
        holds.lease(second, EMPTY_BLOB)
    holds.end_leases(second, held)
    assert holds.statistics()["leases"] == 3
    holds.end_leases(first, [held[0], held[0], 1])
    holds.lease(second, EMPTY_BLOB)
    holds.disconnect(second)
    assert holds.statistics()["leases"] == 1
    holds.disconnect(first)
    assert holds.statistics()["leases"] == 0
    assert list(holds.leased_blobs()) == []


def test_a_set_takes_over_the_numbers_of_another() -> None:
    first, second = NumberSet(), NumberSet()
    for number in (0, 5, 32_767, 32_768, 1_000_000):
        second.add(number)
    first.add(5)
    first.add(40_000)
    first.update(second)
    assert len(first) == 6
    assert all(number in first for number in (0, 5, 32_767, 32_768, 40_000, 1_000_000))
    assert len(second) == 5
