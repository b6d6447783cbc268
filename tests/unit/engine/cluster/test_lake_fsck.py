"""fsck over a lake, asked at its head: damage by name, what heals as notes, and what could not be checked."""

from __future__ import annotations

import pytest

from engine.format.keyed import SPACES_BEGIN, SPACES_END
from engine.format.layouts import Table, unpack_chunk_record
from engine.format.shards import shard_key
from engine.fsck.report import Report
from engine.lake_upkeep import named_chunks
from engine.lake_upkeep.content_check import ContentCheck
from engine.lake_upkeep.stripe_check import StripeCheck
from engine.segments.files import segment_path
from engine.tables.views import Transaction
from lakefs.cluster.members import Member
from lakefs.cluster.placing import next_table
from lakefs.cluster.table_format import pack
from lakefs.ids import ChunkId, MemberId, ShardNumber, data_chunk_id
from lakefs.limits import GIB
from lakefs.wire import messages as m
from tests.shards import Shard, store
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, delete
from tests.unit.engine.cluster.stripe_rig import Fault, id_of, payload_of, table_of
from tests.unit.engine.cluster.upkeep_rig import LARGE, SMALL, Kept, codes, kept, named


def test_a_lake_in_order_has_no_findings() -> None:
    async def body(one: Kept) -> None:
        await one.put("small", SMALL)
        await one.put("large", LARGE, SMALL)
        for full in (False, True):
            report = await one.fsck(full=full)
            assert (report["damage"], report["notes"], report["findings"], report["unchecked"]) == (0, 0, [], [])
            assert report["level"] == ("full" if full else "quick")
            assert report["checked"]["members"] == 6
            assert report["checked"]["names"] == 3
            assert report["checked"]["named_chunks"] == 4, "two data chunks, one of them twice, and a manifest"
        assert report["checked"]["chunks_walked"] == 3

    kept(body)


def test_a_report_has_all_counts_whatever_the_lake_holds_and_whoever_answers() -> None:
    async def body(one: Kept) -> None:
        kinds = [(await one.fsck(full=full))["checked"].keys() for full in (False, True)]
        for number in range(6):
            one.rig.lose(number)
        assert (await one.fsck())["checked"].keys() == kinds[0]
        one.rig.heal()
        await one.put("large", LARGE, SMALL)
        assert [(await one.fsck(full=full))["checked"].keys() for full in (False, True)] == kinds

    kept(body)


@pytest.mark.parametrize("lost", [3, 6])
def test_a_name_whose_chunk_lost_too_many_shards_is_damaged(lost: int) -> None:
    async def body(one: Kept) -> None:
        await one.put("good", SMALL)
        await one.put("bad/one", LARGE)
        await one.put("bad/two", SMALL, LARGE)
        await one.lose(data_chunk_id(LARGE), *range(lost))
        report = await one.fsck()
        found = {finding["object"]: finding["code"] for finding in report["findings"]}
        code = "content-chunk-missing" if lost == 6 else "content-chunk-damaged"
        assert found == {"bkt/bad/one": code, "bkt/bad/two": code}
        assert report["damage"] == 2

    kept(body)


@pytest.mark.parametrize("lost", [(0,), (1, 5)])
def test_a_chunk_that_is_short_and_can_be_read_is_a_note_and_heals(lost: tuple[int, ...]) -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        await one.lose(data_chunk_id(LARGE), *lost)
        report = await one.fsck()
        assert (report["damage"], codes(report), report["unchecked"]) == (0, ["stripe-short"], [])
        assert await one.rig.dirty() == {one.rig.table.partition_of(data_chunk_id(LARGE))}
        while await one.upkeep.walks.step() and await one.rig.dirty():
            pass
        assert (await one.fsck())["findings"] == []

    kept(body)


def test_a_manifest_that_is_gone_is_damage_of_its_names_and_hides_no_garbage() -> None:
    async def body(one: Kept) -> None:
        blob = await one.put("name", LARGE, SMALL)
        await one.lose(blob, 0, 4, 5)
        report = await one.fsck()
        assert [(f["object"], f["code"]) for f in report["findings"]] == [("bkt/name", "content-manifest-missing")]
        for _ in range(3):
            await one.upkeep.state.advance_generation(await one.upkeep.state.generation())
        report = await one.fsck()
        assert codes(report) == ["content-manifest-missing", "garbage"]
        assert "gc keeps them" in report["findings"][1]["message"]

    kept(body)


