"""Requests about folders that stay or are removed, changes that are answered when visible, and events for watchers.

On every kind of client.
"""

from __future__ import annotations

import pytest

from lakefs.errors import (
    AlreadyExists,
    BucketNotFound,
    FolderNotEmpty,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    NotAFolder,
    PreconditionFailed,
    RequestTooLarge,
)
from lakefs.ids import EMPTY_BLOB
from lakefs.limits import ATTRIBUTES_BYTES_MAX
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import keys_of, kinds_of, stat
from tests.contract.test_requests_nodes import LINK, SMALL, folders_of, keep, one
from tests.store_rig import ask, change, good, put, session_of, store_chunks

# --- folders -------------------------------------------------------------------------------------------


def test_a_folder_that_loses_its_last_name_stays_when_asked_to(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        keys = ["a/b/x", "a/b/y", "m/x", "deep/" + "n" * 1000, "top"]
        for key in keys:
            await put(client, key, SMALL)
        names = [("bkt", "a/b/x"), ("bkt", keys[3]), ("bkt", "top"), ("bkt", "missing/x")]
        good_or_none = await ask(client, m.DeleteNames(names, keep_folder=True), m.NameResults)
        assert kinds_of(good_or_none) == [None] * 4
        assert await folders_of(client) == ["a/", "a/b/", "a/b/y", "deep/", "m/", "m/x"]
        assert (await stat(client, "a/b/")).blob == b""
        assert (await stat(client, "deep/")).blob == EMPTY_BLOB
        await one(client, m.Rename("bkt", "a/b/y", "bkt", "z", keep_folder=True))
        assert await keys_of(client, m.ListNames("bkt")) == ["a/b/", "deep/", "m/x", "z"]
        gone = await one(client, m.RemoveFolder("bkt", "a/b", keep_folder=True))
        assert (gone.kind, gone.blob) == (1, EMPTY_BLOB)
        assert await keys_of(client, m.ListNames("bkt")) == ["a/", "deep/", "m/x", "z"]
        await one(client, m.Rename("bkt", "m/x", "bkt", "m/y", keep_folder=True))
        assert (await stat(client, "m/")).blob == b""
        await one(client, m.Rename("bkt", "m/", "bkt", "deep/m/", keep_folder=True))
        await one(client, m.Rename("bkt", "deep/m/y", "bkt", "y"))
        assert await folders_of(client) == ["a/", "deep/", "y", "z"]

    kind.run(body)


def test_only_empty_folders_are_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "implicit/x", SMALL)
        await put(client, "object", SMALL)
        for key in ("made/in/", "one/two/"):
            await one(client, m.MakeFolder("bkt", key))
        for error, key in (
            (FolderNotEmpty, "implicit/"),
            (FolderNotEmpty, "made/"),
            (NotAFolder, "object"),
            (NotAFolder, "object/"),
            (KeyNotFound, "missing/"),
            (KeyNotFound, "missing/in/"),
            (InvalidName, ""),
        ):
            await refused(client, error, m.RemoveFolder("bkt", key))
        await refused(client, BucketNotFound, m.RemoveFolder("nowhere", "x/"))
        assert (await one(client, m.RemoveFolder("bkt", "made/in/"))).key == "made/in/"
        await one(client, m.RemoveFolder("bkt", "one/two"))
        assert await folders_of(client) == ["implicit/", "implicit/x", "object"]

    kind.run(body)


