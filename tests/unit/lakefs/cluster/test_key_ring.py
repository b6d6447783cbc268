"""The ring of keys: shares in proportion to room, keys that move only to or from members that change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster.key_ring import KeyRing
from lakefs.cluster.members import Member, Standing
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.ring import vnode_room
from lakefs.ids import MemberId
from tests.unit.lakefs.cluster.fleets import TB, fleet, member_id, with_state

KEYS = [b"key %d" % number for number in range(6000)]


def key_homes(members: list[Member], unit: int) -> list[MemberId]:
    ring = KeyRing(members, unit)
    return [ring.home(7, key) for key in KEYS]


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


def test_a_table_has_the_ring_of_its_members_that_get_places() -> None:
    members = with_state(fleet(8), Standing.DRAINING, 3)
    table = first_table(Protection.parse("4+2"), members)
    ring = table.key_ring()
    assert sorted(ring.members) == sorted(member.id for member in table.members if member.state is Standing.IN)
    assert [ring.home(1, key) for key in KEYS[:100]] == [
        KeyRing(table.members, table.vnode_room_bytes).home(1, key) for key in KEYS[:100]
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1 << 26, 1 << 62))
def test_shares_of_a_quota_are_in_proportion_to_keys_and_together_at_most_the_quota(
    rooms: list[int], quota_bytes: int
) -> None:
    members = [Member(member_id(number), room) for number, room in enumerate(rooms)]
    ring = KeyRing(members, vnode_room(members))
    shares = {member: ring.share(member, quota_bytes) for member in ring.members}
    assert min(shares.values()) >= 1
    assert sum(shares.values()) <= quota_bytes
    assert {ring.share(member, 0) for member in ring.members} == {0}, "no quota is no quota at any member"
    assert sum(shares.values()) >= quota_bytes - len(shares), "nothing of it is lost"
    homes = Counter(ring.home(3, key) for key in KEYS[:2000])
    for member, share in shares.items():
        assert abs(homes[member] / 2000 - share / quota_bytes) < 0.06


def test_the_only_member_has_the_whole_quota() -> None:
    (only,) = (ring := KeyRing(fleet(1), 1 << 30)).members
    assert [ring.share(only, quota) for quota in (1, 1 << 30, (1 << 62) - 1)] == [1, 1 << 30, (1 << 62) - 1]


GOLDEN_KEYS = [17, 15, 11, 10]
