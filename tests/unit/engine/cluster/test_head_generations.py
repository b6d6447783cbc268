"""Answers that names accept no more, as gc or the ring has gone on: a head asks for new ones, and binds once more."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from engine.head.session_renewal import LOOK_EVERY_S
from engine.process.embedded import EmbeddedEngine
from lakefs.errors import EngineBusy, SessionLost
from lakefs.ids import ChunkId, RingEpoch, data_chunk_id
from lakefs.wire import messages as m
from tests.head_rig import Lake, commit, exists, store_blob, with_lake
from tests.memory_stripes import table_of
from tests.store_rig import PLAIN, ask, change, good, put, session_of, store_chunks

LONG: Final = bytes(range(251)) * 500
SHORT: Final = b"short"


def test_a_commit_of_an_old_generation_is_repeated_in_the_present_one_unseen_by_the_client() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        lake.advance(5)
        assert (await commit(client, session, "k", blob)).size_bytes == len(LONG) + len(SHORT)
        assert {lake.stripes.touched[chunk] for chunk in map(data_chunk_id, (LONG, SHORT))} == {5}
        assert lake.stripes.touched[ChunkId(blob)] == 5

    with_lake(body)


def test_the_generation_before_the_joined_one_is_accepted() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        lake.advance(2)
        await commit(client, session, "k", chunk)
        assert lake.stripes.offered == []

    with_lake(body)


def test_answers_under_a_retired_epoch_are_asked_for_again() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        lake.known.tables = [table_of(2), table_of(1)]
        await store_chunks(client, session, [SHORT])  # the session's answers are as old as its oldest
        lake.names.gate.retire_below(RingEpoch(2))
        await commit(client, session, "k", chunk)
        assert lake.stripes.offered == [(1, [chunk])]

    with_lake(body)


def test_small_objects_of_an_old_generation_are_stored_again_and_told_as_new_once() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        lake.advance(7)
        request = m.PutObjects([5, 5], [change("a"), change("b")])
        results = (await ask(client, request, m.NameResults, SHORT, SHORT)).results
        assert [result.fresh for result in results] == [True, False]
        assert [generation for generation, _ in lake.stripes.stored] == [1, 7]
        await put(client, "c", b"other")
        assert [generation for generation, _ in lake.stripes.stored] == [1, 7, 7], "the head has learned"

    with_lake(body)


def test_a_chunk_that_was_freed_before_its_old_generation_is_renewed_loses_the_session() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        lake.advance(5)
        lake.stripes.free(data_chunk_id(SHORT))
        with pytest.raises(SessionLost, match="offer the chunks again"):
            await commit(client, session, "k", blob)
        assert not await exists(client, "k")
        await store_chunks(client, session, [SHORT])
        assert (await commit(client, session, "k", blob)).chunk_count == 2

    with_lake(body)


def test_a_manifest_that_was_freed_before_its_commit_loses_the_session() -> None:
    """Its client offers everything again then; ChunkNotFound would end the put."""

    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        upload = await ask(client, m.UploadCreate("bkt", "big", PLAIN), m.UploadStat)
        for number, request in enumerate(("commit", "part")):
            session = await session_of(client)
            blob = await store_blob(client, session, LONG, request.encode())
            lake.advance(5 + 4 * number)
            del lake.stripes.chunks[ChunkId(blob)]
            with pytest.raises(SessionLost):
                if request == "commit":
                    await commit(client, session, "k", blob)
                else:
                    part = m.UploadPut(session, "bkt", "big", upload.upload, 1, blob, bytes(16))
                    await ask(client, part, m.PartStat)
            again = await session_of(client)
            assert await store_blob(client, again, LONG, request.encode()) == blob
            await commit(client, again, "k", blob)

    with_lake(body)


def test_parts_and_completions_of_an_old_generation_are_repeated_too() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        upload = await ask(client, m.UploadCreate("bkt", "big", PLAIN), m.UploadStat)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        lake.advance(5)
        part = m.UploadPut(session, "bkt", "big", upload.upload, 1, chunk, b"\1" * 16)
        assert (await ask(client, part, m.PartStat)).size_bytes == len(LONG)
        lake.advance(9)
        complete = m.UploadComplete(session, "bkt", "big", upload.upload, chunk, [1], [b"\1" * 16], end_session=True)
        first = await ask(client, complete, m.NameResults)
        assert good(first)[0].size_bytes == len(LONG)
        assert lake.stripes.touched[ChunkId(chunk)] == 9
        assert await ask(client, complete, m.NameResults) == first, "its session has ended: the first answer again"

    with_lake(body)


def test_chunks_that_are_stored_while_their_session_begins_anew_are_offered_again() -> None:
    """Members answered them in the old generation: their gc may free them before a name refers to them."""

    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        (first,) = await store_chunks(client, session, [LONG])
        lake.stripes.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store_chunks, client, session, [SHORT])
            await trio.testing.wait_all_tasks_blocked()
            lake.advance(5)
            await commit(client, session, "first", first, end=False)
            lake.stripes.gate.set()
        assert lake.stripes.touched[data_chunk_id(SHORT)] == 1
        await commit(client, session, "second", data_chunk_id(SHORT))
        assert lake.stripes.touched[data_chunk_id(SHORT)] == 5

    with_lake(body)


def test_a_commit_whose_session_begins_anew_meanwhile_holds_its_chunks_once_more() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        (other,) = await store_chunks(client, session, [b"other"])
        lake.head.parts.manifests._cache.clear()
        gate, read_now = trio.Event(), lake.stripes.read

        async def reads(*args: object) -> object:
            await gate.wait()
            return await read_now(*args)  # type: ignore[arg-type]

        lake.stripes.read = reads  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit, client, session, "slow", blob)
            await trio.testing.wait_all_tasks_blocked()
            lake.advance(5)
            (stat,) = good(await ask(client, m.Commit(session, [change("quick", other)]), m.NameResults))
            assert stat.size_bytes == 5
            gate.set()
        assert await exists(client, "slow")
        asked = (blob, data_chunk_id(LONG), data_chunk_id(SHORT))
        assert {lake.stripes.touched[ChunkId(chunk)] for chunk in asked} == {5}

    with_lake(body)


def test_a_session_keeps_its_generation_when_the_head_learns_of_a_later_one() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        (chunk,) = await store_chunks(client, await session_of(client), [LONG])
        session = await session_of(client)
        await store_chunks(client, session, [SHORT])
        lake.advance(2, tell_head=True)
        await commit(client, session, "k", chunk)
        assert lake.stripes.offered == [(1, [chunk])]

    with_lake(body)


def test_what_a_put_in_progress_holds_is_touched_in_each_generation_for_as_long_as_it_lasts() -> None:
    """A put of hours would be lost otherwise: gc frees what was not touched in the last two generations."""

    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        session, ended = await session_of(client), await session_of(client)
        blob = await store_blob(client, session, LONG, SHORT)
        (left,) = await store_chunks(client, ended, [b"of a put that ends"])
        for generation in range(2, 9):
            lake.advance(generation, tell_head=True)
            await trio.sleep(LOOK_EVERY_S + 1)
            for chunk in (data_chunk_id(LONG), data_chunk_id(SHORT), ChunkId(blob)):
                assert lake.stripes.touched[chunk] == generation
            if generation == 3:
                await ask(client, m.SessionEnd(ended), m.Done)
        assert lake.stripes.touched[ChunkId(left)] == 3
        offered = len(lake.stripes.offered)
        assert (await commit(client, session, "k", blob)).size_bytes == len(LONG) + len(SHORT)
        assert len(lake.stripes.offered) == offered, "what it holds is current"

    with_lake(body)


def test_names_that_advance_again_and_again_make_the_client_try_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        offer, store = lake.stripes.offer, lake.stripes.store
        generation = 1

        def advance() -> None:
            nonlocal generation
            generation += 5
            lake.advance(generation)

        async def offered(*args: object) -> list[int]:
            found = await offer(*args)  # type: ignore[arg-type]
            advance()
            return found

        async def stored(*args: object) -> list[bool]:
            found = await store(*args)  # type: ignore[arg-type]
            advance()
            return found

        monkeypatch.setattr(lake.stripes, "offer", offered)
        monkeypatch.setattr(lake.stripes, "store", stored)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LONG])
        with pytest.raises(EngineBusy, match="try again"):
            await commit(client, session, "k", chunk)
        with pytest.raises(EngineBusy, match="try again"):
            await put(client, "k", SHORT)
        assert not await exists(client, "k")

    with_lake(body)
