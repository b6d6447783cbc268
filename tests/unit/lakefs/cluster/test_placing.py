"""Making tables: failure domains, loads, and that nothing moves which need not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster.losses import losses_outlived
from lakefs.cluster.members import Level, Member, Standing
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import PROTECTIONS, Protection
from lakefs.cluster.table import Table, moves
from lakefs.errors import InvalidArgument
from tests.unit.lakefs.cluster.fleets import (
    P42,
    TB,
    check_table,
    domain_count,
    fleet,
    homes_of,
    loads,
    member_id,
    most_in_a_domain,
    settle,
    small_tables,
    with_state,
)

OUT, DRAINING = Standing.OUT, Standing.DRAINING


@st.composite
def fleets(draw: st.DrawFn, least: int = 1) -> list[Member]:
    """Draw members in nested domains of any sizes, with rooms that differ by up to ten times."""
    count = draw(st.integers(least, 26))
    machines = draw(st.integers(1, count))
    racks = draw(st.integers(1, 6))
    zones = draw(st.integers(1, 4))
    known = draw(st.sampled_from([(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)]))
    dice = random.Random(draw(st.integers(0, 1000)))
    unequal, shares = draw(st.booleans()), draw(st.booleans())
    members = []
    for number in range(count):
        machine = dice.randrange(machines)
        rack = machine * 7 % racks
        names = (f"m{machine}", f"r{rack}", f"z{rack % zones}")
        machine_name, rack_name, zone_name = (
            name if is_known else "" for name, is_known in zip(names, known, strict=True)
        )
        room = dice.randrange(TB, 10 * TB) if unequal else TB
        device = f"d{dice.randrange(4)}" if shares and dice.randrange(2) else ""
        members.append(Member(member_id(number), room, machine_name, rack_name, zone_name, device=device))
    return members


def counted_moves(last: Table, table: Table) -> list[int]:
    """Return the number of homes that changed, for each partition of the newer table."""
    counted = Counter(move.partition for move in moves(last, table))
    return [counted[number] for number in range(len(table.rows))]  # type: ignore[index]


# --- failure domains ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(fleets(), st.sampled_from(PROTECTIONS))
def test_no_domain_holds_more_than_m_shards_of_a_row_where_there_are_enough(
    members: list[Member], protection: Protection
) -> None:
    with small_tables(7):
        table = first_table(protection, members, accept_loss=True)
        check_table(table)
        following = next_table(table, members, accept_loss=True)
        assert sum(counted_moves(table, following)) <= len(table.rows) * protection.width // 50
        check_table(following)


@pytest.mark.parametrize(
    ("protection", "count", "per_machine", "per_rack"),
    [("4+2", 24, 4, 0), ("4+2", 24, 2, 4), ("4+2", 18, 1, 6), ("8+2", 40, 4, 2), ("2+1", 9, 1, 3), ("1+1", 8, 2, 2)],
)
def test_shards_are_spread_evenly_over_the_domains_of_each_level(
    protection: str, count: int, per_machine: int, per_rack: int
) -> None:
    with small_tables():
        table = first_table(Protection.parse(protection), fleet(count, per_machine, per_rack))
        check_table(table)
        for level in (Level.DEVICE, Level.MACHINE, Level.RACK) if per_rack else (Level.DEVICE, Level.MACHINE):
            domains = domain_count(table, level)
            assert most_in_a_domain(table, level) == -(-table.protection.width // domains)
        assert max(loads(table).values()) <= 1.02 * len(table.rows) * table.protection.width / count


@pytest.mark.parametrize(("devices", "folders"), [(4, 3), (3, 4), (5, 2), (6, 2)])
def test_folders_of_one_device_hold_no_more_than_m_shards_of_a_row_together(devices: int, folders: int) -> None:
    members = [
        replace(member, machine="host", device=f"disk{number // folders}")
        for number, member in enumerate(fleet(devices * folders))
    ]
    with small_tables():
        table = first_table(P42, members)
        check_table(table)
        assert most_in_a_domain(table, Level.DEVICE) == -(-6 // devices)
        assert losses_outlived(table, Level.DEVICE) == (2 if devices == 6 else 1)
        seventh = next_table(table, [*members, replace(fleet(1, first=90)[0], machine="host")])
        assert losses_outlived(settle(seventh), Level.DEVICE) >= 1


def test_folders_of_too_few_devices_are_spread_as_if_each_had_its_own() -> None:
    alone = [replace(member, machine="host") for member in fleet(6)]
    shared = [replace(member, device="disk") for member in alone]
    with small_tables():
        assert first_table(P42, shared).rows == first_table(P42, alone).rows


def test_a_rack_of_one_machine_gets_two_shards_on_it_and_others_stay_apart() -> None:
    lone = [Member(member_id(number), TB, "lone", "r0") for number in range(4)]
    others = [Member(member_id(10 + number), TB, f"m{number // 2}", f"r{1 + number // 8}") for number in range(16)]
    with small_tables():
        table = first_table(P42, [*lone, *others])
        check_table(table)
        machines = {member.id: member.machine for member in table.members}
        for row in homes_of(table):
            counted = Counter(machines[home] for home in row)
            assert counted.pop("lone") == 2
            assert max(counted.values()) == 1


def test_a_level_of_too_few_domains_asks_for_nothing() -> None:
    with small_tables():
        table = first_table(P42, fleet(12, per_machine=6))
        assert most_in_a_domain(table, Level.DEVICE) == 1
        assert most_in_a_domain(table, Level.MACHINE) > 3


@pytest.mark.parametrize(("count", "most"), [(1, 6), (2, 3), (3, 2), (4, 2), (5, 2), (6, 1)])
def test_few_members_hold_several_shards_of_a_row_as_evenly_as_they_can(count: int, most: int) -> None:
    with small_tables():
        table = first_table(P42, fleet(count), accept_loss=count < 3)
        check_table(table)
        assert most_in_a_domain(table, Level.DEVICE) == most
        assert set(loads(table).values()) <= {6 * 256 // count, 6 * 256 // count + 1, 6 * 256 // count + 2}


def test_three_members_at_4_2_hold_two_each_and_two_are_refused() -> None:
    with small_tables():
        table = first_table(P42, fleet(3))
        assert {tuple(sorted(Counter(row).values())) for row in homes_of(table)} == {(2, 2, 2)}
        with pytest.raises(InvalidArgument, match="needs 3 members and has 2"):
            next_table(table, with_state(fleet(3), OUT, 1))


# --- loads -------------------------------------------------------------------------------------------


def fair_shares(members: Sequence[Member], rows: int, width: int) -> dict[bytes, Fraction]:
    """Return shares by room, for members on machines of their own that hold at most one shard of a row."""
    shares: dict[bytes, Fraction] = {}
    left, places = list(members), Fraction(rows * width)
    while True:
        total = sum(member.room_bytes for member in left)
        over = [member for member in left if places * member.room_bytes >= total * rows]
        if not over:
            return shares | {member.id: places * member.room_bytes / total for member in left}
        for member in over:
            shares[member.id] = Fraction(rows)
            left.remove(member)
            places -= rows
        if not left:
            return shares


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=6, max_size=24))
def test_loads_follow_room_as_far_as_a_row_allows(rooms: list[int]) -> None:
    members = [Member(member_id(number), room * TB, f"host-{number}") for number, room in enumerate(rooms)]
    with small_tables():
        table = first_table(P42, members)
    shares = fair_shares(members, len(table.rows), 6)
    for identifier, load in loads(table).items():
        share = float(shares[identifier])
        assert 0.9 * share - 1 <= load <= max(1.1 * share, share + 1)


def test_24_equal_members_are_balanced_and_a_25th_moves_no_more_than_its_share() -> None:
    table = first_table(P42, fleet(24))
    mean = 4096 * 6 / 24
    assert max(loads(table).values()) <= 1.01 * mean
    for column in range(6):
        assert max(Counter(row[column] for row in table.rows).values()) <= 1.05 * mean / 6
    added = next_table(table, fleet(25))
    assert sum(counted_moves(table, added)) <= 1.01 * 4096 * 6 / 25
    assert max(loads(added).values()) <= 1.01 * mean * 24 / 25
    assert min(loads(added).values()) >= 0.99 * mean * 24 / 25
    gone = next_table(table, fleet(25)[1:-1])
    assert sum(counted_moves(table, gone)) == loads(table)[member_id(0)]
    assert max(loads(gone).values()) <= 1.02 * mean * 24 / 23


def test_a_member_whose_room_grows_gets_more() -> None:
    members = fleet(12)
    with small_tables():
        table = first_table(P42, members)
        grown = [replace(members[0], room_bytes=2 * TB), *members[1:]]
        after = settle(next_table(table, grown))
        share = len(table.rows) * 6 * 2 / 13
        assert 0.9 * share <= loads(after)[members[0].id] <= 1.1 * share
        assert {move.after for move in moves(table, after)} == {members[0].id}


# --- the next epoch ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(fleets(least=5), st.data())
def test_whatever_members_do_rows_stay_right_and_only_m_homes_of_a_row_change(
    members: list[Member], data: st.DataObject
) -> None:
    with small_tables(6):
        table = first_table(P42, members, accept_loss=True)
        for step in range(3):
            present = list(table.members)
            what = data.draw(st.sampled_from(["add", "drain", "remove", "out", "return"]))
            at = data.draw(st.integers(0, len(present) - 1))
            if what == "add":
                present.append(Member(member_id(100 + step), 3 * TB, f"new-{step}"))
            elif what == "remove" and len(present) > 1:
                del present[at]
            elif what == "return":
                present = [replace(member, state=Standing.IN) for member in present]
            else:
                present = with_state(present, OUT if what == "out" else DRAINING, at)
            try:
                following = next_table(table, present, accept_loss=True)
            except InvalidArgument:
                continue
            assert max(counted_moves(table, following)) <= 2
            check_settled(settle(following))
            table = following


def check_settled(table: Table) -> None:
    check_table(table)
    assert all(member.state is Standing.IN or member.id not in loads(table) for member in table.members)


def test_members_that_stay_keep_their_shard_s_number() -> None:
    members = fleet(24, per_machine=4)
    with small_tables():
        table = first_table(P42, members)
        after = next_table(table, with_state(members, OUT, 5))
        for move in moves(table, after):
            assert move.before == members[5].id
        kept = [(was, now) for was, now in zip(homes_of(table), homes_of(after), strict=True)]
        assert all(
            one == other or one == members[5].id for was, now in kept for one, other in zip(was, now, strict=True)
        )
        assert loads(table)[members[5].id] == len(list(moves(table, after)))


def test_a_lake_grows_from_3_to_6_to_7_members_by_the_least_that_can_move() -> None:
    table = first_table(P42, fleet(3))
    first = next_table(table, fleet(6))
    assert max(counted_moves(table, first)) == 2, "more than m shards of a row would move at once"
    second = next_table(first, fleet(6))
    assert max(counted_moves(first, second)) == 1
    assert settle(second) is second
    check_table(second)
    assert losses_outlived(second, Level.DEVICE) == 2
    moved = sum(counted_moves(table, first)) + sum(counted_moves(first, second))
    assert moved == 4096 * 6 / 2
    assert set(loads(second).values()) == {4096}
    assert next_table(table, fleet(6), at_once=True).ring_epoch == 2
    assert max(counted_moves(table, next_table(table, fleet(6), at_once=True))) == 3

    third = next_table(second, fleet(7))
    assert sum(counted_moves(second, third)) <= 1.01 * 4096 * 6 / 7
    assert max(loads(third).values()) <= 1.01 * 4096 * 6 / 7
    assert settle(third) is third


def test_more_than_m_homes_of_a_row_go_only_at_once_and_never_when_they_are_out() -> None:
    members = fleet(9)
    with small_tables():
        table = first_table(P42, members)
        assert next_table(table, with_state(members, OUT, 0, 1)).ring_epoch == 2
        with pytest.raises(InvalidArgument, match="3 homes of one row would be out"):
            next_table(table, with_state(members, OUT, 0, 1, 2), at_once=True, accept_loss=True)
        for fewer in (with_state(members, DRAINING, 0, 1, 2), members[3:]):
            with pytest.raises(InvalidArgument, match="3 homes of one row would lose their places, and 2 may"):
                next_table(table, fewer)
            after = next_table(table, fewer, at_once=True)
            check_table(after)
            assert loads(after).keys() == {member.id for member in members[3:]}


def test_without_parity_one_home_of_a_row_may_change_and_none_may_be_out() -> None:
    members = fleet(4)
    with small_tables():
        table = first_table(Protection(1, 0), members)
        assert sum(counted_moves(table, next_table(table, fleet(5)))) in range(50, 53)
        assert len(loads(next_table(table, members[1:]))) == 3
        with pytest.raises(InvalidArgument, match="1 homes of one row would be out"):
            next_table(table, with_state(members, OUT, 0))


def test_a_member_that_returns_gets_mostly_the_rows_that_it_had() -> None:
    members = fleet(24)
    table = first_table(P42, members)
    away = next_table(table, with_state(members, OUT, 3))
    back = next_table(away, members)
    had = {number for number, row in enumerate(homes_of(table)) if members[3].id in row}
    has = {number for number, row in enumerate(homes_of(back)) if members[3].id in row}
    assert len(has & had) > 0.6 * len(had)


def test_from_100_members_on_each_partition_is_four_which_begin_with_its_row() -> None:
    members = fleet(99)
    table = first_table(P42, members)
    grown = next_table(table, fleet(100))
    assert (len(table.rows), len(grown.rows)) == (4096, 16384)
    changed = Counter(move.after for move in moves(table, grown))
    assert set(changed) == {member_id(99)}, "the split itself moves nothing"
    assert changed[member_id(99)] <= 1.01 * 16384 * 6 / 100
    fewer = next_table(grown, members)
    assert len(fewer.rows) == 16384


def test_the_order_in_which_members_are_listed_changes_nothing() -> None:
    members = fleet(13, per_machine=2)
    with small_tables():
        table = first_table(P42, members)
        assert first_table(P42, members[::-1]) == table
        assert next_table(table, fleet(15, 2)[::-1]) == next_table(table, fleet(15, 2))


def test_substitutes_lie_in_domains_that_have_least_of_the_row() -> None:
    with small_tables():
        table = first_table(P42, fleet(24, per_machine=4))
        machines = [member.machine for member in table.members]
        for row in table.rows:
            assert max(Counter(machines[index] for index in row).values()) == 2
        spread = first_table(P42, fleet(24, per_machine=3))
        machines = [member.machine for member in spread.members]
        assert all(len({machines[index] for index in row}) == 8 for row in spread.rows)
