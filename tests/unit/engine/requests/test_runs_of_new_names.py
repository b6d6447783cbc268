"""Runs of new names, bound as columns, against the same names bound one by one: nothing tells the difference.

Histories of puts and other changes of names are made up by Hypothesis and played to two stores.  In one of them no run
is found.  Replies, tables, notes, and the stamps that turned are compared after each step, and the tables once more
after a kill and a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import msgspec
import pytest
import trio
from hypothesis import given, settings, strategies as st

from engine.chunks import chunk_store
from engine.chunks.chunk_store import Chunks
from engine.format.columns import pack_names, pack_nodes
from engine.format.layouts import Table, chunk_id_of_key
from engine.namespace import new_names
from engine.namespace.tree import ChangedBy
from engine.requests import changes as requests_changes
from engine.store.store import Store
from lakefs.errors import StoreReadOnly, UserError
from lakefs.ids import Sequence as GroupSequence
from lakefs.stamps.stamps import HEADER_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.lengths import repeated
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import ask, client_of, fsck, run, session_of, simulated_store, store_chunks

FOLDERS: Final = ("", "", "d/", "d/e/", "new/f/", "l" * 500 + "/")
NAMES: Final = tuple(f"{letter}{number}" for letter in "ab" for number in range(8))
ODD: Final = ("", "a/", "d", "d/e", "n" * 480, "n" * 479, "n" * 700, "k\0", "\ud800", "é", "x" * 4095, "x" * 4096)
END: Final = b"\xff" * 512

coins = st.booleans()
buckets = st.sampled_from(("one", "one", "one", "one", "two", "made", "made", "no_such!"))
keys = st.one_of(st.builds("".join, st.tuples(st.sampled_from(FOLDERS), st.sampled_from(NAMES))), st.sampled_from(ODD))
some_bytes = st.integers(0, 255)
plain_conditions = st.just(m.NO_CONDITION)
conditions = st.sampled_from(
    (
        m.NO_CONDITION,
        m.Condition(),
        m.Condition(absent=True),
        m.Condition(etags=["*"]),
        m.Condition(not_etags=["*"]),
        m.Condition(node=7),
    )
)


good_attributes = st.builds(
    m.ObjectAttributes,
    mode=st.sampled_from((0o644, 0o600)),
    mtime_ns=st.sampled_from((0, 5)),
    content_type=st.sampled_from(("", "a/b")),
    user_metadata=st.sampled_from(({}, {"k": "v" * 40})),
    etag_kind=st.just(1),
    etag=st.just(b"e" * 16),
    checksums=st.sampled_from(({}, {"CRC32": b"1234"})),
    tags=st.sampled_from(({}, {"t": "1"})),
)


@st.composite
def attributes(draw: st.DrawFn) -> m.ObjectAttributes:
    """Attributes as the gateway or a native client send them, valid or not."""
    mark = draw(some_bytes)
    kind = draw(st.sampled_from((0, 1, 1, 1, 1, 2, 3)))
    etag = bytes([mark]) * draw(st.sampled_from((16, 16, 16, 16, 15)))
    sums: dict[str, bytes] = draw(
        st.sampled_from(({}, {}, {}, {"CRC32": bytes([mark, 1, 2, 3])}, {"CRC32": b"1"}, {"A": b"1", "B": b"2"}))
    )
    return m.ObjectAttributes(
        mode=draw(st.sampled_from((0o644, 0o644, 0o644, 0o600))),
        mtime_ns=draw(st.sampled_from((0, 5, mark, 1 << 62, 1 << 63))),
        content_type=draw(st.sampled_from(("", "a/b", "a/b"))),
        user_metadata=draw(st.sampled_from(({}, {}, {"k": "v"}))),
        etag_kind=kind,
        etag=etag if kind else b"",
        checksums=sums,
        tags=draw(st.sampled_from(({}, {}, {"t": "1"}))),
        atime_ns=draw(st.sampled_from((None, None, 3))),
        uid=draw(st.sampled_from((0, 0, 0, 1 << 40))),
    )


any_changes = st.builds(
    m.NameChange,
    buckets,
    keys,
    st.just(b""),
    attributes(),
    conditions,
    create_bucket=coins,
    keep_node=st.sampled_from((0, 0, 3, 9)),
    named_ns=st.sampled_from((0, 0, 77)),
)


@st.composite
def alike(draw: st.DrawFn) -> list[m.NameChange]:
    """Changes of one folder, alike but for their times, ETags and checksums: most of them can be bound as a run."""
    first = draw(st.one_of(good_attributes, good_attributes, st.just(m.ObjectAttributes()), attributes()))
    bucket, folder, create = draw(buckets), draw(st.sampled_from(FOLDERS)), draw(coins)
    shape = st.sampled_from((*[first] * 9, draw(attributes())))
    times = draw(st.sampled_from(((0,), (5, 6, 7), (0, 5))))  # none have a time, all, or some: these are no run
    made: list[m.NameChange] = []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=6, max_size=16, unique=draw(st.integers(0, 3)) > 0)):
        mark, attrs = draw(some_bytes), draw(shape)
        attrs = msgspec.structs.replace(
            attrs,
            mtime_ns=draw(st.sampled_from(times)),
            etag=bytes([mark]) * len(attrs.etag),
            checksums={key: bytes([mark]) * len(value) for key, value in attrs.checksums.items()},
        )
        made.append(m.NameChange(bucket, folder + name, b"", attrs, create_bucket=create))
    for change in draw(st.lists(any_changes, max_size=2)):
        made.insert(len(made) - draw(st.integers(0, len(made))), change)
    return made


# --- steps ---------------------------------------------------------------------------------------------

contents = st.sampled_from((b"", b"x", b"y" * 3000, b"z" * 70_000))


@dataclass(frozen=True)
class Put:
    """PutObjects.  A content of None is one that no other object has."""

    changes: list[m.NameChange]
    contents: list[bytes | None]
    durable: bool
    stamps: bool

    async def do(self, client: EngineClient, number: int) -> m.Message:
        """Send it."""
        payloads = [
            b"%d/%d" % (number, index) if content is None else content
            for index, (_, content) in enumerate(zip(self.changes, self.contents * 20, strict=False))
        ]
        request = m.PutObjects(list(map(len, payloads)), self.changes, self.durable, self.stamps)
        results = await ask(client, request, m.NameResults, *payloads)
        await self.check_stamps(client, results.results)
        return results

    async def check_stamps(self, client: EngineClient, results: list[m.NameResult]) -> None:
        """Check that names have the stamps that opening them has now, if any were asked for."""
        names = [(change.bucket, change.key) for change in self.changes]
        request = m.OpenObjects(names, lease=False, stamps=True)
        opened = await ask(client, request, m.OpenResults)
        for result, now in zip(results, opened.results, strict=True):
            assert result.stamps == (now.stamps if self.stamps and result.stat is not None else b"")
            assert bool(result.stamps) == (self.stamps and result.stat is not None)


@dataclass(frozen=True)
class Commit:
    """Commit, of stored chunks, of which some are not stored."""

    changes: list[m.NameChange]
    missing: int

    async def do(self, client: EngineClient, number: int) -> m.Message:
        """Store the chunks and send it."""
        session = await session_of(client)
        payloads = [b"c%d/%d" % (number, index) for index in range(len(self.changes))]
        blobs = await store_chunks(client, session, payloads)
        if self.missing < len(blobs):
            blobs[self.missing] = b"\x01" + bytes(32)
        bound = [msgspec.structs.replace(each, blob=blob) for each, blob in zip(self.changes, blobs, strict=True)]
        return (await client.call(m.Commit(session, bound, end_session=True))).message


@dataclass(frozen=True)
class Plain:
    """Any other request."""

    request: m.Request

    async def do(self, client: EngineClient, number: int) -> m.Message:
        """Send it."""
        return (await client.call(self.request)).message


@dataclass(frozen=True)
class Pause:
    """A while without requests, in which the overlay is written to the index."""

    async def do(self, client: EngineClient, number: int) -> m.Message:
        """Wait."""
        await trio.sleep(3)
        return m.Done()


plain = st.one_of(
    st.builds(m.DeleteNames, st.lists(st.tuples(buckets, keys), min_size=1, max_size=8)),
    st.builds(m.Rename, buckets, keys, buckets, keys),
    st.builds(m.BucketCreate, buckets),
    st.builds(m.BucketRemove, buckets),
    st.builds(m.BucketSet, buckets, versioning=st.sampled_from(("enabled", "suspended"))),
)
steps = st.one_of(
    st.builds(Put, alike(), st.lists(st.none() | contents, min_size=1, max_size=3), coins, coins),
    st.builds(Put, alike(), st.just([None]), st.just(True), coins),
    st.builds(Put, st.lists(any_changes, min_size=1, max_size=6), st.just([None]), coins, coins),
    st.builds(Commit, alike(), st.integers(0, 30)),
    st.builds(Plain, plain),
    st.builds(Pause),
)


# --- the two stores ------------------------------------------------------------------------------------


@contextmanager
def one_by_one() -> Iterator[None]:
    """Context manager: no run is found, and the records of chunks are made one by one."""
    with mock.patch.object(requests_changes, "plain_run", return_value=(b"", [])):
        with mock.patch.object(Chunks, "_record_new", return_value=False):
            yield


@dataclass
class Counted:
    """Names that were bound as columns."""

    names: int = 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Context manager: count the names bound as columns, which begin at 3 names so that histories have many runs."""
    counted, original = Counted(), new_names._insert

    def insert(*arguments: Any) -> list[m.ObjectStat]:
        stats = original(*arguments)
        counted.names += len(stats)
        return stats

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(new_names, "_insert", insert))
        for module, least in ((new_names, "RUN_MIN"), (requests_changes, "RUN_MIN"), (chunk_store, "_MANY")):
            stack.enter_context(mock.patch.object(module, least, 3))
        yield counted


