"""A walk works on stripes of several partitions together: few requests, right bytes, no bad chunk spoils another."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from engine.walker import walker as walker_module
from lakefs.ids import ChunkId, MemberId, id_text
from lakefs.limits import GRANULE_BYTES, KIB, MIB
from lakefs.wire import messages as m
from tests.unit.engine.cluster.test_walker import on_a_lake
from tests.unit.engine.cluster.walker_rig import PARTITIONS, SIZES, Lake, member_id

LENGTHS = (5_000, GRANULE_BYTES + 1, 200 * KIB, 300_000)


def counted(made: Lake) -> Counter[str]:
    """Count the requests to members from now on, by their kind."""
    requests: Counter[str] = Counter()

    async def count(_: MemberId, request: m.Request) -> None:
        requests[type(request).__name__] += 1

    made.before.append(count)
    return requests


def partitions_of(made: Lake) -> set[int]:
    return {made.tables[0].partition_of(chunk) for chunk in made.content}


def test_members_are_asked_once_for_the_shards_of_all_partitions() -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*SIZES, *SIZES, *SIZES)
        assert len(partitions_of(made)) == len(PARTITIONS)
        await made.lose(member_id(3))
        requests = counted(made)
        report = await made.walk(page=1000)
        assert report.is_healed
        assert report.rebuilt > len(PARTITIONS)
        assert requests["ReadChunks"] <= 5, "one of each member that has what is read"
        assert requests["StoreShards"] == 1
        await made.check()

    on_a_lake(scenario)


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(made: Lake) -> None:
        await made.write(*[200 * KIB] * 12)
        await made.lose(member_id(3))
        monkeypatch.setattr(walker_module, "BATCH_BYTES", 700 * KIB)
        requests = counted(made)
        report = await made.walk(page=1000)
        assert report.is_healed
        assert requests["StoreShards"] >= 3, "three chunks a batch"
        await made.check()

    on_a_lake(scenario)


def test_more_shards_of_a_member_than_fit_in_a_request_are_several() -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*[4 * MIB] * 6)
        await made.lose(member_id(3))
        await made.lose(member_id(4))
        sizes: list[int] = []

        async def note(_: MemberId, request: m.Request) -> None:
            if isinstance(request, m.StoreShards):
                sizes.append(sum(request.lengths))

        made.before.append(note)
        assert (await made.walk(page=1000)).is_healed
        assert sum(sizes) == 2 * len(chunks) * MIB
        assert max(sizes) <= 16 * MIB
        await made.check()

    on_a_lake(scenario)


def test_one_or_two_lost_shards_of_any_pattern_are_made_from_the_others() -> None:
    async def scenario(made: Lake) -> None:
        patterns = [one for count in (1, 2) for one in combinations(range(6), count)]
        lost = dict(zip(await made.write(*[GRANULE_BYTES * 4 - 17] * len(patterns)), patterns, strict=True))
        for chunk, pattern in lost.items():
            for number in pattern:
                await made.take(made.shard(chunk, number))
        report = await made.walk(page=1000)
        assert report.is_healed
        assert report.rebuilt == sum(map(len, patterns))
        await made.check()

    on_a_lake(scenario)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_wrong_shard_among_those_that_are_read_is_noticed_and_replaced(length: int) -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*[length] * 8)
        for chunk in chunks:
            await made.take(made.shard(chunk, 5))
        for chunk in chunks[::2]:
            await made.lie(made.shard(chunk, 0))
        report = await made.walk(page=1000)
        assert report.is_healed
        assert (report.rebuilt, report.replaced) == (8 + 4, 4)
        await made.check()

    on_a_lake(scenario)


def test_a_chunk_that_cannot_be_made_whole_does_not_keep_the_others_of_its_batch_from_it() -> None:
    async def scenario(made: Lake) -> None:
        chunks = await made.write(*[200 * KIB] * 6)
        for chunk in chunks:
            await made.take(made.shard(chunk, 1))
        await spoil_all(made, chunks[2])
        report = await made.walk(page=1000)
        assert sum(report.left.values()) == 1
        del made.content[chunks[2]]
        found = await made.lists()
        for chunk in made.content:
            assert found[id_text(chunk), 1] == [made.home(made.shard(chunk, 1))]

    on_a_lake(scenario)


async def spoil_all(made: Lake, chunk: ChunkId) -> None:
    """Let three members of a chunk lie, so that no choice of shards makes it."""
    for number in (0, 2, 3):
        await made.lie(made.shard(chunk, number))
