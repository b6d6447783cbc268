"""Pure: which member takes which shard of a chunk, and when so many are stored that the chunk counts as stored.

    1. each shard goes to its home, if the home can take it
    2. the others go to substitutes, then as second shards to members of the row that can take them; never more than m
       of a chunk on one member (one, without parity)

Rules kept here:
- Among members that could take a shard, one comes first whose failure domains then hold no more than m shards of the
  chunk, on as many levels as possible; then one that holds fewest of them; then substitutes.
- A chunk is stored when all its shards are, or when its data shards' number remains whichever member goes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lakefs.cluster.members import LEVELS, DomainKey, Level, Member, domain_key
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.ids import ChunkId, MemberId

Placed = Mapping[int, MemberId]
"""Members by the numbers of the shards that they have."""


def placed(
    table: Table, chunk: ChunkId, kept: Placed, shards: Iterable[int], can_take: Callable[[MemberId, int], bool]
) -> dict[int, MemberId]:
    """Return where to store `shards`, as far as there is a place; `kept` are those of the chunk that its row has.

    `can_take(member, shard)` is False for a member that is away, is full, or has refused that shard.
    """
    homes = table.homes(chunk)
    found: dict[int, MemberId] = {}
    displaced: list[int] = []
    for shard in shards:
        if can_take(homes[shard], shard):
            found[shard] = homes[shard]
        else:
            displaced.append(shard)
    if displaced:
        _displace(table, chunk, kept, displaced, found, can_take)
    return found


def _displace(
    table: Table,
    chunk: ChunkId,
    kept: Placed,
    displaced: Iterable[int],
    found: dict[int, MemberId],
    can_take: Callable[[MemberId, int], bool],
) -> None:
    """Add to `found` places other than homes."""
    row, width = table.row_of(chunk), table.protection.width
    order = [index for index in dict.fromkeys((*row[width:], *row[:width])) if index != NO_MEMBER]
    candidates = [table.members[index] for index in order]
    most = max(1, table.protection.parity)
    domains = {member.id: _domains(member) for member in candidates}
    for shard in displaced:
        holders = [*kept.values(), *found.values()]
        best: tuple[tuple[int, int, int], MemberId] | None = None
        for place, member in enumerate(candidates):
            held = holders.count(member.id)
            if held >= most or not can_take(member.id, shard):
                continue
            over = sum(
                sum(domains[holder][level] == domains[member.id][level] for holder in holders) >= most
                for level in range(len(LEVELS) - 1)
            )
            key = (over, held, place)
            if best is None or key < best[0]:
                best = key, member.id
        if best is not None:
            found[shard] = best[1]


def _domains(member: Member) -> tuple[DomainKey, ...]:
    return tuple([domain_key(member, level) for level in LEVELS if level is not Level.MEMBER])


def is_stored(stored: Placed, data_shards: int, shard_count: int) -> bool:
    """Return True if a chunk counts as stored that has so many data shards, and so many shards in all."""
    if len(stored) == shard_count:
        return True
    holders = [*stored.values()]
    return len(holders) - max(map(holders.count, holders), default=0) >= data_shards


def is_at_home(table: Table, chunk: ChunkId, stored: Placed, shard_count: int) -> bool:
    """Return True if all shards are stored, each at its own home: then nothing is left for the walker."""
    homes = table.homes(chunk)
    return len(stored) == shard_count and all(homes[shard] == member for shard, member in stored.items())
