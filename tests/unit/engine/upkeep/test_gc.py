"""Garbage collection: what is referred to stays, whatever happens beside the walk; all else is freed, with its room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import pytest
import trio
import trio.testing

from engine.format.layouts import SegmentKind
from engine.process.embedded import EmbeddedEngine
from engine.segments.files import segment_path
from engine.store.store import Store
from engine.upkeep import gc as gc_module
from lakefs.content.manifest import CutKind, build
from lakefs.errors import ChunkDamaged, ChunkNotFound, DiskFailed, SessionLost
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB, SESSION_LINGER_S
from lakefs.wire import messages as m
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimDisk
from tests.sim.world.segment_world import lies_at
from tests.store_rig import (
    SMALL_SIZES,
    ask,
    change,
    client_of,
    delete,
    fsck,
    gc,
    good,
    in_flight,
    put,
    read,
    records,
    run,
    session_of,
    simulated_store,
    store_chunks,
)

STEPWISE: Final = replace(SMALL_SIZES, gc_batch=1)
"""A checkpoint after every record, so that others run between any two."""
LARGE: Final = next(each for n in range(10_000) if data_chunk_id(each := b"%04d" % n * 20_000)[1] > 0xFB)
"""80,000 bytes that the sweep comes to late."""
SMALL: Final = b"small payload"


async def put_chunks(client: EmbeddedEngine, key: str, payloads: list[bytes]) -> bytes:
    """Put an object of several chunks; return its blob."""
    session = await session_of(client)
    chunks = await store_chunks(client, session, payloads)
    tree = build(CutKind.FIXED, [(ChunkId(c), len(payload)) for c, payload in zip(chunks, payloads, strict=True)])
    await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
    commit = m.Commit(session, [change(key, tree.blob)], end_session=True)
    good(await ask(client, commit, m.NameResults))
    return tree.blob


Action = Callable[[Store, EmbeddedEngine], Awaitable[None]]


def race(prepare: Action, act: Action, check: Action, *, stride: int = 3) -> None:
    """Run one cycle of gc, with `act` beginning at each checkpoint in turn; then, and after a second, check for damage.

    With a negative delay the cycle begins at a checkpoint of `act`.
    """
    delay = -12
    beside = True

    async def main() -> None:
        nonlocal beside
        async with simulated_store(sizes=STEPWISE if delay >= 0 else SMALL_SIZES) as store:
            client, other = client_of(store), client_of(store)
            await prepare(store, client)

            async def cycle(task_status: trio.TaskStatus[None]) -> None:
                task_status.started()
                await checkpoints(-delay)
                await gc(other)

            async with trio.open_nursery() as nursery:
                await nursery.start(cycle)
                await checkpoints(delay)
                beside = delay < 0 or store.collector.running
                await act(store, client)
            for _ in range(2):
                await check(store, client)
                assert (await fsck(client))["damage"] == 0
                await gc(other)

    while beside:
        run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += stride if delay >= 0 else 1
    assert delay >= 10, "the cycle is walked in steps"


async def checkpoints(count: int) -> None:
    """Let others run so many times."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


# --- what stays and what goes --------------------------------------------------------------------------


def test_only_what_nothing_refers_to_is_freed() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            for key, payload in (("kept", LARGE), ("also", SMALL), ("gone", LARGE[1:]), ("too", SMALL * 2)):
                await put(client, key, payload)
            await delete(client, "gone", "too")
            report = await gc(client)
            assert set(records(store)) == {data_chunk_id(LARGE), data_chunk_id(SMALL)}
            assert (report["freed_chunks"], report["live_chunks"]) == (2, 2)
            assert report["live_bytes"] == len(LARGE) + 8 + len(SMALL)
            assert report["freed_bytes"] == len(LARGE) - 1 + 8 + 2 * len(SMALL)
            assert await read(client, data_chunk_id(LARGE)) == LARGE
            with pytest.raises(ChunkNotFound):
                await read(client, data_chunk_id(LARGE[1:]))
            report = await fsck(client)
            assert (report["damage"], report["notes"]) == (0, 0)

    run(main)


def test_content_that_another_name_has_stays() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await put(client, "one", LARGE)
            await put(client, "two", LARGE)
            await delete(client, "one")
            assert (await gc(client))["freed_chunks"] == 0
            await delete(client, "two")
            assert (await gc(client))["freed_chunks"] == 1

    run(main)


