"""Conditions on places, and what changes tell of folders; on every kind of client."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lakefs.errors import AlreadyExists, PreconditionFailed
from lakefs.host.descriptors import close_all
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_names import kinds_of, stat
from tests.store_rig import PLAIN, ask, good, put

Made = Callable[[m.Condition], m.Request]


def _put(key: str, upon: m.Condition, keep_node: int = 0, named_ns: int = 0) -> m.PutObjects:
    change = m.NameChange("bkt", key, b"", PLAIN, upon, keep_node=keep_node, named_ns=named_ns)
    return m.PutObjects([1], [change], folders=True)


async def _result(client: EngineClient, request: m.Request) -> m.NameResult:
    body = [b"x"] if isinstance(request, m.PutObjects) else []
    message = (await client.call(request, body)).message
    assert isinstance(message, m.NameResults)
    (result,) = message.results
    return result


async def _is_refused(client: EngineClient, request: m.Request) -> bool:
    """Return True if the request is refused with PreconditionFailed, False if it is done."""
    try:
        result = await _result(client, request)
    except PreconditionFailed:
        return True
    if result.failure is None:
        return False
    assert isinstance(result.failure.as_error(), PreconditionFailed)
    return True


async def _folders(client: EngineClient) -> tuple[int, int]:
    """Make two folders in a bucket; return their nodes."""
    await put(client, "first", b"1")  # makes the bucket
    await ask(client, m.MakeFolder("bkt", "d/"), m.NameResults)
    await ask(client, m.MakeFolder("bkt", "e/"), m.NameResults)
    return (await stat(client, "d/")).node, (await stat(client, "e/")).node


CHANGES: dict[str, Made] = {
    "put": lambda upon: _put("d/new", upon),
    "make_folder": lambda upon: m.MakeFolder("bkt", "d/new", condition=upon, folders=True),
    "make_symlink": lambda upon: m.MakeSymlink("bkt", "d/new", b"target", PLAIN, condition=upon, folders=True),
    "remove_folder": lambda upon: m.RemoveFolder("bkt", "d/sub", condition=upon, folders=True),
    "delete": lambda upon: m.DeleteNames([("bkt", "d/a")], conditions=[upon], folders=True),
    "rename_from": lambda upon: m.Rename("bkt", "d/a", "bkt", "e/moved", condition=upon, folders=True),
    "rename_to": lambda upon: m.Rename("bkt", "e/b", "bkt", "d/moved", to_condition=upon, folders=True),
    "exchange_from": lambda upon: m.Exchange("bkt", "d/a", "e/b", condition=upon, folders=True),
    "exchange_to": lambda upon: m.Exchange("bkt", "e/b", "d/a", to_condition=upon, folders=True),
    "set_attributes": lambda upon: m.SetAttributes("bkt", "d/a", condition=upon, mode=0o600),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_made_in_the_folder_that_it_was_decided_upon_and_in_no_other(kind: Kind, change: str) -> None:
    async def body(engine: Engine) -> None:
        client, made = engine.client, CHANGES[change]
        d, e = await _folders(client)
        await put(client, "d/a", b"1")
        await put(client, "e/b", b"1")
        await ask(client, m.MakeFolder("bkt", "d/sub/"), m.NameResults)
        before = [await stat(client, key) for key in ("d/", "e/", "d/a", "d/sub/")]
        assert await _is_refused(client, made(m.Condition(folder=e)))
        assert before == [await stat(client, key) for key in ("d/", "e/", "d/a", "d/sub/")], "a refusal changes nothing"
        assert not await _is_refused(client, made(m.Condition(folder=d)))

    kind.run(body)


@pytest.mark.parametrize("number", [-1, -(1 << 40), 1 << 63, (1 << 64) - 1])
def test_a_number_that_no_node_has_is_of_no_folder_and_of_nothing_that_is_left(kind: Kind, number: int) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await _folders(client)
        await put(client, "d/a", b"1")
        await put(client, "e/b", b"1")
        await ask(client, m.MakeFolder("bkt", "d/sub/"), m.NameResults)
        for made in CHANGES.values():
            assert await _is_refused(client, made(m.Condition(folder=number)))
        assert not await _is_refused(client, _put("d/new", m.Condition(gone=number)))

    kind.run(body)


@pytest.mark.parametrize("change", ["put", "make_folder", "make_symlink"])
@pytest.mark.parametrize("gone", [m.Rename("bkt", "d/", "bkt", "elsewhere/"), m.RemoveFolder("bkt", "d")])
def test_a_folder_that_was_renamed_or_removed_is_not_made_again_by_a_name_in_it(
    kind: Kind, change: str, gone: m.Request
) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        d, _ = await _folders(client)
        await ask(client, gone, m.NameResults)
        assert await _is_refused(client, CHANGES[change](m.Condition(folder=d)))
        results = await ask(client, m.StatNames([("bkt", "d/"), ("bkt", "d/new")]), m.NameResults)
        assert all(found is not None for found in kinds_of(results))

    kind.run(body)


def test_a_name_is_alone_when_no_name_of_the_other_kind_has_its_path(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client, alone = engine.client, m.Condition(absent=True, alone=True)
        await _folders(client)
        await ask(client, m.MakeFolder("bkt", "folder/"), m.NameResults)
        await put(client, "object", b"1")
        assert await _is_refused(client, _put("folder", alone))
        assert await _is_refused(client, m.MakeFolder("bkt", "object/", condition=alone))
        await refused(client, AlreadyExists, m.MakeFolder("bkt", "object/", exclusive=True))
        long = "x" * 600
        await ask(client, m.MakeFolder("bkt", f"{long}/"), m.NameResults)
        assert await _is_refused(client, _put(long, alone))
        assert not await _is_refused(client, _put("folder-2", alone))

    kind.run(body)


def test_content_is_replaced_only_where_it_is_the_expected_one(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"1")
        first = await stat(client, "a")
        seen = m.Condition(node=first.node, blob=first.blob)
        assert not await _is_refused(client, _put("a", seen, keep_node=first.node))
        second = await stat(client, "a")
        assert second.node == first.node
        assert second.blob != first.blob
        assert await _is_refused(client, _put("a", seen, keep_node=first.node)), "the node is the same, not the content"
        assert await _is_refused(client, _put("missing", m.Condition(blob=first.blob)))

    kind.run(body)


def test_what_was_overwritten_is_gone_and_what_was_renamed_is_not(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"1")
        renamed = (await stat(client, "a")).node
        await ask(client, m.Rename("bkt", "a", "bkt", "b"), m.NameResults)
        await put(client, "a", b"2")
        overwritten = (await stat(client, "a")).node
        assert await _is_refused(client, _put("a", m.Condition(gone=renamed)))
        assert not await _is_refused(client, _put("a", m.Condition(node=overwritten)))
        assert not await _is_refused(client, _put("a", m.Condition(gone=overwritten)))

    kind.run(body)


def test_a_former_version_of_a_name_is_gone_from_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "first", b"1")  # makes the bucket
        await ask(client, m.BucketSet("bkt", versioning="enabled"), m.Buckets)
        await put(client, "a", b"1")
        former = (await stat(client, "a")).node
        await put(client, "a", b"2")
        assert not await _is_refused(client, _put("a", m.Condition(gone=former)))
        present = (await stat(client, "a")).node
        await ask(client, m.Rename("bkt", "a", "bkt", "b"), m.NameResults)
        assert await _is_refused(client, _put("a", m.Condition(gone=present)))

    kind.run(body)


def test_a_change_tells_what_became_of_its_folder(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        d, e = await _folders(client)
        await put(client, "d/a", b"1")
        await put(client, "e/b", b"1")
        for name in ("put", "make_folder", "delete", "rename_to", "rename_from", "remove_folder"):
            if name == "rename_from":
                await put(client, "d/a", b"1")
            if name == "remove_folder":
                await ask(client, m.MakeFolder("bkt", "d/sub/"), m.NameResults)
            before = [(await stat(client, key)).ctime_ns for key in ("d/", "e/")]
            result = await _result(client, CHANGES[name](m.Condition()))
            after = [(await stat(client, key)).ctime_ns for key in ("d/", "e/")]
            assert result.folder is not None
            told = result.from_folder if name == "rename_from" else result.folder
            assert told is not None
            assert (told.node, told.before_ns, told.after_ns) == (d, before[0], after[0]), name
            assert told.after_ns > told.before_ns
            if name == "rename_from":
                assert (result.folder.node, result.folder.before_ns, result.folder.after_ns) == (e, before[1], after[1])

    kind.run(body)


def test_a_folder_that_one_name_gives_wrongly_is_not_taken_for_that_of_another(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        d, e = await _folders(client)
        await put(client, "e/b", b"1")
        elsewhere = (await stat(client, "e/")).ctime_ns
        upon = (m.Condition(folder=d), m.Condition(folder=e))
        changes = [m.NameChange("bkt", f"d/{at}", b"", PLAIN, condition) for at, condition in enumerate(upon)]
        message = (await client.call(m.PutObjects([1, 1], changes, folders=True), [b"x", b"y"])).message
        assert isinstance(message, m.NameResults)
        made, wrong = message.results
        assert made.failure is None
        assert wrong.failure is not None
        assert made.folder is not None
        assert (made.folder.node, made.folder.after_ns) == (d, (await stat(client, "d/")).ctime_ns)
        assert made.folder.before_ns != elsewhere

    kind.run(body)


def test_a_change_of_a_folders_attributes_tells_what_became_of_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        d, _ = await _folders(client)
        before = await stat(client, "d/")
        result = await _result(client, m.SetAttributes("bkt", "d/", mode=0o700, folders=True))
        after = await stat(client, "d/")
        assert result.folder is not None
        assert (result.folder.node, result.folder.before_ns) == (d, before.ctime_ns)
        assert result.folder.after_ns == after.ctime_ns > before.ctime_ns

    kind.run(body)


def test_a_name_that_appeared_before_its_folder_was_last_changed_moves_its_change_time_too(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await _folders(client)
        await put(client, "d/a", b"1")
        before = await stat(client, "d/")
        result = await _result(client, _put("d/late", m.Condition(), named_ns=1))
        after = await stat(client, "d/")
        assert (after.mtime_ns, after.ctime_ns) == (before.mtime_ns, before.ctime_ns + 1)
        assert result.folder is not None
        assert (result.folder.before_ns, result.folder.after_ns) == (before.ctime_ns, after.ctime_ns)

    kind.run(body)


def test_the_stamps_of_a_folder_stand_until_a_name_in_it_changes(kind: Kind) -> None:
    if not kind.puts_have_stamps:
        pytest.skip("answers to changes have no stamps here")

    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        reply = await client.call(m.OpenStamps())
        stands = StampReader(*reply.descriptors).stand
        close_all(reply.descriptors)
        await _folders(client)
        made = await _result(client, m.MakeFolder("bkt", "d/in/", folders=True))
        own, of_d = made.stamps, made.folder
        assert of_d is not None
        assert stands(own)
        assert stands(of_d.stamps)
        await put(client, "d/in/a", b"1")
        assert not stands(own), "its names have changed"
        assert stands(of_d.stamps), "those of the folder above have not"
        late = await _result(client, _put("d/late", m.Condition(), named_ns=1))
        assert not stands(of_d.stamps)
        assert late.folder is not None
        assert stands(late.folder.stamps)
        good(await ask(client, m.Rename("bkt", "d/", "bkt", "f/"), m.NameResults))
        assert not stands(late.folder.stamps), "the folder has another name"

    kind.run(body)


def test_one_watch_is_told_of_all_buckets_also_of_one_made_later(kind: Kind) -> None:
    if not kind.can_watch:
        pytest.skip("a blocking client cannot watch")

    async def body(engine: Engine) -> None:
        client = engine.client
        async with client.watch("") as events:
            await put(client, "a", b"1")
            await ask(client, m.BucketCreate("later"), m.Buckets)
            await ask(client, m.MakeFolder("later", "x/"), m.NameResults)
            told: list[tuple[str, str]] = []
            async for event in events:
                told.append((event.bucket, event.key))
                if event.bucket == "later" and event.key == "x/":
                    break
            assert told[0] == ("bkt", "a")

    kind.run(body)


def test_new_content_of_a_node_leaves_what_others_have_set_on_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await put(client, "a", b"1")
        first = await stat(client, "a")
        await ask(
            client, m.SetAttributes("bkt", "a", mode=0o751, xattrs={"user.x": b"y"}, tags={"t": "u"}), m.NameResults
        )
        change = m.NameChange("bkt", "a", b"", PLAIN, keep_node=first.node, keep_attributes=True)
        (found,) = good(await ask(client, m.PutObjects([1], [change]), m.NameResults, b"2"))
        assert (found.mode, found.xattrs, found.tags) == (0o751, {"user.x": b"y"}, {"t": "u"})
        assert found.blob != first.blob
        plain = m.NameChange("bkt", "a", b"", PLAIN, keep_node=first.node)
        (found,) = good(await ask(client, m.PutObjects([1], [plain]), m.NameResults, b"3"))
        assert (found.mode, found.xattrs, found.tags) == (PLAIN.mode, {}, {})

    kind.run(body)
