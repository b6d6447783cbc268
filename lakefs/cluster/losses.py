"""Losses that a table outlives: for `lake status`, and for commands that must not lose data."""

from __future__ import annotations

from collections.abc import Set

from lakefs.cluster.members import DomainKey, Level, domain_key
from lakefs.cluster.table import Table
from lakefs.ids import MemberId

_AWAY = -1


def losses_outlived(table: Table, level: Level, away: Set[MemberId] = frozenset()) -> int:
    """Return how many more domains of `level`, whichever they are, can be lost with every row still readable.

    `away` are members that are lost already.  -1: some row has fewer than k homes left now.  It speaks of stripes whose
    shards are all at their homes; where they are not (dirty or moving partitions), less may be outlived.

    Exact: rows are independent, and the worst that a number of losses can do to a row is to take the domains with most
    of its homes.
    """
    width, data = table.protection.width, table.protection.data
    domains: dict[DomainKey, int] = {}
    of_member = [
        _AWAY if member.id in away else domains.setdefault(domain_key(member, level), len(domains))
        for member in table.members
    ]
    patterns = {tuple([of_member[index] for index in row[:width]]) for row in table.rows}
    return min(_losses_of(shape, data) for shape in {_shape(pattern) for pattern in patterns})


def _shape(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of homes in each domain of a row, the most first."""
    domains = set(pattern)
    if len(domains) == len(pattern) and _AWAY not in domains:
        return (1,) * len(pattern)
    return tuple(sorted([pattern.count(domain) for domain in domains if domain != _AWAY], reverse=True))


def _losses_of(shape: tuple[int, ...], data: int) -> int:
    """Return the losses that a row outlives whose domains have so many homes, the most first."""
    left = sum(shape)
    if left < data:
        return -1
    for lost, homes in enumerate(shape):
        left -= homes
        if left < data:
            return lost
    return len(shape)
