"""Requests about names, and the small requests; on every kind of client."""

from __future__ import annotations

import pytest

from lakefs.errors import (
    AlreadyExists,
    BucketNotEmpty,
    BucketNotFound,
    InvalidArgument,
    InvalidName,
    IsAFolder,
    KeyNotFound,
    LakeError,
    NotAFolder,
    PreconditionFailed,
    RequestTooLarge,
    UserError,
    from_wire,
)
from lakefs.ids import EMPTY_BLOB, data_chunk_id
from lakefs.limits import ATTRIBUTES_BYTES_MAX, CHUNK_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.collecting import collected, notes_of
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import PLAIN, ask, change, delete, fsck, good, put, session_of

SMALL = b"small payload"
ABSENT = m.Condition(absent=True)


def kinds_of(results: m.NameResults) -> list[type[LakeError] | None]:
    """Return, for each result, the class of its failure, or None."""
    return [
        None if result.failure is None else type(from_wire(result.failure.wire_code, "")) for result in results.results
    ]


async def stat(client: EngineClient, key: str, *, bucket: str = "bkt") -> m.ObjectStat:
    (found,) = good(await ask(client, m.StatNames([(bucket, key)]), m.NameResults))
    return found


async def keys_of(client: EngineClient, request: m.ListNames) -> list[str]:
    listed = await ask(client, request, m.Listed)
    return [entry.key for entry in listed.entries]


async def buckets_of(client: EngineClient) -> list[str]:
    return [bucket.name for bucket in (await ask(client, m.BucketList(), m.Buckets)).buckets]


# --- binding -------------------------------------------------------------------------------------------


def test_small_objects_are_stored_in_one_request_each_failing_by_itself(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "there", SMALL)
        changes = [
            change("a"),
            change("there", condition=ABSENT),
            change("bad\0key"),
            change(""),
            change("k", bucket="no bucket!"),
            change("k", bucket="missing", create_bucket=False),
            change("empty"),
            change("folder/deep/x"),
        ]
        payloads = [b"%d" % number for number in range(6)] + [b"", b"y" * 70_000]
        request = m.PutObjects([len(payload) for payload in payloads], changes)
        results = await ask(client, request, m.NameResults, *payloads)
        failures = kinds_of(results)
        assert failures[0] is failures[6] is failures[7] is None
        assert failures[1] is PreconditionFailed
        assert failures[2] in (InvalidName, InvalidArgument, None)
        assert [failure and issubclass(failure, UserError) for failure in failures[3:6]] == [True] * 3
        assert failures[5] is BucketNotFound
        assert (await stat(client, "a")).blob == data_chunk_id(b"0")
        assert (await stat(client, "empty")).blob == EMPTY_BLOB
        assert (await stat(client, "there")).blob == data_chunk_id(SMALL)
        assert "missing" not in await buckets_of(client)

    kind.run(body)


def test_requests_that_do_not_fit_together_are_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await refused(client, InvalidArgument, m.PutObjects([1, 1], [change("a")]), [b"xy"])
        await refused(client, InvalidArgument, m.PutObjects([1], []), [b"x"])
        await refused(client, InvalidArgument, m.PutObjects([2], [change("a")]), [b"x"])
        too_long = [CHUNK_BYTES + 1]
        await refused(client, InvalidArgument, m.PutObjects(too_long, [change("a")]), [b"x" * too_long[0]])
        assert await buckets_of(client) == []

    kind.run(body)


