"""Requests that store chunks: sessions, offers, payloads in bodies and from descriptors; on every kind of client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import trio

from lakefs.errors import EngineBusy, InvalidArgument, LakeError, RequestTooLarge, SessionLost, SourceChanged
from lakefs.host.descriptors import close_all
from lakefs.ids import EMPTY_CHUNK, data_chunk_id, manifest_chunk_id
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES, SESSION_LINGER_S, SOURCES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.collecting import collected
from tests.contract.engines import Engine, Kind
from tests.store_rig import ask, change, good, put, read, session_of, store_chunks

LARGE = bytes(range(251)) * 1200
NO_SESSION = bytes(16)


async def refused(
    client: EngineClient,
    error: type[LakeError],
    request: m.Request,
    body: Sequence[bytes] = (),
    descriptors: Sequence[int] = (),
) -> LakeError:
    """Send a request that must fail; return its error, which must have a message."""
    with pytest.raises(error) as raised:
        await client.call(request, body, descriptors)
    assert raised.value.message
    return raised.value


# --- sessions ------------------------------------------------------------------------------------------


def test_a_session_is_of_its_client_and_ends_when_told(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        session = await session_of(engine.client)
        assert len(session) == 16
        assert await session_of(engine.client) != session
        async with engine.connect() as other:
            await ask(other, m.SessionJoin(session), m.Done)
            await store_chunks(other, session, [b"stored by another connection"])
        await ask(engine.client, m.SessionEnd(session), m.Done)
        await ask(engine.client, m.SessionEnd(session), m.Done)
        for request in (m.SessionJoin(session), m.Offer(session, []), m.Commit(session, [])):
            await refused(engine.client, SessionLost, request)
        await refused(engine.client, SessionLost, m.StoreChunks(session, [1], [3]), [b"abc"])

    kind.run(body)


@pytest.mark.parametrize("session", [b"", NO_SESSION, b"x" * 100])
def test_an_unknown_session_is_lost(kind: Kind, session: bytes) -> None:
    async def body(engine: Engine) -> None:
        await refused(engine.client, SessionLost, m.SessionJoin(session))
        await ask(engine.client, m.SessionEnd(session), m.Done)

    kind.run(body)


def test_there_is_one_domain(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        for domain in (1, -1, 1 << 40):
            await refused(engine.client, InvalidArgument, m.SessionOpen(domain))

    kind.run(body)


def test_a_session_expires_a_minute_after_its_last_connection(kind: Kind) -> None:
    if not kind.simulated:
        pytest.skip("time is real here")

    async def body(engine: Engine) -> None:
        async with engine.connect() as first:
            session = await session_of(first)
            await store_chunks(first, session, [b"held"])
        await trio.sleep(SESSION_LINGER_S - 1)
        async with engine.connect() as second:
            await ask(second, m.SessionJoin(session), m.Done)
            await trio.sleep(2 * SESSION_LINGER_S)
            await ask(second, m.SessionJoin(session), m.Done)
        await trio.sleep(SESSION_LINGER_S + 1)
        await refused(engine.client, SessionLost, m.SessionJoin(session))

    kind.run(body)


def test_a_session_that_holds_nothing_ends_with_its_connection(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return  # this kind has only one connection
        async with engine.connect() as first:
            session = await session_of(first)
        with trio.fail_after(10):
            while engine.store.references.statistics()["sessions"]:
                await trio.lowlevel.checkpoint()
        await refused(engine.client, SessionLost, m.SessionJoin(session))

    kind.run(body)


# --- payloads in bodies --------------------------------------------------------------------------------


def test_chunks_are_named_by_the_engine_and_new_only_once(kind: Kind) -> None:
    payloads = [b"a", b"b" * 65_535, b"c" * 65_536, LARGE, b"d" * CHUNK_BYTES, b"a"]

    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        request = m.StoreChunks(session, [1] * 6, [len(payload) for payload in payloads])
        stored = await ask(client, request, m.Stored, *payloads)
        assert stored.chunks == [data_chunk_id(payload) for payload in payloads]
        assert stored.fresh == [True] * 5 + [False]
        again = await ask(client, request, m.Stored, *payloads)
        assert again == m.Stored(stored.chunks, [False] * 6)
        for payload in payloads:
            assert await read(client, data_chunk_id(payload)) == payload

    kind.run(body)


def test_a_manifest_has_an_id_of_its_own_kind(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        session = await session_of(engine.client)
        request = m.StoreChunks(session, [1, 2], [5, 5])
        stored = await ask(engine.client, request, m.Stored, b"equal", b"equal")
        assert stored.chunks == [data_chunk_id(b"equal"), manifest_chunk_id(b"equal")]
        assert stored.fresh == [True, True]

    kind.run(body)


def test_payloads_that_break_a_bound_are_refused_and_the_connection_serves_on(kind: Kind) -> None:
    too_much = [b"x" * CHUNK_BYTES] * (BODY_BYTES_MAX // CHUNK_BYTES) + [b"x"]

    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)

        def store(kinds: list[int], lengths: list[int]) -> m.StoreChunks:
            return m.StoreChunks(session, kinds, lengths)

        await refused(client, InvalidArgument, store([1], [0]))
        await refused(client, InvalidArgument, store([1, 1], [-1, 4]), [b"abc"])
        await refused(client, InvalidArgument, store([1], [CHUNK_BYTES + 1]), [b"x" * (CHUNK_BYTES + 1)])
        await refused(client, InvalidArgument, store([1, 1], [3]), [b"abc"])
        await refused(client, InvalidArgument, store([], [3]), [b"abc"])
        await refused(client, InvalidArgument, store([3], [3]), [b"abc"])
        await refused(client, InvalidArgument, store([0, 1], [3, 70_000]), [b"abc", b"x" * 70_000])
        await refused(client, InvalidArgument, store([1], [4]), [b"abc"])
        await refused(client, RequestTooLarge, store([1] * len(too_much), [len(part) for part in too_much]), too_much)
        many = BATCH_MAX + 1
        await refused(client, RequestTooLarge, store([1] * many, [1] * many), [b"x" * many])
        assert await store_chunks(client, session, [b"served"]) == [data_chunk_id(b"served")]
        assert (await ask(client, m.StoreChunks(session, [], []), m.Stored)) == m.Stored([], [])

    kind.run(body)


def test_the_same_payload_stored_by_many_at_once_is_stored_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        fresh: list[bool] = []

        async def store(payload: bytes) -> None:
            request = m.StoreChunks(session, [1], [len(payload)])
            stored = await ask(client, request, m.Stored, payload)
            assert stored.chunks == [data_chunk_id(payload)]
            fresh.extend(stored.fresh)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(store, LARGE)
                nursery.start_soon(store, b"small")
        assert sum(fresh) == 2

    kind.run(body)


# --- offers --------------------------------------------------------------------------------------------


def test_an_offer_says_what_is_there_and_creates_nothing(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", LARGE)
        session = await session_of(client)
        asked = [data_chunk_id(LARGE), data_chunk_id(b"not there"), bytes(EMPTY_CHUNK), data_chunk_id(LARGE)]
        offered = await ask(client, m.Offer(session, asked), m.Offered)
        assert offered.present == [True, False, True, True]
        assert (await ask(client, m.Offer(session, asked[1:2]), m.Offered)).present == [False]
        assert (await ask(client, m.Offer(session, []), m.Offered)).present == []

    kind.run(body)


@pytest.mark.parametrize("identifier", [b"", b"\x01", b"\x03" + bytes(32), b"\x01" + bytes(33), bytes(33)])
def test_malformed_ids_are_refused_wherever_they_are_taken(kind: Kind, identifier: bytes) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        for request in (m.Offer(session, [identifier]), m.Locate([identifier]), m.ReadChunks([identifier], [0], [0])):
            await refused(client, InvalidArgument, request)
        (result,) = (await ask(client, m.Commit(session, [change("k", identifier)]), m.NameResults)).results
        assert result.failure is not None
        assert result.failure.wire_code == InvalidArgument.wire_code

    kind.run(body)


def test_batches_are_bounded(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        chunks = [bytes(data_chunk_id(b"x"))] * (BATCH_MAX + 1)
        names = [("bkt", "k")] * (BATCH_MAX + 1)
        for request in (
            m.Offer(session, chunks),
            m.Locate(chunks),
            m.ReadChunks(chunks, [0] * len(chunks), [0] * len(chunks)),
            m.StatNames(names),
            m.OpenObjects(names),
            m.DeleteNames(names[:1001]),
            m.OpenSegments([1] * 65),
            m.Commit(session, [change("k", chunks[0])] * (BATCH_MAX + 1)),
        ):
            if isinstance(request, m.OpenSegments) and not client.carries_descriptors:
                continue
            await refused(client, RequestTooLarge, request)
        assert len((await ask(client, m.Locate(chunks[1:]), m.Located)).grants) == BATCH_MAX

    kind.run(body)


# --- sources -------------------------------------------------------------------------------------------


@contextmanager
def file_of(engine: Engine, content: bytes, flags: int = os.O_RDONLY) -> Iterator[int]:
    path = engine.folder / "source"
    path.write_bytes(content)
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def source_of(client: EngineClient, descriptor: int) -> int:
    reply = await client.call(m.SourceOpen(), (), [descriptor])
    assert isinstance(reply.message, m.SourceOpened)
    return reply.message.source


def test_the_engine_reads_a_file_that_it_was_handed(kind: Kind) -> None:
    content = LARGE * 3 + b"tail"

    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            with file_of(engine, content) as descriptor:
                await refused(client, InvalidArgument, m.SourceOpen(), (), [descriptor])
            return
        session = await session_of(client)
        with file_of(engine, content) as descriptor:
            source = await source_of(client, descriptor)
        offsets, lengths = [0, 100_000, len(content) - 4], [100_000, len(content) - 100_004, 4]
        request = m.StoreFromSource(session, source, offsets, lengths)
        stored = await ask(client, request, m.Stored)
        pieces = [content[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
        assert stored == m.Stored([data_chunk_id(piece) for piece in pieces], [True] * 3)
        await ask(client, m.SourceClose(source), m.Done)
        await ask(client, m.SourceClose(source), m.Done)
        await refused(client, InvalidArgument, request)

    kind.run(body)


def test_a_source_that_is_too_short_stores_nothing(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        session = await session_of(client)
        with file_of(engine, LARGE) as descriptor:
            source = await source_of(client, descriptor)
            for offset, length in ((0, len(LARGE) + 1), (len(LARGE), 1), (1 << 50, 10)):
                request = m.StoreFromSource(session, source, [0, offset], [10, length])
                await refused(client, SourceChanged, request)
        offered = await ask(client, m.Offer(session, [data_chunk_id(LARGE[:10])]), m.Offered)
        assert offered.present == [False]

    kind.run(body)


def test_places_in_a_source_that_cannot_be_are_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        session = await session_of(client)
        with file_of(engine, LARGE) as descriptor:
            source = await source_of(client, descriptor)
            for offsets, lengths in (
                ([0], []),
                ([0], [0]),
                ([0], [CHUNK_BYTES + 1]),
                ([0], [-1]),
                ([-1], [10]),
                ([1 << 63], [10]),
            ):
                await refused(client, InvalidArgument, m.StoreFromSource(session, source, offsets, lengths))
            await refused(client, InvalidArgument, m.StoreFromSource(session, 4711, [0], [1]))
            await refused(client, SessionLost, m.StoreFromSource(NO_SESSION, source, [0], [1]))

    kind.run(body)


def test_only_regular_files_that_can_be_read_are_taken(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        receiver, sender = os.pipe()
        folder = os.open(engine.folder, os.O_RDONLY)
        foreign = os.open("/proc/self/status", os.O_RDONLY)
        try:
            for descriptor in (receiver, sender, folder, foreign):
                await refused(client, InvalidArgument, m.SourceOpen(), (), [descriptor])
            with file_of(engine, b"write-only", os.O_WRONLY) as descriptor:
                await refused(client, InvalidArgument, m.SourceOpen(), (), [descriptor])
            await refused(client, InvalidArgument, m.SourceOpen())
            await refused(client, InvalidArgument, m.SourceOpen(), (), [foreign, foreign])
            await refused(client, InvalidArgument, m.Ping(), (), [foreign])
        finally:
            close_all([receiver, sender, folder, foreign])

    kind.run(body)


def test_the_sources_of_a_connection_are_bounded_also_when_opened_at_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        opened: list[int] = []
        refusals: list[LakeError] = []
        with file_of(engine, b"content") as descriptor:

            async def open_one() -> None:
                try:
                    opened.append(await source_of(client, descriptor))
                except EngineBusy as error:
                    refusals.append(error)

            async with trio.open_nursery() as nursery:
                for _ in range(SOURCES_PER_CONNECTION_MAX + 10):
                    nursery.start_soon(open_one)
            assert (len(opened), len(refusals)) == (SOURCES_PER_CONNECTION_MAX, 10)
            assert len(set(opened)) == len(opened)
            await ask(client, m.SourceClose(opened[0]), m.Done)
            await source_of(client, descriptor)

    kind.run(body)


# --- commits -------------------------------------------------------------------------------------------


def test_a_commit_binds_names_and_ends_its_session_when_all_are_bound(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LARGE])
        commit = m.Commit(session, [change("one", chunk), change("two", EMPTY_CHUNK)], end_session=True)
        one, two = good(await ask(client, commit, m.NameResults))
        assert (one.key, one.size_bytes, one.blob) == ("one", len(LARGE), chunk)
        assert (two.size_bytes, two.etag) == (0, "d41d8cd98f00b204e9800998ecf8427e")
        await refused(client, SessionLost, m.SessionJoin(session))
        assert (await collected(engine, client))["freed_chunks"] == 0

    kind.run(body)


def test_a_commit_in_which_a_name_failed_keeps_the_session_for_another_try(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [LARGE])
        missing = data_chunk_id(b"never stored")
        changes = [change("good", chunk), change("bad", missing), change("", chunk)]
        results = (await ask(client, m.Commit(session, changes, end_session=True), m.NameResults)).results
        assert [result.failure is None for result in results] == [True, False, False]
        await store_chunks(client, session, [b"never stored"])
        commit = m.Commit(session, [change("bad", missing)], end_session=True)
        good(await ask(client, commit, m.NameResults))
        await refused(client, SessionLost, m.SessionJoin(session))

    kind.run(body)
