"""The table: one row of members for each partition, by which everybody finds the shards of a chunk.

A row has k+m homes and SUBSTITUTE_COUNT substitutes.  Data shard i of a chunk lies at home i, parity shard p at home
k+p; a substitute takes a shard while its home is down.  A table is data: all processes with one ring epoch have the
same, and nothing is hashed to look something up.

Rules kept here:
- `members` are ordered by id.  Rows hold indexes into it; NO_MEMBER stands for a substitute that does not exist.
- A chunk's partition is the first 12 or 14 bits of its digest.  Later tables may have more partitions than earlier
  ones, never fewer.
- A table never changes.  `lakefs.cluster.placing` makes one from its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from lakefs.cluster.key_ring import KeyRing
from lakefs.cluster.members import Member
from lakefs.cluster.protection import Protection
from lakefs.ids import ChunkId, MemberId, Partition, RingEpoch

SUBSTITUTE_COUNT: Final = 2
NO_MEMBER: Final = 0xFFFF

Row = tuple[int, ...]
"""k+m homes, then SUBSTITUTE_COUNT substitutes, as indexes into the table's members."""


@dataclass(frozen=True, slots=True)
class Table:
    """One ring epoch: its members, in the order of their ids, and 2^partition_bits rows.

    `vnode_room_bytes` is the room that one vnode of the ring stands for.
    """

    ring_epoch: RingEpoch
    protection: Protection
    members: tuple[Member, ...]
    rows: tuple[Row, ...]
    partition_bits: int
    vnode_room_bytes: int

    def partition_of(self, chunk: ChunkId) -> Partition:
        """Return the partition of a well-formed chunk id."""
        return Partition((chunk[1] << 8 | chunk[2]) >> 16 - self.partition_bits)

    def row_of(self, chunk: ChunkId) -> Row:
        """Return the row of a well-formed chunk id; about 0.2 us."""
        return self.rows[(chunk[1] << 8 | chunk[2]) >> 16 - self.partition_bits]

    def homes(self, chunk: ChunkId) -> tuple[MemberId, ...]:
        """Return the home of each shard of the chunk, data shards first; a member may be home of several."""
        members = self.members
        return tuple([members[index].id for index in self.row_of(chunk)[: self.protection.width]])

    def substitutes(self, chunk: ChunkId) -> tuple[MemberId, ...]:
        """Return the members that take a shard when its home cannot; none of them is a home of the chunk."""
        substitutes = self.row_of(chunk)[self.protection.width :]
        return tuple([self.members[index].id for index in substitutes if index != NO_MEMBER])

    def key_ring(self) -> KeyRing:
        """Return the homes of keyed blobs among this table's members; keep it, it takes milliseconds to make."""
        return KeyRing(self.members, self.vnode_room_bytes)


def members_to_ask(tables: Iterable[Table], chunk: ChunkId, shard: int) -> Iterator[MemberId]:
    """Yield where a shard may lie, the likeliest first, each member once.

    `tables` are those that are not retired, the newest first.  For each: the shard's home, the substitutes, the other
    homes of the row.
    """
    seen: set[MemberId] = set()
    for table in tables:
        row = table.row_of(chunk)
        width = table.protection.width
        for index in (row[shard], *row[width:], *row[:width]):
            if index == NO_MEMBER:
                continue
            member = table.members[index].id
            if member not in seen:
                seen.add(member)
                yield member


@dataclass(frozen=True, slots=True)
class Move:
    """A shard's home that differs between two tables, in a partition of the newer one."""

    partition: Partition
    shard: int
    before: MemberId
    after: MemberId


def moves(last: Table, table: Table) -> Iterator[Move]:
    """Yield each home that changed from `last` to `table`, a later table of the same lake, by partition."""
    split_bits = table.partition_bits - last.partition_bits
    before = [member.id for member in last.members]
    after = [member.id for member in table.members]
    for number, row in enumerate(table.rows):
        old = last.rows[number >> split_bits]
        for shard in range(table.protection.width):
            if before[old[shard]] != after[row[shard]]:
                yield Move(Partition(number), shard, before[old[shard]], after[row[shard]])
