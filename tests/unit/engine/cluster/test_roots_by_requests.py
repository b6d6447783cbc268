"""A walk through the roots of another names shard by requests: whole, of one leader and one connection, or an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec
import pytest
import trio

from engine.lake_gc import lake_gc_bounds, names_requests
from engine.lake_gc.names_by_requests import NamesByRequests
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_gc.root_owners import packed_owner, unpacked_owner
from engine.process.embedded import EmbeddedEngine
from engine.upkeep.roots import Roots
from engine.uploads.keys import part_key
from lakefs.errors import CoordinatorLost, InvalidArgument, LakeError, SessionLost
from lakefs.ids import EMPTY_CHUNK, GcGeneration, NodeId, Sequence, data_chunk_id
from lakefs.limits import KIB
from lakefs.wire import messages as m
from tests.names_shards_rig import LedShard, Reach, ShardedLake, nothing_happens, noticed, sharded_lake
from tests.store_rig import ask, run

FOLDER = b"folder"
NEW = b"of a session"
CONTENT = [b"content %d" % number for number in range(20)]
Main = Callable[[ShardedLake, LedShard], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_requests, "ROOTS_PAGE", 3)


def with_content(main: Main) -> None:
    """Run a test with two shards, the second of which has content that is as old as can be."""

    async def opened() -> None:
        async with sharded_lake(Reach.BY_REQUESTS, 2) as lake:
            shard = lake.others[0]
            await put_all(shard)
            for _ in range(3):
                await lake.collect()
            await main(lake, shard)

    run(opened)


async def put_all(shard: LedShard) -> None:
    await shard.put("folder/", FOLDER)
    for number, payload in enumerate(CONTENT):
        await shard.put(f"key {number}", payload)


async def all_are_readable(lake: ShardedLake) -> None:
    for _ in range(3):
        for payload in CONTENT:
            assert await lake.first.is_readable(payload), "bound content was freed"
        await lake.collect()


async def pages(client: EmbeddedEngine) -> list[m.RootsPage]:
    """Walk to the end; return the pages."""
    await ask(client, m.BeginRoots(), m.Done)
    found = [await ask(client, m.NextRoots(0), m.RootsPage)]
    while not found[-1].done:
        found.append(await ask(client, m.NextRoots(len(found)), m.RootsPage))
    return found


# --- leaders and connections ----------------------------------------------------------------------------


def another_leads_amid_the_walk(ends: AbstractContextManager[object]) -> None:
    """The leader ends behind its first page.  `ends`: expects the cycle's error."""

    async def main(lake: ShardedLake, shard: LedShard) -> None:
        was_lost = False

        async def hook(led: LedShard, request: m.Request) -> None:
            nonlocal was_lost
            if isinstance(request, m.NextRoots) and request.page and not was_lost:
                was_lost = True
                with trio.CancelScope(shield=True):  # the connection ends with the leader
                    await shard.stop_names()
                    await shard.start_names()

        lake.hook = hook
        with ends:
            await lake.collect()
        assert was_lost
        await all_are_readable(lake)

    with_content(main)


def test_a_cycle_ends_when_another_leads_amid_the_walk() -> None:
    another_leads_amid_the_walk(pytest.raises(LakeError))


