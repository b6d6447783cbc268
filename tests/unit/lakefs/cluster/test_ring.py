"""The ring: vnodes in proportion to room, the same ones for ever."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings, strategies as st

from lakefs.cluster.members import Member, Standing
from lakefs.cluster.ring import Ring, vnode_room
from tests.unit.lakefs.cluster.fleets import TB, fleet, member_id, with_state


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
