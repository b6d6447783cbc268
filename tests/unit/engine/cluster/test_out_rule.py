"""When silent members are made out: the lake's settings, and the rule that stops it while too many are away at once."""

from __future__ import annotations

import pytest

from engine.coordinator.records import MemberRecord, MemberState, SettingsRecord
from engine.walker.out_rule import stopped_because
from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from tests.unit.engine.cluster.test_walker_pass import Running, running, small_rings
from tests.unit.engine.cluster.walker_rig import SIZES, member_id

__all__ = ["small_rings"]
RACKS = 4
COUNT = 3 * RACKS
"""Members of a lake with four racks, three members each."""


def records_of(racks: int, machines: int, count: int = COUNT) -> list[MemberRecord]:
    """Return records of members in so many racks in turn, and so many machines; 0: they have no name."""
    return [
        MemberRecord(
            member_id(number),
            (),
            1 << 40,
            ("sda", f"host {number % machines}" if machines else "", f"rack {number % racks}" if racks else "", ""),
        )
        for number in range(count)
    ]


def stopped(records: list[MemberRecord], away: int, stops: str) -> str:
    """Return the reason while the members of the first domains are away, of a table that has each of them apart."""
    members = [
        Member(each.member, 1 << 40, machine=f"host {number}", rack=each.domains[2], zone=each.domains[3])
        for number, each in enumerate(records)
    ]
    table = first_table(Protection(4, 2), members)
    ordered = sorted(records, key=lambda each: each.domains[::-1])
    return stopped_because([table], records, {each.member for each in ordered[:away]}, stops)


@pytest.mark.parametrize(
    ("racks", "machines", "stops", "most"),
    [(RACKS, COUNT, "rack", 3), (RACKS, COUNT, "machine", 2), (0, 0, "rack", 2), (1, 0, "rack", 2)],
)
def test_none_is_made_out_while_more_are_away_than_the_largest_domain_has(
    racks: int, machines: int, stops: str, most: int
) -> None:
    records = records_of(racks, machines)
    assert not stopped(records, most, stops)
    reason = stopped(records, most + 1, stops)
    assert f"{most + 1} members are away at once" in reason
    assert f"({most})" in reason


def test_none_is_made_out_while_a_row_has_more_than_m_homes_away_whatever_is_set() -> None:
    records = records_of(RACKS, COUNT)
    assert not stopped(records, 3, "off")
    assert "some content has more than 2 shards" in stopped(records, 6, "off")


def test_a_member_without_a_named_rack_is_in_that_of_its_machine() -> None:
    records = records_of(0, 4)
    assert not stopped(records, 2, "rack")
    assert "largest rack has (3)" in stopped(records, 4, "rack")


def test_a_whole_rack_is_made_out_and_no_member_more_until_the_rule_is_changed() -> None:
    async def scenario(one: Running) -> None:
        made = one.made
        for number in range(COUNT):
            await one.register(number, "sda", f"host {number}", f"rack {number % RACKS}")
        for _ in range(4):
            await one.turn()
        assert len(made.tables) == 1
        await made.write(*SIZES)
        rack, more = [member_id(number) for number in (0, 4, 8)], member_id(1)
        for each in rack:
            await made.stop(each)
        for _ in range(12):
            await one.turn()
        assert {each for each, state in (await one.states()).items() if state is MemberState.OUT} == set(rack)
        assert one.membership.stopped_because == ""
        await made.stop(more)
        for _ in range(12):
            await one.turn()
        assert (await one.states())[more] is MemberState.UP
        assert "4 members are away at once, more than the largest rack has (3)" in one.membership.stopped_because
        await made.state.change_settings(lambda known: SettingsRecord(known.out_after_s, "off"))
        for _ in range(2):
            await one.turn()
        assert (await one.states())[more] is MemberState.OUT
        assert one.membership.stopped_because == ""
        await made.check()

    running(scenario, count=COUNT)


def test_the_time_of_silence_is_the_lakes_and_is_read_anew() -> None:
    async def scenario(one: Running) -> None:
        first, second = member_id(0), member_id(1)
        await one.made.state.change_settings(lambda known: SettingsRecord(120, known.out_stops))
        await one.made.stop(first)
        await one.turn(61)
        await one.turn(61)
        assert (await one.states())[first] is MemberState.UP
        await one.turn(61)
        assert (await one.states())[first] is MemberState.OUT
        await one.made.state.change_settings(lambda known: SettingsRecord(3600, known.out_stops))
        await one.made.stop(second)
        for _ in range(20):
            await one.turn(61)
        assert (await one.states())[second] is MemberState.UP

    running(scenario, count=9)
