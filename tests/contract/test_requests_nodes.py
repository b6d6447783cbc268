"""Requests about nodes: puts that keep them, their attributes, symlinks.

On every kind of client.
"""

from __future__ import annotations

import pytest
import trio

from lakefs.errors import (
    AlreadyExists,
    BucketNotFound,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    LakeError,
    PreconditionFailed,
    RequestTooLarge,
    from_wire,
)
from lakefs.ids import data_chunk_id
from lakefs.limits import ATTRIBUTES_BYTES_MAX, SYMLINK_TARGET_BYTES_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.collecting import collected, notes_of
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import keys_of, kinds_of, stat
from tests.store_rig import ask, change, delete, fsck, good, put, session_of, store_chunks

SMALL = b"small payload"
LINK = m.ObjectAttributes(mode=0o777, uid=5, gid=6, mtime_ns=7, xattrs={"user.l": b"x"})


async def keep(
    client: EngineClient,
    key: str,
    node: int,
    payload: bytes = b"new",
    *,
    condition: m.Condition = m.NO_CONDITION,
    attributes: m.ObjectAttributes | None = None,
) -> m.NameResults:
    """Put over the node that a name has."""
    changed = m.NameChange("bkt", key, b"", attributes or m.ObjectAttributes(), condition, keep_node=node)
    return await ask(client, m.PutObjects([len(payload)], [changed]), m.NameResults, payload)


async def one(client: EngineClient, request: m.Request) -> m.ObjectStat:
    """Send a request about one name; return the stat of its answer."""
    (found,) = good(await ask(client, request, m.NameResults))
    return found


async def clock_moves_on(kind: Kind) -> None:
    """Let the clock move on: simulated time only passes while somebody sleeps."""
    if kind.simulated:
        await trio.sleep(1)


async def folders_of(client: EngineClient) -> list[str]:
    """Return all keys, also of folders that nobody made."""
    return await keys_of(client, m.ListNames("bkt", folders=True))


async def failure_of(client: EngineClient, request: m.Request) -> LakeError:
    """Send a request that must be refused; return the error."""
    with pytest.raises(LakeError) as caught:
        await client.call(request)
    return caught.value


# --- kept nodes ----------------------------------------------------------------------------------------