@pytest.mark.parametrize("bad", ["key", "condition", "attributes", "chunk"])
def test_a_bucket_is_not_made_for_a_name_that_was_refused(kind: Kind, bad: str) -> None:
    changes = {
        "key": change("x" * 5000, bucket="fresh"),
        "condition": change("k", bucket="fresh", condition=m.Condition(etags=["*"])),
        "attributes": change(
            "k", bucket="fresh", attributes=m.ObjectAttributes(user_metadata={"k": "v" * ATTRIBUTES_BYTES_MAX})
        ),
        "chunk": change("k", data_chunk_id(b"missing"), bucket="fresh"),
    }

    async def body(engine: Engine) -> None:
        client = engine.client
        if bad == "chunk":
            request: m.Request = m.Commit(await session_of(client), [changes[bad]])
            results = await ask(client, request, m.NameResults)
        else:
            results = await ask(client, m.PutObjects([1], [changes[bad]]), m.NameResults, b"x")
        assert kinds_of(results) != [None]
        assert await buckets_of(client) == []
        both = m.PutObjects([1, 1], [changes[bad], change("good", bucket="fresh")])
        results = await ask(client, both, m.NameResults, b"x", b"y")
        assert kinds_of(results)[1] is None
        assert await buckets_of(client) == ["fresh"]
        if kind.simulated:
            assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_a_name_is_changed_only_when_its_condition_holds(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k", SMALL)

        async def try_put(condition: m.Condition) -> type[LakeError] | None:
            request = m.PutObjects([3], [change("k", condition=condition)])
            return kinds_of(await ask(client, request, m.NameResults, b"new"))[0]

        for condition in (
            ABSENT,
            m.Condition(etags=["other"]),
            m.Condition(not_etags=["*"]),
            m.Condition(not_etags=[first.etag]),
            m.Condition(node=first.node + 1),
            m.Condition(etags=[first.etag], not_etags=[first.etag]),
        ):
            assert await try_put(condition) is PreconditionFailed
        assert (await stat(client, "k")).node == first.node
        assert await try_put(m.Condition(etags=["other", first.etag])) is None
        second = await stat(client, "k")
        assert second.node != first.node
        assert await try_put(m.Condition(node=first.node)) is PreconditionFailed
        assert await try_put(m.Condition(node=second.node, not_etags=["other"])) is None
        deletion = m.DeleteNames([("bkt", "k")], m.Condition(etags=[first.etag]))
        assert kinds_of(await ask(client, deletion, m.NameResults)) == [PreconditionFailed]

    kind.run(body)


def test_attributes_come_back_as_they_were_given(kind: Kind) -> None:
    attributes = m.ObjectAttributes(
        mode=0o640,
        uid=7,
        gid=8,
        mtime_ns=1_234_567_890_123_456_789,
        content_type="text/plain",
        user_metadata={"a": "ä"},
        headers={"cache-control": "no-store"},
        etag_kind=1,
        etag=bytes(range(16)),
        checksums={"crc64nvme": b"12345678"},
        xattrs={"user.x": b"\0\1"},
    )

    async def body(engine: Engine) -> None:
        client = engine.client
        request = m.PutObjects([5], [change("k", attributes=attributes)])
        good(await ask(client, request, m.NameResults, b"12345"))
        found = await stat(client, "k")
        assert (found.mode, found.uid, found.gid, found.mtime_ns) == (0o640, 7, 8, attributes.mtime_ns)
        assert (found.content_type, found.user_metadata, found.headers, found.checksums) == (
            "text/plain",
            {"a": "ä"},
            {"cache-control": "no-store"},
            {"crc64nvme": b"12345678"},
        )
        assert found.etag == bytes(range(16)).hex()
        copied = good(await ask(client, m.Copy("bkt", "k", "bkt", "copy"), m.NameResults))[0]
        assert (copied.etag, copied.content_type, copied.blob) == (found.etag, "text/plain", found.blob)
        other = m.Copy("bkt", "k", "bkt", "copy", m.ObjectAttributes(content_type="b/c"))
        changed = good(await ask(client, other, m.NameResults))[0]
        assert (changed.etag, changed.content_type, changed.user_metadata) == (found.etag, "b/c", {})
        for bad in (
            m.ObjectAttributes(uid=-1),
            m.ObjectAttributes(mtime_ns=(1 << 63) - 1, gid=1 << 33),
            m.ObjectAttributes(etag_kind=9),
            m.ObjectAttributes(etag_kind=1, etag=b"short"),
        ):
            result = await ask(client, m.PutObjects([1], [change("k", attributes=bad)]), m.NameResults, b"x")
            assert kinds_of(result) == [InvalidArgument]
        huge = m.ObjectAttributes(user_metadata={"k": "v" * ATTRIBUTES_BYTES_MAX})
        result = await ask(client, m.PutObjects([1], [change("k", attributes=huge)]), m.NameResults, b"x")
        assert kinds_of(result) == [RequestTooLarge]

    kind.run(body)


# --- moving, copying, removing -------------------------------------------------------------------------


def test_names_move_and_are_copied_also_into_a_new_bucket(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "a/x", SMALL)
        await put(client, "b", b"other")
        moved = good(await ask(client, m.Rename("bkt", "a/x", "bkt", "c/y"), m.NameResults))[0]
        assert (moved.key, moved.node) == ("c/y", first.node)
        await refused(client, KeyNotFound, m.Rename("bkt", "a/x", "bkt", "z"))
        await refused(client, AlreadyExists, m.Rename("bkt", "c/y", "bkt", "b", replace=False))
        await refused(client, BucketNotFound, m.Rename("bkt", "c/y", "new", "y"))
        await refused(client, KeyNotFound, m.Rename("bkt", "missing", "new", "y", create_bucket=True))
        assert await buckets_of(client) == ["bkt"]
        await refused(client, InvalidArgument, m.Rename("bkt", "c/", "bkt", "c/d/"))
        good(await ask(client, m.Rename("bkt", "c/", "new", "e/", create_bucket=True), m.NameResults))
        assert (await stat(client, "e/y", bucket="new")).node == first.node
        good(await ask(client, m.Copy("new", "e/y", "third", "y", create_bucket=True), m.NameResults))
        await refused(client, KeyNotFound, m.Copy("new", "nope", "fourth", "y", create_bucket=True))
        await refused(client, PreconditionFailed, m.Copy("new", "e/y", "third", "y", condition=ABSENT))
        assert await buckets_of(client) == ["bkt", "new", "third"]
        good(await ask(client, m.Rename("bkt", "b", "third", "y"), m.NameResults))
        assert (await stat(client, "y", bucket="third")).blob == data_chunk_id(b"other")

    kind.run(body)


def test_removing_tells_what_was_there(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        there = await put(client, "k", SMALL)
        await put(client, "f/x", SMALL)
        await ask(client, m.MakeFolder("bkt", "f/"), m.NameResults)
        names = [("bkt", "k"), ("bkt", "k"), ("bkt", "f/"), ("nowhere", "k"), ("bkt", "bad" * 500)]
        results = await ask(client, m.DeleteNames(names), m.NameResults)
        assert results.results[0].stat is not None
        assert results.results[0].stat.node == there.node
        assert results.results[1] == m.NameResult()
        failures = kinds_of(results)
        assert failures[:4] == [None, None, None, BucketNotFound]
        assert await keys_of(client, m.ListNames("bkt", folders=True)) == ["f/", "f/x"]
        await delete(client, "f/x")
        assert await keys_of(client, m.ListNames("bkt", folders=True)) == []

    kind.run(body)


def test_folders_are_made_found_and_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await refused(client, BucketNotFound, m.MakeFolder("bkt", "f/"))
        made = good(await ask(client, m.MakeFolder("bkt", "f/g/", create_bucket=True), m.NameResults))[0]
        assert (made.kind, made.key, made.blob) == (1, "f/g/", EMPTY_BLOB)
        await refused(client, AlreadyExists, m.MakeFolder("bkt", "f/g/", exclusive=True))
        await ask(client, m.MakeFolder("bkt", "f/g/"), m.NameResults)
        await put(client, "object", SMALL)
        (failure,) = kinds_of(await ask(client, m.StatNames([("bkt", "object/")]), m.NameResults))
        assert failure in (KeyNotFound, NotAFolder)
        assert (await stat(client, "")).kind == 1
        assert (await stat(client, "f/")).kind == 1
        assert kinds_of(await ask(client, m.StatNames([("bkt", "f")]), m.NameResults))[0] in (KeyNotFound, IsAFolder)
        await delete(client, "f/g/")
        assert await keys_of(client, m.ListNames("bkt", folders=True)) == ["object"]

    kind.run(body)


# --- listing and buckets -------------------------------------------------------------------------------


def test_pages_follow_each_other_in_byte_order(kind: Kind) -> None:
    keys = sorted(["a", "a/b", "a/c/d", "b", "ä", "z/1", "z/2", *(f"n{number:03}" for number in range(40))])
    keys.sort(key=str.encode)

    async def body(engine: Engine) -> None:
        client = engine.client
        request = m.PutObjects([1] * len(keys), [change(key) for key in keys])
        good(await ask(client, request, m.NameResults, b"x" * len(keys)))
        for limit in (1, 7, 1000, 1 << 40):
            found: list[str] = []
            after = ""
            while True:
                page = await ask(client, m.ListNames("bkt", after=after, limit=limit), m.Listed)
                assert len(page.entries) <= limit
                found += [entry.key for entry in page.entries]
                after = page.next_after
                if not after:
                    break
            assert found == keys
        rolled = await ask(client, m.ListNames("bkt", delimiter="/", prefix="a"), m.Listed)
        assert [(entry.key, entry.is_prefix) for entry in rolled.entries] == [("a", False), ("a/", True)]
        assert await keys_of(client, m.ListNames("bkt", prefix="z/", after="z/1")) == ["z/2"]
        assert await keys_of(client, m.ListNames("bkt", prefix="none")) == []
        assert await keys_of(client, m.ListNames("bkt", limit=0)) == []
        for bad in (m.ListNames("bkt", delimiter="x"), m.ListNames("bkt", limit=-1)):
            await refused(client, InvalidArgument, bad)
        await refused(client, BucketNotFound, m.ListNames("nowhere"))
        await refused(client, InvalidName, m.ListNames("no bucket!"))

    kind.run(body)


def test_buckets_are_made_listed_and_removed_when_empty(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        assert await buckets_of(client) == []
        (made,) = (await ask(client, m.BucketCreate("one"), m.Buckets)).buckets
        assert made.name == "one"
        await ask(client, m.BucketCreate("another"), m.Buckets)
        assert await buckets_of(client) == ["another", "one"]
        assert (await ask(client, m.BucketList("one"), m.Buckets)).buckets == [made]
        await refused(client, AlreadyExists, m.BucketCreate("one"))
        for bad in ("", "no bucket!", "1.2.3.4", "x" * 64):
            await refused(client, InvalidName, m.BucketCreate(bad))
        await refused(client, BucketNotFound, m.BucketList("missing"))
        await put(client, "k", SMALL, bucket="one")
        await refused(client, BucketNotEmpty, m.BucketRemove("one"))
        await delete(client, "k", bucket="one")
        await ask(client, m.BucketRemove("one"), m.Done)
        await refused(client, BucketNotFound, m.BucketRemove("one"))
        assert await buckets_of(client) == ["another"]

    kind.run(body)


# --- the engine itself ---------------------------------------------------------------------------------


def test_the_engine_tells_of_itself(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        assert await ask(client, m.Ping(), m.Done) == m.Done()
        status = (await ask(client, m.Status(), m.StatusReply)).status_json
        assert '"state": "serving"' in status
        await put(client, "k", SMALL)
        assert (await collected(engine, client))["live_chunks"] == 1
        for full in (False, True) if kind.simulated else (True,):
            report = await fsck(client, full=full)
            assert (report["level"], report["damage"], notes_of(report)) == ("full" if full else "quick", 0, 0)
        assert PLAIN.mode == 0o644

    kind.run(body)


# --- watching ------------------------------------------------------------------------------------------


def test_changes_are_told_in_order_to_who_watches_the_bucket(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    to = "unwatched" if kind.moves_anywhere else "bkt"

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "before", SMALL)
        await put(client, "k", SMALL, bucket="unwatched")
        async with client.watch("bkt") as events:
            async with engine.connect() as other:
                await put(other, "f/x", SMALL)
                good(await ask(other, m.Rename("bkt", "f/", "bkt", "g/"), m.NameResults))
                await put(other, "k", b"not told", bucket="unwatched")
                await delete(other, "g/x", "missing")
                good(await ask(other, m.Rename("bkt", "before", to, "after"), m.NameResults))
            told = [await anext(events) for _ in range(6)]
        assert [(event.kind, event.key, event.to_bucket, event.to_key) for event in told] == [
            ("put", "f/", "", ""),
            ("put", "f/x", "", ""),
            ("rename", "f/", "bkt", "g/"),
            ("delete", "g/x", "", ""),
            ("delete", "g/", "", ""),
            ("rename", "before", to, "after"),
        ]
        sequences = [event.sequence for event in told]
        assert sequences == sorted(sequences)

    kind.run(body)


def test_a_watch_of_the_others_is_not_told_what_its_own_connection_changes(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "before", SMALL)
        async with client.watch("bkt", others_only=True) as events:
            await put(client, "own", SMALL)
            async with engine.connect() as other:
                await put(other, "theirs", SMALL)
                await put(client, "own", b"again")
                await delete(client, "own")
                await delete(other, "theirs")
            told = [await anext(events) for _ in range(2)]
        assert [(event.kind, event.key) for event in told] == [("put", "theirs"), ("delete", "theirs")]

    kind.run(body)


def test_a_bucket_that_is_not_there_cannot_be_watched(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    async def body(engine: Engine) -> None:
        with pytest.raises(BucketNotFound):
            async with engine.client.watch("missing"):
                raise AssertionError("not reached")
        assert await ask(engine.client, m.Ping(), m.Done) == m.Done()

    kind.run(body)


def test_who_falls_behind_is_told_to_look_at_everything_again(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", SMALL)
        count = 2000
        async with client.watch("bkt") as events:
            async with engine.connect() as other:
                for _ in range(5):
                    request = m.PutObjects([1] * count, [change("same")] * count)
                    good(await ask(other, request, m.NameResults, b"x" * count))
                await put(other, "last", SMALL)
            kinds: list[str] = []
            while True:
                event = await anext(events)
                kinds.append(event.kind)
                if event.key == "last":
                    break
        assert "resync" in kinds
        assert len(kinds) < 5 * count

    kind.run(body)
