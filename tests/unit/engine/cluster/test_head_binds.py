"""A head binds a name only to what members answered as stored, in a generation and epoch that names accept."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from engine.process.embedded import EmbeddedEngine
from lakefs.content.manifest import CutKind, build
from lakefs.errors import (
    ChunkNotFound,
    ClusterDegraded,
    EngineBusy,
    EngineUnreachable,
    InvalidArgument,
    KeyNotFound,
    LakeError,
    SessionLost,
    StoreFull,
)
from lakefs.ids import ChunkId, GcGeneration, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body
from tests.head_rig import Lake, commit, exists, lake_of, store_blob, with_lake
from tests.store_rig import ask, change, good, put, read, run, session_of, store_chunks

LONG: Final = bytes(range(251)) * 500
SHORT: Final = b"short"


# --- only what was answered -----------------------------------------------------------------------------


def test_what_was_stored_in_the_session_is_bound_without_asking_again() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        stat = await commit(client, session, "k", blob)
        assert (stat.size_bytes, stat.chunk_count) == (len(LONG) + len(SHORT), 2)
        assert lake.stripes.offered == []

    with_lake(body)


def test_what_members_do_not_have_is_bound_to_no_name() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        missing = data_chunk_id(b"nobody has stored this")
        for blob in (missing, b"\2" + bytes(32)):
            with pytest.raises(ChunkNotFound):
                await commit(client, session, "k", blob)
        assert not await exists(client, "k")

    with_lake(body)


def test_a_manifest_is_bound_only_with_all_of_its_chunks_and_their_lengths() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        for pieces, error in (
            ([(ChunkId(chunk), len(LONG)), (data_chunk_id(b"missing"), 7)], ChunkNotFound),
            ([(ChunkId(chunk), len(LONG)), (ChunkId(chunk), len(LONG) - 1)], InvalidArgument),
        ):
            tree = build(CutKind.PARTS, pieces)
            await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
            with pytest.raises(error):
                await commit(client, session, "k", tree.blob)
        assert not await exists(client, "k")

    with_lake(body)


def test_chunks_of_another_session_are_offered_before_they_are_bound() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        blob = await store_blob(client, await session_of(client), LONG, SHORT)
        lake.known.generation = GcGeneration(2)
        await commit(client, await session_of(client), "k", blob)
        asked = {chunk for generation, chunks in lake.stripes.offered for chunk in chunks if generation == 2}
        assert asked == {blob, data_chunk_id(LONG), data_chunk_id(SHORT)}
        assert {lake.stripes.touched[chunk] for chunk in asked} == {2}

    with_lake(body)


def test_each_change_of_a_commit_fails_by_itself() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [SHORT])
        changes = [
            change("a", chunk),
            change("b", data_chunk_id(b"missing")),
            change("c", b"no id"),
            change("d", chunk),
        ]
        answer = await ask(client, m.Commit(session, changes, end_session=True), m.NameResults)
        failures = [result.failure and type(result.failure.as_error()) for result in answer.results]
        assert failures == [None, ChunkNotFound, InvalidArgument, None]
        stats = [result.stat for result in answer.results]
        assert [stat and stat.key for stat in stats] == ["a", None, None, "d"]
        await commit(client, session, "e", chunk)  # not all were bound: the session goes on

    with_lake(body)


# --- failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ClusterDegraded("two members are away"), StoreFull("no member has room")])
def test_what_members_refuse_is_held_by_no_session_and_bound_to_no_name(error: LakeError) -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        lake.stripes.store_error = error
        for request, payload in (
            (m.StoreChunks(session, [1], [len(LONG)]), LONG),
            (m.PutObjects([len(SHORT)], [change("k")]), SHORT),
        ):
            with pytest.raises(type(error), match=error.message):
                await client.call(request, [payload])
        with pytest.raises(type(error)):
            await client.call(m.Offer(session, [data_chunk_id(LONG)]))
        lake.stripes.store_error = None
        with pytest.raises(ChunkNotFound):
            await commit(client, session, "k", data_chunk_id(LONG))
        assert not await exists(client, "k")
        assert lake.head.parts.chunks.answers == 0

    with_lake(body)


def test_a_renewal_that_members_refuse_binds_nothing_and_may_be_repeated() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        lake.advance(5)
        lake.stripes.store_error = ClusterDegraded("two members are away")
        with pytest.raises(ClusterDegraded):
            await commit(client, session, "k", chunk)
        assert not await exists(client, "k")
        lake.stripes.store_error = None
        await commit(client, session, "k", chunk)
        assert await read(client, chunk) == LONG

    with_lake(body)


def test_a_put_that_is_cancelled_while_it_is_stored_binds_nothing() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        lake.stripes.gate = trio.Event()
        with trio.move_on_after(1):
            await put(client, "k", LONG)
        with trio.move_on_after(1):
            await store_chunks(client, await session_of(client), [LONG])
        lake.stripes.gate = None
        assert not await exists(client, "k")
        assert lake.head.parts.chunks.answers == 0
        assert lake.head.parts.buffers.in_use == 0
        await put(client, "k", LONG)

    with_lake(body)


def test_a_session_that_ends_while_a_commit_of_it_waits_binds_nothing() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        blob = await store_blob(client, await session_of(client), LONG, SHORT)
        session = await session_of(client)
        offer = lake.stripes.offer

        async def offered(*args: object) -> list[int]:
            await ask(client, m.SessionEnd(session), m.Done)
            return await offer(*args)  # type: ignore[arg-type]

        lake.stripes.offer = offered  # type: ignore[method-assign, assignment]
        with pytest.raises((SessionLost, ChunkNotFound)):
            await commit(client, session, "k", blob)
        assert not await exists(client, "k")

    with_lake(body)


def test_of_a_commit_whose_session_ends_meanwhile_not_even_what_was_held_is_bound() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        lake.head.parts.manifests._cache.clear()
        read_now = lake.stripes.read

        async def reads(*args: object) -> object:
            await ask(client, m.SessionEnd(session), m.Done)
            return await read_now(*args)  # type: ignore[arg-type]

        lake.stripes.read = reads  # type: ignore[method-assign, assignment]
        changes = [change("one", data_chunk_id(LONG)), change("two", blob)]
        with pytest.raises(SessionLost):
            await client.call(m.Commit(session, changes))
        assert not await exists(client, "one")

    with_lake(body)


def test_answers_of_sessions_are_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.head.head_chunks.HEAD_ANSWERS_MAX", 4)

    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        await store_chunks(client, session, [b"1", b"2", b"3", b"1"])
        with pytest.raises(EngineBusy, match="chunks of puts in progress"):
            await store_chunks(client, session, [b"4"])
        assert lake.head.parts.chunks.answers == 3
        lake.advance(5)
        await commit(client, session, "k", data_chunk_id(b"2"), end=False)
        assert lake.head.parts.chunks.answers == 3
        await ask(client, m.SessionEnd(session), m.Done)
        assert lake.head.parts.chunks.answers == 0
        await store_chunks(client, await session_of(client), [b"4"])

    with_lake(body)


def test_names_that_are_lost_end_what_they_kept_for_a_client() -> None:
    async def main() -> None:
        async with lake_of() as lake:
            ended: list[str] = []
            client = lake.head.connected("one", descriptors=False, trusted=True, end=lambda: ended.append("one"))
            other = lake.client()
            await put(other, "k", SHORT)
            opened = await lake.head.serve(client, m.OpenObjects([("bkt", "k")], inline_bytes=0), Body(), ())
            assert isinstance(opened.message, m.OpenResults)
            statistics = lake.names.store.references.statistics
            assert statistics() == {"connections": 3, "sessions": 0, "leases": 1}  # one is the head's own
            lake.names.lose()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == ["one"]
            assert statistics() == {"connections": 0, "sessions": 0, "leases": 0}
            with pytest.raises(EngineUnreachable, match="names of this lake"):
                await lake.head.serve(client, m.StatNames([("bkt", "k")]), Body(), ())
            await lake.head.disconnected(client)
            await other.aclose()
            anew = lake.client()
            assert await read(anew, data_chunk_id(SHORT)) == SHORT
            with pytest.raises(KeyNotFound):
                good(await ask(anew, m.StatNames([("bkt", "none")]), m.NameResults))
            await anew.aclose()

    run(main)
