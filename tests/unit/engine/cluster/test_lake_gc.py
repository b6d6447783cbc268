"""Gc over a lake: dead content is freed in the second cycle after it was last touched; what is referred to stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from engine.lake_gc import lake_gc_manifests
from lakefs.content.manifest import CutKind, Entry, Manifest, encode
from lakefs.errors import ChunkNotFound, SessionLost
from lakefs.ids import BlobId, ChunkId, GcGeneration, data_chunk_id, manifest_chunk_id
from lakefs.limits import MANIFEST_FANOUT
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake, layout, old, only_kept, with_garbage, with_lake
from tests.store_rig import ask

ONE, TWO, THREE = b"one" * 50, b"two" * 30_000, b"three" * 20
Action = Callable[[SmallLake], Awaitable[None]]


def chunks_of(*payloads: bytes) -> set[ChunkId]:
    return {chunk for chunk, _ in layout(payloads)[1]}


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
            assert await lake.stripes.offer(GcGeneration(generation), [data_chunk_id(ONE)]) == [len(ONE)]
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
        lake.gate.check(m.Answered(2, 1))
        with pytest.raises(SessionLost):
            lake.gate.check(m.Answered(1, 1))
        await lake.joined.join(GcGeneration(2))
        assert lake.joined.number == 3, "it never goes back"

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


def test_what_lies_below_manifests_of_manifests_stays() -> None:
    async def main(lake: SmallLake) -> None:
        leaves = [data_chunk_id(payload) for payload in (ONE, TWO)]
        full = Manifest(CutKind.FIXED, 0, MANIFEST_FANOUT, (Entry(leaves[0], 1),) * MANIFEST_FANOUT)
        last = Manifest(CutKind.FIXED, 0, len(TWO), (Entry(leaves[1], len(TWO)),))
        below = [encode(each) for each in (full, last)]
        entries = [
            Entry(manifest_chunk_id(payload), each.size_bytes)
            for payload, each in zip(below, (full, last), strict=True)
        ]
        top = encode(Manifest(CutKind.FIXED, 1, MANIFEST_FANOUT + len(TWO), tuple(entries)))
        chunks = [(manifest_chunk_id(payload), payload) for payload in (*below, top)]
        chunks += zip(leaves, (ONE, TWO), strict=True)
        await lake.store_chunks(chunks, GcGeneration(1))
        await lake.bind("deep", manifest_chunk_id(top), 1, size=MANIFEST_FANOUT + len(TWO))
        await old(lake)
        assert await lake.chunks() == {chunk for chunk, _ in chunks}
        await lake.delete("deep")
        await old(lake)
        assert await lake.chunks() == set()

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
