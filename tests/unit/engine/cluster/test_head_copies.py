"""Copies from one names shard to another have the results and errors of copies within one."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from engine.process.embedded import EmbeddedEngine
from lakefs.errors import LakeError
from lakefs.ids import EMPTY_BLOB, GcGeneration
from lakefs.wire import messages as m
from tests.head_rig import store_blob
from tests.shards_rig import ShardedLake, with_shards
from tests.store_rig import ask, change, good, session_of

SAME, OTHER = "same", "other"
"""A bucket in the shard of the source, and one in another."""
SMALL = b"some content"
RICH = m.ObjectAttributes(
    mode=0o640,
    uid=7,
    gid=8,
    mtime_ns=1_000_000_000_000_000_123,
    content_type="a/b",
    user_metadata={"who": "me"},
    headers={"cache-control": "no-store"},
    etag_kind=1,
    etag=hashlib.md5(SMALL).digest(),
    checksums={"sha256": b"\1" * 32, "crc32": b"\2" * 4},
    xattrs={"user.x": b"\0\1", "user.empty": b""},
    atime_ns=1_000_000_000_000_000_777,
    tags={"a": "1", "b": ""},
)
PARTS = msgspec.structs.replace(RICH, etag_kind=2, etag=b"0123456789abcdef0123456789abcdef-3")
DERIVED = m.ObjectAttributes(content_type="x/y", tags={"t": "1"})
NEW = m.ObjectAttributes(mode=0o600, uid=1, content_type="n/n", user_metadata={"n": "1"}, xattrs={"user.n": b"n"})
NEW_TIMES = msgspec.structs.replace(NEW, mtime_ns=5, atime_ns=6, tags={"ignored": "1"}, etag_kind=1, etag=b"e" * 16)
MISSING_VERSION = "0" * 15 + "1"


def of(key: str, to_key: str = "copy", **more: object) -> m.Copy:
    return msgspec.structs.replace(m.Copy("source", key, "", to_key), **more)


COPIES = {
    "rich": of("rich"),
    "parts": of("parts"),
    "derived": of("derived"),
    "long": of("long"),
    "empty": of("empty"),
    "empty, with an MD5": of("empty-md5"),
    "symlink": of("link"),
    "pipe": of("pipe"),
    "device over an object": of("null", "there"),
    "in folders": of("rich", "a/b/c"),
    "folder's own": of("f/", "g/"),
    "folder to object": of("f/", "object"),
    "object to folder": of("rich", "g/"),
    "over an object": of("rich", "there"),
    "over a symlink": of("rich", "there-link"),
    "symlink over an object": of("link", "there"),
    "onto a folder": of("rich", "there-folder/"),
    "object beside a folder": of("rich", "there-folder"),
    "attributes": of("rich", attributes=NEW),
    "attributes with times": of("rich", attributes=NEW_TIMES),
    "attributes of parts": of("parts", attributes=NEW),
    "attributes of a symlink": of("link", attributes=NEW_TIMES),
    "tags": of("rich", tags={"c": "3"}),
    "no tags": of("rich", tags={}),
    "attributes and tags": of("rich", attributes=NEW, tags={"c": "3"}),
    "tags of a symlink": of("link", tags={"c": "3"}),
    "version": of("kept", version="null"),
    "version of none": of("rich", version="null"),
    "condition": of("rich", "there", condition=m.Condition(etags=["*"])),
    "uploaded": of("uploaded"),
}
REFUSED = {
    "no key": of(""),
    "missing": of("missing"),
    "missing folder": of("missing/"),
    "bare folder": of("bare/"),
    "deleted": of("gone"),
    "no such version": of("kept", version=MISSING_VERSION),
    "bad version": of("kept", version="odd"),
    "symlink to folder": of("link", "g/"),
    "absent": of("rich", "there", condition=m.Condition(absent=True)),
    "other ETag": of("rich", "there", condition=m.Condition(etags=["x"])),
    "condition on none": of("rich", condition=m.Condition(etags=["*"])),
    "empty name": of("rich", ""),
    "long name": of("rich", "n" * 5000),
    "odd name": of("rich", "\udc80"),
    "odd source": of("\udc80"),
    "attributes too large": of("rich", attributes=m.ObjectAttributes(xattrs={"user.x": b"x" * (1 << 20)})),
    "odd owner": of("rich", attributes=m.ObjectAttributes(uid=-1)),
    "odd time": of("link", attributes=m.ObjectAttributes(mtime_ns=1 << 63)),
}


async def prepare(client: EmbeddedEngine) -> None:
    """Make things to copy, in the first shard, and the same targets in both."""
    for bucket in ("source", "fill", SAME, OTHER):  # made in turn, in two shards
        await ask(client, m.BucketCreate(bucket), m.Buckets)
    session = await session_of(client)
    long = await store_blob(client, session, b"one" * 1000, b"two" * 999)
    small = await store_blob(client, session, SMALL)
    things = {"rich": RICH, "parts": PARTS, "derived": DERIVED, "f/": RICH, "kept": RICH, "gone": RICH, "bare/x": RICH}
    changes = [change(key, small, bucket="source", attributes=attributes) for key, attributes in things.items()]
    changes.append(change("long", long, bucket="source", attributes=DERIVED))
    changes.append(change("empty", EMPTY_BLOB, bucket="source"))
    md5 = m.ObjectAttributes(etag_kind=1, etag=hashlib.md5(b"").digest())
    changes.append(change("empty-md5", EMPTY_BLOB, bucket="source", attributes=md5))
    for bucket in (SAME, OTHER):
        changes += [change(key, small, bucket=bucket) for key in ("there", "there-folder/", "there-folder/x")]
    good(await ask(client, m.Commit(session, changes), m.NameResults))
    upload = await ask(client, m.UploadCreate("source", "uploaded", RICH), m.UploadStat)
    put = m.UploadPut(session, "source", "uploaded", upload.upload, 1, small, b"5" * 16)
    await ask(client, put, m.PartStat)
    complete = m.UploadComplete(session, "source", "uploaded", upload.upload, small, [1], [b"5" * 16], end_session=True)
    good(await ask(client, complete, m.NameResults))
    good(await ask(client, m.MakeSymlink("source", "link", b"there", RICH), m.NameResults))
    good(await ask(client, m.MakeNode("source", "pipe", 5, RICH), m.NameResults))
    good(await ask(client, m.MakeNode("source", "null", 7, RICH, 259), m.NameResults))
    for bucket in (SAME, OTHER):
        good(await ask(client, m.MakeSymlink(bucket, "there-link", b"x", RICH), m.NameResults))
    await ask(client, m.BucketSet("source", versioning="enabled"), m.Buckets)
    good(await ask(client, m.DeleteNames([("source", "gone")]), m.NameResults))
    session = await session_of(client)
    other = await store_blob(client, session, b"newer")
    good(
        await ask(client, m.Commit(session, [change("kept", other, bucket="source")], end_session=True), m.NameResults)
    )


def compared(stat: m.ObjectStat) -> m.ObjectStat:
    """Return a stat without what differs between two copies; a time that is that of the copy is 0."""
    mtime_ns = 0 if stat.mtime_ns == stat.ctime_ns else stat.mtime_ns
    return msgspec.structs.replace(stat, bucket="", node=0, ctime_ns=0, mtime_ns=mtime_ns)


async def copied(client: EmbeddedEngine, request: m.Copy, bucket: str) -> list[m.ObjectStat]:
    """Copy; return the answer's stat, and that of the copy as it is found then."""
    request = msgspec.structs.replace(request, to_bucket=bucket)
    answer = good(await ask(client, request, m.NameResults))
    found = good(await ask(client, m.StatNames([(bucket, request.to_key)]), m.NameResults))
    return [compared(stat) for stat in (*answer, *found)]


