"""Gc over a lake with several names shards: whatever any of them refers to stays, in each way to reach them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio

from engine.coordinator.lake_state import LakeState
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.names_in_process import NamesInProcess
from engine.lake_gc.names_port import ShardNames
from engine.lake_upkeep.shard_upkeep import ShardUpkeep
from engine.sessions.references import References
from engine.upkeep.roots import Roots
from lakefs.errors import ChunkNotFound, LakeError, PreconditionFailed, SessionLost
from lakefs.ids import GcGeneration, MemberId, RingEpoch, data_chunk_id
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.names_shards_rig import NEAR, WAYS, Reach, ShardedLake, noticed, sharded_lake
from tests.sim.world.determinism import run_seeded
from tests.store_rig import run
from tests.unit.engine.cluster.test_lake_gc_beside import (
    Act,
    content_named,
    content_of,
    copy_and_remove,
    copy_over_a_folder_key,
    copy_to_a_folder_key,
    make_a_part,
    names_around,
    open_and_remove,
    put_again,
    rename,
)

each_way = pytest.mark.parametrize(("reach", "count"), WAYS, ids=lambda way: getattr(way, "value", way))
Main = Callable[[ShardedLake], Awaitable[None]]


def with_shards(main: Main, reach: Reach = Reach.BY_REQUESTS, count: int = 2) -> None:
    async def opened() -> None:
        async with sharded_lake(reach, count) as lake:
            await main(lake)

    run(opened)


async def old(lake: ShardedLake) -> None:
    for _ in range(3):
        await lake.collect()


@each_way
def test_content_of_each_shard_stays_and_garbage_goes(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            for name in ("kept", "gone", "read"):
                await shard.put(name, b"%s %d" % (name.encode(), number), b"more of it %d" % number)
            await shard.lease("read")
            await shard.delete("gone", "read")
        await old(lake)
        for number in range(count):
            for key in (b"kept", b"read"):
                assert await lake.first.is_readable(b"%s %d" % (key, number), b"more of it %d" % number)
            assert data_chunk_id(b"gone %d" % number) not in await lake.first.chunks()

    with_shards(main, reach, count)


@each_way
def test_content_of_two_shards_stays_until_neither_has_it(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for shard in lake.shards:
            await shard.put("key", b"shared")
        for shard in lake.shards:
            await old(lake)
            assert await lake.first.is_readable(b"shared")
            await shard.delete("key")
        await old(lake)
        assert await lake.first.chunks() == set()

    with_shards(main, reach, count)


@each_way
def test_old_uploads_of_each_shard_are_removed_and_counted(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        shard = lake.others[-1]
        await shard.stop_names()
        shard.expiry_s = 10.0
        await shard.start_names()
        await shard.put("key", b"content")
        upload = await shard.begin_upload("upload")
        blob = await lake.first.put("elsewhere", b"part")
        await shard.record_part(upload, blob)
        await lake.first.delete("elsewhere")
        assert (await lake.collect()).expired_uploads == 0
        await old(lake)
        assert await lake.first.is_readable(b"part")
        await trio.sleep(11)
        assert (await lake.collect()).expired_uploads == 1
        await old(lake)
        assert await lake.first.chunks() == {data_chunk_id(b"content")}

    with_shards(main, reach, count)


@each_way
def test_an_unreadable_manifest_is_named_by_the_shard_that_has_it(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        blob = await lake.others[-1].put("folder/key", b"one", b"two")
        lake.first.stripes.unreadable.add(blob)  # type: ignore[arg-type]
        with pytest.raises(ChunkNotFound, match="a manifest of bkt/folder/key cannot be read"):
            await lake.collect()

    with_shards(main, reach, count)


# --- what happens amid a cycle -------------------------------------------------------------------------


def race(*acts: Act, step: int = 7) -> None:
    """Let each act begin at each checkpoint of a cycle in turn, at the second shard, on content of its own.

    The shard is asked by requests; names in one process are walked as the first shard (`test_lake_gc_beside`).
    """
    delay, beside = 0, True

    async def main() -> None:
        nonlocal beside
        async with sharded_lake(Reach.BY_REQUESTS, 2, 2, batch=1) as lake:
            shard = lake.others[0]
            await names_around(shard, *acts)
            await old(lake)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lake.collect)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                beside = delay == 0 or lake.first.gc.running
                for act in acts:
                    nursery.start_soon(act, shard, act.__name__)
            for _ in range(3):
                for act in acts:
                    assert await shard.is_readable(*content_of(act)), f"lost by {act.__name__} at checkpoint {delay}"
                await lake.collect()

    while beside:
        run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += step
    assert delay >= 40, "the cycle is walked in steps"


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.lake_gc.names_requests.ROOTS_PAGE", 3)


@pytest.mark.usefixtures("small_pages")
def test_content_that_moves_within_a_shard_amid_its_walk_stays() -> None:
    race(
        copy_and_remove,
        copy_to_a_folder_key,
        copy_over_a_folder_key,
        rename,
        put_again,
        make_a_part,
        open_and_remove,
        step=17,
    )


@pytest.mark.usefixtures("small_pages")
def test_a_walk_that_loses_a_blob_bound_behind_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roots, "_note_rebound", lambda self, sequence, notes: None)
    with noticed("lost by copy_to_a_folder_key"):
        race(copy_to_a_folder_key)


def test_a_shard_that_forgets_its_leases_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(References, "leased_blobs", lambda self: iter(()))
    with noticed("lost by open_and_remove"):
        race(open_and_remove)


def copy_elsewhere_amid_a_cycle(reach: Reach) -> None:
    """Copy from a shard that is not walked yet to one that was, as a head does: by new offers in a session."""

    async def main(lake: ShardedLake) -> None:
        source, target = lake.others[0], lake.first
        await source.put("key", *content_named("key"))
        await old(lake)
        walked: list[object] = []

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcMark) and not walked:
                walked.append(request)  # of the first shard: a few names there make the batch that is sent
                await target.put("copy", *content_named("key"))
                await source.delete("key")
            return None

        for number in range(200):
            await target.put(f"more {number}", b"%d" % number)
        lake.first.members.hook = hook
        await lake.collect()
        assert walked
        for _ in range(3):
            assert await target.is_readable(*content_named("key"))
            await lake.collect()

    with_shards(main, reach)


@pytest.mark.parametrize("reach", NEAR)
def test_a_copy_into_a_shard_that_was_walked_stays(reach: Reach) -> None:
    copy_elsewhere_amid_a_cycle(reach)


def add_amid_a_cycle(reach: Reach) -> None:
    """A shard is added when a cycle has counted them; a session of an old generation binds there, and in the next."""

    async def main(lake: ShardedLake) -> None:
        is_added = False
        for _ in range(4):
            await lake.collect()
        stale = GcGeneration(await lake.first.state.generation() - 1)
        await lake.first.store_chunks([(data_chunk_id(b"stale"), b"stale")], stale)

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal is_added
            if isinstance(request, m.GcBegin) and not is_added:
                is_added = True
                added = await lake.add()
                await added.put("stale", b"stale", generation=stale)
                await added.put("fresh", b"fresh")
            return None

        lake.first.members.hook = hook
        for _ in range(4):
            await lake.collect()
            assert await lake.first.is_readable(b"stale"), "bound on an answer that this cycle does not respect"
            assert await lake.first.is_readable(b"fresh")

    with_shards(main, reach)


@pytest.mark.parametrize("reach", NEAR)
def test_a_shard_that_is_added_amid_a_cycle_begins_with_its_generation(reach: Reach) -> None:
    add_amid_a_cycle(reach)


def test_a_shard_that_begins_with_nothing_joined_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(self: ShardUpkeep) -> None:
        return

    monkeypatch.setattr(ShardUpkeep, "begin", begin)
    with noticed("bound on an answer that this cycle does not respect"):
        add_amid_a_cycle(Reach.BY_REQUESTS)


def add_before_the_generation(count_of: Callable[[LakeState], Awaitable[int]]) -> None:
    """A shard is added, and binds what this cycle may free, just before the cycle's generation is made.

    `count_of`: returns the number of shards that the cycle goes by.
    """
    begin_gc = LakeState.begin_gc

    async def main(lake: ShardedLake) -> None:
        for _ in range(4):
            await lake.collect()
        stale = GcGeneration(await lake.first.state.generation() - 1)
        await lake.first.store_chunks([(data_chunk_id(b"stale"), b"stale")], stale)

        async def adding(self: LakeState) -> tuple[GcGeneration, dict[RingEpoch, bytes]]:
            if len(lake.shards) == 2:
                added = await lake.add()
                await added.put("stale", b"stale", generation=stale)
            return await begin_gc(self)

        with pytest.MonkeyPatch.context() as plant:
            plant.setattr(LakeState, "begin_gc", adding)
            plant.setattr(LakeState, "names_shards", count_of)
            await lake.collect()
        assert await lake.first.is_readable(b"stale"), "it is bound in a shard that was not walked"

    with_shards(main)


def test_the_number_of_shards_is_read_behind_the_generation() -> None:
    add_before_the_generation(LakeState.names_shards)


def test_a_number_of_shards_of_before_the_generation_is_noticed() -> None:
    async def before(self: LakeState) -> int:
        return 2

    with noticed("bound in a shard that was not walked"):
        add_before_the_generation(before)


# --- joined, all or nothing -----------------------------------------------------------------------------


def bind_on_old_answers(reach: Reach) -> None:
    """A session's answers are three generations old when it binds at the second shard."""

    async def main(lake: ShardedLake) -> None:
        shard, known = lake.others[0], GcGeneration(1)
        blob = data_chunk_id(b"content")
        await shard.store_chunks([(blob, b"content")], known)
        await shard.put("key", b"other")
        await old(lake)
        try:
            await shard.bind("late", blob, known)
        except SessionLost:
            return
        assert await shard.is_readable(b"content"), "bound content was freed"

    with_shards(main, reach)


