"""The ring: vnodes in proportion to room, keys that move only to or from members that change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster.members import Member, Standing
from lakefs.cluster.ring import KeyRing, Ring, vnode_room
from lakefs.ids import MemberId
from tests.unit.lakefs.cluster.fleets import TB, fleet, member_id, with_state

KEYS = [b"key %d" % number for number in range(6000)]


def key_homes(members: list[Member], unit: int) -> list[MemberId]:
    ring = KeyRing(members, unit)
    return [ring.home(7, key) for key in KEYS]


def test_a_member_of_mean_room_has_150_vnodes_and_others_in_proportion() -> None:
    members = [
        Member(member_id(0), TB),
        Member(member_id(1), 2 * TB),
        Member(member_id(2), 3 * TB),
        Member(member_id(3), TB // 1000),
    ]
    unit = vnode_room(members[:3])
    assert [len(own) for own in Ring(members, unit).of_member] == [75, 150, 225, 1]
    assert Ring(with_state(members, Standing.OUT, 1), unit).of_member[1] == []


def test_more_room_leaves_a_member_s_first_vnodes_where_they_are() -> None:
    small, large = (Ring([Member(member_id(0), room)], 10).of_member[0] for room in (300, 500))
    assert (len(small), large[:30]) == (30, small)


def test_the_unit_of_vnodes_stays_while_it_fits() -> None:
    first = vnode_room(fleet(6))
    larger = [replace(member, room_bytes=TB * 19 // 10) for member in fleet(6)]
    assert vnode_room(larger, first) == first
    much_larger = [replace(member, room_bytes=3 * TB) for member in fleet(6)]
    assert vnode_room(much_larger, first) == vnode_room(much_larger) > first


def test_keys_lie_where_they_are_said_to_lie_for_ever() -> None:
    ring = KeyRing(fleet(24), vnode_room(fleet(24)))
    found = [ring.home(space, key) for space, key in ((1, b"a"), (2, b"a"), (1, b"b"), ((1 << 64) - 1, bytes(64)))]
    numbers = {member_id(number): number for number in range(24)}
    assert [numbers[member] for member in found] == GOLDEN_KEYS


def test_keys_are_shared_in_proportion_to_room() -> None:
    members = [replace(member, room_bytes=TB * (1 + number % 2)) for number, member in enumerate(fleet(8))]
    counted = Counter(key_homes(members, vnode_room(members)))
    for member in members:
        share = len(KEYS) * member.room_bytes / (12 * TB)
        assert 0.7 * share < counted[member.id] < 1.3 * share


@pytest.mark.parametrize("room_bytes", [TB // 4, TB, 3 * TB])
def test_a_new_member_takes_keys_and_moves_no_others(room_bytes: int) -> None:
    members = fleet(10)
    unit = vnode_room(members)
    added = Member(member_id(99), room_bytes)
    before, after = key_homes(members, unit), key_homes([*members, added], vnode_room([*members, added], unit))
    changed = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(changed) == {added.id}
    share = len(KEYS) * room_bytes / (10 * TB + room_bytes)
    assert 0.7 * share < len(changed) < 1.3 * share


def test_only_the_keys_of_a_lost_member_move() -> None:
    members = fleet(10)
    unit = vnode_room(members)
    before, after = key_homes(members, unit), key_homes(with_state(members, Standing.OUT, 4), unit)
    assert {was for was, now in zip(before, after, strict=True) if was != now} == {members[4].id}


@settings(max_examples=20)
@given(st.integers(1, 400), st.integers(1, 9))
def test_a_member_looks_at_each_partition_once_those_at_its_vnodes_first(vnodes: int, bits: int) -> None:
    ring = Ring([Member(member_id(5), vnodes)], 1)
    near = list(ring.partitions_near(0, bits))
    assert sorted(near) == list(range(1 << bits))
    shift = 64 - bits
    assert near[0] in {position >> shift for position in ring.positions}
    touched = {position >> shift for position in ring.positions}
    assert set(near[: len(touched)]) == touched


GOLDEN_KEYS = [17, 15, 11, 10]
