"""Members and tables for the tests of this folder; `small_tables` makes them quick where the size does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import blake3

from lakefs.cluster import placing, table_format
from lakefs.cluster.members import Level, Member, Standing, domain_key
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.ids import MemberId

TB = 10**12
P42 = Protection(4, 2)


def member_id(number: int) -> MemberId:
    return MemberId(blake3.blake3(b"member %d" % number).digest()[:16])


def fleet(count: int, per_machine: int = 1, per_rack: int = 0, first: int = 0) -> list[Member]:
    """Return members of equal room; machines per rack, or no racks."""
    machines = [(number, number // per_machine) for number in range(first, first + count)]
    return [
        Member(member_id(number), TB, f"host-{machine}", f"rack-{machine // per_rack}" if per_rack else "")
        for number, machine in machines
    ]


def with_state(members: Sequence[Member], state: Standing, *numbers: int) -> list[Member]:
    """Return the members with those at `numbers` in another state."""
    return [replace(member, state=state) if at in numbers else member for at, member in enumerate(members)]


@contextmanager
def small_tables(bits: int = 8) -> Iterator[None]:
    """Make, pack and unpack tables of 2^bits rows, below MANY_MEMBERS members."""
    with patch.object(placing, "PARTITION_BITS", bits), patch.object(table_format, "PARTITION_BITS", bits):
        yield


def homes_of(table: Table) -> list[list[MemberId]]:
    return [[table.members[index].id for index in row[: table.protection.width]] for row in table.rows]


def loads(table: Table) -> Counter[MemberId]:
    """Return the homes of each member that gets places, also of those that have none."""
    counted = Counter({member.id: 0 for member in table.members if member.state is Standing.IN})
    for row in homes_of(table):
        counted.update(row)
    return counted


def most_in_a_domain(table: Table, level: Level) -> int:
    """Return the most homes that one domain of the level has in one row."""
    keys = {member.id: domain_key(member, level) for member in table.members}
    return max(max(Counter(keys[home] for home in row).values()) for row in homes_of(table))


def domain_count(table: Table, level: Level) -> int:
    return len({domain_key(member, level) for member in table.members if member.state is Standing.IN})


def check_table(table: Table) -> None:
    """Assert what is true of every table in which no change waits for the next epoch."""
    protection = table.protection
    placing_members = {index for index, member in enumerate(table.members) if member.state is Standing.IN}
    assert len(table.rows) == 1 << table.partition_bits
    for row in table.rows:
        homes, substitutes = row[: protection.width], row[protection.width :]
        assert set(homes) <= placing_members
        wanted = min(2, len(placing_members) - len(set(homes)))
        found = [index for index in substitutes if index != NO_MEMBER]
        assert len(set(found)) == len(found) == wanted
        assert set(found) <= placing_members - set(homes)
    for level in Level:
        count = domain_count(table, level)
        if count >= protection.members_min:
            assert most_in_a_domain(table, level) <= max(1, protection.parity)
    even = -(-protection.width // len(placing_members))
    if len(placing_members) < protection.members_min:
        assert most_in_a_domain(table, Level.MEMBER) == even


def settle(table: Table) -> Table:
    """Return the table from which the same members make no other."""
    for _ in range(12):
        following = placing.next_table(table, table.members, accept_loss=True)
        if following.rows == table.rows:
            return table
        table = following
    raise AssertionError("tables of the same members go on changing")
