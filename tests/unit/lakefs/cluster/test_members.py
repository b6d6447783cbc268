"""Members: a list is accepted as a whole, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lakefs.cluster.members import Level, Member, Standing, checked_members, domain_key
from lakefs.cluster.protection import Protection
from lakefs.errors import InvalidArgument
from lakefs.ids import MemberId
from tests.unit.lakefs.cluster.fleets import P42, TB, fleet, member_id, with_state


def test_members_are_ordered_by_their_ids() -> None:
    members = fleet(9)
    assert checked_members(P42, members) == checked_members(P42, reversed(members))
    assert [member.id for member in checked_members(P42, members)] == sorted(member.id for member in members)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": member_id(1)}, "listed twice"),
        ({"id": MemberId(b"short")}, "16 bytes"),
        ({"room_bytes": 0}, "has room for 1 to"),
        ({"room_bytes": (1 << 62) + 1}, "has room for 1 to"),
        ({"machine": "h" * 256}, "at most 255 bytes"),
        ({"rack": "é" * 128}, "at most 255 bytes"),
        ({"zone": "a\0b"}, "printable"),
        ({"zone": "\ud800"}, "printable"),
        ({"machine": "host-1", "rack": "other"}, 'machine "host-1" is in rack'),
        ({"machine": "host-1", "zone": "other"}, 'machine "host-1" is in rack'),
    ],
)
def test_a_member_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    members = fleet(6)
    with pytest.raises(InvalidArgument, match=message):
        checked_members(P42, [replace(members[0], **changes), *members[1:]])  # type: ignore[arg-type]


def test_members_without_places_do_not_count_towards_the_fewest() -> None:
    members = fleet(3)
    assert len(checked_members(P42, members)) == 3
    for state in (Standing.OUT, Standing.DRAINING):
        with pytest.raises(InvalidArgument, match="needs 3 members and has 2"):
            checked_members(P42, with_state(members, state, 1))


def test_who_accepts_loss_needs_one_member() -> None:
    assert len(checked_members(P42, fleet(1), accept_loss=True)) == 1
    with pytest.raises(InvalidArgument, match="has 0"):
        checked_members(P42, [], accept_loss=True)
    assert len(checked_members(Protection(1, 0), fleet(1))) == 1


def test_a_table_holds_no_more_members_than_its_indexes_can_name() -> None:
    many = [Member(MemberId(number.to_bytes(16, "big")), TB) for number in range(65_536)]
    with pytest.raises(InvalidArgument, match="at most 65535 members"):
        checked_members(P42, many)


def test_racks_of_one_name_in_two_zones_are_two() -> None:
    one, other = Member(member_id(0), TB, "a", "r1", "z1"), Member(member_id(1), TB, "b", "r1", "z2")
    assert domain_key(one, Level.RACK) != domain_key(other, Level.RACK)


def test_machines_that_are_not_known_are_one_in_each_rack() -> None:
    one, other = Member(member_id(0), TB, "", "r1"), Member(member_id(1), TB, "", "r1")
    assert domain_key(one, Level.MACHINE) == domain_key(other, Level.MACHINE)
    assert domain_key(one, Level.MACHINE) != domain_key(replace(other, rack="r2"), Level.MACHINE)