def test_a_member_that_is_away_was_not_checked_and_is_named() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        one.rig.lose(2, fault=Fault.AWAY)
        one.rig.lose(4, fault=Fault.LOST)
        report = await one.fsck()
        assert report["damage"] == 0
        assert [each["object"] for each in report["unchecked"]] == [named(2), named(4)]
        assert "away" in report["unchecked"][0]["reason"]
        assert codes(report) == ["member-unchecked", "member-unchecked"]
        assert await one.rig.dirty() == set(), "what homes that are away have is not known to be missing"

    kept(body)


def test_what_only_members_away_can_tell_is_no_damage() -> None:
    async def body(one: Kept) -> None:
        await one.put("one", LARGE)
        await one.put("two", LARGE, SMALL)
        one.rig.lose(0, 1, 2, 3)
        report = await one.fsck()
        assert report["damage"] == 0
        assert len(report["unchecked"]) == 5
        assert report["unchecked"][-1]["object"] == "lake"

    kept(body)


def test_a_chunk_that_lost_too_many_shards_is_damaged_once_its_row_has_answered() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        holders = await one.holders(data_chunk_id(LARGE))
        await one.lose(data_chunk_id(LARGE), 0, 1, 2)
        one.rig.members.faults[holders[5]] = Fault.AWAY
        report = await one.fsck()
        assert (report["damage"], len(report["unchecked"])) == (0, 2), "the member that is away may have more"
        one.rig.heal()
        report = await one.fsck()
        assert (report["damage"], report["unchecked"]) == (1, [])

    kept(body)


def test_garbage_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(one: Kept) -> None:
        await one.put("name", SMALL)
        await one.put("gone", LARGE)
        await delete(one.client, "gone")
        assert (await one.fsck())["findings"] == [], "sessions may have touched it in this generation"
        await one.upkeep.state.advance_generation(await one.upkeep.state.generation())
        assert (await one.fsck())["findings"] == [], "or in the one before"
        await one.upkeep.state.advance_generation(await one.upkeep.state.generation())
        report = await one.fsck()
        assert (report["damage"], report["notes"], codes(report)) == (0, 1, ["garbage"])
        assert "6 shards" in report["findings"][0]["message"]
        monkeypatch.setattr(named_chunks, "NAMED_CHUNKS_MAX", 0)
        assert (await one.fsck(full=True))["findings"] == [], "too many chunks to tell"

    kept(body)


def test_a_damaged_shard_at_a_member_is_a_note_by_member() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        chunk = data_chunk_id(LARGE)
        member = (await one.holders(chunk))[1]
        opened = one.rig.stores[member]
        await spoil(one, member, chunk)
        report = await one.fsck(full=True)
        assert report["damage"] == 0
        shard = next(finding for finding in report["findings"] if finding["code"] == "shard-damaged")
        assert shard["object"].startswith(f"member {member.hex()}: c:")
        assert "chunk-damaged" in shard["message"]
        assert len(opened.quarantine) == 0, "the deep walk has made it anew"
        assert (await one.fsck(full=True))["findings"] == []

    kept(body)


def test_damaged_shards_of_chunks_that_nothing_refers_to_are_counted_too() -> None:
    async def body(one: Kept) -> None:
        await one.put("gone", LARGE)
        chunk = data_chunk_id(LARGE)
        await delete(one.client, "gone")
        for _ in range(2):
            await one.upkeep.state.advance_generation(await one.upkeep.state.generation())
        await spoil(one, (await one.holders(chunk))[1], chunk)
        report = await one.fsck(full=True)
        told = [finding["message"] for finding in report["findings"] if finding["code"] == "garbage"]
        assert [text.split(" are ")[0].split(" (")[0] for text in told] == ["5 shards", "1 damaged shards"]

    kept(body)


def test_records_of_spaces_are_checked_where_the_names_are() -> None:
    async def body(one: Kept) -> None:
        await ask(one.client, m.SpaceOpen("kv"), m.SpaceStat)
        assert (report := await one.fsck())["findings"] == []
        assert (report["checked"]["spaces"], report["checked"]["named_chunks"]) == (1, 0)
        names = one.upkeep.fsck._parts.metadata
        with names.view() as view:
            [key] = [key for key, _ in view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END)]

        def spoil_record(txn: Transaction) -> None:
            txn.put(Table.KEYED, key, b"no record")

        await names.wait_durable((await names.commit(spoil_record))[1])
        report = await one.fsck()
        assert (report["damage"], codes(report)) == (1, ["keyed-unreadable"])

    kept(body)