@pytest.mark.parametrize("reach", NEAR)
def test_each_shard_joins_so_it_binds_nothing_that_may_be_freed(reach: Reach) -> None:
    bind_on_old_answers(reach)


@pytest.mark.parametrize("reach", NEAR)
def test_a_shard_that_is_not_joined_is_noticed(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    join = LakeGc._join

    async def only_first(self: LakeGc, shards: Sequence[ShardNames], *more: Any) -> None:
        await join(self, shards[:1], *more)

    monkeypatch.setattr(LakeGc, "_join", only_first)
    with noticed("bound content was freed"):
        bind_on_old_answers(reach)


def test_a_shard_joins_durably_before_members_begin() -> None:
    async def main(lake: ShardedLake) -> None:
        shard, begun = lake.others[0], list[int]()

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            if isinstance(request, m.GcBegin) and not begun:
                begun.append(0)
                await shard.stop_names(crash=True)
                with pytest.MonkeyPatch.context() as plant:
                    plant.setattr(ShardUpkeep, "begin", nothing_more)
                    await shard.start_names()
                begun[0] = shard.joined.number
            return None

        lake.first.members.hook = hook
        await lake.collect()
        assert begun == [await lake.first.state.generation()], "what its log says is enough"

    with_shards(main)


async def nothing_more(self: ShardUpkeep) -> None:
    return


@each_way
@pytest.mark.parametrize("at", [m.GcBegin, m.GcMark, None])
def test_nothing_is_freed_when_a_shard_cannot_be_asked(reach: Reach, count: int, at: type[m.Request] | None) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            await shard.put("key", b"content %d" % number)
            await shard.put("gone", b"gone %d" % number)
        await lake.collect()
        for shard in lake.shards:
            await shard.delete("gone")
        await lake.collect()
        before = await lake.first.chunks()
        lost = lake.others[-1]
        is_lost = False

        async def hook(member: MemberId, request: m.Request) -> Reply | None:
            nonlocal is_lost
            if at is not None and isinstance(request, at) and not is_lost:
                is_lost = True
                await lost.stop_names()
            return None

        lake.first.members.hook = hook
        if at is None:
            await lost.stop_names()
        if at is m.GcMark:  # marks are sent when all shards were walked
            await lake.collect()
        else:
            with pytest.raises(LakeError):
                await lake.collect()
            assert await lake.first.chunks() == before
        await lost.start_names()
        await old(lake)
        assert await lake.first.chunks() == {data_chunk_id(b"content %d" % number) for number in range(count)}

    with_shards(main, reach, count)


def test_a_process_that_cannot_ask_other_shards_frees_nothing() -> None:
    async def main(lake: ShardedLake) -> None:
        await lake.others[0].put("key", b"content")
        names = NamesInProcess(lake.first.names, lake.first.joined)
        parts = lake.first.coordinator, lake.first.members, lake.first.stripes, names, lake.first.clock
        with pytest.raises(PreconditionFailed, match="several names shards"):
            await LakeGc(*parts).run()
        assert await lake.first.is_readable(b"content")

    with_shards(main)