async def refusal(client: EmbeddedEngine, request: m.Copy, bucket: str) -> tuple[type[LakeError], str, str]:
    with pytest.raises(LakeError) as raised:
        await ask(client, msgspec.structs.replace(request, to_bucket=bucket), m.NameResults)
    error = raised.value
    return type(error), error.message.replace(bucket, SAME), error.subject.replace(bucket, SAME)


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_across_shards_is_that_within_one(case: str) -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await prepare(client)
        within, across = [await copied(client, COPIES[case], bucket) for bucket in (SAME, OTHER)]
        assert across == within
        assert (lake.shard_of("source"), lake.shard_of(SAME), lake.shard_of(OTHER)) == (0, 0, 1)
        assert across[0].upload == b""
        assert lake.head.parts.references.statistics()["sessions"] == 0
        assert lake.leases() == 0

    with_shards(2, body)


def test_refusals_of_copies_across_shards_are_those_within_one() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await prepare(client)
        before = [names.store.metadata.durable_sequence for names in lake.all_names]
        for case, request in REFUSED.items():
            within, across = [await refusal(client, request, bucket) for bucket in (SAME, OTHER)]
            assert across == within, case
        assert lake.head.parts.references.statistics()["sessions"] == 0
        assert lake.leases() == 0
        assert [names.store.metadata.durable_sequence for names in lake.all_names] == before

    with_shards(2, body)


def test_a_delete_marker_is_not_copied_across_shards() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await prepare(client)
        listed = await ask(client, m.ListVersions("source", "gone"), m.ListedVersions)
        (marker,) = [entry.version for entry in listed.entries if entry.is_marker]
        request = of("gone", version=marker)
        within, across = [await refusal(client, request, bucket) for bucket in (SAME, OTHER)]
        assert across == within

    with_shards(2, body)


def test_a_copy_into_a_bucket_that_keeps_versions_is_a_version() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await prepare(client)
        for bucket in (SAME, OTHER):
            await ask(client, m.BucketSet(bucket, versioning="enabled"), m.Buckets)
        found = []
        for bucket in (SAME, OTHER):
            request = msgspec.structs.replace(of("rich", "there"), to_bucket=bucket)
            (stat,) = good(await ask(client, request, m.NameResults))
            listed = await ask(client, m.ListVersions(bucket, "there"), m.ListedVersions)
            found.append([(entry.key, entry.version == stat.version, entry.is_latest) for entry in listed.entries])
        assert found[0] == found[1] != []

    with_shards(2, body)


def test_a_copy_is_bound_in_a_shard_that_has_joined_a_later_generation() -> None:
    async def body(lake: ShardedLake, client: EmbeddedEngine) -> None:
        await prepare(client)
        lake.all_names[1].gate.join(GcGeneration(9))
        for case in ("long", "link", "empty"):
            within, across = [await copied(client, of(case), bucket) for bucket in (SAME, OTHER)]
            assert across == within

    with_shards(2, body)
