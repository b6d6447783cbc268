"""Losses that a table outlives, compared with trying all of them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster.losses import losses_outlived
from lakefs.cluster.members import Level, Member, checked_members, domain_key
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import PROTECTIONS, Protection
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.ids import MemberId, RingEpoch
from tests.unit.lakefs.cluster.fleets import P42, TB, fleet, member_id, small_tables


def by_trying(table: Table, level: Level, away: frozenset[MemberId]) -> int:
    domains = {domain_key(member, level) for member in table.members}
    for count in range(len(domains) + 1):
        for lost in combinations(sorted(domains), count):
            up = [member.id not in away and domain_key(member, level) not in lost for member in table.members]
            if any(
                sum(up[home] for home in row[: table.protection.width]) < table.protection.data for row in table.rows
            ):
                return count - 1
    raise AssertionError("no shard is left, and all can be read")


@st.composite
def odd_tables(draw: st.DrawFn) -> Table:
    """Draw a table of a few rows with any homes, as no ring would make it."""
    protection = draw(st.sampled_from(PROTECTIONS))
    places = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    members = [_member(number, machine, draw(st.booleans())) for number, machine in enumerate(places)]
    indexes = st.integers(0, len(members) - 1)
    homes = st.tuples(*[indexes] * protection.width)
    rows = draw(st.lists(homes, min_size=2, max_size=2))
    ordered = checked_members(protection, members, accept_loss=True)
    return Table(RingEpoch(1), protection, ordered, tuple((*row, NO_MEMBER, NO_MEMBER) for row in rows), 1, 1)


def _member(number: int, machine: int, shares: bool) -> Member:
    return Member(member_id(number), TB, f"m{machine}", f"r{machine % 2}", device="shared" if shares else "")


@settings(max_examples=150)
@given(odd_tables(), st.sampled_from(Level), st.randoms(use_true_random=False))
def test_it_says_what_trying_all_losses_says(table: Table, level: Level, dice: random.Random) -> None:
    ids = [member.id for member in table.members]
    for away in (frozenset[MemberId](), frozenset(dice.sample(ids, dice.randint(0, min(2, len(ids)))))):
        assert losses_outlived(table, level, away) == by_trying(table, level, away)


def test_a_lake_says_what_it_outlives_level_by_level() -> None:
    with small_tables():
        table = first_table(P42, fleet(12, per_machine=2, per_rack=2))
        assert [losses_outlived(table, level) for level in Level] == [2, 2, 2, 1, 0]
        away = frozenset({table.members[0].id})
        assert losses_outlived(table, Level.DEVICE, away) == 1
        gone = frozenset(member.id for member in table.members if member.rack == "rack-0")
        assert [losses_outlived(table, level, gone) for level in Level] == [0, 0, 0, 0, 0]
        assert losses_outlived(table, Level.RACK, gone | {min(set(member_ids(table)) - gone)}) == -1


def member_ids(table: Table) -> list[MemberId]:
    return [member.id for member in table.members]


@pytest.mark.parametrize(("count", "outlived"), [(1, 0), (2, 0), (3, 1), (5, 1), (6, 2)])
def test_few_members_outlive_less(count: int, outlived: int) -> None:
    with small_tables():
        table = first_table(P42, fleet(count), accept_loss=True)
        assert losses_outlived(table, Level.DEVICE) == outlived


def test_without_parity_nothing_is_outlived() -> None:
    with small_tables():
        assert losses_outlived(first_table(Protection(1, 0), fleet(4)), Level.DEVICE) == 0
