"""Requests about versions, on every kind of client."""

from __future__ import annotations

import pytest

from lakefs.errors import (
    BucketNotEmpty,
    InvalidArgument,
    KeyDeleted,
    KeyNotFound,
    PreconditionFailed,
    VersionIsMarker,
    VersionNotFound,
)
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.collecting import collected, notes_of
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import kinds_of
from tests.store_rig import PLAIN, ask, change, delete, fsck, good, put

NULL = "null"


async def keep_versions(client: EngineClient, versioning: str = "enabled") -> None:
    """Set the versioning of the bucket `bkt`; create the bucket when it is missing."""
    buckets = await ask(client, m.BucketList(), m.Buckets)
    if not buckets.buckets:
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
    await ask(client, m.BucketSet("bkt", versioning=versioning), m.Buckets)


async def version_put(client: EngineClient, key: str, payload: bytes) -> str:
    return (await put(client, key, payload)).version


async def get(client: EngineClient, key: str, version: str = "") -> bytes:
    """Return the inline content of a small object."""
    reply = await client.call(m.OpenObjects([("bkt", key)], lease=False, versions=[version]))
    payload = reply.body.joined()
    reply.body.release()
    assert isinstance(reply.message, m.OpenResults)
    (result,) = reply.message.results
    if result.failure is not None:
        raise result.failure.as_error()
    assert result.opened is not None
    assert version in ("", result.opened.stat.version)
    return payload


async def stat(client: EngineClient, key: str, version: str = "") -> m.ObjectStat:
    (found,) = good(await ask(client, m.StatNames([("bkt", key)], versions=[version]), m.NameResults))
    return found


async def remove(client: EngineClient, key: str, version: str = "") -> m.NameResult:
    request = m.DeleteNames([("bkt", key)], versions=[version])
    (result,) = (await ask(client, request, m.NameResults)).results
    return result


async def versions(client: EngineClient, *, prefix: str = "") -> list[tuple[str, str, bool, bool]]:
    """Return of each version: key, id, whether it is the latest, whether it is a delete marker."""
    listed = await ask(client, m.ListVersions("bkt", prefix), m.ListedVersions)
    return [(e.key, e.version, e.is_latest, e.is_marker) for e in listed.entries]


