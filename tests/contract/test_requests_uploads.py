"""Requests about multipart uploads; on every kind of client.

Parts here have a few bytes: the least size of a part is tested in `test_lake_uploads`.
"""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from lakefs.content.manifest import CutKind, build
from lakefs.errors import (
    BucketNotFound,
    ChunkNotFound,
    InvalidArgument,
    InvalidName,
    InvalidPart,
    InvalidPartOrder,
    PartTooSmall,
    PreconditionFailed,
    RequestTooLarge,
    SessionLost,
    UploadNotFound,
)
from lakefs.ids import EMPTY_BLOB, ChunkId, data_chunk_id
from lakefs.limits import (
    ATTRIBUTES_BYTES_MAX,
    CHUNK_BYTES,
    PART_BYTES_MIN,
    PART_CHECKSUMS_BYTES_MAX,
    PART_NUMBER_MAX,
    UPLOAD_DETAILS_BYTES_MAX,
)
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.collecting import collected, notes_of
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import stat
from tests.store_rig import PLAIN, ask, delete, fsck, good, put, read, session_of, store_chunks

BIG = b"B" * PART_BYTES_MIN


def md5(payload: bytes) -> bytes:
    return hashlib.md5(payload).digest()


async def begin(client: EngineClient, key: str, *, bucket: str = "bkt") -> m.UploadStat:
    return await ask(client, m.UploadCreate(bucket, key, PLAIN), m.UploadStat)


async def make_bucket(client: EngineClient, name: str = "bkt") -> None:
    await ask(client, m.BucketCreate(name), m.Buckets)


async def blob_of(client: EngineClient, session: bytes, *payloads: bytes) -> bytes:
    """Store payloads as one blob of the session, each cut from its own start in chunks of at most 4 MiB."""
    chunks: list[tuple[ChunkId, int]] = []
    for payload in payloads:
        for start in range(0, len(payload), CHUNK_BYTES):
            piece = payload[start : start + CHUNK_BYTES]
            (chunk,) = await store_chunks(client, session, [piece])
            chunks.append((ChunkId(chunk), len(piece)))
    tree = build(CutKind.PARTS, chunks)
    for _, manifest in tree.manifests:
        await store_chunks(client, session, [manifest], kind=2)
    return tree.blob


def part(upload: m.UploadStat, session: bytes, number: int, blob: bytes, etag: bytes) -> m.UploadPut:
    return m.UploadPut(session, upload.bucket, upload.key, upload.upload, number, blob, etag)


async def put_part(client: EngineClient, upload: m.UploadStat, number: int, payload: bytes) -> m.PartStat:
    session = await session_of(client)
    blob = await blob_of(client, session, payload)
    found = await ask(client, part(upload, session, number, blob, md5(payload)), m.PartStat)
    await ask(client, m.SessionEnd(session), m.Done)
    return found


async def parts(client: EngineClient, upload: m.UploadStat, after: int = 0, limit: int = 1000) -> m.Parts:
    request = m.UploadParts(upload.bucket, upload.key, upload.upload, after, limit)
    return await ask(client, request, m.Parts)


async def completion(
    client: EngineClient, upload: m.UploadStat, payloads: dict[int, bytes], condition: m.Condition = m.NO_CONDITION
) -> m.UploadComplete:
    """Return the request that completes an upload from these parts, in the order of the dictionary."""
    session = await session_of(client)
    blob = await blob_of(client, session, *payloads.values())
    return m.UploadComplete(
        session,
        upload.bucket,
        upload.key,
        upload.upload,
        blob,
        list(payloads),
        [md5(payload) for payload in payloads.values()],
        condition=condition,
        end_session=True,
    )


async def complete(client: EngineClient, upload: m.UploadStat, payloads: dict[int, bytes]) -> m.ObjectStat:
    (found,) = good(await ask(client, await completion(client, upload, payloads), m.NameResults))
    return found


def abort(upload: m.UploadStat) -> m.UploadAbort:
    return m.UploadAbort(upload.bucket, upload.key, upload.upload)


async def uploads(client: EngineClient, request: m.UploadList) -> list[str]:
    return [entry.key for entry in (await ask(client, request, m.Uploads)).entries]


# --- begin, parts, complete ----------------------------------------------------------------------------


