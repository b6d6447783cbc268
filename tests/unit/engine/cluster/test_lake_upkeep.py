"""The upkeep of a lake: gc, scrub and status asked at a head over six members, and the loops of the names' process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from engine.coordinator.records import MemberRecord
from engine.process.embedded import EmbeddedEngine
from lakefs.errors import InvalidArgument, PreconditionFailed
from lakefs.ids import MemberId, data_chunk_id, id_text
from lakefs.limits import GIB
from lakefs.wire import messages as m
from tests.lake_rig import SmallLake, with_lake
from tests.store_rig import ask, delete
from tests.unit.engine.cluster.stripe_rig import Fault, id_of
from tests.unit.engine.cluster.test_lake_fsck import spoil
from tests.unit.engine.cluster.upkeep_rig import LARGE, SMALL, Kept, kept, named

CYCLES = 3


# --- gc ----------------------------------------------------------------------------------------------------


def test_gc_at_a_head_frees_and_reports_by_member() -> None:
    async def body(one: Kept) -> None:
        await one.put("stays", SMALL)
        await one.put("gone", LARGE)
        await delete(one.client, "gone")
        reports = [await one.ask(m.RunGc()) for _ in range(CYCLES)]
        assert sum(report["freed_shards"] for report in reports) == 6
        last = reports[-1]
        assert last["generation"] == CYCLES + 1
        assert set(last["members"]) == {id_text(id_of(number)) for number in range(6)}
        each = last["members"].values()
        assert sum(member["freed_bytes"] for member in each) == last["freed_bytes"]
        assert all(member["kept_because"] == "" for member in each)
        assert all(member["freed_chunks"] == 0 and member["disk_bytes_after"] > 0 for member in each)
        assert last["disk_bytes_after"] == sum(member["disk_bytes_after"] for member in each)
        assert await one.holders(data_chunk_id(LARGE)) == {}
        assert len(await one.holders(data_chunk_id(SMALL))) == 3

    kept(body)


def test_a_member_that_is_away_frees_nothing_and_says_why() -> None:
    async def body(one: Kept) -> None:
        one.rig.lose(3)
        members = (await one.ask(m.RunGc()))["members"]
        assert members[id_text(id_of(2))]["not_collected_because"] == ""
        assert len({tuple(each) for each in members.values()}) == 1, "all have the same keys"
        report = members[id_text(id_of(3))]
        assert report["disk_bytes_after"] is None
        assert "has not begun the cycle" in report["kept_because"]
        assert "away" in report["not_collected_because"]

    kept(body)


def test_gc_that_compacts_asks_members_to_compact() -> None:
    async def body(one: Kept) -> None:
        seen: list[bool] = []
        real = one.rig.members.call

        async def call(member: MemberId, request: m.Request, *args: Any, **more: Any) -> Any:
            if isinstance(request, m.RunGc):
                seen.append(request.compact)
            return await real(member, request, *args, **more)

        one.rig.members.call = call  # type: ignore[method-assign]
        await one.ask(m.RunGc())
        await one.ask(m.RunGc(compact=True))
        assert seen == [False] * 6 + [True] * 6

    kept(body)


# --- scrub -------------------------------------------------------------------------------------------------


def test_scrub_reads_all_members_and_ends_when_all_have() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        report = await one.ask(m.RunScrub(10.0, 0))
        assert report["done"]
        assert report["last_pass"]["chunks"] == 6
        assert set(report["members"]) == {id_text(id_of(number)) for number in range(6)}
        assert (report["state"], report["unchecked"], report["quarantined_chunks"]) == ("idle", [], 0)
        report = await one.ask(m.RunScrub(damaged=True))
        assert (report["done"], report["damaged"]) == (False, [])
        assert report["passes"] == 1

    kept(body)


def test_a_member_that_has_ended_is_not_asked_to_begin_again_before_the_others_have() -> None:
    async def body(one: Kept) -> None:
        slow, asked = id_of(5), []
        real = one.rig.members.call

        async def call(member: MemberId, request: m.Request, *args: Any, **more: Any) -> Any:
            if isinstance(request, m.RunScrub) and request.for_s:
                asked.append(member)
                if member == slow and asked.count(slow) < 3:
                    request = m.RunScrub()
            return await real(member, request, *args, **more)

        one.rig.members.call = call  # type: ignore[method-assign]
        reports = [await one.ask(m.RunScrub(1.0, 0)) for _ in range(3)]
        assert [report["done"] for report in reports] == [False, False, True]
        assert [report["position"] for report in reports] == [0.8333, 0.8333, 0.0]
        assert sorted(asked[:6]) == [id_of(number) for number in range(6)]
        assert asked[6:] == [slow, slow]
        assert (await one.ask(m.RunScrub(1.0, 0)))["passes"] == 2

    kept(body)


def test_damage_that_scrub_finds_is_of_its_member_and_heals() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        chunk = data_chunk_id(LARGE)
        member = (await one.holders(chunk))[1]
        await spoil(one, member, chunk)
        assert (await one.ask(m.RunScrub(10.0, 0)))["done"]
        report = await one.ask(m.RunScrub(damaged=True))
        (found,) = report["damaged"]
        assert (found["chunk"], found["member"]) == (f"{id_text(chunk)}/1", id_text(member))
        assert found["objects"] == [f"member {id_text(member)}"]
        assert await one.rig.dirty() == {one.rig.table.partition_of(chunk)}
        while await one.upkeep.walks.step() and await one.rig.dirty():
            pass
        assert (await one.ask(m.RunScrub(damaged=True)))["damaged"] == []
        assert len(await one.holders(chunk)) == 6

    kept(body)


def test_scrub_does_not_wait_for_a_member_that_is_away_and_names_it() -> None:
    async def body(one: Kept) -> None:
        one.rig.lose(1, fault=Fault.LOST)
        report = await one.ask(m.RunScrub(10.0, 0))
        assert report["done"]
        assert [each["object"] for each in report["unchecked"]] == [named(1)]
        one.rig.lose(0, 2, 3, 4, 5)
        report = await one.ask(m.RunScrub(10.0, 0))
        assert report["done"], "nobody is left to wait for"
        assert len(report["unchecked"]) == 6

    kept(body)


def test_two_that_scrub_at_once_read_one_pass() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        reports: list[dict[str, Any]] = []

        async def scrub() -> None:
            reports.append(await one.ask(m.RunScrub(10.0, 0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrub)
            nursery.start_soon(scrub)
        assert [report["done"] for report in reports] == [True, True]
        assert {report["passes"] for report in reports} == {1}
        for wrong in (m.RunScrub(-1.0), m.RunScrub(1e9), m.RunScrub(1.0, -2)):
            with pytest.raises(InvalidArgument):
                await one.ask(wrong)

    kept(body)


# --- status ------------------------------------------------------------------------------------------------


def test_status_has_the_members_and_what_may_be_lost() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        lake = await one.status()
        assert (lake["name"], lake["protection"], lake["ring_epoch"], lake["gc_generation"]) == ("six", "4+2", 1, 1)
        assert lake["outlives"] == {"devices": 2, "machines": 2}
        assert [member["id"] for member in lake["members"]] == [id_text(id_of(number)) for number in range(6)]
        assert all(member["up"] and member["state"] == "up" and not member["reason"] for member in lake["members"])
        assert all(member["used_bytes"] > 0 and member["machine"] for member in lake["members"])
        assert lake["walker"]["healed"] is False, "no walk has been through all partitions"
        assert lake["gc"] == {"running": False, "last_ended_ns": 0, "last": None}
        assert lake["names"] == {}
        whole = lake["disk"]
        one.rig.lose(0, fault=Fault.LOST)
        one.rig.lose(1, fault=Fault.AWAY)
        lake = await one.status()
        assert lake["outlives"] == {"devices": 0, "machines": 0}
        assert [member["up"] for member in lake["members"]] == [False, False, True, True, True, True]
        assert "away" in lake["members"][0]["reason"]
        assert lake["disk"]["total_bytes"] == pytest.approx(whole["total_bytes"] * 4 / 6)
        one.rig.lose(2)
        assert (await one.status())["outlives"]["devices"] == -1
        await one.ask(m.RunGc())
        last = (await one.status())["gc"]["last"]
        assert last["generation"] == 2
        assert "kept_because" in last["members"][id_text(id_of(0))]

    kept(body)


def test_status_has_scrub_and_quarantine_of_all_members_with_the_keys_of_one_engine() -> None:
    async def body(one: Kept) -> None:
        await one.put("name", LARGE)
        members = [await status_of(client) for client in one.rig.members.clients.values()]
        found = await one.whole_status()
        for part in ("scrub", "segments"):
            assert found[part].keys() == members[0][part].keys()
        assert found["scrub"]["last_pass"].keys() == members[0]["scrub"]["last_pass"].keys()
        assert found["scrub"]["since_start"] == dict.fromkeys(members[0]["scrub"]["since_start"], 0)
        assert found["scrub"]["rate_bytes_per_s"] == sum(member["scrub"]["rate_bytes_per_s"] for member in members)
        chunk = data_chunk_id(LARGE)
        member = (await one.holders(chunk))[1]
        await spoil(one, member, chunk)
        await one.ask(m.RunScrub(10.0, 0))
        found = await one.whole_status()
        scrub = found["scrub"]
        assert (scrub["passes"], scrub["quarantined_chunks"], found["segments"]["damaged_chunks"]) == (1, 1, 1)
        assert (scrub["last_pass"]["chunks"], scrub["last_pass"]["damage_found"]) == (6, 1)
        assert (scrub["since_start"]["chunks"], scrub["since_start"]["passes"]) == (6, 6)
        by_member = {each["id"]: each for each in found["lake"]["members"]}
        assert [by_member[name]["damaged_chunks"] for name in sorted(by_member)].count(1) == 1
        assert by_member[id_text(member)]["scrub"]["damage_found"] == 1
        assert all(each["scrub"]["ended_ns"] and each["scrub"]["state"] == "idle" for each in by_member.values())
        for number in range(6):
            one.rig.lose(number)
        nothing = await one.whole_status()
        assert nothing["scrub"].keys() == scrub.keys(), "all keys, whoever answers"
        assert (nothing["scrub"]["state"], nothing["scrub"]["last_pass"]["ended_ns"]) == ("idle", 0)
        assert nothing["segments"] == dict.fromkeys(found["segments"], 0)
        assert [each["scrub"] for each in nothing["lake"]["members"]] == [None] * 6

    kept(body)


async def status_of(client: EmbeddedEngine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ask(client, m.Status(), m.StatusReply)).status_json)
    return found


def test_folders_of_one_device_count_as_one() -> None:
    async def body(one: Kept) -> None:
        for number in range(3):
            domains = "disk", f"host{number // 2}"
            await one.rig.state.register(MemberRecord(id_of(number), ("here",), GIB, domains))
        lake = await one.status()
        assert lake["outlives"] == {"devices": 1, "machines": 2}, "the other folder of that name is on another machine"
        first = id_text(id_of(0))
        assert [member["shared_device"] for member in lake["members"]] == [first, first, "", "", "", ""]

    kept(body)


def test_members_are_not_asked_for_each_status() -> None:
    async def body(one: Kept) -> None:
        for _ in range(5):
            await ask(one.client, m.Status(), m.StatusReply)
        assert one.rig.members.calls["Status"] == 6
        await trio.sleep(6)
        await ask(one.client, m.Status(), m.StatusReply)
        assert one.rig.members.calls["Status"] == 12

    kept(body)


def test_a_status_without_the_coordinator_has_its_reason() -> None:
    async def body(lake: SmallLake) -> None:
        lake.coordinator.close()
        assert "cannot be asked" in (await lake.upkeep.status())["lake"]["reason"]

    with_lake(body)


def test_members_are_changed_by_a_head_s_clients() -> None:
    async def body(one: Kept) -> None:
        async def change(member: bytes, kind: int, *, accept_loss: bool = False) -> None:
            await ask(one.client, m.ChangeMember(member, kind, accept_loss), m.Done)

        first = id_of(0)
        with pytest.raises(PreconditionFailed, match="it has places in a table; drain it"):
            await change(first, m.MEMBER_REMOVE)
        for _ in range(2):
            await change(first, m.MEMBER_DRAIN)
        assert await state_of(one, 0) == "draining"
        for number in (1, 2):
            await change(id_of(number), m.MEMBER_DRAIN)
        with pytest.raises(PreconditionFailed, match="3 members on 3 devices have places, and 3 are needed"):
            await change(id_of(3), m.MEMBER_DRAIN)
        one.rig.lose(3)
        for _ in range(2):
            await change(id_of(3), m.MEMBER_REMOVE, accept_loss=True)
        with pytest.raises(PreconditionFailed, match="it is removed"):
            await change(id_of(3), m.MEMBER_DRAIN)
        for odd in (b"", b"x" * 16, b"x" * 17):
            with pytest.raises(InvalidArgument, match="no such member"):
                await change(odd, m.MEMBER_REMOVE)
        with pytest.raises(InvalidArgument, match="no change 9"):
            await change(first, 9)
        with pytest.raises(InvalidArgument, match="without etcd have no replicas"):
            await change(first, m.NAMES_REMOVE)

    kept(body)


async def state_of(one: Kept, number: int) -> str:
    members = (await one.status())["members"]
    return str(next(member["state"] for member in members if member["id"] == id_text(id_of(number))))


def test_settings_of_the_lake_are_changed_by_a_head_s_clients_and_shown() -> None:
    async def body(one: Kept) -> None:
        async def shown() -> tuple[object, ...]:
            lake = await one.status()
            assert "heads" not in lake, "a lake without etcd does not know them"
            return lake["out_after_s"], lake["out_stops"], lake["out_stopped_because"]

        assert await shown() == (600, "rack", "")
        for _ in range(2):
            await ask(one.client, m.SetLake(out_after_s=1200), m.Done)
        assert await shown() == (1200, "rack", "")
        await ask(one.client, m.SetLake(out_stops="off"), m.Done)
        assert await shown() == (1200, "off", "")
        for wrong in (m.SetLake(59), m.SetLake(-1), m.SetLake(m.OUT_AFTER_S_MAX + 1), m.SetLake(out_stops="row")):
            with pytest.raises(InvalidArgument, match="out-"):
                await ask(one.client, wrong, m.Done)
        assert await shown() == (1200, "off", "")

    kept(body)