def test_what_is_overwritten_and_deleted_can_be_read_by_its_version(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        before = await version_put(client, "k", b"before")
        assert before == ""
        await keep_versions(client)
        first, second = await version_put(client, "k", b"first"), await version_put(client, "k", b"second")
        assert len({first, second, NULL}) == 3
        marker = (await remove(client, "k")).marker
        assert await versions(client) == [
            ("k", marker, True, True),
            ("k", second, False, False),
            ("k", first, False, False),
            ("k", NULL, False, False),
        ]
        assert await get(client, "k", first) == b"first"
        assert await get(client, "k", second) == b"second"
        assert await get(client, "k", NULL) == b"before"
        for wanted, error in (("", KeyDeleted), (marker, VersionIsMarker), ("0" * 15 + "1", VersionNotFound)):
            with pytest.raises(error):
                await get(client, "k", wanted)
        with pytest.raises(InvalidArgument):
            await get(client, "k", "no-id")
        assert (await stat(client, "k", marker)).is_marker
        assert not (await ask(client, m.ListNames("bkt"), m.Listed)).entries
        await collected(engine, client)
        assert await get(client, "k", first) == b"first"
        assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_the_newest_version_that_is_left_takes_the_place_of_one_that_goes(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        ids = [await version_put(client, "f/k", text) for text in (b"0", b"1", b"2")]
        marker = (await remove(client, "f/k")).marker
        gone = await remove(client, "f/k", marker)
        assert gone.stat is not None
        assert gone.stat.is_marker
        assert await get(client, "f/k") == b"2"
        await remove(client, "f/k", ids[2])
        assert await get(client, "f/k") == b"1"
        await remove(client, "f/k", ids[0])
        assert await get(client, "f/k") == b"1"
        assert (await remove(client, "f/k", ids[0])).failure is None
        await remove(client, "f/k", ids[1])
        assert await versions(client) == []
        await ask(client, m.BucketRemove("bkt"), m.Done)
        assert (await collected(engine, client))["live_chunks"] == 0
        assert notes_of(await fsck(client)) == 0

    kind.run(body)


def test_while_versioning_is_suspended_null_takes_the_place_of_null(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        kept = await version_put(client, "k", b"kept")
        await keep_versions(client, "suspended")
        assert await version_put(client, "k", b"null 1") == NULL
        assert await version_put(client, "k", b"null 2") == NULL
        assert await versions(client) == [("k", NULL, True, False), ("k", kept, False, False)]
        assert (await remove(client, "k")).marker == NULL
        assert await versions(client) == [("k", NULL, True, True), ("k", kept, False, False)]
        await keep_versions(client)
        newest = await version_put(client, "k", b"newest")
        assert await versions(client) == [
            ("k", newest, True, False),
            ("k", NULL, False, True),
            ("k", kept, False, False),
        ]

    kind.run(body)


def test_conditions_look_at_what_a_key_is_bound_to(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        await put(client, "k", b"1")
        await delete(client, "k")
        request = m.PutObjects([1], [change("k", condition=m.Condition(absent=True))])
        assert kinds_of(await ask(client, request, m.NameResults, b"2")) == [None]
        assert kinds_of(await ask(client, request, m.NameResults, b"3")) == [PreconditionFailed]
        assert len(await versions(client)) == 3

    kind.run(body)


def test_each_name_is_removed_under_its_own_condition(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        first = await put(client, "k1", b"12345")
        await put(client, "k2", b"12345")
        await put(client, "k3", b"12345")
        names = [("bkt", key) for key in ("k1", "k2", "k3", "none", "none")]
        conditions = [
            m.Condition(etags=[first.etag]),
            m.Condition(size_bytes=6),
            m.NO_CONDITION,
            m.Condition(etags=["*"]),
            m.Condition(mtime_s=1),
        ]
        request = m.DeleteNames(names, m.Condition(absent=True), conditions=conditions)
        found = kinds_of(await ask(client, request, m.NameResults))
        assert found == [None, PreconditionFailed, None, KeyNotFound, None]
        assert [key for key, _, _, _ in await versions(client)] == ["k2"]
        await refused(client, InvalidArgument, m.DeleteNames(names, conditions=conditions[1:]))

    kind.run(body)


def test_a_condition_beside_a_version_is_about_that_one(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        old = await version_put(client, "k", b"old")
        first = await stat(client, "k")
        await put(client, "k", b"newest")
        for condition, version, expected in (
            (m.Condition(size_bytes=6), old, PreconditionFailed),
            (m.Condition(etags=["*"]), "0" * 15 + "f", KeyNotFound),
            (m.Condition(etags=[first.etag], size_bytes=3), old, None),
        ):
            request = m.DeleteNames([("bkt", "k")], condition, versions=[version])
            assert kinds_of(await ask(client, request, m.NameResults)) == [expected]
        assert len(await versions(client)) == 1

    kind.run(body)


def test_a_bucket_with_versions_is_not_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        await put(client, "k", b"1")
        await delete(client, "k")
        error = await refused(client, BucketNotEmpty, m.BucketRemove("bkt"))
        assert "versions" in error.message

    kind.run(body)


def test_a_version_is_copied_and_a_delete_marker_is_not(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        old = await version_put(client, "k", b"old")
        await put(client, "k", b"new")
        copied = m.Copy("bkt", "k", "bkt", "copy", version=old)
        (made,) = good(await ask(client, copied, m.NameResults))
        assert await get(client, "copy") == b"old"
        assert made.version not in ("", old)
        marker = (await remove(client, "k")).marker
        await refused(client, VersionIsMarker, m.Copy("bkt", "k", "bkt", "copy", version=marker))

    kind.run(body)


def test_moving_an_object_leaves_its_old_versions_below_a_delete_marker(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        await put(client, "fresh", b"1")
        await ask(client, m.Rename("bkt", "fresh", "bkt", "moved"), m.NameResults)
        assert [(key, marker) for key, _, _, marker in await versions(client)] == [("moved", False)]
        old = await version_put(client, "target", b"2")
        await ask(client, m.Rename("bkt", "moved", "bkt", "target"), m.NameResults)
        assert await get(client, "target") == b"1"
        assert await get(client, "target", old) == b"2"
        await ask(client, m.Rename("bkt", "target", "bkt", "f/away"), m.NameResults)
        found = await versions(client, prefix="target")
        assert [(key, latest, marker) for key, _, latest, marker in found] == [
            ("target", True, True),
            ("target", False, False),
        ]

    kind.run(body)


def test_moving_a_folder_takes_along_what_its_names_are_bound_to(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        old = await put(client, "f/k", b"null")
        await put(client, "g/k", b"older null")
        await keep_versions(client)
        replaced = await version_put(client, "g/k", b"replaced")
        await delete(client, "g/k")
        await ask(client, m.Rename("bkt", "f/", "bkt", "g/"), m.NameResults)
        assert (await stat(client, "g/k")).node == old.node
        newest = await version_put(client, "g/k", b"newest")
        found = await versions(client)
        assert len({version for _, version, _, _ in found}) == 5
        texts = [await get(client, "g/k", version) for _, version, _, marker in found if not marker]
        assert sorted(texts) == [b"newest", b"null", b"older null", b"replaced"]
        assert {newest, replaced, NULL} <= {version for _, version, _, _ in found}
        assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_a_node_that_is_kept_is_a_new_version_only_with_other_content(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await keep_versions(client)
        first = await put(client, "k", b"1")

        async def rewrite(payload: bytes) -> m.ObjectStat:
            rewritten = m.NameChange("bkt", "k", b"", PLAIN, keep_node=first.node)
            request = m.PutObjects([len(payload)], [rewritten])
            (made,) = good(await ask(client, request, m.NameResults, payload))
            return made

        same, other = await rewrite(b"1"), await rewrite(b"2")
        assert (same.version, same.node, other.node) == (first.version, first.node, first.node)
        assert other.version != first.version
        assert await get(client, "k", first.version) == b"1"
        assert await get(client, "k") == b"2"
        assert len(await versions(client)) == 2

    kind.run(body)


def test_versions_go_with_as_many_names(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "k", b"1")
        for request in (
            m.StatNames([("bkt", "k")], versions=[NULL, NULL]),
            m.OpenObjects([("bkt", "k")], versions=[NULL, NULL]),
            m.DeleteNames([("bkt", "k")], versions=[NULL, NULL]),
        ):
            await refused(client, InvalidArgument, request)
        assert (await stat(client, "k", NULL)).version == ""
        assert await versions(client) == [("k", NULL, True, False)]
        await remove(client, "k", NULL)
        assert await versions(client) == []

    kind.run(body)
