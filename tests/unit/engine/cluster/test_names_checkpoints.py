"""Checkpoints of the names in the lake itself: gc keeps the newest two, and names are made from them anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

import pytest
import trio

from engine.coordinator.kept_coordinator import KeptCoordinator
from engine.coordinator.lake_state import LakeState, pages
from engine.coordinator.records import (
    CHECKPOINTS_KEY,
    CheckpointsRecord,
    LakeRecord,
    NamesCheckpoint,
    checkpoints_key,
    encode,
)
from engine.lake import names_checkpoints
from engine.lake.from_lake import LakeSource
from engine.lake.names_checkpoints import FIRST_S, KEPT, NamesCheckpoints, decoded
from engine.members.ports import NewChunk
from engine.store.names_opening import open_names_store
from lakefs.errors import ChunkNotFound, EngineUnreachable, StoreDamaged
from lakefs.host.offload import InlineOffload
from lakefs.ids import GcGeneration, RingEpoch, chunk_of
from tests.contract.coordinators import put
from tests.lake_rig import SmallLake, small_lake
from tests.names_shards_rig import Reach, sharded_lake
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import run
from tests.unit.support.metadata_rig import NAMES_OF, contents

HOUR_S = 3600.0


@asynccontextmanager
async def checkpoints_of(lake: SmallLake, every_s: float = HOUR_S, key: bytes = CHECKPOINTS_KEY) -> AsyncIterator[None]:
    """Put checkpoints of a lake's names into it, during the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made_by(lake, every_s, key).run)
        yield
        nursery.cancel_scope.cancel()


def made_by(lake: SmallLake, every_s: float, key: bytes = CHECKPOINTS_KEY) -> NamesCheckpoints:
    parts = lake.coordinator, lake.members, lake.stripes, lake.names, lake.names_disk, lake.gate
    return NamesCheckpoints(*parts, InlineOffload(), every_s, key)


async def recorded(lake: SmallLake) -> CheckpointsRecord:
    return decoded((await lake.coordinator.get(CHECKPOINTS_KEY)).entry)


async def is_readable(lake: SmallLake, checkpoint: NamesCheckpoint) -> bool:
    """Return True if names can be made from a checkpoint."""
    source = LakeSource(lake.stripes, [checkpoint], SimClock(), InlineOffload())
    with mock.patch("engine.lake.from_lake.PATIENCE_S", 0.0):
        try:
            return sum([len(piece) async for piece in source._pieces(chunk_of(checkpoint.blob))]) > 0
        except ChunkNotFound:
            return False


@pytest.mark.parametrize("piece_bytes", [1 << 22, 256])
def test_names_are_made_from_a_checkpoint_in_the_lake(piece_bytes: int) -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            for number in range(30):
                await lake.put(f"object {number}", b"payload %d" % number)
            async with checkpoints_of(lake):
                await trio.sleep(FIRST_S + 10)
                [checkpoint] = (await recorded(lake)).checkpoints
            before = contents(lake.names.metadata)
            source = LakeSource(lake.stripes, [checkpoint], SimClock(), InlineOffload())
            opening = open_names_store(
                SimDisk(9),
                SimClock(),
                InlineOffload(),
                cluster_id=NAMES_OF,
                create=True,
                verify_index=False,
                begin_anew=source.begin_anew,
            )
            async with opening as names:
                assert contents(names.metadata) == before
                assert names.metadata.durable_sequence == checkpoint.sequence

    with mock.patch.object(names_checkpoints, "CHUNK_BYTES", piece_bytes):
        run(main)


def test_gc_keeps_the_newest_two_also_when_another_replica_leads() -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            seen: list[NamesCheckpoint] = []
            async with checkpoints_of(lake):
                for number in range(4):
                    await lake.put(f"object {number}", b"payload %d" % number)
                    await trio.sleep(FIRST_S + 10 if not number else HOUR_S)
                    found = (await recorded(lake)).checkpoints
                    seen.append(found[0])
                    assert list(found) == seen[::-1][:KEPT]
                    for _ in range(4):
                        await lake.collect()
                    readable = [each for each in seen[::-1] if await is_readable(lake, each)]
                    assert readable == seen[::-1][:KEPT]
            await lake.stop_names()
            await lake.start_names()
            async with checkpoints_of(lake):
                await trio.sleep(FIRST_S + 10)
                for _ in range(4):
                    await lake.collect()
                assert list((await recorded(lake)).checkpoints) == seen[::-1][:KEPT], "none was due"
                assert [await is_readable(lake, each) for each in seen[-KEPT:]] == [True] * KEPT

    run(main)


