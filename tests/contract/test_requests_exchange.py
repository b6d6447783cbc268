"""Requests that exchange two names.

On every kind of client.
"""

from __future__ import annotations

from lakefs.errors import AlreadyExists, BucketNotFound, InvalidArgument, KeyNotFound, PreconditionFailed
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import stat
from tests.contract.test_requests_nodes import LINK, clock_moves_on, folders_of, one
from tests.contract.test_requests_versions import get, keep_versions, version_put, versions
from tests.store_rig import ask, delete, fsck, put

LONG = "n" * 480
"""A component whose name is split: its folder and its object are below one hidden node."""


def test_two_names_have_each_others_nodes_whatever_their_kinds(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a/one", b"1")
        await put(client, "b/two", b"2")
        await put(client, f"b/{LONG}", b"3")
        await one(client, m.MakeSymlink("bkt", "link", b"a", LINK))
        for key, to_key in (
            ("a/one", "b/two"),
            ("a/", "b/"),
            ("link", "b/one"),
            ("b/", "link"),
            (f"a/{LONG}", "link/"),
        ):
            await clock_moves_on(kind)
            new_key = to_key.removesuffix("/") + ("/" if key.endswith("/") else "")
            old_key = key.removesuffix("/") + ("/" if to_key.endswith("/") else "")
            before, other = await stat(client, key), await stat(client, to_key)
            moved = await one(client, m.Exchange("bkt", key, to_key))
            assert (moved.key, moved.node, moved.kind) == (new_key, before.node, before.kind)
            assert moved.ctime_ns > before.ctime_ns
            assert moved == await stat(client, new_key)
            there = await stat(client, old_key)
            assert (there.node, there.kind) == (other.node, other.kind)
            assert there.ctime_ns > other.ctime_ns
        keys = await folders_of(client)
        assert keys == ["a/", f"a/{LONG}/", f"a/{LONG}/one", "a/two", "b", "link"]
        assert (await fsck(client))["damage"] == 0
        await delete(client, "a/two", "b", "link", f"a/{LONG}/one")
        assert await folders_of(client) == [], "folders that nobody made went with their last names"

    kind.run(body)


def test_names_that_cannot_be_exchanged_stay_as_they_are(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a/in", b"1")
        await put(client, "a", b"beside its folder")
        await put(client, "b", b"2")
        before = await folders_of(client)
        node = (await stat(client, "b")).node
        for error, request in (
            (BucketNotFound, m.Exchange("none", "a", "b")),
            (KeyNotFound, m.Exchange("bkt", "a", "missing")),
            (KeyNotFound, m.Exchange("bkt", "missing", "b")),
            (InvalidArgument, m.Exchange("bkt", "a/", "a/in")),
            (InvalidArgument, m.Exchange("bkt", "a/in", "a/")),
            (InvalidArgument, m.Exchange("bkt", "", "b")),
            (AlreadyExists, m.Exchange("bkt", "a/", "b")),
            (AlreadyExists, m.Exchange("bkt", "b", "a/")),
            (PreconditionFailed, m.Exchange("bkt", "b", "a", condition=m.Condition(node=node + 1000))),
            (PreconditionFailed, m.Exchange("bkt", "a", "b", to_condition=m.Condition(node=node + 1000))),
        ):
            await refused(client, error, request)
        assert (await one(client, m.Exchange("bkt", "b", "b"))).node == node
        assert await folders_of(client) == before
        assert (await stat(client, "b")).node == node

    kind.run(body)


def test_an_exchange_that_is_sent_twice_with_its_nodes_is_made_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        a, b = await put(client, "a", b"1"), await put(client, "b", b"2")
        upon, to_upon = m.Condition(node=a.node), m.Condition(node=b.node)
        request = m.Exchange("bkt", "a", "b", condition=upon, to_condition=to_upon, folders=True)
        await one(client, request)
        await refused(client, PreconditionFailed, request)
        assert ((await stat(client, "a")).node, (await stat(client, "b")).node) == (b.node, a.node)

    kind.run(body)


def test_objects_with_versions_become_new_ones_of_each_others_keys(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"null of a")
        await keep_versions(client)
        old = await version_put(client, "b", b"old of b")
        await version_put(client, "b", b"b")
        await one(client, m.Exchange("bkt", "a", "b"))
        assert [await get(client, key) for key in ("a", "b")] == [b"b", b"null of a"]
        assert await get(client, "b", old) == b"old of b"
        await one(client, m.MakeFolder("bkt", "f/"))
        await one(client, m.Exchange("bkt", "f/", "b"))
        found = [(key, latest, marker) for key, _, latest, marker in await versions(client) if not key.endswith("/")]
        assert found == [("a", True, False), ("b", True, True), ("b", False, False), ("f", True, False)]
        await ask(client, m.BucketSet("bkt", versioning="suspended"), m.Buckets)
        await one(client, m.Exchange("bkt", "a", "f"))
        assert [await get(client, key) for key in ("a", "f")] == [b"null of a", b"b"]
        assert (await fsck(client))["damage"] == 0

    kind.run(body)