def test_an_upload_becomes_the_object_when_it_is_completed_and_not_before(kind: Kind) -> None:
    attributes = m.ObjectAttributes(mode=0o600, content_type="text/x", user_metadata={"a": "b"}, headers={"h": "v"})

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "there", b"the old one")
        request = m.UploadCreate("bkt", "there", attributes, {"algorithm": "CRC32C"})
        upload = await ask(client, request, m.UploadStat)
        assert (upload.bucket, upload.key, len(upload.upload)) == ("bkt", "there", 16)
        assert (upload.details, upload.created_ns > 0) == ({"algorithm": "CRC32C"}, True)
        second = await put_part(client, upload, 20, b"last")
        first = await put_part(client, upload, 3, BIG)
        assert (first.number, first.size_bytes, first.etag) == (3, len(BIG), md5(BIG))
        assert first.mtime_ns > 0
        assert (await stat(client, "there")).blob == data_chunk_id(b"the old one")

        async with engine.connect() as other:
            found = await parts(other, upload)
            assert (found.upload, found.parts, found.next_after) == (upload, [first, second], 0)
            whole = await complete(other, upload, {3: BIG, 20: b"last"})
        etag = hashlib.md5(md5(BIG) + md5(b"last")).hexdigest()
        assert whole == await stat(client, "there")
        assert (whole.size_bytes, whole.etag) == (len(BIG) + 4, f"{etag}-2")
        assert (whole.mode, whole.content_type, whole.user_metadata, whole.headers) == (
            0o600,
            "text/x",
            {"a": "b"},
            {"h": "v"},
        )
        assert whole.mtime_ns >= upload.created_ns
        assert await uploads(client, m.UploadList("bkt")) == []
        await refused(client, UploadNotFound, m.UploadParts("bkt", "there", upload.upload))
        await refused(client, UploadNotFound, abort(upload))
        assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_a_part_that_comes_again_replaces_the_one_before_and_parts_not_listed_are_dropped(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        for number, payload in ((2, b"not this"), (1, b"never listed"), (2, b"this")):
            await put_part(client, upload, number, payload)
        assert [found.etag for found in (await parts(client, upload)).parts] == [md5(b"never listed"), md5(b"this")]
        await collected(engine, client)
        replaced = await completion(client, upload, {2: b"not this"})
        await refused(client, InvalidPart, replaced)
        await ask(client, m.SessionEnd(replaced.session), m.Done)
        whole = await complete(client, upload, {2: b"this"})
        assert (whole.blob, whole.size_bytes) == (data_chunk_id(b"this"), 4)
        await collected(engine, client)
        assert notes_of(await fsck(client)) == 0
        for gone in (b"not this", b"never listed"):
            with pytest.raises(ChunkNotFound):
                await read(client, data_chunk_id(gone))

    kind.run(body)


def test_parts_outlive_their_session_and_gc(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        await put_part(client, upload, 1, BIG)
        await put_part(client, upload, 2, b"tail")
        await collected(engine, client)
        report = await fsck(client)
        assert (report["damage"], notes_of(report)) == (0, 0)
        assert report["checked"]["parts"] == 2
        assert await read(client, data_chunk_id(b"tail")) == b"tail"
        await complete(client, upload, {1: BIG, 2: b"tail"})
        await collected(engine, client)
        assert await read(client, data_chunk_id(b"tail")) == b"tail"

    kind.run(body)


def test_a_layout_is_what_a_part_consists_of(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        for number, payload in ((1, BIG), (2, b"tail"), (3, b"")):
            await put_part(client, upload, number, payload)
        plain = await parts(client, upload)
        assert [found.chunks for found in plain.parts] == [[], [], []]
        found = await ask(client, m.UploadParts(upload.bucket, upload.key, upload.upload, layouts=True), m.Parts)
        ids = [data_chunk_id(BIG[: 4 << 20]), data_chunk_id(BIG[4 << 20 :])]
        assert [(part.chunks, part.lengths) for part in found.parts] == [
            (ids, [4 << 20, 1 << 20]),
            ([data_chunk_id(b"tail")], [4]),
            ([], []),
        ]
        assert found.parts[2].blob == EMPTY_BLOB

    kind.run(body)


def test_an_upload_may_be_of_nothing(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "nothing")
        await put_part(client, upload, 1, b"")
        whole = await complete(client, upload, {1: b""})
        assert (whole.size_bytes, whole.blob) == (0, EMPTY_BLOB)
        assert whole.etag == hashlib.md5(md5(b"")).hexdigest() + "-1"

    kind.run(body)


# --- refusals ------------------------------------------------------------------------------------------


def test_what_cannot_be_completed_says_why_and_the_upload_goes_on(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", b"the old one")
        upload = await begin(client, "k")
        good_parts = {1: BIG, 2: b"tail"}
        for number, payload in {**good_parts, 5: b"five"}.items():
            await put_part(client, upload, number, payload)
        for error, listed in (
            (InvalidPart, {1: BIG, 3: b"tail"}),
            (InvalidPart, {1: BIG, 2: b"another tail"}),
            (InvalidPart, {}),
            (InvalidPartOrder, {2: b"tail", 1: BIG}),
            (PartTooSmall, {1: BIG, 2: b"tail", 5: b"five"}),
        ):
            await refused(client, error, await completion(client, upload, listed))
        twice = await completion(client, upload, {1: BIG})
        await refused(client, InvalidPartOrder, _with(twice, numbers=[1, 1], etags=[md5(BIG)] * 2))
        await refused(client, InvalidArgument, _with(twice, numbers=[1, 2]))
        await refused(client, InvalidArgument, _with(twice, numbers=[2], etags=[md5(b"tail")]))
        many = list(range(1, PART_NUMBER_MAX + 2))
        await refused(client, InvalidArgument, _with(twice, numbers=many, etags=[md5(BIG)] * len(many)))
        absent = m.Condition(absent=True)
        await refused(client, PreconditionFailed, _with(twice, condition=absent))
        await refused(client, SessionLost, _with(twice, session=bytes(16)))
        gone = _with(twice, blob=data_chunk_id(b"never stored"))
        await refused(client, ChunkNotFound, gone)
        huge = {"c": b"x" * PART_CHECKSUMS_BYTES_MAX}
        await refused(client, RequestTooLarge, _with(twice, checksums=huge))
        assert (await stat(client, "k")).blob == data_chunk_id(b"the old one")
        assert len((await parts(client, upload)).parts) == 3
        await complete(client, upload, good_parts)

    kind.run(body)


def _with(request: m.UploadComplete, **fields: object) -> m.UploadComplete:
    return msgspec.structs.replace(request, **fields)


def test_what_is_no_part_is_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"payload"])
        etag = md5(b"payload")
        for number in (0, -1, PART_NUMBER_MAX + 1, 1 << 40):
            await refused(client, InvalidArgument, part(upload, session, number, chunk, etag))
        for bad in (b"", b"x" * 15, b"x" * 17):
            await refused(client, InvalidArgument, part(upload, session, 1, chunk, bad))
        await refused(client, InvalidArgument, part(upload, session, 1, b"no blob", etag))
        missing = data_chunk_id(b"never stored")
        await refused(client, ChunkNotFound, part(upload, session, 1, missing, etag))
        await refused(client, SessionLost, part(upload, bytes(16), 1, chunk, etag))
        huge = m.UploadPut(session, "bkt", "k", upload.upload, 1, chunk, etag, {"c": b"x" * PART_CHECKSUMS_BYTES_MAX})
        await refused(client, RequestTooLarge, huge)
        assert (await parts(client, upload)).parts == []

    kind.run(body)


def test_an_upload_that_makes_no_sense_is_not_begun(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        await refused(client, BucketNotFound, m.UploadCreate("nowhere", "k", PLAIN))
        for key in ("", "x" * 1025, "a\0b"):
            await refused(client, InvalidName, m.UploadCreate("bkt", key, PLAIN))
        await refused(client, InvalidArgument, m.UploadCreate("bkt", "k", m.ObjectAttributes(uid=-1)))
        full = m.ObjectAttributes(user_metadata={"a": "b" * (ATTRIBUTES_BYTES_MAX - 100)})
        await refused(client, RequestTooLarge, m.UploadCreate("bkt", "k", full))
        details = {"a": "b" * UPLOAD_DETAILS_BYTES_MAX}
        await refused(client, RequestTooLarge, m.UploadCreate("bkt", "k", PLAIN, details))
        assert await uploads(client, m.UploadList("bkt")) == []

    kind.run(body)


@pytest.mark.parametrize("upload", [b"", bytes(16), b"x" * 600])
def test_an_unknown_upload_is_not_found(kind: Kind, upload: bytes) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", b"object")
        unknown = m.UploadStat("bkt", "k", upload, 0)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"payload"])
        for request in (
            part(unknown, session, 1, chunk, md5(b"payload")),
            m.UploadParts("bkt", "k", upload),
            m.UploadComplete(session, "bkt", "k", upload, chunk, [1], [md5(b"payload")]),
            m.UploadComplete(session, "bkt", "", upload, chunk, [], []),
            abort(unknown),
        ):
            await refused(client, UploadNotFound, request)
        real = await begin(client, "k")
        for key in ("other", "k/", "", "x" * 5000):
            await refused(client, UploadNotFound, m.UploadAbort("bkt", key, real.upload))
        await refused(client, BucketNotFound, m.UploadAbort("nowhere", "k", real.upload))

    kind.run(body)


# --- twice, and at once --------------------------------------------------------------------------------


def test_a_second_completion_is_answered_as_the_first_while_the_name_has_what_it_got(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        await put_part(client, upload, 1, BIG)
        await put_part(client, upload, 2, b"tail")
        absent = m.Condition(absent=True)
        requests = [
            await completion(client, upload, {1: BIG, 2: b"tail"}, absent),
            await completion(client, upload, {1: BIG, 2: b"tail"}, absent),
            m.UploadComplete(b"", "bkt", "k", upload.upload, b"", [1, 2], [md5(BIG), md5(b"tail")]),
        ]
        answers = [good(await ask(client, request, m.NameResults))[0] for request in requests]
        assert answers[0] == answers[1] == answers[2] == await stat(client, "k")
        await refused(client, UploadNotFound, _with(requests[2], numbers=[1], etags=[md5(BIG)]))
        good(await ask(client, m.Copy("bkt", "k", "bkt", "copy"), m.NameResults))
        copied = m.UploadComplete(b"", "bkt", "copy", upload.upload, b"", [1, 2], requests[2].etags)
        await refused(client, UploadNotFound, copied)
        await put(client, "k", b"somebody else's")
        for request in requests:
            await refused(client, UploadNotFound, request)
        assert (await stat(client, "k")).blob == data_chunk_id(b"somebody else's")
        await delete(client, "k")
        await refused(client, UploadNotFound, requests[2])

    kind.run(body)


def test_an_aborted_upload_leaves_the_object_alone_and_its_parts_go(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        live = await put(client, "k", b"live")
        first, other = await begin(client, "k"), await begin(client, "k")
        for upload in (first, other):
            await put_part(client, upload, 1, b"live")
            await put_part(client, upload, 2, b"part of " + upload.upload)
        late = await completion(client, first, {1: b"live"})
        await ask(client, abort(first), m.Done)
        await refused(client, UploadNotFound, late)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"too late"])
        await refused(client, UploadNotFound, part(first, session, 1, chunk, md5(b"too late")))
        await ask(client, m.SessionEnd(session), m.Done)
        await collected(engine, client)
        assert await stat(client, "k") == live
        assert await read(client, data_chunk_id(b"live")) == b"live"
        assert await read(client, data_chunk_id(b"part of " + other.upload)) == b"part of " + other.upload
        with pytest.raises(ChunkNotFound):
            await read(client, data_chunk_id(b"part of " + first.upload))
        assert len((await parts(client, other)).parts) == 2

    kind.run(body)


def test_an_upload_is_to_a_key_whatever_happens_to_names_and_folders(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "f/there", b"x")
        inside, fresh = await begin(client, "f/new"), await begin(client, "f/g/h")
        for upload in (inside, fresh):
            await put_part(client, upload, 1, b"payload")
        good(await ask(client, m.Rename("bkt", "f/", "bkt", "moved/"), m.NameResults))
        await put(client, "f", b"an object of that name")
        await complete(client, inside, {1: b"payload"})
        await complete(client, fresh, {1: b"payload"})
        listed = await ask(client, m.ListNames("bkt"), m.Listed)
        assert [entry.key for entry in listed.entries] == ["f", "f/g/h", "f/new", "moved/there"]
        folder = await begin(client, "folder/")
        await put_part(client, folder, 1, b"its own content")
        assert (await complete(client, folder, {1: b"its own content"})).kind == 1

    kind.run(body)


def test_the_uploads_of_a_bucket_go_with_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        await put_part(client, upload, 1, b"part of a bucket that goes")
        await ask(client, m.BucketRemove("bkt"), m.Done)
        await refused(client, BucketNotFound, m.UploadParts("bkt", "k", upload.upload))
        await refused(client, BucketNotFound, m.UploadList("bkt"))
        await make_bucket(client)
        assert await uploads(client, m.UploadList("bkt")) == []
        await refused(client, UploadNotFound, m.UploadParts("bkt", "k", upload.upload))
        report = await fsck(client)
        assert (report["damage"], notes_of(report)) == (0, 1)
        assert (await collected(engine, client))["expired_uploads"] == 1
        assert notes_of(await fsck(client)) == 0
        with pytest.raises(ChunkNotFound):
            await read(client, data_chunk_id(b"part of a bucket that goes"))

    kind.run(body)
