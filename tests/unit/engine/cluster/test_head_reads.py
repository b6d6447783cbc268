"""A head reads over members: what they answer is sent, what is damaged names its object, and answers are bounded."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Final

import pytest
import trio

from engine.process.embedded import EmbeddedEngine
from lakefs.content.manifest import CutKind, build
from lakefs.content.verify import granule_crcs
from lakefs.errors import ChunkDamaged, ChunkNotFound, ClusterDegraded, InvalidArgument, RequestTooLarge
from lakefs.host.descriptors import close_all
from lakefs.host.new_memory import new_memory
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import ANSWER_CLIENT_BYTES, BODY_BYTES_MAX, CHUNK_BYTES, GRANULE_BYTES, MIB
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_INLINE, MEDIUM_NONE, MEDIUM_STREAMED
from tests.head_rig import Lake, lake_of
from tests.store_rig import ask, change, good, put, read, run, session_of, store_chunks

LONG: Final = bytes(range(251)) * 1200
SHORT: Final = b"short"
NAMES: Final = [("bkt", "short"), ("bkt", "long"), ("bkt", "other")]


def with_lake(body: Callable[[Lake, EmbeddedEngine], Awaitable[None]], *, descriptors: bool = False) -> None:
    """Run with a lake that has three objects, and a client of its head."""

    async def main() -> None:
        async with lake_of() as lake:
            client = lake.client(descriptors=descriptors)
            for key, content in (("short", SHORT), ("long", LONG), ("other", b"other")):
                await put(client, key, content)
            try:
                await body(lake, client)
            finally:
                await client.aclose()

    run(main)


async def opened(client: EmbeddedEngine, request: m.OpenObjects) -> tuple[list[m.OpenResult], bytes]:
    reply = await client.call(request)
    assert isinstance(reply.message, m.OpenResults)
    content = reply.body.joined()
    reply.body.release()
    return reply.message.results, content


async def pieces(client: EmbeddedEngine, request: m.ReadChunks) -> list[m.ReadPiece]:
    return (await ask(client, request, m.ReadChunksReply)).pieces


def errors_of(found: list[m.ReadPiece]) -> list[type[Exception] | None]:
    return [None if piece.failure is None else type(piece.failure.as_error()) for piece in found]


async def put_blob(client: EmbeddedEngine, key: str, *payloads: bytes) -> bytes:
    session = await session_of(client)
    chunks = await store_chunks(client, session, payloads)
    tree = build(CutKind.FIXED, [(ChunkId(c), len(payload)) for c, payload in zip(chunks, payloads, strict=True)])
    await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
    good(await ask(client, m.Commit(session, [change(key, tree.blob)], end_session=True), m.NameResults))
    return tree.blob


# --- opening --------------------------------------------------------------------------------------------


def test_small_payloads_of_a_request_are_read_together_and_long_ones_are_asked_for() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        results, content = await opened(client, m.OpenObjects(NAMES))
        assert [len(wanted) for wanted in lake.stripes.reads] == [2]
        media = [result.opened and result.opened.grants[0].medium for result in results]
        assert media == [MEDIUM_INLINE, MEDIUM_STREAMED, MEDIUM_INLINE]
        assert content == SHORT + b"other"
        assert await read(client, data_chunk_id(LONG)) == LONG

    with_lake(body)


def test_what_is_damaged_names_its_object_and_leaves_the_others_alone() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        blob = await put_blob(client, "many", LONG, SHORT)
        lake.head.parts.manifests._cache.clear()
        lake.stripes.rotten |= {data_chunk_id(SHORT), data_chunk_id(LONG), ChunkId(blob)}
        results, content = await opened(client, m.OpenObjects([*NAMES, ("bkt", "many")]))
        assert content == b"other"
        for index, name in ((0, "bkt/short"), (3, "bkt/many")):
            failure = results[index].failure
            assert failure is not None
            assert isinstance(failure.as_error(), ChunkDamaged)
            assert (failure.subject, name in failure.message) == (name, True)
        assert lake.names.store.references.statistics()["leases"] == 2, "of what was opened, and no more"
        found = await pieces(client, m.ReadChunks([data_chunk_id(LONG), data_chunk_id(b"other")], [0, 0], [0, 0]))
        assert errors_of(found) == [ChunkDamaged, None]

    with_lake(body)


def test_objects_are_opened_while_too_many_members_are_away_and_reads_say_so() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        lake.stripes.read_error = ClusterDegraded("three members are away")
        results, content = await opened(client, m.OpenObjects(NAMES))
        assert [result.opened and result.opened.grants[0].medium for result in results] == [MEDIUM_STREAMED] * 3
        assert content == b""
        found = await pieces(client, m.ReadChunks([data_chunk_id(SHORT)], [0], [0]))
        assert errors_of(found) == [ClusterDegraded]
        lake.stripes.read_error = None
        assert await read(client, data_chunk_id(SHORT)) == SHORT

    with_lake(body)


def test_leases_that_the_client_does_not_receive_are_ended() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        read_now = lake.stripes.read

        async def waits(*args: object) -> object:
            await trio.sleep(10)
            return await read_now(*args)  # type: ignore[arg-type]

        lake.stripes.read = waits  # type: ignore[method-assign, assignment]
        with trio.move_on_after(1) as scope:
            await opened(client, m.OpenObjects(NAMES))
        assert scope.cancelled_caught
        assert lake.names.store.references.statistics()["leases"] == 0

    with_lake(body)


# --- places and streams ---------------------------------------------------------------------------------


def test_chunks_are_located_by_their_length_whether_or_not_the_head_knows_it() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        asked: list[bytes] = [data_chunk_id(content) for content in (LONG, b"missing", SHORT)]
        for is_known in (True, False):
            if not is_known:
                lake.head.parts.chunks.lengths._lengths.clear()
            grants = (await ask(client, m.Locate(asked), m.Located)).grants
            assert [grant.medium for grant in grants] == [MEDIUM_STREAMED, MEDIUM_NONE, MEDIUM_STREAMED]
            assert [grant.logical_bytes for grant in grants] == [len(LONG), 0, len(SHORT)]
        lake.head.parts.chunks.lengths._lengths.clear()
        lake.stripes.read_error = ClusterDegraded("three members are away")
        with pytest.raises(ClusterDegraded):
            await client.call(m.Locate(asked))

    with_lake(body)


@pytest.mark.parametrize("is_known", [True, False])
def test_ranges_are_streamed_as_whole_granules(is_known: bool) -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        chunk = bytes(data_chunk_id(LONG))
        if not is_known:
            lake.head.parts.chunks.lengths._lengths.clear()
        ranges = [
            (0, 0),
            (10, 20),
            (GRANULE_BYTES - 1, 2),
            (len(LONG) - 1, 0),
            (len(LONG), 0),
            (0, len(LONG) + 1),
            (-1, 5),
        ]
        request = m.ReadChunks([chunk] * 7, [offset for offset, _ in ranges], [length for _, length in ranges])
        reply = await client.call(request)
        assert isinstance(reply.message, m.ReadChunksReply)
        content, found = reply.body.joined(), reply.message.pieces
        reply.body.release()
        last = len(LONG) // GRANULE_BYTES * GRANULE_BYTES
        places = [(0, len(LONG)), (0, GRANULE_BYTES), (0, 2 * GRANULE_BYTES), (last, len(LONG) - last)]
        assert [(piece.offset, piece.length) for piece in found[:4]] == places
        assert errors_of(found) == [None] * 4 + [InvalidArgument] * 3
        at = 0
        for piece in found[:4]:
            assert content[at : at + piece.length] == LONG[piece.offset : piece.offset + piece.length]
            assert piece.crcs == granule_crcs(content[at : at + piece.length])
            at += piece.length

    with_lake(body)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_answer_holds_what_fits_one_body(is_known: bool) -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        contents = [bytes([index]) * CHUNK_BYTES for index in range(5)]
        for index, content in enumerate(contents):
            await put(client, f"{index}", content)
        if not is_known:
            lake.head.parts.chunks.lengths._lengths.clear()
        asked: list[bytes] = [data_chunk_id(content) for content in [*contents, SHORT]]
        found = await pieces(client, m.ReadChunks(asked, [0] * 6, [0] * 6))
        assert sum(piece.length for piece in found) == BODY_BYTES_MAX
        assert errors_of(found) == [None] * 4 + [RequestTooLarge] * 2
        if not is_known:
            lake.head.parts.chunks.lengths._lengths.clear()
        few = await pieces(client, m.ReadChunks([asked[5], *asked[:4]], [0] * 5, [0] * 5))
        assert errors_of(few) == [None] * 4 + [RequestTooLarge]

    with_lake(body)


def test_a_client_that_does_not_take_its_answers_waits_for_the_next() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        for index in range(2):
            await put(client, f"{index}", bytes([index]) * CHUNK_BYTES)
        request = m.ReadChunks([data_chunk_id(bytes([index]) * CHUNK_BYTES) for index in range(2)], [0, 0], [0, 0])
        first = await client.call(request)
        assert lake.head.parts.answers.held_bytes == ANSWER_CLIENT_BYTES
        with trio.move_on_after(1) as scope:
            await client.call(request)
        assert scope.cancelled_caught
        first.body.release()
        assert (await pieces(client, request))[1].length == CHUNK_BYTES

    with_lake(body)


# --- loads ----------------------------------------------------------------------------------------------


def test_slots_are_loaded_with_checked_bytes_or_fail_by_themselves() -> None:
    async def body(lake: Lake, client: EmbeddedEngine) -> None:
        descriptor = new_memory(MIB)
        try:
            reply = await client.call(m.LendMemory(MIB, True), descriptors=[descriptor])
            assert isinstance(reply.message, m.MemoryLent)
            lake.stripes.rotten.add(data_chunk_id(b"other"))
            contents = (LONG, SHORT, b"other", b"missing", b"", SHORT)
            asked: list[bytes] = [data_chunk_id(content) for content in contents]
            offsets = [4096, 0, 500_000, 600_000, MIB - 1, 5000]
            loaded = await ask(client, m.LoadSlots(reply.message.memory, asked, offsets), m.SlotsLoaded)
            assert loaded.lengths == [len(LONG), len(SHORT), 0, 0, 0, 0]
            failures = [failure and type(failure.as_error()) for failure in loaded.failures]
            assert failures == [None, None, ChunkDamaged, ChunkNotFound, None, InvalidArgument]
            assert loaded.crcs[0] == granule_crcs(LONG)
            assert os.pread(descriptor, len(LONG), 4096) == LONG
            assert os.pread(descriptor, len(SHORT), 0) == SHORT
            await ask(client, m.ReturnMemory(reply.message.memory), m.Done)
        finally:
            close_all([descriptor])

    with_lake(body, descriptors=True)