def test_chunks_of_manifests_stay_as_long_as_one_of_them_is_named() -> None:
    shared, first, second = b"s" * 70_000, b"1" * 70_000, b"2" * 70_000

    async def main() -> None:
        async with simulated_store(sizes=STEPWISE) as store:
            client = client_of(store)
            await put_chunks(client, "a", [shared, first])
            await put_chunks(client, "b", [shared, second, shared])
            await gc(client)
            assert len(records(store)) == 5
            await delete(client, "a")
            assert (await gc(client))["freed_chunks"] == 2
            assert await read(client, data_chunk_id(shared)) == shared
            await delete(client, "b")
            assert (await gc(client))["freed_chunks"] == 3
            assert records(store) == {}

    run(main)


def test_a_manifest_that_cannot_be_read_stops_the_cycle_before_anything_is_freed() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            blob = await put_chunks(client, "a", [b"1" * 70_000, b"2" * 70_000])
            await put(client, "gone", SMALL)
            await delete(client, "gone")
        async with simulated_store(disk) as store:
            client = client_of(store)
            record = records(store)[ChunkId(blob)]
            path = segment_path(record.segment, store.segments.register.kinds[record.segment])
            disk.flip_bit(path, record.offset + 40, 3)
            with pytest.raises(ChunkDamaged):
                await gc(client)
            assert data_chunk_id(SMALL) in records(store)
            assert store.references.barrier is None
            disk.flip_bit(path, record.offset + 40, 3)
            assert (await gc(client))["freed_chunks"] == 1

    run(main)


def test_a_removed_bucket_takes_its_content_along() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await put(client, "k", LARGE, bucket="old")
            await delete(client, "k", bucket="old")
            await ask(client, m.BucketRemove("old"), m.Done)
            await gc(client)
            assert records(store) == {}

    run(main)


# --- sessions and leases -------------------------------------------------------------------------------


def test_a_session_holds_what_it_stored_and_what_it_was_told_is_there() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await put(client, "k", SMALL)
            session = await session_of(client)
            (stored,) = await store_chunks(client, session, [LARGE])
            told = data_chunk_id(SMALL)
            assert (await ask(client, m.Offer(session, [told]), m.Offered)).present == [True]
            await delete(client, "k")
            assert (await gc(client))["freed_chunks"] == 0
            assert set(records(store)) == {stored, told}
            await ask(client, m.SessionEnd(session), m.Done)
            assert (await gc(client))["freed_chunks"] == 2

    run(main)


def test_a_session_outlives_its_connection_by_a_minute() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            lost, other = client_of(store), client_of(store)
            session = await session_of(lost)
            await store_chunks(lost, session, [LARGE])
            await lost.aclose()
            await trio.sleep(SESSION_LINGER_S - 1)
            assert (await gc(other))["freed_chunks"] == 0
            await ask(other, m.SessionJoin(session), m.Done)
            await trio.sleep(SESSION_LINGER_S * 2)
            assert (await gc(other))["freed_chunks"] == 0
            await other.aclose()
            await trio.sleep(SESSION_LINGER_S)
            last = client_of(store)
            assert (await gc(last))["freed_chunks"] == 1
            with pytest.raises(SessionLost):
                await ask(last, m.SessionJoin(session), m.Done)

    run(main)


@pytest.mark.parametrize("ending", ["close", "disconnect"])
def test_an_open_object_keeps_its_content_until_it_is_closed(ending: str) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            reader, client = client_of(store), client_of(store)
            await put(client, "k", LARGE)
            opened = (await ask(reader, m.OpenObjects([("bkt", "k")]), m.OpenResults)).results[0].opened
            assert opened is not None
            await put(client, "k", b"another content")
            assert (await gc(client))["freed_chunks"] == 0
            assert await read(reader, opened.chunks[0]) == LARGE
            if ending == "close":
                await ask(reader, m.CloseLeases([opened.lease]), m.Done)
            else:
                await reader.aclose()
            assert (await gc(client))["freed_chunks"] == 1

    run(main)


def test_nothing_is_freed_in_the_first_seconds_after_a_start() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await put(client, "k", LARGE)
            await delete(client, "k")
        async with simulated_store(disk, grace_s=10.0) as store:
            client = client_of(store)
            begun = trio.current_time()
            await trio.sleep(4)
            assert (await gc(client))["freed_chunks"] == 1
            assert trio.current_time() == begun + 10

    run(main)


# --- beside writers ------------------------------------------------------------------------------------


async def a_name_among_others(store: Store, client: EmbeddedEngine) -> None:
    """Put `f/` early and `x` late in the order of nodes, so that much happens between their turns."""
    keys = ["f/child", *(f"filler-{number}" for number in range(20))]
    payloads = [key.encode() for key in keys]
    request = m.PutObjects([len(payload) for payload in payloads], [change(key) for key in keys])
    good(await ask(client, request, m.NameResults, *payloads))
    await put(client, "x", LARGE)
    await put(client, "y", SMALL)