def test_a_new_folder_takes_the_attributes_that_it_is_made_with(kind: Kind) -> None:
    attributes = m.ObjectAttributes(mode=0o2710, uid=1, gid=2, mtime_ns=3, xattrs={"user.f": b"f"})

    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "implicit/x", SMALL)
        implicit = await stat(client, "implicit/")
        for key in ("new/", "implicit/"):
            made = await one(client, m.MakeFolder("bkt", key, attributes=attributes))
            assert (made.mode, made.uid, made.gid, made.mtime_ns, made.xattrs, made.blob) == (
                0o2710,
                1,
                2,
                3,
                {"user.f": b"f"},
                EMPTY_BLOB,
            )
            assert await stat(client, key) == made
        assert (await stat(client, "implicit/")).node == implicit.node
        other = await one(client, m.MakeFolder("bkt", "new/", attributes=m.ObjectAttributes(mode=0o700)))
        assert other.mode == 0o2710
        assert (await one(client, m.MakeFolder("bkt", "plain/"))).mode == 0o755
        bad = m.ObjectAttributes(gid=-1)
        await refused(client, InvalidArgument, m.MakeFolder("bkt", "bad/in/", attributes=bad))
        huge = m.ObjectAttributes(xattrs={"user.h": b"x" * ATTRIBUTES_BYTES_MAX})
        await refused(client, RequestTooLarge, m.MakeFolder("bkt", "bad/in/", attributes=huge))
        assert await folders_of(client) == ["implicit/", "implicit/x", "new/", "plain/"]

    kind.run(body)


# --- visible and durable -------------------------------------------------------------------------------


def test_what_was_asked_for_as_visible_is_there_for_all_and_synced_by_sync(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        put_request = m.PutObjects([len(SMALL)], [change("f/k")], durable=False)
        (first,) = good(await ask(client, put_request, m.NameResults, SMALL))
        assert (await stat(client, "f/k")) == first
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"c"])
        await one(client, m.Commit(session, [change("c", chunk)], end_session=True, durable=False))
        await one(client, m.MakeFolder("bkt", "d/", durable=False))
        await one(client, m.MakeSymlink("bkt", "l", b"t", LINK, durable=False))
        await one(client, m.SetAttributes("bkt", "l", uid=9, durable=False))
        await one(client, m.Rename("bkt", "c", "bkt", "moved", durable=False))
        await one(client, m.RemoveFolder("bkt", "d/", durable=False))
        gone = await ask(client, m.DeleteNames([("bkt", "f/k")], durable=False), m.NameResults)
        assert kinds_of(gone) == [None]
        assert await ask(client, m.Sync(), m.Done) == m.Done()
        async with engine.connect() as other:
            assert await keys_of(other, m.ListNames("bkt")) == ["l", "moved"]
            assert (await stat(other, "l")).uid == 9

    kind.run(body)


def test_refusals_are_the_same_for_who_asks_for_no_durability(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", SMALL)
        await refused(client, KeyNotFound, m.Rename("bkt", "x", "bkt", "y", durable=False))
        await refused(client, AlreadyExists, m.MakeFolder("bkt", "k/", exclusive=True, durable=False))
        await refused(client, KeyNotFound, m.SetAttributes("bkt", "x", durable=False))
        await refused(client, AlreadyExists, m.MakeSymlink("bkt", "k", b"t", LINK, durable=False))
        await refused(client, KeyNotFound, m.RemoveFolder("bkt", "x/", durable=False))
        request = m.PutObjects([1], [change("k", condition=m.Condition(absent=True))], durable=False)
        assert kinds_of(await ask(client, request, m.NameResults, b"x")) == [PreconditionFailed]

    kind.run(body)


# --- watching ------------------------------------------------------------------------------------------


def test_changes_of_nodes_are_told_to_who_watches(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "f/k", SMALL)
        async with client.watch("bkt") as events:
            async with engine.connect() as other:
                good(await keep(other, "f/k", first.node))
                for request in (
                    m.SetAttributes("bkt", "", mode=0o700),
                    m.SetAttributes("bkt", "f/", mode=0o700),
                    m.MakeSymlink("bkt", "l", b"t", LINK),
                    m.Rename("bkt", "f/k", "bkt", "k", keep_folder=True),
                    m.RemoveFolder("bkt", "f/", keep_folder=True),
                ):
                    await one(other, request)
            told = [await anext(events) for _ in range(7)]
        assert [(event.kind, event.key) for event in told] == [
            ("put", "f/k"),
            ("put", ""),
            ("put", "f/"),
            ("put", "l"),
            ("rename", "f/k"),
            ("put", "f/"),
            ("delete", "f/"),
        ]
        assert told[0].node == first.node

    kind.run(body)