def walk_at_one_that_was_deposed(before: bool, ends: AbstractContextManager[object], *, may_read: bool) -> None:
    """Shard 0's leader is connected to one that has a successor, which has joined.

    Before the walk: the successor has bound content of a session, before it joined.  Else behind its beginning, when a
    name was removed in vain: the successor has it yet.  `may_read`: the leader takes itself for one.
    """

    async def main(lake: ShardedLake, shard: LedShard) -> None:
        successor = LedShard.of(lake.first, 1)
        await successor.start_names()
        await put_all(successor)
        deposed, known = CoordinatorLost("another replica leads"), GcGeneration(await lake.first.state.generation() - 1)

        def refuse() -> None:
            raise deposed

        async def hook(led: LedShard, request: m.Request) -> None:
            metadata = shard.names.metadata
            if isinstance(request, m.BeginRoots) and metadata.failed is None:
                if before:
                    await successor.bind("new", data_chunk_id(NEW), known, size=len(NEW))
                    await successor.joined.join(await lake.first.state.generation())
                else:
                    await shard.remove_without_waiting("key 19")
                    metadata.stop_leading(deposed)
                metadata.check_leader = None if may_read else refuse

        await lake.first.store_chunks([(data_chunk_id(NEW), NEW)], known)
        lake.hook = hook
        with ends:
            await lake.collect()
        assert await lake.first.is_readable(NEW), "content of a session was freed"
        lake.others[0], lake.hook = successor, nothing_happens
        await all_are_readable(lake)
        await shard.stop_names(crash=True)

    with_content(main)


@pytest.mark.parametrize("before", [True, False])
def test_the_walk_of_a_deposed_leader_does_not_count(before: bool) -> None:
    ends = pytest.raises(CoordinatorLost, match="names shard 1: another replica leads")
    walk_at_one_that_was_deposed(before, ends, may_read=not before)


def test_a_walk_whose_answer_was_lost_does_not_go_on() -> None:
    async def main(lake: ShardedLake, shard: LedShard) -> None:
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        whole = await pages(client)
        assert len(whole) > 3
        await ask(client, m.BeginRoots(), m.Done)
        await ask(client, m.NextRoots(0), m.RootsPage)
        with pytest.raises(SessionLost, match=r"page 0 .* was asked for, and not page 1"):
            await client.call(m.NextRoots(0))
        for number in (0, 1):
            with pytest.raises(SessionLost):
                await client.call(m.NextRoots(number))
        await client.aclose()

    with_content(main)


def test_a_page_that_is_cancelled_ends_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(lake: ShardedLake, shard: LedShard) -> None:
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        await ask(client, m.BeginRoots(), m.Done)
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.call(m.NextRoots(0))
        with pytest.raises(SessionLost):
            await client.call(m.NextRoots(0))
        await client.aclose()

    with_content(main)


def test_a_walk_is_of_one_connection_and_the_newest_one_counts() -> None:
    async def main(lake: ShardedLake, shard: LedShard) -> None:
        first, second = [EmbeddedEngine(shard.service, descriptors=False) for _ in range(2)]  # type: ignore[arg-type]
        with pytest.raises(SessionLost, match="no walk"):
            await first.call(m.NextRoots(0))
        await ask(first, m.BeginRoots(), m.Done)
        await ask(first, m.NextRoots(0), m.RootsPage)
        with pytest.raises(SessionLost, match="no walk"):
            await second.call(m.NextRoots(1))
        whole = await pages(second)
        found = {blob for page in whole for blob in page.blobs}
        assert found == {EMPTY_CHUNK, *map(data_chunk_id, [FOLDER, *CONTENT])}
        with pytest.raises(SessionLost, match="no walk"):
            await first.call(m.NextRoots(1))
        for client in (first, second):
            await client.aclose()

    with_content(main)


def test_nothing_is_noted_for_a_walk_whose_connection_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[object] = []
    note = Roots._note_rebound

    def counted(self: Roots, sequence: Sequence, notes: list[object]) -> None:
        noted.append(notes)
        note(self, sequence, notes)

    monkeypatch.setattr(Roots, "_note_rebound", counted)

    async def main(lake: ShardedLake, shard: LedShard) -> None:
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        await ask(client, m.BeginRoots(), m.Done)
        await ask(client, m.NextRoots(0), m.RootsPage)
        await shard.copy("key 0", "folder/")
        assert noted
        await client.aclose()
        noted.clear()
        await shard.copy("key 1", "folder/")
        assert not noted

    with_content(main)