@dataclass
class Side:
    """One of the stores: what its observers heard, and its client."""

    store: Store
    client: EngineClient
    joined: list[tuple[int, object]] = field(default_factory=list)
    durable: list[tuple[int, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store.metadata.on_joined(lambda sequence, notes: self._note(self.joined, sequence, notes))
        self.store.metadata.on_durable(lambda sequence, notes: self._note(self.durable, sequence, notes))

    def _note(self, heard: list[tuple[int, object]], sequence: GroupSequence, notes: list[object]) -> None:
        heard += [(sequence, type(note) if isinstance(note, ChangedBy) else note) for note in notes]

    async def do(self, step: Any, number: int) -> object:
        """Return the reply, or the error."""
        try:
            return await step.do(self.client, number)
        except UserError as error:
            return type(error), error.message

    def seen(self) -> dict[str, Any]:
        """Return all that must be equal in both stores."""
        counters = self.store.metadata._tables.counters
        assert self.store.metadata.stamps is not None
        tables, index = tables_of(self.store), self.store.shared_index
        return {
            "tables": tables,
            "joined": self.joined,
            "durable": self.durable,
            "numbers": [(each.next, each.mark) for each in (counters.node, counters.birth, counters.segment)],
            "stamps": bytes(self.store.metadata.stamps._memory.view[HEADER_BYTES:]),
            "shared index": index and index.records([chunk_id_of_key(key) for key, _ in tables[Table.CHUNKS]]),
        }


def tables_of(store: Store) -> dict[Table, list[tuple[bytes, bytes]]]:
    """Return all records, and check that each is found by its key."""
    with store.metadata.view() as view:
        found = {table: list(view.scan(table, b"\0", END)) for table in Table}
        for table, records in found.items():
            assert all(view.get(table, key) == value for key, value in records)
        return found


async def problems(client: EngineClient) -> list[Any]:
    """Return what a check of the store finds, except for chunks that only gc has to look at."""
    return [finding for finding in (await fsck(client))["findings"] if finding["severity"] != "note"]


async def play(history: Sequence[Any], versioning: str | None) -> int:
    """Play a history to both stores, compare them, and return how many names were bound as columns."""
    disks = [SimDisk(1), SimDisk(1)]
    ended: list[dict[Table, list[tuple[bytes, bytes]]]] = []
    with counting() as counted:
        try:
            async with simulated_store(disks[0]) as first, simulated_store(disks[1]) as second:
                await compare(first, second, history, versioning)
                ended = [tables_of(first), tables_of(second)]
                disks = [disk.kill() for disk in disks]
        except* (SimCrashed, StoreReadOnly):
            pass  # the end of a killed store
    for disk, tables in zip(disks, ended, strict=True):
        async with simulated_store(disk) as store:
            assert tables_of(store) == tables
            assert not await problems(client_of(store))
    return counted.names


async def compare(first: Store, second: Store, history: Sequence[Any], versioning: str | None) -> None:
    """Play a history to both stores, in the second one by one, and compare them after each step."""
    columns, singly = Side(first, client_of(first)), Side(second, client_of(second))
    begin: list[Any] = [Plain(m.BucketCreate("one")), Plain(m.BucketCreate("two"))]
    if versioning:
        begin.append(Plain(m.BucketSet("two", versioning=versioning)))
    for number, step in enumerate((*begin, *history)):
        answer = await columns.do(step, number)
        with one_by_one():
            expected = await singly.do(step, number)
        assert answer == expected, step
        await first.metadata.sync()
        await second.metadata.sync()
        for (name, seen), other in zip(columns.seen().items(), singly.seen().values(), strict=True):
            assert seen == other, (name, step)
    for side in (columns, singly):
        assert not await problems(side.client)


def test_runs_do_what_single_names_do() -> None:
    bound = 0

    @settings(max_examples=repeated(40, 100))
    @given(st.lists(steps, min_size=2, max_size=8), st.sampled_from((None, "enabled", "suspended")))
    def check(history: list[Any], versioning: str | None) -> None:
        nonlocal bound
        bound += run(lambda: play(history, versioning))

    check()
    assert bound > repeated(80, 200), "the histories have runs"


# --- planted bugs --------------------------------------------------------------------------------------


def _put(names: Sequence[str]) -> Put:
    changes = [
        m.NameChange("one", name, b"", m.ObjectAttributes(etag_kind=1, etag=name.encode() * 8)) for name in names
    ]
    return Put(changes, [None], durable=True, stamps=True)


def _wrong_record(*arguments: Any) -> list[bytes]:
    records = pack_nodes(*arguments)
    return [*records[:-1], records[0]]


def _wrong_names(*arguments: Any) -> list[bytes]:
    return list(reversed(pack_names(*arguments)))


@pytest.mark.parametrize(
    ("planted", "instead"),
    [
        ("engine.namespace.new_names.pack_nodes", _wrong_record),
        ("engine.namespace.new_names.pack_names", _wrong_names),
        ("engine.tables.merged_tables.TableView.present", lambda *_: set()),
        ("engine.format.columns.Insertions.mutations", lambda *_: iter(())),
        ("engine.requests.stamped.node_key", lambda _: bytes(8)),
    ],
)
def test_a_planted_bug_of_runs_is_noticed(planted: str, instead: Any) -> None:
    removal = Plain(m.DeleteNames([("one", name) for name in NAMES[:4]]))
    history = [_put(NAMES[:6]), removal, _put(NAMES[:12]), Pause(), _put(NAMES)]
    assert run(lambda: play(history, None)) == 6 + 4 + 6 + 4
    with mock.patch(planted, instead), pytest.raises((AssertionError, BaseExceptionGroup)):
        run(lambda: play(history, None))