def test_gc_that_goes_on_while_a_checkpoint_is_stored_frees_nothing_of_it() -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            for number in range(60):
                await lake.put(f"object {number}", b"payload %d" % number)
            store = lake.stripes.store

            async def slowly(generation: GcGeneration, chunks: list[NewChunk]) -> list[bool]:
                stored = await store(generation, chunks)
                if lake.names.references.statistics()["connections"] > 1 and cycles:
                    cycles.pop()
                    await lake.collect()
                return stored

            cycles = [1, 2, 3, 4]
            with mock.patch.object(lake.stripes, "store", slowly):
                async with checkpoints_of(lake):
                    await trio.sleep(600)
                    found = (await recorded(lake)).checkpoints
                    for _ in range(4):
                        await lake.collect()
                    assert not cycles
                    assert await is_readable(lake, found[0])

    with mock.patch.object(names_checkpoints, "CHUNK_BYTES", 256):
        run(main)


def test_none_is_made_where_none_is_wanted_and_a_clock_that_went_back_makes_one() -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            async with checkpoints_of(lake, every_s=0):
                await trio.sleep(600)
                assert await recorded(lake) == CheckpointsRecord()
            later = NamesCheckpoint(b"\x01" * 33, 1, 1, lake.clock.wall_ns() + 10**18)  # type: ignore[arg-type]
            await put(lake.coordinator, CHECKPOINTS_KEY, encode(CheckpointsRecord((later,))))
            async with checkpoints_of(lake):
                await trio.sleep(FIRST_S + 10)
                assert len((await recorded(lake)).checkpoints) == 2

    run(main)


def test_a_checkpoint_that_is_short_makes_no_names() -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            await lake.put("object", b"payload")
            async with checkpoints_of(lake):
                await trio.sleep(FIRST_S + 10)
                [checkpoint] = (await recorded(lake)).checkpoints
            longer = NamesCheckpoint(checkpoint.blob, checkpoint.sequence, checkpoint.file_bytes + 1, 0)
            source = LakeSource(lake.stripes, [longer], SimClock(), InlineOffload())
            opening = open_names_store(
                SimDisk(9), SimClock(), InlineOffload(), cluster_id=NAMES_OF, create=True, begin_anew=source.begin_anew
            )
            with pytest.raises(StoreDamaged, match="bytes, not"):
                async with opening:
                    pass
            source = LakeSource(lake.stripes, [longer, checkpoint], SimClock(), InlineOffload())
            async with open_names_store(
                SimDisk(10), SimClock(), InlineOffload(), cluster_id=NAMES_OF, create=True, begin_anew=source.begin_anew
            ):
                assert source.used == checkpoint, "the one before it"

    run(main)


def test_kept_records_are_read_as_a_coordinator_and_never_changed() -> None:
    async def main() -> None:
        records = {b"epochs/%016x" % number: b"t" * 900_000 for number in range(1, 6)}
        records[b"lake"] = encode(LakeRecord(NAMES_OF, 2, 1))
        kept = KeptCoordinator(records)
        read = [entry.key async for page in pages(kept, b"\0", b"\xff") for entry in page.entries]
        assert read == sorted(records)
        assert list(await LakeState(kept).epoch_tables()) == [1, 2, 3, 4, 5]
        assert (await kept.get(b"epoch")).entry is None
        with pytest.raises(EngineUnreachable, match="only read"):
            await LakeState(kept).next_epoch(RingEpoch(0), b"")
        with trio.move_on_after(1000) as waiting:
            async with kept.watch(b"\0", b"\xff", (await kept.get(b"lake")).revision) as watch:
                await anext(watch)
        assert waiting.cancelled_caught

    run(main)


def test_a_leader_has_leased_what_is_recorded_before_it_serves() -> None:
    async def main() -> None:
        async with small_lake(2) as lake:
            await lake.put("object", b"payload")
            async with checkpoints_of(lake):
                await trio.sleep(FIRST_S + 10)
            [checkpoint] = (await recorded(lake)).checkpoints
            await lake.stop_names()
            await lake.start_names()
            await made_by(lake, HOUR_S).begin()
            for _ in range(4):
                await lake.collect()
            assert await is_readable(lake, checkpoint)

    run(main)


def test_each_names_shard_has_checkpoints_of_its_own() -> None:
    async def main() -> None:
        async with sharded_lake(Reach.BY_REQUESTS, 2, 2) as sharded:
            lake, shard = sharded.first, sharded.others[0]
            await lake.put("object", b"payload")
            await shard.put("object of the shard", b"payload of the shard")
            key = checkpoints_key(shard.shard)
            async with checkpoints_of(lake), checkpoints_of(shard, key=key):
                await trio.sleep(FIRST_S + 10)
                [first] = (await recorded(lake)).checkpoints
                [second] = decoded((await lake.coordinator.get(key)).entry).checkpoints
                assert first.blob != second.blob
                for _ in range(4):
                    await sharded.collect()
                assert await is_readable(lake, first)
                assert await is_readable(lake, second)

    run(main)
