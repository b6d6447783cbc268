"""KeyedCommit while it waits for room: what it refers to stays, or its key fails; a session that ended says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
import trio

from engine.store.store import Store
from lakefs.errors import ERROR_TABLE, ChunkDamaged, ChunkNotFound, SessionLost
from lakefs.ids import ChunkId
from lakefs.limits import CHUNK_BYTES, KEYED_QUOTA_BYTES_MIN
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.test_requests_keyed import space_of, value_of
from tests.store_rig import ask, client_of, fsck, gc, records, run, session_of, simulated_store, store_chunks

VALUE = b"v" * CHUNK_BYTES
CODES = {row.error: row.wire_code for row in ERROR_TABLE}
Meanwhile = Callable[[Store, EngineClient, bytes, ChunkId], Awaitable[None]]


async def commit_beside(meanwhile: Meanwhile) -> m.KeyedOutcomes:
    """Commit a value for which there is no room at first; run `meanwhile`, then make room.  Returns the answer."""
    answers: list[m.KeyedOutcomes] = []
    async with simulated_store() as store:
        client, others = client_of(store), ExitStack()
        space, session = await space_of(client, quota_bytes=KEYED_QUOTA_BYTES_MIN), await session_of(client)
        (chunk,) = await store_chunks(client, session, [VALUE])
        others.enter_context(store.keyed.admitted(space, KEYED_QUOTA_BYTES_MIN))

        async def commit() -> None:
            request = m.KeyedCommit(session, space, [b"k"], [1], [chunk])
            answers.append(await ask(client, request, m.KeyedOutcomes))

        with others:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(commit)
                await trio.sleep(0.3)
                await meanwhile(store, client, session, ChunkId(chunk))
                assert not answers, "it waits for room"
                others.close()
        await ask(client, m.SessionEnd(session), m.Done)
        for _ in range(2):
            await gc(client)
        if answers[0].outcomes == [m.KEYED_STORED]:
            assert await value_of(client, space, b"k") == VALUE
        report = await fsck(client)
        assert not report["damage"], report
    return answers[0]


async def collect(store: Store, client: EngineClient, session: bytes, chunk: ChunkId) -> None:
    for _ in range(2):
        await gc(client)
    assert chunk in records(store)


async def store_anew(store: Store, chunk: ChunkId) -> None:
    """Find a chunk damaged; another client stores it again and ends, so that nobody holds it."""
    await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("planted", subject="x"))
    other = client_of(store)
    session = await session_of(other)
    birth = records(store)[chunk].birth
    await store_chunks(other, session, [VALUE])
    assert records(store)[chunk].birth > birth
    await ask(other, m.SessionEnd(session), m.Done)


async def store_anew_and_collect(store: Store, client: EngineClient, session: bytes, chunk: ChunkId) -> None:
    await store_anew(store, chunk)
    for _ in range(2):
        await gc(client)
    assert chunk not in records(store), "else this test shows nothing"


async def end_session(store: Store, client: EngineClient, session: bytes, chunk: ChunkId) -> None:
    await ask(client, m.SessionEnd(session), m.Done)
    for _ in range(2):
        await gc(client)


def test_chunks_that_the_session_holds_stay_while_a_commit_waits_for_room() -> None:
    async def main() -> None:
        assert await commit_beside(collect) == m.KeyedOutcomes([m.KEYED_STORED])

    run(main)


def test_a_chunk_that_is_gone_when_there_is_room_fails_its_key() -> None:
    async def main() -> None:
        answer = await commit_beside(store_anew_and_collect)
        assert answer.outcomes == [m.KEYED_FAILED]
        (failure,) = answer.failures
        assert failure is not None
        assert failure.wire_code == CODES[ChunkNotFound]

    run(main)


def test_a_chunk_that_was_stored_anew_is_kept_from_a_cycle_of_gc_that_is_marking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: set[int] = set()
    births: list[int] = []

    async def store_anew_beside_gc(store: Store, client: EngineClient, session: bytes, chunk: ChunkId) -> None:
        await store_anew(store, chunk)
        births.append(records(store)[chunk].birth)
        monkeypatch.setattr(store.references, "keep", kept.add)  # as a barrier does

    async def main() -> None:
        assert (await commit_beside(store_anew_beside_gc)).outcomes == [m.KEYED_STORED]
        assert set(births) <= kept

    run(main)


def test_a_session_that_ends_while_its_commit_waits_stores_nothing() -> None:
    async def main() -> None:
        with pytest.raises(SessionLost):
            await commit_beside(end_session)

    run(main)
