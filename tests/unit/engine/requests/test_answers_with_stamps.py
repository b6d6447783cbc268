"""Answers with stamps: whatever happens to names, an answer that has become another one does not stand any more.

Histories of all requests that change names are made up by Hypothesis.  Before and after each request every name of a
small space is looked up and opened, present or not, and every version that ever was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from engine.format.layouts import SegmentKind
from engine.requests.table import Service
from engine.segments.files import segment_path
from engine.sessions.references import References
from engine.store.store import Store
from lakefs.content.manifest import CutKind, build
from lakefs.errors import ChunkDamaged, EngineBusy, PermissionDenied, UserError
from lakefs.ids import ChunkId, ChunkKind, data_chunk_id
from lakefs.limits import STAMPS_PER_ANSWER_MAX
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, EngineClient
from tests.lengths import repeated
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, change, client_of, put, records, run, session_of, simulated_store, store_chunks

BUCKETS: Final = ("one", "two")
KEYS: Final = ("a", "a/b", "d/x", "d/e/z", "n" * 500)
FOLDERS: Final = ("a/", "d/", "d/e/", "m/")
NO_SUCH: Final = "0" * 15 + "1"
"""The id of a version that no key has."""
Name = tuple[str, str]
Looked = tuple[str, Name, str]
"""The kind of a request, the name, and the version that was asked for."""

buckets = st.sampled_from(BUCKETS)
keys = st.sampled_from(KEYS)
folders = st.sampled_from(FOLDERS)
coins = st.booleans()
attributes = st.builds(m.ObjectAttributes, mode=st.sampled_from((0o644, 0o600)), mtime_ns=st.sampled_from((0, 5)))
conditions = st.sampled_from(
    (
        m.NO_CONDITION,
        m.NO_CONDITION,
        m.Condition(absent=True),
        m.Condition(etags=["*"]),
        m.Condition(etags=["none"]),
        m.Condition(not_etags=["*"]),
        m.Condition(node=1),
    )
)
changes = st.builds(
    m.NameChange,
    buckets,
    st.one_of(keys, keys, folders),
    st.just(b""),
    attributes,
    conditions,
    create_bucket=coins,
    keep_node=st.sampled_from((0, 0, 1)),
)


# --- requests ------------------------------------------------------------------------------------------


@dataclass
class World:
    """A store's client, and what is known of the store.  `versions`: those that names have, or had."""

    client: EngineClient
    stamps: StampReader
    versions: set[tuple[Name, str]] = field(default_factory=set)
    versioned: set[str] = field(default_factory=set)
    """Buckets that keep versions, or did."""
    contents: int = 0

    def content(self) -> bytes:
        """Return new content; every third is longer than what is sent inline."""
        self.contents += 1
        return b"%d" % self.contents * (1 if self.contents % 3 else 70_000)

    async def node_of(self, name: Name) -> int:
        """Return the node of a name, a wrong one if there is none."""
        (result,) = (await ask(self.client, m.StatNames([name]), m.NameResults)).results
        return result.stat.node if result.stat is not None else 1 << 40

    async def with_nodes(self, change: m.NameChange) -> m.NameChange:
        """Return the change with the present node in place of 1."""
        node = await self.node_of((change.bucket, change.key))
        condition = msgspec.structs.replace(change.condition, node=node if change.condition.node else 0)
        return msgspec.structs.replace(change, keep_node=node if change.keep_node else 0, condition=condition)

    def version_of(self, name: Name, number: int) -> str:
        """Return a version that the key is known to have had, by a number; of a key without any, one that is none."""
        known = sorted(version for found, version in self.versions if found == name)
        return known[number % len(known)] if known else NO_SUCH


@dataclass(frozen=True)
class Plain:
    """A request that is sent as it is."""

    request: m.Request

    async def do(self, world: World) -> None:
        """Send it."""
        await world.client.call(self.request)


@dataclass(frozen=True)
class Put:
    """Small objects in one request."""

    changes: list[m.NameChange]
    durable: bool

    async def do(self, world: World) -> None:
        """Send it with new content."""
        payloads = [world.content() for _ in self.changes]
        asked = [await world.with_nodes(change) for change in self.changes]
        await world.client.call(m.PutObjects(list(map(len, payloads)), asked, self.durable), payloads)


@dataclass(frozen=True)
class Commit:
    """Names bound to a blob that a session has stored; with an upload, as its parts."""

    change: m.NameChange
    as_upload: bool

    async def do(self, world: World) -> None:
        """Store the blob and bind it."""
        client, change = world.client, await world.with_nodes(self.change)
        session = await session_of(client)
        (blob,) = await store_chunks(client, session, [world.content()], kind=ChunkKind.DATA)
        if not self.as_upload:
            await client.call(m.Commit(session, [msgspec.structs.replace(change, blob=blob)], end_session=True))
            return
        name = change.bucket, change.key
        upload = (await ask(client, m.UploadCreate(*name, change.attributes), m.UploadStat)).upload
        await client.call(m.UploadPut(session, *name, upload, 1, blob, b"e" * 16))
        await client.call(m.UploadComplete(session, *name, upload, blob, [1], [b"e" * 16], end_session=True))


