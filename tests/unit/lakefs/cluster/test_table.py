"""Tables: look-ups, the order in which members are asked, and golden vectors."""

from __future__ import annotations

import blake3
import pytest

from lakefs.cluster.members import Member, Standing
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import NO_MEMBER, Table, members_to_ask, moves
from lakefs.cluster.table_format import pack
from lakefs.ids import ChunkId, RingEpoch, data_chunk_id
from tests.unit.lakefs.cluster.fleets import P42, TB, fleet, member_id, small_tables, with_state

CHUNKS = [data_chunk_id(b"chunk %d" % number) for number in range(200)]
GOLDEN = {
    "six": "d26ab6eff227c87946b6bce868ef46ec",
    "twenty-four": "11d36dfc0419737e34cd7d5ebf05f6d4",
    "hundred": "d49f875e26866965080b72cff891367d",
    "grown": "01b7cc101ebd8ee0c47766ab93d1bb6e",
}
"""Hashes of packed tables.  A change of one is a change of what all members of a lake compute: it breaks none of their
tables, which are data, but neighbouring releases would no longer make the same."""


def golden_tables() -> dict[str, Table]:
    unequal = [
        Member(member_id(number), TB + number * TB // 20, f"host-{number // 4}", f"rack-{number // 8}")
        for number in range(24)
    ]
    twenty_four = first_table(P42, unequal)
    return {
        "six": first_table(P42, fleet(6)),
        "twenty-four": twenty_four,
        "hundred": first_table(P42, fleet(100, per_machine=5, per_rack=2)),
        "grown": next_table(twenty_four, [*with_state(unequal, Standing.DRAINING, 7), Member(member_id(50), 3 * TB)]),
    }


def test_tables_are_the_same_everywhere_and_for_ever() -> None:
    found = {name: blake3.blake3(pack(table)).hexdigest()[:32] for name, table in golden_tables().items()}
    assert found == GOLDEN


@pytest.mark.parametrize("bits", [12, 14])
def test_a_chunk_s_row_is_named_by_the_first_bits_of_its_digest(bits: int) -> None:
    rows = tuple((number % 3, number // 3 % 3, NO_MEMBER, NO_MEMBER) for number in range(1 << bits))
    table = Table(RingEpoch(1), Protection(1, 1), tuple(fleet(3)), rows, bits, 1)
    for chunk in CHUNKS:
        number = int(chunk[1:].hex(), 16) >> 256 - bits
        assert table.partition_of(chunk) == number
        assert table.row_of(chunk) == rows[number]
    assert table.partition_of(ChunkId(b"\x01" + b"\xff" * 32)) == (1 << bits) - 1
    assert table.partition_of(ChunkId(b"\x02" + bytes(32))) == 0


def test_homes_and_substitutes_of_a_chunk_are_its_row_s() -> None:
    with small_tables():
        table = first_table(P42, fleet(7))
    for chunk in CHUNKS[:20]:
        row = table.row_of(chunk)
        assert table.homes(chunk) == tuple(table.members[index].id for index in row[:6])
        assert row[7] == NO_MEMBER
        assert table.substitutes(chunk) == (table.members[row[6]].id,)
        assert set(table.homes(chunk)) | set(table.substitutes(chunk)) == {member.id for member in table.members}


def test_a_shard_is_looked_for_at_its_home_then_at_substitutes_other_homes_and_older_homes() -> None:
    members = fleet(12)
    with small_tables():
        old = first_table(P42, members)
        new = next_table(old, with_state(members, Standing.DRAINING, *range(2)))
    for chunk in CHUNKS:
        for shard in (0, 5):
            asked = list(members_to_ask([new, old], chunk, shard))
            homes, substitutes = new.homes(chunk), new.substitutes(chunk)
            assert len(substitutes) == 2
            assert asked[0] == homes[shard]
            assert asked[1:3] == list(substitutes)
            assert asked[3:8] == [home for home in homes if home != homes[shard]]
            older = [old.homes(chunk)[shard], *old.substitutes(chunk), *old.homes(chunk)]
            assert asked[8:] == [member for member in dict.fromkeys(older) if member not in asked[:8]]
    assert any(old.homes(chunk)[0] != new.homes(chunk)[0] for chunk in CHUNKS)


def test_a_member_with_two_shards_of_a_row_is_asked_once() -> None:
    with small_tables():
        table = first_table(P42, fleet(3))
    for chunk in CHUNKS[:20]:
        asked = list(members_to_ask([table], chunk, 4))
        assert asked[0] == table.homes(chunk)[4]
        assert sorted(asked) == sorted(member.id for member in table.members)


def test_moves_name_partition_shard_and_members_of_each_home_that_changed() -> None:
    members = tuple(sorted(fleet(3), key=lambda member: member.id))
    one = Table(RingEpoch(1), Protection(1, 1), members, ((0, 1, 2, NO_MEMBER), (1, 2, 0, NO_MEMBER)), 1, 1)
    rows = ((0, 1, NO_MEMBER, NO_MEMBER),) * 2 + ((1, 0, NO_MEMBER, NO_MEMBER),) * 2
    other = Table(RingEpoch(2), Protection(1, 1), members[:2], rows, 2, 1)
    found = [(move.partition, move.shard, move.before, move.after) for move in moves(one, other)]
    assert found == [(2, 1, members[2].id, members[0].id), (3, 1, members[2].id, members[0].id)]
