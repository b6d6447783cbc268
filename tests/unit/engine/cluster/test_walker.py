"""The walker: whatever was lost, moved or spoiled, a walk makes every stripe whole and at home, and says so truly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from lakefs.ids import ChunkKind
from lakefs.limits import GRANULE_BYTES, KIB
from tests.unit.engine.cluster.walker_rig import PARTITIONS, SIZES, Lake, lake, member_id, shards_of
from tests.unit.support.metadata_rig import run

Scenario = Callable[[Lake], Awaitable[None]]


def on_a_lake(scenario: Scenario, count: int = 6, seed: int = 0) -> None:
    """Run a scenario on a new lake."""

    async def main() -> None:
        async with lake(count, seed) as made:
            await scenario(made)

    run(main, seed)


@pytest.mark.parametrize("page", [3, 1000])
def test_where_all_is_at_home_nothing_is_done_and_it_is_healed(page: int) -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES, *SIZES)
        await made.write(3000, kind=ChunkKind.MANIFEST)
        report = await made.walk(page=page)
        assert report.is_healed
        assert (report.partitions, report.chunks) == (len(PARTITIONS), 2 * len(SIZES) + 1)
        assert (report.rebuilt, report.moved, report.dropped, report.bytes_written) == (0, 0, 0, 0)
        assert (report.checked, report.bytes_read) == (0, 0), "lengths are listed, and nothing is read to learn them"
        await made.check()

    on_a_lake(scenario)


@pytest.mark.parametrize("lost", [(0,), (1, 4)])
def test_members_that_are_lost_and_replaced_by_empty_ones_are_healed(lost: tuple[int, ...]) -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES, *SIZES)
        await made.write(300_000, kind=ChunkKind.MANIFEST)
        for number in lost:
            await made.lose(member_id(number))
        report = await made.walk()
        assert report.is_healed, report
        assert report.rebuilt > 0
        await made.check()
        again = await made.walk()
        assert (again.rebuilt, again.moved, again.dropped) == (0, 0, 0)

    on_a_lake(scenario)


def test_a_chunk_of_full_shards_that_lost_its_last_one_is_not_taken_for_a_shorter_one() -> None:
    async def scenario(made: Lake) -> None:
        sizes = (2 * GRANULE_BYTES, 3 * GRANULE_BYTES, 4 * GRANULE_BYTES, 200 * KIB, 500_000)
        for size in sizes:
            (chunk,) = await made.write(size)
            await made.take([s for s in shards_of(chunk, made.content[chunk]) if s.number < 4][-1])
        report = await made.walk()
        assert (report.rebuilt, report.is_healed) == (len(sizes), True)
        await made.check()

    on_a_lake(scenario)


def test_a_chunk_that_ends_in_zeros_gets_back_a_shard_of_zeros() -> None:
    async def scenario(made: Lake) -> None:
        for size, zeros in ((2 * GRANULE_BYTES, GRANULE_BYTES), (100_000, 40_000), (300_000, 200_000)):
            await made.write_bytes(made.rng.randbytes(size - zeros) + bytes(zeros))
        for chunk, payload in made.content.items():
            await made.take([shard for shard in shards_of(chunk, payload) if shard.number < 4][-1])
        report = await made.walk()
        assert (report.rebuilt, report.is_healed) == (3, True)
        await made.check()

    on_a_lake(scenario)


def test_a_member_that_was_away_gets_what_substitutes_took_and_what_was_not_stored() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES)
        gone = member_id(2)
        await made.stop(gone)
        made.away.add(gone)
        for size in (*SIZES, *SIZES):
            for shard in made.new_chunk(made.rng.randbytes(size)):
                home = made.home(shard)
                if home != gone:
                    await made.put(home, shard)
                elif made.rng.random() < 0.5:
                    await made.put(member_id(5), shard)
        halfway = await made.walk()
        assert not halfway.is_healed
        assert halfway.unanswered == {gone.hex()}
        assert (halfway.moved, halfway.dropped, halfway.left) == (0, 0, {}), "what is away is waited for"
        made.away.clear()
        await made.start(gone)
        report = await made.walk()
        assert report.is_healed
        assert min(report.moved, report.dropped, report.rebuilt) > 0
        assert report.moved == report.dropped
        await made.check()

    on_a_lake(scenario)
