"""Requests about keys of more than 1,024 bytes, up to the limit of a path and beyond it.

On every kind of client.
"""

from __future__ import annotations

import pytest

from lakefs.errors import InvalidName, LakeError
from lakefs.limits import KEY_BYTES_MAX
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import keys_of, stat
from tests.contract.test_requests_nodes import LINK, folders_of, keep, one
from tests.contract.test_requests_versions import get, keep_versions
from tests.store_rig import ask, delete, fsck, put

PART = "d" * 254 + "/"
"""Sixteen of these are 4,080 bytes."""
DEEP = PART * 16
OUTER = "o" * 254 + "/"


def test_what_a_folders_rename_made_longer_is_found_changed_renamed_and_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        longest = DEEP + "k" * (KEY_BYTES_MAX - len(DEEP))
        await put(client, longest, b"longest")
        for request in (m.MakeSymlink("bkt", longest + "k", b"t", LINK), m.MakeFolder("bkt", longest + "/")):
            await refused(client, InvalidName, request)
        with pytest.raises(LakeError):
            await put(client, longest + "k", b"too long")
        await put(client, "f/file", b"1")
        await one(client, m.MakeFolder("bkt", "f/" + "e" * 100))
        await refused(client, InvalidName, m.Rename("bkt", "f/file", "bkt", longest + "k"))
        await one(client, m.Rename("bkt", "f/", "bkt", DEEP + "f/"))
        await one(client, m.Rename("bkt", DEEP, "bkt", OUTER + DEEP))
        long = OUTER + DEEP + "f/file"
        found = await stat(client, long)
        assert await get(client, long) == b"1"
        await keep(client, long, found.node, b"kept")
        assert (await stat(client, long)).node == found.node
        await put(client, long, b"put anew")
        renamed = await one(client, m.Rename("bkt", long, "bkt", long[:-1] + "x"))
        assert await get(client, renamed.key) == b"put anew"
        await one(client, m.Rename("bkt", OUTER + DEEP + "f/", "bkt", OUTER + DEEP + "g" * 200 + "/"))
        await one(client, m.Rename("bkt", OUTER + DEEP + "g" * 200 + "/filx", "bkt", "short"))
        assert await get(client, "short") == b"put anew"
        if kind.simulated:
            assert (await fsck(client))["damage"] == 0
        await delete(client, *reversed(await folders_of(client)))
        assert await folders_of(client) == []

    kind.run(body)


def test_a_long_key_is_removed_where_versions_are_kept(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "f/file", b"1")
        await keep_versions(client)
        await one(client, m.Rename("bkt", "f/", "bkt", DEEP + OUTER))
        await delete(client, DEEP + OUTER + "file")
        assert await keys_of(client, m.ListNames("bkt")) == []

    kind.run(body)


def test_a_page_of_long_keys_ends_before_it_is_too_large_to_send(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        count = 320 if kind.simulated else 270
        await put(client, "f/0", b"1")
        for number in range(1, count):
            await ask(client, m.Copy("bkt", "f/0", "bkt", f"f/{number}"), m.NameResults)
        await one(client, m.Rename("bkt", "f/", "bkt", DEEP))
        seen: list[str] = []
        pages, after = 0, ""
        while pages == 0 or after:
            page = await ask(client, m.ListNames("bkt", after=after), m.Listed)
            seen += [entry.key for entry in page.entries]
            pages, after = pages + 1, page.next_after
        assert (len(seen), len(set(seen)), pages) == (count, count, 2)

    kind.run(body)
