"""fsck over a lake with several names shards: one report of all, garbage only when all of them could be asked."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from engine.fsck.report import FINDINGS_MAX, Report
from engine.lake_upkeep import names_fsck_requests
from engine.lake_upkeep.named_chunks import NAMED_CHUNKS_MAX, NamedChunks
from engine.lake_upkeep.names_fsck import NamesFsck
from engine.process.embedded import EmbeddedEngine
from lakefs.errors import EngineBusy, SessionLost
from lakefs.findings import Finding
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake, member_id
from tests.names_shards_rig import WAYS, Reach, ShardedLake, sharded_lake
from tests.shards import Shard, drop
from tests.store_rig import ask, run

Main = Callable[[ShardedLake], Awaitable[None]]
each_way = pytest.mark.parametrize(("reach", "count"), WAYS, ids=lambda way: getattr(way, "value", way))


def with_shards(main: Main, reach: Reach = Reach.BY_REQUESTS, count: int = 2) -> None:
    async def opened() -> None:
        async with sharded_lake(reach, count) as lake:
            await main(lake)

    run(opened)


async def fsck(lake: ShardedLake, *, full: bool = False) -> dict[str, Any]:
    return await lake.first.upkeep.fsck.run(full=full)


async def lose(lake: SmallLake, payload: bytes, *numbers: int) -> None:
    """Let shards of a chunk vanish from their members."""
    chunk = data_chunk_id(payload)
    for member, found, number in sorted(await lake.shards()):
        if found == chunk and number in numbers:
            shard = Shard(chunk, number, b"")
            assert await drop(lake.members.client(member), shard, touched=m.GENERATION_MAX, epoch=1 << 40) == [0]


@each_way
def test_a_lake_in_order_has_no_findings_and_all_shards_are_counted(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            await shard.put("key", b"content %d" % number, b"shared")
        for full in (False, True):
            report = await fsck(lake, full=full)
            assert (report["damage"], report["notes"], report["findings"], report["unchecked"]) == (0, 0, [], [])
            assert report["checked"]["names"] == 2 * count, "a bucket and a key each"
            assert report["checked"]["named_chunks"] == 3 * count, "with the manifests"

    with_shards(main, reach, count)


@each_way
def test_damage_of_each_shard_is_named_and_short_chunks_are_counted(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            await shard.put(f"bad-{number}", b"bad %d" % number)
            await shard.put(f"short-{number}", b"short %d" % number)
            await lose(lake.first, b"bad %d" % number, 0, 1)
            await lose(lake.first, b"short %d" % number, 1)
        report = await fsck(lake)
        damaged = {found["object"] for found in report["findings"] if found["code"] == "content-chunk-missing"}
        assert damaged == {f"bkt/bad-{number}" for number in range(count)}
        [short] = [found["message"] for found in report["findings"] if found["code"] == "stripe-short"]
        assert short.startswith(f"shards of {count} chunks")
        assert (report["damage"], report["notes"], report["unchecked"]) == (count, 1, [])

    with_shards(main, reach, count)


@each_way
def test_garbage_is_what_no_shard_refers_to(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            await shard.put("key", b"content %d" % number)
        await lake.others[-1].put("gone", b"gone")
        for _ in range(2):
            await lake.collect()
        await lake.others[-1].delete("gone")
        await lake.first.state.advance_generation(await lake.first.state.generation())
        report = await fsck(lake)
        [garbage] = report["findings"]
        assert garbage["code"] == "garbage"
        assert garbage["message"].startswith("2 shards (8 bytes)")

    with_shards(main, reach, count)


def test_a_shard_that_cannot_be_asked_is_unchecked_and_garbage_is_not_counted() -> None:
    async def main(lake: ShardedLake) -> None:
        await lake.others[0].put("key", b"content")
        await lake.first.put("bad", b"bad")
        await lose(lake.first, b"bad", 0, 1)
        for _ in range(2):
            await lake.collect()
        await lake.others[0].stop_names()
        report = await fsck(lake)
        assert [found["object"] for found in report["findings"]] == ["bkt/bad"], "and no garbage"
        [unchecked] = report["unchecked"]
        assert unchecked["object"] == "names shard 1"
        assert "no replica of the names leads; garbage was not counted" in unchecked["reason"]
        await lake.others[0].start_names()
        assert (await fsck(lake))["unchecked"] == []

    with_shards(main)


@each_way
def test_members_away_are_unchecked_once(reach: Reach, count: int) -> None:
    async def main(lake: ShardedLake) -> None:
        for number, shard in enumerate(lake.shards):
            await shard.put("key", b"content %d" % number)
        await lake.first.members.stop(member_id(1))
        report = await fsck(lake)
        assert [found["object"] for found in report["unchecked"]].count(f"member {member_id(1).hex()}") == 1

    with_shards(main, reach, count)


def test_a_damaged_store_of_a_shard_is_named_by_the_shard() -> None:
    async def main(lake: ShardedLake) -> None:
        report = Report("quick")
        check = NamesFsck(lake.others[0].upkeep_of_shard.fsck._parts, report, full=False, has_spaces=False)

        async def damaged() -> None:
            report.found("index", Finding.INDEX_DAMAGED, "it is damaged")

        check._of_names.index_and_journal = damaged  # type: ignore[method-assign]
        await check.look("names shard 1: ")
        assert [found["object"] for found in report.findings] == ["names shard 1: index"]

    with_shards(main)


# --- requests -------------------------------------------------------------------------------------------


def test_named_chunks_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_fsck_requests, "NAMED_PAGE", 4)

    async def main(lake: ShardedLake) -> None:
        payloads = [b"content %d" % number for number in range(13)]
        for number, payload in enumerate(payloads):
            await lake.others[0].put(f"key {number}", payload)
            await lake.others[0].put(f"again {number}", payload)
        checked = await lake.reached.check(lake.others[0].shard, False)
        assert not any(checked.named.absent(sorted(map(data_chunk_id, payloads))))
        assert checked.named.absent([data_chunk_id(b"another")]) == [True]

    with_shards(main)


def test_what_a_check_keeps_is_of_its_connection() -> None:
    async def main(lake: ShardedLake) -> None:
        first, second = [EmbeddedEngine(lake.others[0].service, descriptors=False) for _ in range(2)]  # type: ignore[arg-type]
        await ask(first, m.CheckNames(), m.ReportReply)
        with pytest.raises(SessionLost, match="no check is kept"):
            await second.call(m.ReadNamedChunks())
        await ask(first, m.ReadNamedChunks(), m.NamedChunksPage)
        await ask(second, m.CheckNames(), m.ReportReply)
        with pytest.raises(SessionLost, match="no check is kept"):
            await first.call(m.ReadNamedChunks())
        for client in (first, second):
            await client.aclose()

    with_shards(main)


def test_one_check_of_a_shard_at_a_time() -> None:
    async def main(lake: ShardedLake) -> None:
        client = EmbeddedEngine(lake.others[0].service, descriptors=False)  # type: ignore[arg-type]
        for number in range(20):
            await lake.others[0].put(f"key {number}", b"content %d" % number)
        busy: list[EngineBusy] = []

        async def check() -> None:
            try:
                await client.call(m.CheckNames())
            except EngineBusy as error:
                busy.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(check)
        assert len(busy) == 2
        await ask(client, m.CheckNames(), m.ReportReply)
        await client.aclose()

    with_shards(main)


# --- parts ----------------------------------------------------------------------------------------------


def chunk_of_number(number: int) -> ChunkId:
    return ChunkId(b"\x01" + number.to_bytes(8, "big") + bytes(24))


def test_sets_of_named_chunks_are_the_same_by_pages() -> None:
    numbers = sorted(
        {0, 1, (1 << 52) - 1, 1 << 52, (1 << 64) - 1, *[each * 0x9E3779B97F4A7C15 % (1 << 64) for each in range(500)]}
    )
    named = NamedChunks()
    named.add([*map(chunk_of_number, numbers), *map(chunk_of_number, numbers[::3])])
    for limit in (1, 7, len(numbers), 1 << 17):
        copied, found, after = NamedChunks(), list[int](), -1
        while page := named.page(after, limit):
            found += page
            copied.add_numbers(page)
            after = page[-1]
            if len(page) < limit:
                break
        assert found == numbers
        assert not any(copied.absent(list(map(chunk_of_number, numbers))))
        assert all(copied.absent([chunk_of_number(number ^ 1) for number in numbers if number ^ 1 not in numbers]))
    both = NamedChunks()
    both.add_all(named)
    assert not any(both.absent(list(map(chunk_of_number, numbers))))


def test_a_set_that_lacks_some_makes_each_incomplete_that_takes_it() -> None:
    named, taken = NamedChunks(), NamedChunks()
    named.leave_incomplete()
    assert not named.is_complete
    taken.add_all(named)
    assert not taken.is_complete
    whole = NamedChunks()
    whole._count = NAMED_CHUNKS_MAX
    whole.add_numbers(array("Q", [1]))
    assert not whole.is_complete


def test_a_report_takes_all_of_another_also_what_that_one_does_not_list() -> None:
    other, report = Report("quick"), Report("quick")
    report.found("first", Finding.GARBAGE, "here")
    for number in range(FINDINGS_MAX + 10):
        other.found(f"{number}", Finding.GARBAGE if number % 2 else Finding.STORE_DAMAGED, "there")
    other.count("names", 7)
    report.count("names", 1)
    report.take(other.as_json())
    assert (report.damage, report.notes) == (505, 506)
    assert len(report.findings) == FINDINGS_MAX
    assert report.checked["names"] == 8