def is_read_as(key: str, content: bytes) -> Action:
    async def check(store: Store, client: EmbeddedEngine) -> None:
        (result,) = (await ask(client, m.OpenObjects([("bkt", key)]), m.OpenResults)).results
        assert result.opened is not None, result.failure
        assert await read(client, result.opened.chunks[0]) == content

    return check


def test_a_folders_own_key_that_gets_a_blob_behind_the_marker_keeps_it() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        good(await ask(client, m.Copy("bkt", "x", "bkt", "f/"), m.NameResults))
        await delete(client, "x")

    race(a_name_among_others, act, is_read_as("f/", LARGE))


def test_a_copy_of_a_name_that_is_removed_keeps_the_content() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        good(await ask(client, m.Copy("bkt", "x", "bkt", "copy"), m.NameResults))
        await delete(client, "x")

    race(a_name_among_others, act, is_read_as("copy", LARGE))


def test_a_moved_name_keeps_its_content() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        for source, target in (("x", "a/moved"), ("a/", "0/")):
            good(await ask(client, m.Rename("bkt", source, "bkt", target), m.NameResults))

    race(a_name_among_others, act, is_read_as("0/moved", LARGE))


async def garbage(store: Store, client: EmbeddedEngine) -> None:
    await a_name_among_others(store, client)
    await delete(client, "x")


def test_content_that_is_garbage_and_is_put_again_meanwhile_stays() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        await put(client, "again", LARGE)

    race(garbage, act, is_read_as("again", LARGE))