@dataclass(frozen=True)
class Versioned:
    """A request about one version: its removal, a copy of it, or its attributes."""

    name: Name
    number: int
    make: Callable[[Name, str], m.Request]

    async def do(self, world: World) -> None:
        """Send it with the id of a version."""
        await world.client.call(self.make(self.name, world.version_of(self.name, self.number)))


def _remove(name: Name, version: str) -> m.Request:
    return m.DeleteNames([name], versions=[version])


def _copy(name: Name, version: str) -> m.Request:
    return m.Copy(*name, "two", "a", create_bucket=True, version=version)


def _tag(name: Name, version: str) -> m.Request:
    return m.SetAttributes(*name, tags={"of": version}, version=version)


names = st.tuples(buckets, keys)
settings_of_buckets = st.builds(
    m.BucketSet, buckets, st.none() | coins, st.sampled_from((None, "enabled", "suspended"))
)
any_names = st.tuples(buckets, st.one_of(keys, folders))
plain = st.one_of(
    st.builds(m.DeleteNames, st.lists(any_names, min_size=1, max_size=3), conditions, coins, coins),
    st.builds(m.Rename, buckets, keys, buckets, keys, coins, coins, coins, coins),
    st.builds(m.Rename, buckets, folders, buckets, folders, coins, coins, coins, coins),
    st.builds(m.Exchange, buckets, st.one_of(keys, folders), st.one_of(keys, folders)),
    st.builds(m.Copy, buckets, keys, buckets, keys, st.none() | attributes, create_bucket=coins),
    st.builds(m.MakeFolder, buckets, folders, coins, coins, st.none() | attributes),
    st.builds(m.RemoveFolder, buckets, folders, coins),
    st.builds(m.MakeSymlink, buckets, keys, st.sampled_from((b"x", b"../y")), attributes),
    st.builds(
        m.SetAttributes,
        buckets,
        st.one_of(keys, folders, st.just("")),
        mode=st.none() | st.sampled_from((0o400, 0o640)),
        xattrs=st.sampled_from(({}, {"user.x": b"1"}, {"user.x": None})),
        tags=st.sampled_from((None, {}, {"t": "1"})),
    ),
    st.builds(m.BucketCreate, buckets),
    st.builds(m.BucketRemove, buckets),
    settings_of_buckets,
)
steps = st.one_of(
    st.builds(Put, st.lists(changes, min_size=1, max_size=3), coins),
    st.builds(Put, st.lists(changes, min_size=1, max_size=1), coins),
    st.builds(Commit, changes, coins),
    st.builds(Plain, plain),
    st.builds(Plain, plain),
    st.builds(Plain, settings_of_buckets),
    st.builds(Versioned, names, st.integers(0, 5), st.sampled_from((_remove, _remove, _copy, _tag))),
)


# --- answers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer without its lease and grants, and its stamps."""

    content: Any
    failed: bool
    stamps: bytes


def _answer(result: m.NameResult | m.OpenResult) -> Answer:
    if isinstance(result, m.NameResult):
        return Answer((result.stat, result.failure), result.failure is not None, result.stamps)
    opened = result.opened
    content = None if opened is None else (opened.stat, opened.chunks, opened.lengths)
    return Answer((content, result.failure), result.failure is not None, result.stamps)


async def _looked(client: EngineClient, wanted: Sequence[tuple[Name, str]]) -> dict[Looked, Answer]:
    """Look all names up and open them, in one request each."""
    asked, versions = [name for name, _ in wanted], [version for _, version in wanted]
    stats = await ask(client, m.StatNames(asked, versions=versions, stamps=True), m.NameResults)
    opened = await ask(client, m.OpenObjects(asked, lease=False, versions=versions, stamps=True), m.OpenResults)
    found = {("stat", *each): _answer(result) for each, result in zip(wanted, stats.results, strict=True)}
    return found | {("open", *each): _answer(result) for each, result in zip(wanted, opened.results, strict=True)}


