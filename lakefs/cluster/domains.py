"""Limits of failure domains, and each member's fair share of the places.

Rules kept here, for rows of n = k+m places:
- A level counts if it has at least ceil(n/m) domains with members that get places.  On such a level a domain has an
  even limit of ceil(n/domains) places in a row, which is at most m.
- The level of members always counts.  With fewer members than ceil(n/m), which the operator has accepted, its limit is
  ceil(n/domains) too, and more than m.  Members that share devices, of which there are too few, are spread as if each
  had its own.
- Even limits of nested levels may leave too few places: with three racks of which one is a single machine, two shards
  in each rack and one on each machine do not add up.  Then limits are raised, up to m, from the widest level down:
  first in domains whose inner limits are tighter than their own, those with the most room for each place before others.
  Limits of m always suffice, because each domain contains a member, and a member may have m.
- Nested limits form a laminar matroid: places taken in any order, each within the limits, can be extended to a whole
  row (Schrijver, Combinatorial Optimization, section 39.4).  So rows are filled greedily and never have to go back.
- A member's share is in proportion to its room, except that no domain's share is over what its limits let it hold.
  What a domain cannot hold is shared by the others.

Whole numbers only: results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from lakefs.cluster.members import LEVELS, DomainKey, Level, Member, Standing, domain_key
from lakefs.cluster.protection import Protection

SHARE_UNIT: Final = 1 << 16
"""Shares are counted in 1/65,536 of a place."""


@dataclass(frozen=True, slots=True)
class Domains:
    """Limits and shares of one list of members.

    `of_member[i]` lists the domains of member i on the levels that count, as indexes into `limits`, the member's first;
    it is empty for a member that gets no places.  `shares[i]` is member i's share of all places, in `SHARE_UNIT`.
    `places_max` is the number of places that a row could have within the limits, at least k+m; `parity_places_max` that
    with limits of m everywhere.
    """

    of_member: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    shares: tuple[int, ...]
    places_max: int
    parity_places_max: int


@dataclass(slots=True)
class _Domain:
    """A domain of a level that counts; a member has no inner domains.  `limit` is at first the even limit."""

    index: int
    limit: int
    member: int
    room_bytes: int = 0
    inner: list[_Domain] = field(default_factory=list)

    def free_limit(self) -> int:
        """Return the number of places in a row that this domain's limit and all inner limits allow."""
        return min(self.limit, sum(domain.free_limit() for domain in self.inner)) if self.inner else self.limit


def make_domains(protection: Protection, members: Sequence[Member], partition_count: int) -> Domains:
    """Return limits and shares for tables of `partition_count` rows over these members, which were checked."""
    placing = [index for index, member in enumerate(members) if member.state is Standing.IN]
    levels = _counting_levels(protection, members, placing)
    of_member, widest, limits = _nest(protection, members, placing, levels)
    _raise_limits(widest, protection.width, limits)
    shares = [0] * len(members)
    _share_out(widest, protection.width * partition_count * SHARE_UNIT, partition_count * SHARE_UNIT, shares)
    places_max = sum(domain.free_limit() for domain in widest)
    return Domains(of_member, tuple(limits), tuple(shares), places_max, len(widest) * protection.parity)


def _counting_levels(protection: Protection, members: Sequence[Member], placing: list[int]) -> list[Level]:
    """Return the levels that count, the widest first.  A level with one inner domain in each domain adds nothing."""
    counts = {level: len({domain_key(members[index], level) for index in placing}) for level in LEVELS}
    levels = [Level.MEMBER]
    for level in LEVELS[1:]:
        if protection.members_min <= counts[level] < counts[levels[-1]]:
            levels.append(level)
    return levels[::-1]


def _nest(
    protection: Protection, members: Sequence[Member], placing: list[int], levels: list[Level]
) -> tuple[tuple[tuple[int, ...], ...], list[_Domain], list[int]]:
    """Return the domains of each member, the domains of the widest level, and all even limits."""
    known: dict[tuple[Level, DomainKey], _Domain] = {}
    counts = dict.fromkeys(levels, 0)
    of_member: list[tuple[int, ...]] = [()] * len(members)
    widest: list[_Domain] = []
    for index in placing:
        outer, path = widest, list[int]()
        for level in levels:
            key = (level, domain_key(members[index], level))
            domain = known.get(key)
            if domain is None:
                domain = known[key] = _Domain(len(known), int(level), index)
                counts[level] += 1
                outer.append(domain)
            domain.room_bytes += members[index].room_bytes
            path.append(domain.index)
            outer = domain.inner
        of_member[index] = tuple(reversed(path))
    for (level, _), domain in known.items():
        domain.limit = -(-protection.width // counts[level])
    return tuple(of_member), widest, [domain.limit for domain in known.values()]


def _raise_limits(siblings: list[_Domain], wanted: int, limits: list[int]) -> None:
    """Raise limits in and below `siblings` so that together they allow `wanted` places in a row.

    No limit gets over m: the even limits of the widest level suffice, so there only inner limits are raised; and a
    domain whose inner limits are raised wants m places at most.
    """
    free = [domain.free_limit() for domain in siblings]
    missing = wanted - sum(free)
    if missing <= 0:
        return
    raised = list(free)
    for _ in range(missing):
        within = [place for place, domain in enumerate(siblings) if raised[place] < domain.limit]
        chosen = max(
            within or range(len(siblings)), key=lambda place: Fraction(siblings[place].room_bytes, raised[place] + 1)
        )
        raised[chosen] += 1
    for place, domain in enumerate(siblings):
        if raised[place] > free[place]:
            domain.limit = limits[domain.index] = max(domain.limit, raised[place])
            if domain.inner:
                _raise_limits(domain.inner, raised[place], limits)


def _share_out(siblings: list[_Domain], amount: int, partitions: int, shares: list[int]) -> None:
    """Divide `amount` among `siblings` by room, none over what its limits allow, and on to their members."""
    most = {domain.index: domain.free_limit() * partitions for domain in siblings}
    given: dict[int, int] = {}
    open_ones = siblings
    while open_ones:
        room_bytes = sum(domain.room_bytes for domain in open_ones)
        full = [domain for domain in open_ones if amount * domain.room_bytes >= most[domain.index] * room_bytes]
        if not full:
            given.update((domain.index, amount * domain.room_bytes // room_bytes) for domain in open_ones)
            break
        for domain in full:
            given[domain.index] = most[domain.index]
            amount -= most[domain.index]
        open_ones = [domain for domain in open_ones if domain.index not in given]
    for domain in siblings:
        if domain.inner:
            _share_out(domain.inner, given[domain.index], partitions, shares)
        else:
            shares[domain.member] = given[domain.index]
