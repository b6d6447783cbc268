"""Sessions and gc: chunks that a put in progress needs are never freed, however the two interleave."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from engine.sessions.references import Client, References
from engine.tables.number_set import NumberSet
from lakefs.errors import EngineBusy, SessionLost
from lakefs.ids import EMPTY_BLOB, Birth, SessionId
from lakefs.limits import CHUNK_BYTES, SESSION_LINGER_S, SESSIONS_LINGERING_MAX
from tests.store_rig import SMALL_SIZES, client_of, delete, gc, put, records, run, simulated_store


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall_ns(self) -> int:
        return 0


def connected() -> tuple[References, Client, HandClock]:
    clock = HandClock()
    references = References(clock)
    return references, references.connect("test", descriptors=False, trusted=True), clock


def end(references: References, client: Client, identifier: SessionId) -> None:
    references.end_session(identifier)


def expire(references: References, client: Client, identifier: SessionId) -> None:
    references.disconnect(client)
    references.expire()


@pytest.mark.parametrize("ended", [end, expire])
@pytest.mark.parametrize("while_marking", [True, False])
def test_a_session_that_ends_while_gc_runs_leaves_what_it_held_to_the_cycle(
    ended: Callable[[References, Client, SessionId], None], while_marking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sessions.references.SESSION_LINGER_S", 0)

    async def main() -> None:
        async with simulated_store(sizes=replace(SMALL_SIZES, gc_batch=1)) as store:
            asker = client_of(store)
            await put(asker, "k", b"x" * 70_000)
            [record] = records(store).values()
            await delete(asker, "k")
            client = store.references.connect("test", descriptors=False, trusted=True)
            session = store.references.begin_session(client)
            store.references.hold(session, record.birth)
            sets = store.references.held_sets

            def held_sets() -> Iterator[NumberSet]:
                for held in sets():
                    if while_marking:
                        ended(store.references, client, session.identifier)
                    yield held

            def reached(point: str) -> None:
                if point == "gc.marked":
                    ended(store.references, client, session.identifier)
                    assert not store.references.is_open(session)

            monkeypatch.setattr(store.references, "held_sets", held_sets)
            monkeypatch.setattr("engine.upkeep.gc.reached", reached)
            assert (await gc(asker))["freed_chunks"] == 0
            assert (await gc(asker))["freed_chunks"] == 1

    run(main)


def test_a_session_is_open_until_it_is_ended_by_anybody() -> None:
    references, client, _ = connected()
    session = references.begin_session(client)
    assert references.is_open(session)
    references.end_session(session.identifier)
    assert not references.is_open(session)


def test_a_session_that_holds_nothing_ends_with_its_last_connection() -> None:
    references, client, _ = connected()
    other = references.connect("other", descriptors=False, trusted=True)
    mine, shared, full = (references.begin_session(client).identifier for _ in range(3))
    references.join_session(other, shared)
    references.hold(references.join_session(other, full), Birth(7))
    references.disconnect(client)
    with pytest.raises(SessionLost):
        references.join_session(other, mine)
    assert references.statistics()["sessions"] == 2
    references.disconnect(other)
    assert references.statistics()["sessions"] == 1
    third = references.connect("third", descriptors=False, trusted=True)
    references.join_session(third, full)
    with pytest.raises(SessionLost):
        references.join_session(third, shared)


def test_a_joined_session_lingers_anew_when_that_connection_ends() -> None:
    references, client, clock = connected()
    session = references.begin_session(client)
    references.hold(session, Birth(7))
    references.disconnect(client)
    clock.now = SESSION_LINGER_S - 1
    other = references.connect("other", descriptors=False, trusted=True)
    references.join_session(other, session.identifier)
    clock.now += 2 * SESSION_LINGER_S
    assert references.expire() == 0
    references.disconnect(other)
    clock.now += SESSION_LINGER_S - 1
    assert references.expire() == 0
    clock.now += 1
    assert references.expire() == 1
    assert references.statistics()["sessions"] == 0


def test_of_one_connection_the_sessions_that_it_used_last_linger() -> None:
    references, client, _ = connected()
    sessions = [references.begin_session(client) for _ in range(SESSIONS_LINGERING_MAX + 20)]
    for number, session in enumerate(sessions):
        if number % 10:
            references.hold(session, Birth(number + 1))
    references.disconnect(client)
    left = [session for number, session in enumerate(sessions) if number % 10][-SESSIONS_LINGERING_MAX:]
    assert [session for session in sessions if references.is_open(session)] == left


def test_sessions_of_one_connection_are_bounded_and_those_that_ended_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.sessions.references.SESSIONS_PER_CONNECTION_MAX", 3)
    references, client, _ = connected()
    other = references.connect("other", descriptors=False, trusted=True)
    for _ in range(5):  # what another connection ends is no session of this one any more
        references.end_session(references.begin_session(client).identifier)
    opened = [references.begin_session(client).identifier for _ in range(3)]
    with pytest.raises(EngineBusy, match="3 puts are in progress on this connection"):
        references.begin_session(client)
    references.begin_session(other)
    references.end_session(opened[0])
    references.begin_session(client)


def test_one_user_leaves_sessions_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sessions.references.SESSIONS_MAX", 16)
    references, _, clock = connected()

    def of_user(uid: int | None) -> Client:
        return references.connect("test", descriptors=False, trusted=True, uid=uid)

    greedy = [of_user(4711), of_user(4711)]
    for number in range(4):
        references.hold(references.begin_session(greedy[number % 2]), Birth(number + 1))
    for client in greedy:
        with pytest.raises(EngineBusy, match="4 puts in progress already, of user 4711"):
            references.begin_session(client)
        references.disconnect(client)
    with pytest.raises(EngineBusy):  # lingering sessions still count
        references.begin_session(of_user(4711))
    for uid in (0, os.geteuid(), None, 4712):
        references.begin_session(of_user(uid))
    clock.now = SESSION_LINGER_S
    references.begin_session(of_user(4711))


def test_a_put_that_gets_no_session_fails_with_the_reason_and_works_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(CHUNK_BYTES + 1)
    with open_lake(tmp_path / "store") as lake:
        with monkeypatch.context() as full:
            full.setattr("engine.sessions.references.SESSIONS_PER_CONNECTION_MAX", 0)
            with pytest.raises(EngineBusy, match=r"0 puts are in progress on this connection.*try again") as told:
                lake.put("bkt/k", content, create_bucket=True)
            assert told.value.retryable
            lake.put("bkt/small", b"needs no session", create_bucket=True)
        lake.put("bkt/k", content, create_bucket=True)
        assert lake.get("bkt/k") == content


def test_leases_of_all_connections_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sessions.references.LEASES_MAX", 12)
    references, first, _ = connected()
    second = references.connect("test", descriptors=False, trusted=True)
    another = references.connect("test", descriptors=False, trusted=True, uid=4711)
    held = [references.lease(first, EMPTY_BLOB), references.lease(first, EMPTY_BLOB)]
    references.lease(second, EMPTY_BLOB)
    with pytest.raises(EngineBusy, match="3 open objects already, of all clients over TCP"):
        references.lease(second, EMPTY_BLOB)
    references.lease(another, EMPTY_BLOB)
    references.disconnect(another)
    references.end_leases(second, held)
    assert references.statistics()["leases"] == 3
    references.end_leases(first, [held[0], held[0], 1])
    references.lease(second, EMPTY_BLOB)
    references.disconnect(second)
    assert references.statistics()["leases"] == 1
    references.disconnect(first)
    assert references.statistics()["leases"] == 0
    assert list(references.leased_blobs()) == []


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