async def _everything(world: World) -> dict[Looked, Answer]:
    """Look up all names and versions in two requests, and some by themselves, which must be answered alike."""
    for bucket in BUCKETS:
        try:
            listed = await ask(world.client, m.ListVersions(bucket), m.ListedVersions)
        except UserError:
            continue
        world.versions.update(((bucket, entry.key), entry.version) for entry in listed.entries if entry.version)
        (stat,) = (await ask(world.client, m.BucketList(bucket), m.Buckets)).buckets
        if stat.versioning:
            world.versioned.add(bucket)
    keys_of_all = (*KEYS, *FOLDERS, "", "never/was")
    wanted = [((bucket, key), "") for bucket in (*BUCKETS, "none") for key in keys_of_all]
    wanted += [*sorted(world.versions), (("one", "a"), NO_SUCH)]
    found = await _looked(world.client, wanted)
    for each in wanted[:: len(wanted) // 4]:
        for looked, answer in (await _looked(world.client, [each])).items():
            assert (answer.content, _as_set(answer.stamps)) == (found[looked].content, _as_set(found[looked].stamps))
    return found


def _reader(store: Store) -> StampReader:
    assert store.metadata.stamps is not None
    return StampReader(store.metadata.stamps.descriptor)


def _as_set(stamps: bytes) -> set[bytes]:
    return {stamps[at : at + 12] for at in range(0, len(stamps), 12)}


def _check(world: World, before: dict[Looked, Answer], after: dict[Looked, Answer], step: object) -> None:
    for looked, answer in before.items():
        if answer.stamps and answer.content != after[looked].content:
            assert not world.stamps.stand(answer.stamps), f"{step} changed {looked}, and its stamps still stand"
    for (_, (bucket, _), version), answer in after.items():
        if answer.stamps:
            assert world.stamps.stand(answer.stamps), "nothing has changed since"
        else:
            assert bucket in world.versioned or version, "an ordinary answer has stamps"
            assert answer.failed or version, "only a range of versions, or one of them, is read without stamps"


@settings(max_examples=repeated(50, 150))
@given(st.lists(steps, min_size=3, max_size=16), st.sampled_from((None, None, "enabled")))
def test_an_answer_that_became_another_one_does_not_stand(history: list[Any], versioning: str | None) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            world = World(client_of(store), _reader(store))
            await put(world.client, "d/x", b"first", bucket="one")
            if versioning:
                await world.client.call(m.BucketSet("one", versioning=versioning))
            before = await _everything(world)
            for step in history:
                with suppress(UserError):
                    await step.do(world)
                after = await _everything(world)
                _check(world, before, after, step)
                before = after

    run(main)


# --- single answers ------------------------------------------------------------------------------------


async def _opened(client: EngineClient, *keys_of_one: str, **asked: Any) -> list[m.OpenResult]:
    request = m.OpenObjects([("one", key) for key in keys_of_one], stamps=True, **asked)
    return (await ask(client, request, m.OpenResults)).results


def test_an_object_of_many_chunks_has_stamps_also_if_its_layout_is_read_later() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, reader = client_of(store), _reader(store)
            session = await session_of(client)
            payloads = [b"a" * 70_000, b"b" * 5]
            chunks = await store_chunks(client, session, payloads)
            tree = build(CutKind.FIXED, list(zip(map(ChunkId, chunks), map(len, payloads), strict=True)))
            await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=ChunkKind.MANIFEST)
            bound = change("long", tree.blob, bucket="one")
            await client.call(m.Commit(session, [bound], end_session=True))
            await put(client, "short", b"c", bucket="one")
            long, short = await _opened(client, "long", "short")
            assert long.opened is not None
            assert long.opened.chunks == chunks
            assert reader.stand(long.stamps)
            assert reader.stand(short.stamps)
            await put(client, "long", b"d", bucket="one")
            assert not reader.stand(long.stamps)
            assert reader.stand(short.stamps)

    run(main)


def test_a_failure_that_rests_on_more_than_names_has_no_stamps() -> None:
    async def main() -> None:
        disk = SimDisk(3)
        async with simulated_store(disk) as store:
            client = client_of(store)
            for key, size in (("damaged", 5), ("whole", 5), ("long", 70_000)):
                await put(client, key, key.encode() * size, bucket="one")
            await client.call(m.Sync())
            record = records(store)[data_chunk_id(b"damaged" * 5)]
            disk.flip_bit(segment_path(record.segment, SegmentKind.SMALL), record.offset, 0)
            damaged, whole, missing = await _opened(client, "damaged", "whole", "missing")
            assert damaged.failure is not None
            assert isinstance(damaged.failure.as_error(), ChunkDamaged)
            assert damaged.stamps == b""
            assert whole.stamps
            assert missing.failure is not None
            assert missing.stamps
            with mock.patch.object(References, "lease", side_effect=EngineBusy("too many leases")):
                (busy,) = await _opened(client, "long")
            assert busy.failure is not None
            assert isinstance(busy.failure.as_error(), EngineBusy)
            assert busy.stamps == b""
            (good,) = await _opened(client, "long")
            assert good.stamps

    run(main)


def test_a_key_of_too_many_folders_has_no_stamps() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            shallow, deep = "/".join("abcd"), "/".join("d" * STAMPS_PER_ANSWER_MAX)
            for key in (shallow, deep):
                await put(client, key, b"1", bucket="one")
            first, second = await _opened(client, shallow, deep)
            assert first.stamps
            assert second.stamps == b""

    run(main)


def test_strangers_get_no_memory_of_stamps_even_where_descriptors_travel() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            service = Service(store)
            stranger = service.connected("stranger", descriptors=True, trusted=False)
            with pytest.raises(PermissionDenied, match="Unix socket"):
                await service.serve(stranger, m.OpenStamps(), Body(), ())
            await service.disconnected(stranger)

    run(main)