def test_a_put_told_that_garbage_is_there_finds_it_at_its_commit() -> None:
    async def act(store: Store, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        chunk = data_chunk_id(LARGE)
        (present,) = (await ask(client, m.Offer(session, [chunk]), m.Offered)).present
        if not present:
            await store_chunks(client, session, [LARGE])
        await trio.lowlevel.checkpoint()
        commit = m.Commit(session, [change("adopted", chunk)], end_session=True)
        good(await ask(client, commit, m.NameResults))

    race(garbage, act, is_read_as("adopted", LARGE))


def test_a_session_that_began_before_the_cycle_may_commit_and_end_at_any_moment_of_it() -> None:
    sessions: list[bytes] = []

    async def prepare(store: Store, client: EmbeddedEngine) -> None:
        await a_name_among_others(store, client)
        sessions.append(await session_of(client))
        await store_chunks(client, sessions[-1], [LARGE[7:]])

    async def act(store: Store, client: EmbeddedEngine) -> None:
        commit = m.Commit(sessions[-1], [change("f/late", data_chunk_id(LARGE[7:]))], end_session=True)
        good(await ask(client, commit, m.NameResults))

    race(prepare, act, is_read_as("f/late", LARGE[7:]))


def test_a_session_may_end_with_the_commit_of_a_manifest_at_any_moment_of_a_cycle() -> None:
    payloads = [b"1" * 70_000, b"2" * 70_000]
    commits: list[m.Commit] = []

    async def prepare(store: Store, client: EmbeddedEngine) -> None:
        session = await session_of(client)
        chunks = await store_chunks(client, session, payloads)
        tree = build(CutKind.FIXED, [(ChunkId(chunk), 70_000) for chunk in chunks])
        await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
        commits.append(m.Commit(session, [change("k", tree.blob)], end_session=True))

    async def act(store: Store, client: EmbeddedEngine) -> None:
        good(await ask(client, commits[-1], m.NameResults))

    async def check(store: Store, client: EmbeddedEngine) -> None:
        assert len(records(store)) == 3

    race(prepare, act, check, stride=1)


def test_a_put_of_many_chunks_may_happen_at_any_moment_of_a_cycle() -> None:
    payloads = [b"1" * 70_000, b"2" * 70_000, b"1" * 70_000]

    async def prepare(store: Store, client: EmbeddedEngine) -> None:
        await a_name_among_others(store, client)
        await put_chunks(client, "many", payloads)
        await delete(client, "many")

    async def act(store: Store, client: EmbeddedEngine) -> None:
        await put_chunks(client, "many", payloads)

    async def check(store: Store, client: EmbeddedEngine) -> None:
        for payload in payloads:
            assert await read(client, data_chunk_id(payload)) == payload

    race(prepare, act, check)


def test_an_object_opened_at_any_moment_of_a_cycle_stays_readable() -> None:
    opened: list[m.OpenedObject] = []

    async def act(store: Store, client: EmbeddedEngine) -> None:
        (result,) = (await ask(client, m.OpenObjects([("bkt", "x")]), m.OpenResults)).results
        assert result.opened is not None
        opened.append(result.opened)
        await delete(client, "x")

    async def check(store: Store, client: EmbeddedEngine) -> None:
        assert await read(client, opened[-1].chunks[0]) == LARGE

    race(a_name_among_others, act, check)


def test_a_put_whose_chunk_vanishes_before_its_commit_stores_it_after_all() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client, other = client_of(store), client_of(store)
            await put(client, "x", SMALL)
            await put(client, "anchor", b"keeps the bucket")
            await delete(client, "x")
            commit, freed = store.metadata.commit, 0

            async def commit_after_a_cycle(decide, **options):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, ANN003
                nonlocal freed
                if not store.collector.running and not freed:
                    freed = (await gc(other))["freed_chunks"]
                return await commit(decide, **options)

            store.metadata.commit = commit_after_a_cycle  # type: ignore[method-assign]
            await put(client, "again", SMALL)
            assert freed == 1, "the chunk was there when the put looked, and gone when it committed"
            assert await read(client, data_chunk_id(SMALL)) == SMALL
            assert in_flight(store) == 0

    run(main)


def test_a_chunk_freed_and_stored_again_has_another_place() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await put(client, "x", LARGE)
            before = records(store)[data_chunk_id(LARGE)]
            await delete(client, "x")
            await gc(client)
            await put(client, "x", LARGE)
            after = records(store)[data_chunk_id(LARGE)]
            assert (before.segment, before.offset) != (after.segment, after.offset)
            assert after.birth > before.birth
            assert lies_at(store.segments, before.segment, before.offset, 4096) == bytes(4096)
            assert await read(client, data_chunk_id(LARGE)) == LARGE

    run(main)


# --- room ----------------------------------------------------------------------------------------------


def test_a_segment_in_which_nothing_lives_is_removed() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await put(client, "x", LARGE)
            await put(client, "y", SMALL)
            await delete(client, "x")
        async with simulated_store(disk) as store:
            client = client_of(store)
            old = sorted(store.segments.register.kinds)
            report = await gc(client)
            assert report["removed_segments"] == 1
            assert report["disk_bytes_after"] < report["disk_bytes_before"]
            (left,) = sorted(store.segments.register.kinds)
            assert left in old
            assert store.segments.register.kinds[left] is SegmentKind.SMALL
        async with simulated_store(disk) as store:
            assert sorted(store.segments.register.kinds) == [left]
            assert await read(client_of(store), data_chunk_id(SMALL)) == SMALL

    run(main)


def test_room_that_interrupted_puts_left_is_given_back_once_the_segment_is_sealed() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await put(client, "kept", LARGE)
            disk.fail_next("sync_data", DiskFailed("never synced"), path=".large")
            with pytest.raises(DiskFailed):
                await put(client, "failed", b"f" * (CHUNK_BYTES // 4))
        async with simulated_store(disk) as store:
            client = client_of(store)
            report = await gc(client)
            assert report["freed_chunks"] == 0
            assert report["disk_bytes_after"] <= len(LARGE) + 16 * KIB
            assert await read(client, data_chunk_id(LARGE)) == LARGE

    run(main)


def test_segments_past_the_bound_of_one_cycle_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_module, "EXTENTS_PER_CYCLE", 3)

    async def main() -> None:
        disk = SimDisk()
        for life in range(2):
            async with simulated_store(disk) as store:
                client = client_of(store)
                for number in range(4):
                    await put(client, f"{life}-{number}", b"%d%d" % (life, number) * 50_000)
                await delete(client, f"{life}-0")
        async with simulated_store(disk) as store:
            client = client_of(store)
            await gc(client)
            assert (await fsck(client))["damage"] == 0
            assert len(records(store)) == 6

    run(main)


# --- one cycle at a time -------------------------------------------------------------------------------


def test_a_second_caller_waits_for_the_first_and_finds_nothing_left() -> None:
    async def main() -> None:
        async with simulated_store(sizes=STEPWISE) as store:
            client = client_of(store)
            await garbage(store, client)
            reports: list[int] = []

            async def cycle() -> None:
                reports.append((await gc(client))["freed_chunks"])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cycle)
                nursery.start_soon(cycle)
            assert reports == [1, 0]

    run(main)


def test_a_cycle_cancelled_anywhere_leaves_nothing_behind() -> None:
    delay = 0
    beside = True

    async def main() -> None:
        nonlocal beside
        async with simulated_store(sizes=STEPWISE) as store:
            client = client_of(store)
            await garbage(store, client)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gc, client)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                beside = store.collector.running
                nursery.cancel_scope.cancel()
            assert not store.collector.running
            assert store.references.barrier is None
            await gc(client)
            assert data_chunk_id(LARGE) not in records(store)
            assert (await fsck(client))["damage"] == 0

    while beside or delay < 3:
        run_seeded(main, delay, clock=trio.testing.MockClock(autojump_threshold=0))
        delay += 1