def test_a_walk_that_noted_too_much_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_requests, "REBOUND_MAX", 5)

    async def main(lake: ShardedLake, shard: LedShard) -> None:
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        for changes, is_whole in ((5, True), (6, False)):
            await ask(client, m.BeginRoots(), m.Done)
            number, is_done = 0, False
            while number < 4:
                is_done = (await ask(client, m.NextRoots(number), m.RootsPage)).done
                number += 1
            assert not is_done
            for key in range(changes):
                await shard.copy(f"key {key}", "folder/")
            if is_whole:
                await ask(client, m.NextRoots(number), m.RootsPage)
            else:
                with pytest.raises(SessionLost, match="too many names have changed"):
                    await client.call(m.NextRoots(number))
        await client.aclose()

    with_content(main)


# --- planted bugs ---------------------------------------------------------------------------------------


def test_a_walk_that_ends_early_and_counts_as_whole_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk(self: NamesByRequests, visit: object, pacing: object) -> None:
        try:
            await original(self, visit, pacing)  # type: ignore[arg-type]
        except LakeError:
            return

    original = NamesByRequests.walk
    monkeypatch.setattr(NamesByRequests, "walk", walk)
    with noticed("bound content was freed"):
        another_leads_amid_the_walk(nullcontext())


def test_pages_behind_an_error_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that has raised is at its end when it is asked again: this must not look as a walk that is whole."""

    async def main(lake: ShardedLake, shard: LedShard) -> None:
        names = shard.upkeep_of_shard.names
        walk = names.begin_walk(names.pacing())
        assert walk.next()
        lost = CoordinatorLost("another replica leads")

        def refuse() -> None:
            raise lost

        shard.names.metadata.check_leader = refuse
        with pytest.raises(CoordinatorLost):
            walk.next()
        shard.names.metadata.check_leader = None
        with pytest.raises(SessionLost):
            walk.next()

    with_content(main)


@pytest.mark.parametrize("before", [True, False])
def test_a_deposed_leader_whose_answers_count_is_noticed(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def synced(self: NamesInProcess) -> None:
        return

    if not before:
        monkeypatch.setattr(NamesInProcess, "sync", synced)
    with noticed("was freed"):
        walk_at_one_that_was_deposed(before, nullcontext(), may_read=True)


# --- owners, input --------------------------------------------------------------------------------------


def test_owners_are_named() -> None:
    async def main(lake: ShardedLake, shard: LedShard) -> None:
        upload = await shard.begin_upload("upload")
        await shard.record_part(upload, data_chunk_id(CONTENT[0]))
        await shard.lease("key 1")
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        owners = [owner for page in await pages(client) for owner in page.owners]
        named = [(await ask(client, m.NameRoot(owner), m.RootNamed)).name for owner in owners]
        assert set(named) >= {"bkt/folder/", *[f"bkt/key {number}" for number in range(20)]}
        assert named[-2:] == [f"bkt/upload, upload {upload.hex()}, part 1", "an object that is open for reading"]
        await client.aclose()

    with_content(main)


def test_owners_are_packed_and_what_is_none_is_refused() -> None:
    for owner in (None, NodeId(1 << 40), part_key(bytes(16), 3)):
        assert unpacked_owner(packed_owner(owner)) == owner
    for wrong in (b"n", b"n" + bytes(9), b"p", b"p" + bytes(19), b"x" + bytes(8), b"p\x02" + bytes(19)):
        with pytest.raises(InvalidArgument, match="no owner"):
            unpacked_owner(wrong)


def test_numbers_that_are_none_are_refused() -> None:
    async def main(lake: ShardedLake, shard: LedShard) -> None:
        client = EmbeddedEngine(shard.service, descriptors=False)  # type: ignore[arg-type]
        for request in (m.JoinGeneration(-1), m.RefuseEpochs(-1)):
            with pytest.raises(InvalidArgument):
                await client.call(request)
        await client.aclose()

    with_content(main)


def test_a_page_fits_its_frame() -> None:
    page = m.RootsPage([bytes(33)] * lake_gc_bounds.ROOTS_PAGE, [b"p" + bytes(19)] * lake_gc_bounds.ROOTS_PAGE)
    assert len(msgspec.msgpack.encode(page)) < 256 * KIB
