"""Requests that read: open, locate, descriptors, streamed ranges; on every kind of client."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from lakefs.content.manifest import CutKind, build
from lakefs.content.verify import Check, granule_crcs
from lakefs.errors import (
    BucketNotFound,
    ChunkNotFound,
    EngineBusy,
    InvalidArgument,
    InvalidName,
    IsAFolder,
    KeyNotFound,
    PermissionDenied,
    RequestTooLarge,
    from_wire,
)
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import fetch_into
from lakefs.host.descriptors import close_all
from lakefs.ids import EMPTY_BLOB, EMPTY_CHUNK, ChunkId, data_chunk_id
from lakefs.limits import BATCH_MAX, BODY_BYTES_MAX, CHUNK_BYTES, GRANULE_BYTES, LEASES_PER_CONNECTION_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.media import MEDIUM_INLINE, MEDIUM_NONE, MEDIUM_SEGMENT
from tests.contract.collecting import collected
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, change, delete, good, put, read, session_of, store_chunks

SMALL, LARGE = b"small payload", bytes(range(251)) * 1200


@dataclass(frozen=True)
class Read:
    """One answer to OpenObjects."""

    results: list[m.OpenResult]
    body: bytes

    def opened(self, index: int = 0) -> m.OpenedObject:
        opened = self.results[index].opened
        assert opened is not None, self.results[index].failure
        return opened

    def failure(self, index: int = 0) -> type[Exception]:
        failure = self.results[index].failure
        assert failure is not None
        return type(from_wire(failure.wire_code, failure.message))


async def open_them(client: EngineClient, request: m.OpenObjects) -> Read:
    reply = await client.call(request)
    assert isinstance(reply.message, m.OpenResults)
    body = reply.body.joined()
    reply.body.release()
    return Read(reply.message.results, body)


async def put_blob(client: EngineClient, key: str, payloads: list[bytes], repeat: int = 1) -> bytes:
    """Store an object of several chunks; return its blob."""
    session = await session_of(client)
    chunks = await store_chunks(client, session, payloads)
    pieces = [(ChunkId(c), len(payload)) for c, payload in zip(chunks, payloads, strict=True)] * repeat
    tree = build(CutKind.FIXED, pieces)
    await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
    commit = m.Commit(session, [change(key, tree.blob)], end_session=True)
    good(await ask(client, commit, m.NameResults))
    return tree.blob


# --- opening -------------------------------------------------------------------------------------------


def test_an_open_object_comes_with_layout_places_and_small_payloads(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "small", SMALL)
        await put(client, "large", LARGE)
        await put(client, "empty", b"")
        blob = await put_blob(client, "many", [LARGE, SMALL, LARGE])
        names = [("bkt", key) for key in ("small", "large", "empty", "many", "small")]
        read_ = await open_them(client, m.OpenObjects(names))
        small, large, empty, many, again = (read_.opened(index) for index in range(5))
        for opened in (small, again):
            (grant,) = opened.grants
            assert grant.medium == MEDIUM_INLINE
            assert read_.body[grant.offset : grant.offset + grant.logical_bytes] == SMALL
        assert (large.chunks, large.lengths) == ([data_chunk_id(LARGE)], [len(LARGE)])
        assert [(grant.medium, grant.logical_bytes) for grant in large.grants] == [(kind.medium, len(LARGE))]
        assert (empty.chunks, empty.stat.size_bytes, empty.stat.blob) == ([], 0, EMPTY_BLOB)
        assert many.chunks == [data_chunk_id(LARGE), data_chunk_id(SMALL), data_chunk_id(LARGE)]
        assert (many.stat.blob, many.stat.chunk_count, many.lengths) == (blob, 3, [len(LARGE), len(SMALL), len(LARGE)])
        leases = [opened.lease for opened in (small, large, empty, many, again)]
        assert len(set(leases)) == 5
        assert 0 not in leases
        await refused(client, RequestTooLarge, m.CloseLeases([4711] * (LEASES_PER_CONNECTION_MAX + 1)))
        await ask(client, m.CloseLeases([*leases, 4711]), m.Done)

    kind.run(body)


def test_each_name_that_cannot_be_opened_fails_by_itself(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "folder/inside", SMALL)
        await ask(client, m.MakeFolder("bkt", "made/"), m.NameResults)
        names = [("bkt", "folder/inside"), ("bkt", "missing"), ("nowhere", "k"), ("bkt", "folder/"), ("bkt", "")]
        names += [("no bucket!", "k"), ("bkt", "made/"), ("bkt", "x" * 4096)]
        read_ = await open_them(client, m.OpenObjects(names))
        assert read_.opened(0).stat.key == "folder/inside"
        assert read_.opened(6).stat.blob == EMPTY_BLOB
        failures = [read_.failure(index) for index in (1, 2, 3, 4, 5)]
        assert failures == [KeyNotFound, BucketNotFound, IsAFolder, IsAFolder, InvalidName]
        assert issubclass(read_.failure(7), (InvalidName, KeyNotFound))

    kind.run(body)


def test_bounds_that_the_reader_sets_are_kept(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"a" * 100)
        await put(client, "b", b"b" * 100)
        await put_blob(client, "many", [LARGE, SMALL])
        names = [("bkt", key) for key in ("a", "b", "many")]
        for inline_bytes, media in (
            (150, [MEDIUM_INLINE, kind.medium]),
            (0, [kind.medium] * 2),
            (-5, [kind.medium] * 2),
            (1 << 60, [MEDIUM_INLINE] * 2),
        ):
            read_ = await open_them(client, m.OpenObjects(names, layout_max=1, inline_bytes=inline_bytes))
            assert [read_.opened(index).grants[0].medium for index in range(2)] == media
            assert read_.opened(2).chunks == []
            assert read_.opened(2).stat.chunk_count == 2
        unleased = await open_them(client, m.OpenObjects(names, lease=False))
        assert [unleased.opened(index).lease for index in range(3)] == [0, 0, 0]
        for lease_from, held in ((101, [False, False, True]), (100, [True, True, True]), (1 << 60, [False] * 3)):
            read_ = await open_them(client, m.OpenObjects(names, lease_from=lease_from))
            assert [bool(read_.opened(index).lease) for index in range(3)] == held

    kind.run(body)


def test_many_objects_of_many_chunks_are_opened_in_one_request(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put_blob(client, "many", [b"x"], repeat=1000)
        read_ = await open_them(client, m.OpenObjects([("bkt", "many")] * 200))
        layouts = [len(read_.opened(index).chunks) for index in range(200)]
        assert set(layouts) == {0, 1000}, "a layout comes whole, or the reader gets it from the manifest"
        assert layouts[0] == 1000

    kind.run(body)


def test_open_objects_are_bounded_and_closing_makes_room(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    most = BATCH_MAX
    monkeypatch.setattr("engine.sessions.references.LEASES_PER_CONNECTION_MAX", most)

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", SMALL)
        read_ = await open_them(client, m.OpenObjects([("bkt", "k")] * most, inline_bytes=0))
        assert (await open_them(client, m.OpenObjects([("bkt", "k")]))).failure() is EngineBusy
        await ask(client, m.CloseLeases([read_.opened(17).lease]), m.Done)
        assert (await open_them(client, m.OpenObjects([("bkt", "k")]))).opened().lease
        async with engine.connect() as other:
            if other is not client:
                assert (await open_them(other, m.OpenObjects([("bkt", "k")]))).opened().lease

    kind.run(body)


# --- places --------------------------------------------------------------------------------------------


def test_places_are_told_in_order_and_what_is_not_there_has_none(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "small", SMALL)
        await put(client, "large", LARGE)
        asked = [data_chunk_id(SMALL), data_chunk_id(b"missing"), EMPTY_CHUNK, data_chunk_id(LARGE)]
        grants = (await ask(client, m.Locate([bytes(chunk) for chunk in asked]), m.Located)).grants
        assert [grant.medium for grant in grants] == [kind.medium, MEDIUM_NONE, MEDIUM_NONE, kind.medium]
        assert [grant.logical_bytes for grant in grants] == [len(SMALL), 0, 0, len(LARGE)]
        assert (await ask(client, m.Locate([]), m.Located)).grants == []

    kind.run(body)


def test_descriptors_of_segments_read_what_grants_promise(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        for key, payload in (("small", SMALL), ("large", LARGE), ("huge", LARGE[:-1] * 13)):
            await put(client, key, payload)
        chunks = [data_chunk_id(payload) for payload in (SMALL, LARGE, LARGE[:-1] * 13)]
        grants = (await ask(client, m.Locate([bytes(chunk) for chunk in chunks]), m.Located)).grants
        segments = sorted({grant.segment for grant in grants})
        if not client.carries_descriptors:
            await refused(client, PermissionDenied, m.OpenSegments(segments))
            return
        reply = await client.call(m.OpenSegments([4711, *segments, -1, 1 << 62]))
        if kind.refusal:  # a head's are members', and named by what it shares of keys
            assert (reply.message, reply.descriptors) == (m.SegmentsOpened([]), [])
            return
        assert reply.message == m.SegmentsOpened(segments)
        assert len(reply.descriptors) == len(segments) == 2
        held = SegmentDescriptors()
        for segment, descriptor in zip(segments, reply.descriptors, strict=True):
            held.add(m.SegmentsOpened([segment]).segments[0], descriptor)  # type: ignore[arg-type]
        for chunk, grant in zip(chunks, grants, strict=True):
            memory = bytearray(grant.logical_bytes)
            for check in Check:
                fetch_into(held, chunk, grant, memoryview(memory), check)
        with pytest.raises(OSError, match="descriptor"):
            os.pwrite(reply.descriptors[0], b"x", 0)
        held.close()

    kind.run(body)


def test_no_segments_are_no_descriptors(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if not engine.client.carries_descriptors:
            return
        reply = await engine.client.call(m.OpenSegments([]))
        assert reply.message == m.SegmentsOpened([])
        close_all(reply.descriptors)

    kind.run(body)


# --- streamed ranges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 1), (70_000, 0), (GRANULE_BYTES, GRANULE_BYTES), (65_000, 2000), (len(LARGE) - 1, 1)],
)
def test_a_range_comes_widened_to_granules_with_their_checksums(kind: Kind, offset: int, length: int) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "large", LARGE)
        chunk = data_chunk_id(LARGE)
        reply = await client.call(m.ReadChunks([chunk], [offset], [length]))
        payload = reply.body.joined()
        reply.body.release()
        assert isinstance(reply.message, m.ReadChunksReply)
        (piece,) = reply.message.pieces
        assert piece.failure is None
        end = offset + length if length else len(LARGE)
        assert piece.offset % GRANULE_BYTES == 0
        assert piece.offset <= offset < end <= piece.offset + piece.length
        assert piece.offset + GRANULE_BYTES > offset
        assert payload == LARGE[piece.offset : piece.offset + piece.length]
        assert granule_crcs(payload) == piece.crcs

    kind.run(body)


def test_pieces_that_cannot_be_read_fail_by_themselves(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "large", LARGE)
        await put(client, "small", SMALL)
        large, small, gone = data_chunk_id(LARGE), data_chunk_id(SMALL), data_chunk_id(b"gone")
        asked = [
            (small, 0, 0, None),
            (gone, 0, 0, ChunkNotFound),
            (large, len(LARGE), 1, InvalidArgument),
            (large, 10, len(LARGE), InvalidArgument),
            (large, -1, 5, InvalidArgument),
            (large, 5, -1, InvalidArgument),
            (large, 1 << 62, 1 << 62, InvalidArgument),
            (EMPTY_CHUNK, 0, 0, ChunkNotFound),
            (small, 3, 4, None),
        ]
        request = m.ReadChunks(
            [bytes(chunk) for chunk, _, _, _ in asked],
            [offset for _, offset, _, _ in asked],
            [length for _, _, length, _ in asked],
        )
        reply = await client.call(request)
        assert isinstance(reply.message, m.ReadChunksReply)
        assert reply.body.joined() == SMALL * 2
        reply.body.release()
        for piece, (_, _, _, error) in zip(reply.message.pieces, asked, strict=True):
            failure = piece.failure
            assert (None if failure is None else type(from_wire(failure.wire_code, ""))) is error
        await refused(client, InvalidArgument, m.ReadChunks([large], [0, 0], [0]))

    kind.run(body)


def test_a_reply_never_passes_the_greatest_body_however_ranges_are_cut(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        content = b"c" * CHUNK_BYTES
        await put(client, "k", content)
        chunk = data_chunk_id(content)
        count = BODY_BYTES_MAX // CHUNK_BYTES
        for offsets, lengths, good_count in (
            ([0] * (count + 1), [0] * (count + 1), count),
            ([1] * 300, [2 * GRANULE_BYTES] * 300, BODY_BYTES_MAX // (3 * GRANULE_BYTES)),
            ([GRANULE_BYTES - 1] * 200, [2] * 200, BODY_BYTES_MAX // (2 * GRANULE_BYTES)),
            ([0] + [GRANULE_BYTES - 1] * 200, [1] + [2] * 200, BODY_BYTES_MAX // (2 * GRANULE_BYTES)),
        ):
            reply = await client.call(m.ReadChunks([chunk] * len(offsets), offsets, lengths))
            assert isinstance(reply.message, m.ReadChunksReply)
            assert sum(piece.failure is None for piece in reply.message.pieces) == good_count
            assert reply.body.nbytes == sum(piece.length for piece in reply.message.pieces) <= BODY_BYTES_MAX
            reply.body.release()

    kind.run(body)


def test_content_that_was_collected_is_not_there(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", LARGE)
        await put(client, "other", SMALL)
        await delete(client, "k")
        assert (await collected(engine, client))["freed_chunks"] == 1
        with pytest.raises(ChunkNotFound):
            await read(client, data_chunk_id(LARGE))
        if kind.medium == MEDIUM_SEGMENT:  # a stream is found out to be empty when it is read
            located = await ask(client, m.Locate([data_chunk_id(LARGE)]), m.Located)
            assert located.grants[0].medium == MEDIUM_NONE
        assert await read(client, data_chunk_id(SMALL)) == SMALL

    kind.run(body)
