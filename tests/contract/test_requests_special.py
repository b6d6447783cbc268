"""Requests about special nodes: pipes, sockets, devices.

On every kind of client.
"""

from __future__ import annotations

import pytest

from lakefs.errors import AlreadyExists, BucketNotFound, InvalidArgument, KeyNotFound
from lakefs.wire import messages as m
from tests.contract.collecting import collected
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import kinds_of, stat
from tests.contract.test_requests_nodes import LINK, folders_of, one
from tests.contract.test_requests_versions import keep_versions, versions
from tests.store_rig import ask, delete, fsck, put


@pytest.mark.parametrize(("number", "device"), [(5, 0), (6, 0), (7, 259), (8, (1 << 32) - 1)])
def test_a_special_node_is_made_listed_copied_moved_replaced_and_removed(kind: Kind, number: int, device: int) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await refused(client, BucketNotFound, m.MakeNode("bkt", "a/n", number, LINK, device))
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        made = await one(client, m.MakeNode("bkt", "a/n", number, LINK, device))
        assert (made.kind, made.device, made.size_bytes, made.blob, made.etag) == (number, device, 0, b"", "")
        assert (made.mode, made.uid, made.gid, made.mtime_ns, made.xattrs) == (0o777, 5, 6, 7, {"user.l": b"x"})
        assert await stat(client, "a/n") == made
        (entry,) = (await ask(client, m.ListNames("bkt"), m.Listed)).entries
        assert (entry.key, entry.kind, entry.device, entry.node) == ("a/n", number, device, made.node)
        copied = await one(client, m.Copy("bkt", "a/n", "bkt", "copy"))
        moved = await one(client, m.Rename("bkt", "a/n", "bkt", "b/n"))
        changed = await one(client, m.SetAttributes("bkt", "b/n", mode=0o600))
        assert [(each.kind, each.device) for each in (copied, moved, changed)] == [(number, device)] * 3
        assert (moved.node, changed.node) == (made.node, made.node) != (copied.node, copied.node)
        opened = await ask(client, m.OpenObjects([("bkt", "copy")]), m.OpenResults)
        assert opened.results[0].failure is not None
        assert isinstance(opened.results[0].failure.as_error(), KeyNotFound)
        await refused(client, InvalidArgument, m.Copy("bkt", "copy", "bkt", "folder/"))
        assert (await put(client, "b/n", b"content")).kind == 2
        assert (await collected(engine, client))["live_chunks"] == 1
        if kind.simulated:
            assert (await fsck(client))["damage"] == 0
        await delete(client, "b/n", "copy")
        assert await folders_of(client) == []

    kind.run(body)


def test_a_special_node_is_not_made_where_something_is_nor_of_nonsense(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "object", b"1")
        await put(client, "folder/in", b"1")
        for key in ("object", "folder"):
            await refused(client, AlreadyExists, m.MakeNode("bkt", key, 5, LINK))
        for number, device, key in (
            (4, 0, "n"),
            (2, 0, "n"),
            (9, 0, "n"),
            (5, 1, "n"),
            (7, 1 << 32, "n"),
            (5, 0, "n/"),
        ):
            await refused(client, InvalidArgument, m.MakeNode("bkt", key, number, LINK, device))
        looked = await ask(client, m.StatNames([("bkt", "n")]), m.NameResults)
        assert kinds_of(looked) == [KeyNotFound]

    kind.run(body)


def test_a_special_node_is_a_version_like_any_other(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", b"null")
        await keep_versions(client)
        await delete(client, "k")
        await one(client, m.MakeNode("bkt", "k", 5, LINK))
        await put(client, "k", b"newest")
        assert [marker for _, _, _, marker in await versions(client)] == [False, False, True, False]
        if kind.simulated:
            assert (await fsck(client))["damage"] == 0

    kind.run(body)
