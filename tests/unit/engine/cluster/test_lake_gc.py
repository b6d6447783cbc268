"""Gc over a lake: dead content is freed in the second cycle after it was last touched; what a name refers to stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest
import trio
import trio.testing

from engine.cluster import lake_gc_manifests
from engine.sessions.references import References
from engine.upkeep.roots import Roots
from lakefs.content.manifest import CutKind, Entry, Manifest, encode
from lakefs.errors import ChunkNotFound, EngineUnreachable, SessionLost
from lakefs.ids import BlobId, ChunkId, GcGeneration, MemberId, data_chunk_id, manifest_chunk_id
from lakefs.limits import MANIFEST_FANOUT
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, layout, member_id, serve, small_lake
from tests.sim.world.determinism import run_seeded
from tests.store_rig import ask, run, session_of

ONE, TWO, THREE = b"one" * 50, b"two" * 30_000, b"three" * 20
Action = Callable[[SmallLake], Awaitable[None]]


class Act(Protocol):
    """Something that happens to the name of an object."""

    __name__: str

    async def __call__(self, lake: SmallLake, name: str) -> None: ...


def chunks_of(*payloads: bytes) -> set[ChunkId]:
    return {chunk for chunk, _ in layout(payloads)[1]}


async def old(lake: SmallLake) -> None:
    """Let whatever is there become as old as anything may be."""
    for _ in range(3):
        await lake.collect()


def with_lake(main: Action, count: int = 3) -> None:
    """Run a test with a small lake."""

    async def opened() -> None:
        async with small_lake(count) as lake:
            await main(lake)

    run(opened)


# --- what is freed, and when ---------------------------------------------------------------------------


def test_dead_content_is_freed_in_the_second_cycle_after_it_was_last_touched() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("kept", ONE, TWO)
        await lake.put("gone", TWO, THREE)
        await lake.delete("gone")
        everything = await lake.chunks()
        report = await lake.collect()
        assert (report.generation, report.freed_shards) == (2, 0), "touched in generation 1, which may bind yet"
        assert await lake.chunks() == everything
        report = await lake.collect()
        assert report.freed_shards == 4, "a chunk and a manifest, mirrored"
        assert sum(each.freed_bytes for each in report.members) == report.freed_bytes > 2 * len(THREE)
        assert await lake.chunks() == chunks_of(ONE, TWO)
        assert await lake.is_readable(ONE, TWO)
        assert [each.kept_because for each in report.members] == [""] * 3

    with_lake(main)


def test_a_dead_chunk_that_is_offered_again_stays_for_two_cycles_more() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("gone", ONE)
        await lake.delete("gone")
        for _ in range(3):
            generation = (await lake.collect()).generation
            assert await lake.stripes.offer(GcGeneration(generation), [data_chunk_id(ONE)]) == [True]
        assert (await lake.collect()).freed_shards == 0
        assert (await lake.collect()).freed_shards == 2

    with_lake(main)


def test_what_was_stored_and_never_bound_is_freed() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.store_chunks(layout((ONE, TWO))[1], GcGeneration(1))
        assert [(await lake.collect()).freed_shards for _ in range(3)] == [0, 6, 0]
        assert await lake.shards() == set()

    with_lake(main)


def test_parts_of_uploads_and_leased_content_stay_until_they_end() -> None:
    async def main(lake: SmallLake) -> None:
        part, _ = layout((ONE, THREE))
        await lake.put("part", ONE, THREE)
        await lake.put("open", TWO, THREE)
        upload = await lake.begin_upload("upload")
        await lake.record_part(upload, part)
        lease = await lake.lease("open")
        await lake.delete("part", "open")
        await old(lake)
        assert await lake.is_readable(ONE, THREE)
        assert await lake.is_readable(TWO, THREE)
        await ask(lake.client, m.CloseLeases([lease]), m.Done)
        await old(lake)
        assert await lake.chunks() == chunks_of(ONE, THREE)
        await ask(lake.client, m.UploadAbort("bkt", "upload", upload), m.Done)
        await old(lake)
        assert await lake.shards() == set()

    with_lake(main)


# --- stale sessions ------------------------------------------------------------------------------------


def test_what_was_answered_too_long_ago_is_not_bound() -> None:
    async def main(lake: SmallLake) -> None:
        blob, chunks = layout((ONE, TWO))
        await lake.store_chunks(chunks, GcGeneration(1))
        assert (await lake.collect()).generation == 2
        await lake.bind("in time", blob, 1)
        await lake.delete("in time")
        await lake.collect()
        with pytest.raises(SessionLost, match="generation 1, and names have joined 3; offer the chunks again"):
            await lake.bind("late", blob, 1)
        assert await lake.chunks() == set()
        await lake.put("late", ONE, TWO, generation=1)
        await old(lake)
        assert await lake.is_readable(ONE, TWO)

    with_lake(main)


@pytest.mark.parametrize("crash", [False, True])
def test_names_that_start_again_refuse_the_same_answers(crash: bool) -> None:
    async def main(lake: SmallLake) -> None:
        await lake.collect()
        await lake.collect()
        await lake.stop_names(crash=crash)
        await lake.start_names()
        assert lake.joined.number == 3
        lake.joined.check_generation(2)
        with pytest.raises(SessionLost):
            lake.joined.check_generation(1)
        await lake.joined.join(GcGeneration(2))
        assert lake.joined.number == 3, "it never goes back"

    with_lake(main)


# --- beside the walk -----------------------------------------------------------------------------------


def race(*acts: Act) -> None:
    """Let each act begin at each checkpoint of a cycle in turn, on content of its own, which stays readable."""
    delay, beside = 0, True

    async def main() -> None:
        nonlocal beside
        async with small_lake(2, batch=1) as lake:
            await names_around(lake, *acts)
            await old(lake)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lake.collect)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                beside = delay == 0 or lake.gc.running
                for act in acts:
                    nursery.start_soon(act, lake, act.__name__)
            for _ in range(3):
                for act in acts:
                    assert await lake.is_readable(*content_of(act)), f"lost by {act.__name__} at checkpoint {delay}"
                await lake.collect()

    while beside:
        run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += 3
    assert delay >= 40, "the cycle is walked in steps"


def content_of(act: Act) -> tuple[bytes, bytes]:
    return content_named(act.__name__)


def content_named(name: str) -> tuple[bytes, bytes]:
    return name.encode(), TWO


async def names_around(lake: SmallLake, *acts: Act) -> None:
    """Names that are acted upon, some before and some behind them."""
    for act in acts:
        await lake.put(f"folder of {act.__name__}/", b"folder")
    for number in range(12):
        await lake.put(f"before {number}", b"%d" % number)
    for act in acts:
        await lake.put(act.__name__, *content_of(act))
    await lake.put("behind", b"behind")


async def copy_and_remove(lake: SmallLake, name: str) -> None:
    await lake.copy(name, f"to {name}")
    await lake.delete(name)


async def copy_to_a_folder_key(lake: SmallLake, name: str) -> None:
    await lake.copy(name, f"folder of {name}/")
    await lake.delete(name)


async def copy_over_a_folder_key(lake: SmallLake, name: str) -> None:
    """The node behind the walk has the content for a moment only, and hands it on to a new one."""
    await lake.copy(name, f"folder of {name}/")
    await lake.delete(name)
    await trio.sleep(0.001)
    await lake.copy(f"folder of {name}/", f"to {name}")
    await lake.copy("behind", f"folder of {name}/")


async def rename(lake: SmallLake, name: str) -> None:
    await lake.rename(name, f"to {name}")


async def put_again(lake: SmallLake, name: str) -> None:
    await lake.delete(name)
    await lake.put(f"to {name}", *content_named(name))


async def make_a_part(lake: SmallLake, name: str) -> None:
    upload = await lake.begin_upload("upload")
    blob, chunks = layout(content_named(name))
    generation = await lake.state.generation()
    await lake.store_chunks(chunks, generation)
    await lake.record_part(upload, blob, generation)
    await lake.delete(name)


async def open_and_remove(lake: SmallLake, name: str) -> None:
    await lake.lease(name)
    await lake.delete(name)


def test_content_that_moves_amid_the_walk_stays() -> None:
    race(copy_and_remove, copy_to_a_folder_key, copy_over_a_folder_key, rename, put_again, make_a_part, open_and_remove)


def test_a_walk_that_does_not_look_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roots, "_note_rebound", lambda self, sequence, notes: None)
    with pytest.raises(AssertionError, match="lost by copy_to_a_folder_key"):
        race(copy_to_a_folder_key)


def test_a_walk_that_forgets_leases_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(References, "leased_blobs", lambda self: iter(()))
    with pytest.raises(AssertionError, match="lost by open_and_remove"):
        race(open_and_remove)


def test_nothing_is_swept_before_what_the_walk_saw_is_durable() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("gone", ONE)
        await old(lake)
        seen: list[bool] = []
        removed = 0

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal removed
            if isinstance(request, m.GcMark | m.GcBegin) and not removed:
                removed = await lake.remove_without_waiting("gone")
                assert lake.names.metadata.durable_sequence < removed
            if isinstance(request, m.GcSweep):
                seen.append(lake.names.metadata.durable_sequence >= removed > 0)
            return None

        lake.members.hook = hook
        assert (await lake.collect()).freed_shards == 2
        assert seen == [True] * 3

    with_lake(main)


# --- members that fail ---------------------------------------------------------------------------------


async def with_garbage(lake: SmallLake) -> set[tuple[MemberId, ChunkId, int]]:
    """Make content that stays and as much that is old garbage in two cycles; return the shards of the garbage."""
    for number in range(20):
        await lake.put(f"kept {number}", b"kept %d" % number)
        await lake.put(f"gone {number}", b"gone %d" % number)
    await lake.collect()
    await lake.delete(*[f"gone {number}" for number in range(20)])
    garbage = {data_chunk_id(b"gone %d" % number) for number in range(20)}
    return {shard for shard in await lake.shards() if shard[1] in garbage}


async def only_kept(lake: SmallLake) -> None:
    """All that is named is readable, and in some cycles all else is gone."""
    assert all([await lake.is_readable(b"kept %d" % number) for number in range(20)])
    await old(lake)
    assert await lake.chunks() == {data_chunk_id(b"kept %d" % number) for number in range(20)}
    assert all([await lake.is_readable(b"kept %d" % number) for number in range(20)])


@pytest.mark.parametrize("at", [m.GcMark, m.GcSweep])
def test_a_member_that_restarts_amid_a_cycle_frees_nothing_in_it(at: type[m.Request]) -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        restarted = False

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal restarted
            if isinstance(request, at) and member == member_id(1) and not restarted:
                restarted = True
                await lake.restart(1)
            return None

        lake.members.hook = hook
        report = await lake.collect()
        assert restarted
        reasons = {each.member: each.kept_because for each in report.members}
        assert "no marks of this walk" in reasons.pop(member_id(1).hex())
        assert set(reasons.values()) == {""}
        assert {shard for shard in garbage if shard[0] == member_id(1)} <= await lake.shards()
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(1)]) > 0
        await only_kept(lake)

    with_lake(main)


def test_a_batch_of_marks_that_is_lost_is_sent_again() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        lost: list[m.Request] = []

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark) and len(lost) < 2:
                lost.append(request)
                if len(lost) == 2:
                    await lake.members.client(member).call(request)  # its answer is lost
                raise EngineUnreachable("the connection was lost")
            return None

        lake.members.hook = hook
        assert (await lake.collect()).freed_shards == len(garbage)
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_marks_do_not_reach_is_not_asked_to_sweep() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            assert not (isinstance(request, m.GcSweep) and member == member_id(2))
            if isinstance(request, m.GcMark) and member == member_id(2):
                raise EngineUnreachable("it does not answer")
            return None

        lake.members.hook = hook
        report = await lake.collect()
        (reason,) = {each.kept_because for each in report.members} - {""}
        assert reason == "marks did not reach it: it does not answer"
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(2)])
        lake.members.hook = serve
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_is_given_fewer_batches_than_were_sent_frees_nothing() -> None:
    async def main(lake: SmallLake) -> None:
        await with_garbage(lake)
        everything = await lake.shards()

        async def swallow(member: MemberId, request: m.Request) -> Reply | None:
            return Reply(m.Done()) if isinstance(request, m.GcMark) else None

        lake.members.hook = swallow
        report = await lake.collect()
        assert {each.kept_because for each in report.members} == {"0 of 1 batches of marks were received"}
        assert await lake.shards() == everything
        lake.members.hook = serve
        await only_kept(lake)

    with_lake(main)


def test_a_member_that_is_away_is_left_out_and_collects_when_it_is_back() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        await lake.members.stop(member_id(0))
        report = await lake.collect()
        reasons = {each.member: each.kept_because for each in report.members}
        assert reasons[member_id(0).hex()] == "it has not begun the cycle: the member is away"
        assert report.freed_shards == len([shard for shard in garbage if shard[0] != member_id(0)])
        await lake.members.start(member_id(0), await lake.state.generation())
        assert {shard for shard in garbage if shard[0] == member_id(0)} <= await lake.shards()
        await only_kept(lake)

    with_lake(main)


def test_without_members_a_cycle_reads_no_manifest_and_says_why_nothing_was_freed() -> None:
    async def main(lake: SmallLake) -> None:
        await lake.put("key", ONE, TWO)
        for index in range(3):
            await lake.members.stop(member_id(index))
        report = await lake.collect()
        assert {each.kept_because for each in report.members} == {"it has not begun the cycle: the member is away"}
        assert lake.stripes.reads == []

    with_lake(main)


# --- manifests -----------------------------------------------------------------------------------------


def test_a_manifest_that_cannot_be_read_ends_the_cycle_and_its_object_is_named() -> None:
    async def main(lake: SmallLake) -> None:
        await with_garbage(lake)
        blob = await lake.put("folder/object", ONE, TWO)
        everything = await lake.shards()
        lake.stripes.unreadable.add(ChunkId(blob))
        for _ in range(3):
            with pytest.raises(ChunkNotFound, match="nothing is freed: a manifest of bkt/folder/object cannot be read"):
                await lake.collect()
        assert await lake.shards() == everything
        upload = await lake.begin_upload("upload")
        await lake.record_part(upload, blob)
        await lake.delete("folder/object")
        with pytest.raises(ChunkNotFound, match=f"bkt/upload, upload {upload.hex()}, part 1 cannot be read"):
            await lake.collect()
        lake.stripes.unreadable.clear()
        await ask(lake.client, m.UploadAbort("bkt", "upload", upload), m.Done)
        await only_kept(lake)

    with_lake(main)


def test_a_manifest_that_many_objects_have_is_read_once_in_a_cycle() -> None:
    async def main(lake: SmallLake) -> None:
        for number in range(10):
            await lake.put(f"key {number}", ONE, TWO)
        await lake.collect()
        assert lake.stripes.reads == [layout((ONE, TWO))[0]]

    with_lake(main)


def test_a_tree_that_names_one_manifest_many_times_is_walked_once() -> None:
    """A file of zeros is such a tree: at three levels it names its chunk 8,192 to the third times."""

    async def main(lake: SmallLake) -> None:
        child, payload = ChunkId(data_chunk_id(ONE)), ONE
        await lake.store_chunks([(child, payload)], GcGeneration(1))
        size = len(ONE)
        for level in range(3):
            entries = (Entry(child, size),) * MANIFEST_FANOUT
            size *= MANIFEST_FANOUT
            payload = encode(Manifest(CutKind.FIXED, level, size, entries))
            child = manifest_chunk_id(payload)
            await lake.store_chunks([(child, payload)], GcGeneration(1))
        await lake.bind("zeros", BlobId(child), 1, size=size)
        for _ in range(3):
            report = await lake.collect()
            assert (report.manifests, report.freed_shards) == (3, 0)

    with_lake(main)


def test_manifests_that_were_forgotten_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_gc_manifests, "MANIFESTS_SEEN_MAX", 4)

    async def main(lake: SmallLake) -> None:
        for _ in range(2):
            for number in range(8):
                await lake.put(f"key {_} {number}", b"%d" % number, TWO)
        report = await lake.collect()
        assert report.manifests == 16
        await old(lake)
        assert all([await lake.is_readable(b"%d" % number, TWO) for number in range(8)])

    with_lake(main)


# --- cycles that end early -----------------------------------------------------------------------------


def test_a_cycle_that_dies_amid_its_walk_leaves_nothing_and_the_next_begins_anew() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        walks: list[bytes] = []
        scope = trio.CancelScope()

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark):
                walks.append(request.walk)
                scope.cancel()
            return None

        lake.members.hook = hook
        with scope:
            await lake.collect()
        assert garbage <= await lake.shards()
        assert (await lake.collect()).freed_shards == len(garbage)
        assert len(set(walks)) == 2
        await only_kept(lake)

    with_lake(main)


def test_names_that_crash_amid_a_cycle_walk_anew() -> None:
    async def main(lake: SmallLake) -> None:
        garbage = await with_garbage(lake)
        walks: list[bytes] = []
        scope = trio.CancelScope()

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark):
                walks.append(request.walk)
                scope.cancel()
            return None

        lake.members.hook = hook
        with scope:
            await lake.collect()
        await lake.stop_names(crash=True)
        assert garbage <= await lake.shards()
        await lake.start_names()
        assert lake.joined.number == await lake.state.generation()
        assert (await lake.collect()).freed_shards == len(garbage)
        assert len(set(walks)) == 2
        await only_kept(lake)

    with_lake(main)


def test_sessions_hold_nothing_in_a_lake_and_generations_do() -> None:
    async def main(lake: SmallLake) -> None:
        await session_of(lake.client)
        await lake.store_chunks([(data_chunk_id(ONE), ONE)], GcGeneration(1))
        await lake.collect()
        assert await lake.is_readable(ONE)
        await lake.collect()
        assert not await lake.is_readable(ONE)

    with_lake(main)
