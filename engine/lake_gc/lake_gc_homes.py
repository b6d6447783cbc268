"""Which members may free shards in a cycle of gc over a lake: those that are homes in every table of the cycle.

The tables are those of the ring epochs that were not retired when the cycle's generation began (`LakeState.begin_gc`).
A member frees shards of a partition only if it is a home of it in each of these tables, and what else it has lies there
by accident: the walker moves it.  So a chunk's marks are sent to the same members, and to nobody else: marks of a
partition in which a member frees nothing would decide nothing.  Both are read from one list here.

Later tables may have more partitions than earlier ones; the list has as many as the finest.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakefs.cluster.table import Row, Table
from lakefs.ids import MemberId


class CycleHomes:
    """The members that may free, by partition.  Pure."""

    def __init__(self, tables: Sequence[Table]) -> None:
        assert tables, "a lake has a table"
        self.partition_bits = max(table.partition_bits for table in tables)
        self.of_partition: list[tuple[MemberId, ...]] = [
            _common([_row_of(table, partition, self.partition_bits) for table in tables])
            for partition in range(1 << self.partition_bits)
        ]
        """Members in ascending order of their ids, for each partition."""
        self.members: tuple[MemberId, ...] = tuple(sorted({each for homes in self.of_partition for each in homes}))
        """All members that may free anything."""

    def partitions_of(self, member: MemberId) -> bytes:
        """Return the partitions in which a member may free, as `GcSweep.homes`: a bit for each."""
        bits = bytearray(len(self.of_partition) // 8)
        for partition, homes in enumerate(self.of_partition):
            if member in homes:
                bits[partition >> 3] |= 1 << (partition & 7)
        return bytes(bits)


def _row_of(table: Table, partition: int, partition_bits: int) -> tuple[Table, Row]:
    return table, table.rows[partition >> partition_bits - table.partition_bits]


def _common(rows: Sequence[tuple[Table, Row]]) -> tuple[MemberId, ...]:
    """Return the members that are homes in each of the rows."""
    homes = [{table.members[index].id for index in row[: table.protection.width]} for table, row in rows]
    return tuple(sorted(set.intersection(*homes)))