def test_a_put_may_keep_the_node_that_the_name_has(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        rich = m.ObjectAttributes(content_type="a/b", user_metadata={"k": "v"}, xattrs={"user.x": b"1"})
        changed = change("f/k", attributes=rich)
        first = good(await ask(client, m.PutObjects([1], [changed]), m.NameResults, b"x"))[0]
        plain = m.ObjectAttributes(mode=0o600, uid=3)
        await clock_moves_on(kind)
        (second,) = good(await keep(client, "f/k", first.node, SMALL, attributes=plain))
        assert (second.node, second.blob, second.size_bytes) == (first.node, data_chunk_id(SMALL), len(SMALL))
        assert (second.mode, second.uid, second.content_type, second.user_metadata, second.xattrs) == (
            0o600,
            3,
            "",
            {},
            {},
        )
        assert second.ctime_ns > first.ctime_ns
        assert await stat(client, "f/k") == second
        assert (await collected(engine, client))["live_chunks"] == 1
        assert (await put(client, "f/k", b"other")).node != first.node
        assert await keys_of(client, m.ListNames("bkt")) == ["f/k"]

    kind.run(body)


def test_a_node_is_kept_only_where_it_is_the_object_that_was_meant(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k", SMALL)
        folder = await one(client, m.MakeFolder("bkt", "d/"))
        link = await one(client, m.MakeSymlink("bkt", "l", b"k", LINK))
        for key, node in (
            ("k", first.node + 1000),
            ("k", folder.node),
            ("missing", first.node),
            ("d/", folder.node),
            ("l", link.node),
            ("d/x", first.node),
            ("k", -1),
        ):
            assert kinds_of(await keep(client, key, node)) == [PreconditionFailed], (key, node)
        stale = m.Condition(etags=["other"])
        assert kinds_of(await keep(client, "k", first.node, condition=stale)) == [PreconditionFailed]
        absent = m.Condition(absent=True)
        assert kinds_of(await keep(client, "k", first.node, condition=absent)) == [PreconditionFailed]
        assert await stat(client, "k") == first
        await one(client, m.Rename("bkt", "k", "bkt", "moved"))
        assert kinds_of(await keep(client, "k", first.node)) == [PreconditionFailed]
        (kept,) = good(await keep(client, "moved", first.node))
        assert kept.node == first.node
        assert await folders_of(client) == ["d/", "l", "moved"]

    kind.run(body)


def test_a_commit_may_keep_the_node_too(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k", SMALL)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"y" * 100_000])
        changed = m.NameChange("bkt", "k", chunk, m.ObjectAttributes(), keep_node=first.node)
        kept = await one(client, m.Commit(session, [changed], end_session=True))
        assert (kept.node, kept.blob, kept.size_bytes) == (first.node, chunk, 100_000)
        report = await collected(engine, client)
        assert (report["live_chunks"], report["freed_chunks"]) == (1, 1)
        if kind.simulated:
            assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_who_has_the_object_open_keeps_its_old_content_when_the_node_is_kept(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k", SMALL)
        reply = await client.call(m.OpenObjects([("bkt", "k")], inline_bytes=0))
        reply.body.release()
        good(await keep(client, "k", first.node, b"second"))
        assert (await collected(engine, client))["live_chunks"] == 2
        assert isinstance(reply.message, m.OpenResults)
        opened = reply.message.results[0].opened
        assert opened is not None
        await ask(client, m.CloseLeases([opened.lease]), m.Done)
        assert (await collected(engine, client))["live_chunks"] == 1

    kind.run(body)


# --- attributes ----------------------------------------------------------------------------------------


def test_attributes_of_all_kinds_are_changed_in_place(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "f/k", SMALL)
        await one(client, m.MakeFolder("bkt", "made/"))
        await one(client, m.MakeSymlink("bkt", "l", b"t", LINK))
        for key in ("f/k", "made/", "f/", "", "l"):
            before = await stat(client, key)
            await clock_moves_on(kind)
            request = m.SetAttributes(
                "bkt", key, mode=0o107123, uid=11, gid=(1 << 32) - 1, mtime_ns=0, xattrs={"user.a": b"\0"}
            )
            changed = await one(client, request)
            assert changed == await stat(client, key)
            assert (changed.mode, changed.uid, changed.gid, changed.mtime_ns) == (0o7123, 11, (1 << 32) - 1, 0)
            assert changed.xattrs == {**before.xattrs, "user.a": b"\0"}
            assert changed.ctime_ns > before.ctime_ns
            assert (changed.node, changed.kind, changed.blob, changed.size_bytes, changed.etag) == (
                before.node,
                before.kind,
                before.blob,
                before.size_bytes,
                before.etag,
            )
            assert changed.symlink_target == before.symlink_target
            same = await one(client, m.SetAttributes("bkt", key, condition=m.Condition(node=before.node)))
            assert same.ctime_ns >= changed.ctime_ns
            assert (same.mode, same.uid, same.mtime_ns, same.xattrs) == (
                changed.mode,
                changed.uid,
                changed.mtime_ns,
                changed.xattrs,
            )
        assert await keys_of(client, m.ListNames("bkt")) == ["f/k", "l", "made/"]
        await delete(client, "f/k")
        assert await folders_of(client) == ["l", "made/"]

    kind.run(body)


def test_attributes_are_not_changed_where_they_cannot_be(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k", SMALL)
        await put(client, "d/k", SMALL)
        huge = {"user.h": b"x" * ATTRIBUTES_BYTES_MAX}
        for error, request in (
            (KeyNotFound, m.SetAttributes("bkt", "missing", mode=1)),
            (KeyNotFound, m.SetAttributes("bkt", "k/", mode=1)),
            (KeyNotFound, m.SetAttributes("bkt", "d", mode=1)),
            (BucketNotFound, m.SetAttributes("nowhere", "", mode=1)),
            (PreconditionFailed, m.SetAttributes("bkt", "k", m.Condition(node=first.node + 9), mode=1)),
            (PreconditionFailed, m.SetAttributes("bkt", "k", m.Condition(absent=True), mode=1)),
            (InvalidArgument, m.SetAttributes("bkt", "k", uid=-1)),
            (InvalidArgument, m.SetAttributes("bkt", "k", gid=1 << 32)),
            (InvalidArgument, m.SetAttributes("bkt", "k", mtime_ns=1 << 63)),
            (RequestTooLarge, m.SetAttributes("bkt", "k", xattrs=dict(huge))),
        ):
            await refused(client, error, request)
        assert await stat(client, "k") == first

    kind.run(body)


def test_xattrs_are_set_made_replaced_and_removed_as_asked(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", SMALL)

        def request(xattrs: dict[str, bytes | None], *, absent: bool = False, present: bool = False) -> m.Request:
            return m.SetAttributes("bkt", "k", xattrs=xattrs, xattr_absent=absent, xattr_present=present)

        await one(client, request({"user.a": b"1"}, absent=True))
        exists = await failure_of(client, request({"user.b": b"1", "user.a": b"2"}, absent=True))
        assert (type(exists), exists.subject) == (AlreadyExists, "user.a")
        await one(client, request({"user.a": b"3"}, present=True))
        missing = await failure_of(client, request({"user.a": b"4", "user.b": b""}, present=True))
        assert (type(missing), missing.subject) == (KeyNotFound, "user.b")
        missing = await failure_of(client, request({"user.a": b"4", "user.b": None}))
        assert (type(missing), missing.subject) == (KeyNotFound, "user.b")
        assert (await stat(client, "k")).xattrs == {"user.a": b"3"}
        await one(client, request({"user.a": None, "user.b": b""}))
        assert (await stat(client, "k")).xattrs == {"user.b": b""}
        await one(client, request({"user.b": None}))
        assert (await stat(client, "k")).xattrs == {}

    kind.run(body)


# --- symlinks ------------------------------------------------------------------------------------------


def test_a_symlink_is_made_listed_moved_copied_replaced_and_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await refused(client, BucketNotFound, m.MakeSymlink("bkt", "a/l", b"t", LINK))
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        target = b"../\xff/" + b"t" * (SYMLINK_TARGET_BYTES_MAX - 5)
        made = await one(client, m.MakeSymlink("bkt", "a/l", target, LINK))
        assert (made.kind, made.symlink_target, made.size_bytes) == (3, target, len(target))
        assert (made.mode, made.uid, made.gid, made.mtime_ns, made.xattrs) == (0o777, 5, 6, 7, {"user.l": b"x"})
        assert (made.blob, made.etag, made.chunk_count) == (b"", "", 0)
        assert await stat(client, "a/l") == made
        listed = await ask(client, m.ListNames("bkt"), m.Listed)
        (entry,) = listed.entries
        assert (entry.key, entry.kind, entry.size_bytes, entry.blob) == ("a/l", 3, len(target), b"")
        assert (entry.uid, entry.gid, entry.ctime_ns) == (5, 6, made.ctime_ns)
        copied = await one(client, m.Copy("bkt", "a/l", "bkt", "copy"))
        assert (copied.kind, copied.symlink_target) == (3, target)
        assert copied.node != made.node
        await clock_moves_on(kind)
        moved = await one(client, m.Rename("bkt", "a/l", "bkt", "b/l"))
        assert (moved.node, moved.symlink_target, moved.kind) == (made.node, target, 3)
        assert moved.ctime_ns > made.ctime_ns
        replaced = await put(client, "b/l", SMALL)
        assert (replaced.kind, replaced.symlink_target) == (2, b"")
        assert (await stat(client, "b/l")).blob == data_chunk_id(SMALL)
        onto = await one(client, m.Rename("bkt", "copy", "bkt", "b/l"))
        assert onto.kind == 3
        assert (await collected(engine, client))["live_chunks"] == 0
        if kind.simulated:
            report = await fsck(client)
            assert (report["damage"], notes_of(report)) == (0, 0)
        await delete(client, "b/l")
        assert await folders_of(client) == []

    kind.run(body)


def test_a_symlink_is_not_made_where_something_is_nor_of_nonsense(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "object", SMALL)
        await put(client, "implicit/x", SMALL)
        await put(client, "n" * 600 + "/x", SMALL)
        await one(client, m.MakeFolder("bkt", "made/"))
        await one(client, m.MakeSymlink("bkt", "link", b"t", LINK))
        before = await folders_of(client)
        for key in ("object", "implicit", "made", "link", "n" * 600):
            await refused(client, AlreadyExists, m.MakeSymlink("bkt", key, b"t", LINK))
        for target in (b"", b"t" * (SYMLINK_TARGET_BYTES_MAX + 1), b"a\0b"):
            await refused(client, InvalidArgument, m.MakeSymlink("bkt", "f/new", target, LINK))
        for key in ("f/new/", "f/"):
            await refused(client, InvalidArgument, m.MakeSymlink("bkt", key, b"t", LINK))
        for key in ("", "x" * 4096):
            await refused(client, InvalidName, m.MakeSymlink("bkt", key, b"t", LINK))
        bad = m.ObjectAttributes(uid=-1)
        await refused(client, InvalidArgument, m.MakeSymlink("bkt", "f/new", b"t", bad))
        huge = m.ObjectAttributes(xattrs={"user.h": b"x" * ATTRIBUTES_BYTES_MAX})
        await refused(client, RequestTooLarge, m.MakeSymlink("bkt", "f/new", b"t", huge))
        await refused(client, AlreadyExists, m.MakeFolder("bkt", "link/", exclusive=True))
        await refused(client, AlreadyExists, m.Rename("bkt", "object", "bkt", "link", replace=False))
        assert await folders_of(client) == before

    kind.run(body)


def test_a_symlink_is_not_opened_for_reading(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", SMALL)
        await one(client, m.MakeSymlink("bkt", "l", b"k", LINK))
        results = await ask(client, m.OpenObjects([("bkt", "l"), ("bkt", "l/")]), m.OpenResults)
        errors = []
        for result in results.results:
            assert result.failure is not None
            errors.append(from_wire(result.failure.wire_code, result.failure.message))
        assert [type(error) for error in errors] == [InvalidArgument, KeyNotFound]
        assert "symlink" in errors[0].message
        await refused(client, InvalidArgument, m.Copy("bkt", "l", "bkt", "f/"))

    kind.run(body)


def test_tags_change_in_place_and_go_where_the_object_goes(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        tagged = m.ObjectAttributes(tags={"a": "1"}, user_metadata={"m": "1"})
        new = m.NameChange("bkt", "f/k", b"", tagged)
        (before,) = good(await ask(client, m.PutObjects([len(SMALL)], [new]), m.NameResults, SMALL))
        assert before.tags == {"a": "1"}
        after = await one(client, m.SetAttributes("bkt", "f/k", tags={"b": "2"}))
        assert (after.tags, after.node, after.etag, after.mtime_ns, after.user_metadata) == (
            {"b": "2"},
            before.node,
            before.etag,
            before.mtime_ns,
            {"m": "1"},
        )
        assert (await one(client, m.SetAttributes("bkt", "f/k", mode=0o600))).tags == {"b": "2"}
        assert (await one(client, m.Rename("bkt", "f/k", "bkt", "f/r"))).tags == {"b": "2"}
        assert (await one(client, m.Copy("bkt", "f/r", "bkt", "f/c"))).tags == {"b": "2"}
        plain = m.ObjectAttributes()
        assert (await one(client, m.Copy("bkt", "f/r", "bkt", "f/c", plain))).tags == {"b": "2"}
        assert (await one(client, m.Copy("bkt", "f/r", "bkt", "f/c", tags={"c": "3"}))).tags == {"c": "3"}
        assert (await one(client, m.SetAttributes("bkt", "f/r", tags={}))).tags == {}
        for key in ("f/", "none"):
            await refused(client, KeyNotFound, m.SetAttributes("bkt", key, tags={"a": "1"}))

    kind.run(body)