def test_a_damaged_shard_of_a_put_in_progress_is_made_anew() -> None:
    """No name refers to its chunk yet; one that is bound later was answered before the damage."""

    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        chunk = data_chunk_id(LARGE)
        member = (await one.holders(chunk))[1]
        await spoil(one, member, chunk)
        await delete(one.client, "name")
        assert "shard-damaged" in codes(await one.fsck(full=True))
        assert await one.rig.dirty() == {one.rig.table.partition_of(chunk)}
        while await one.upkeep.walks.step() and await one.rig.dirty():
            pass
        assert len(one.rig.stores[member].quarantine) == 0

    kept(body)


async def spoil(one: Kept, member: MemberId, chunk: bytes) -> None:
    """Flip a bit of a member's shard on its medium."""
    opened = one.rig.stores[member]
    with opened.metadata.view() as view:
        value = view.get(Table.CHUNKS, shard_key(ChunkId(chunk), ShardNumber(1)))
    assert value is not None
    record = unpack_chunk_record(value)
    path = segment_path(record.segment, opened.segments.register.kinds[record.segment])
    assert isinstance(opened.disk, SimDisk)
    opened.disk.flip_bit(path, record.offset, 3)


def test_a_member_that_lies_is_found_by_a_full_check_only_and_mended() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        chunk = data_chunk_id(LARGE)
        member = (await one.holders(chunk))[1]
        length = one.rig.code.extent(len(LARGE), 1)[1]
        await one.lose(chunk, 1)
        await store(one.rig.members.clients[member], Shard(chunk, 1, payload_of(length, 9)), epoch=1)
        assert (await one.fsck())["findings"] == []
        report = await one.fsck(full=True)
        assert (report["damage"], codes(report)) == (0, ["shard-damaged"])
        assert "1 shards had other bytes" in report["findings"][0]["message"]
        assert (await one.fsck(full=True))["findings"] == []

    kept(body)


def test_content_of_another_length_than_its_name_says_is_damage() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        assert await _problems_with(one, len(LARGE) - 70_000) == ["content-chunk-damaged"]
        assert await _problems_with(one, 100_000) == ["content-chunk-size-wrong"]
        assert await _problems_with(one, len(LARGE)) == []

    kept(body)


async def _problems_with(one: Kept, length: int) -> list[str]:
    content = ContentCheck(
        one.upkeep.fsck._parts.metadata,
        one.rig.stripes,
        StripeCheck(one.rig.members, one.rig.state, one.rig.code),
        Report("quick"),
        full=False,
    )
    problems = await content._problems([(data_chunk_id(LARGE), length)])
    return [problem.finding.code for problem in problems.values()]


def test_shards_elsewhere_make_a_chunk_readable() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        chunk = data_chunk_id(LARGE)
        holders = await one.holders(chunk)
        for number in (0, 1, 2):  # at the home of another shard of the row
            (shard,) = [s for s in await _whole_shards(one, chunk) if s.number == number]
            await one.lose(chunk, number)
            await store(one.rig.members.clients[holders[(number + 3) % 6]], shard, epoch=1)
        report = await one.fsck()
        assert (report["damage"], codes(report)) == (0, ["stripe-short"])

    kept(body)


async def _whole_shards(one: Kept, chunk: bytes) -> list[Shard]:
    size = one.rig.code.shard_bytes(len(LARGE))
    return [Shard(ChunkId(chunk), n, LARGE[n * size : (n + 1) * size]) for n in range(4)]


def test_the_tree_of_a_blob_is_walked_once_for_all_its_names() -> None:
    async def body(one: Kept) -> None:
        await one.put("one", LARGE, SMALL)
        await ask(one.client, m.Copy("bkt", "one", "bkt", "two"), m.NameResults)
        report = await one.fsck()
        assert report["checked"]["named_chunks"] == 3
        assert report["checked"]["nodes"] >= 3

    kept(body)


def test_a_table_that_is_made_meanwhile_is_followed() -> None:
    async def body(one: Kept) -> None:
        six = table_of("4+2", 6)
        seven = next_table(six, [*six.members, Member(id_of(6), GIB, "host6")])
        members = one.rig.members
        members.tables, members.newer = [six], [seven, six]
        for number in range(8):
            await one.put(f"name {number}", payload_of(100_000, number))
        await members.clients[id_of(2)].call(m.SetEpoch(2, pack(seven)))
        report = await one.fsck()
        assert one.rig.table is seven
        assert (report["damage"], report["unchecked"]) == (0, [])
        assert codes(report) == ["stripe-short"], "some have another home now"

    kept(body, count=7)
