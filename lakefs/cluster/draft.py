"""A table in the making: rows that change, loads that are counted, and the walk along the ring that finds members.

Rules kept here:
- `load[i]` is the number of homes of member i in all rows, `column_load[c][i]` that in column c.  Columns are evened
  out because they differ: short chunks have data shard 0 and parity only.
- A row's homes change at `changes_max` places at most, counted against the table that the draft began with.
- A walk takes what is within the limits of all domains; loads decide only between such members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from lakefs.cluster.domains import SHARE_UNIT, Domains, make_domains
from lakefs.cluster.members import Member
from lakefs.cluster.protection import Protection
from lakefs.cluster.ring import Ring, partition_position
from lakefs.cluster.table import NO_MEMBER, SUBSTITUTE_COUNT

WALK_VNODES: Final = 512
"""Vnodes that are looked at for a member with a low load: more than 400 of 1,000 members, all of 64."""
LOAD_PERCENT_MAX: Final = 110
"""Bound on a load, in percent of its share; see Mirrokni et al., Consistent Hashing with Bounded Loads, SODA 2018."""


class Draft:
    """Rows over `members` with nothing in them yet; `members` were checked and are in the order of their ids."""

    def __init__(
        self, protection: Protection, members: Sequence[Member], bits: int, vnode_room_bytes: int, changes_max: int
    ) -> None:
        count = 1 << bits
        self.protection = protection
        self.changes_max = changes_max
        self.rows = [[NO_MEMBER] * protection.width for _ in range(count)]
        self.load = [0] * len(members)
        self.column_load = [[0] * len(members) for _ in range(protection.width)]
        self.domains: Domains = make_domains(protection, members, count)
        self.shares = [max(1, share) for share in self.domains.shares]
        """Divisors: a member without places has a share too, which it never meets."""
        self.goal = [-(-share // SHARE_UNIT) for share in self.domains.shares]
        self.floor = [share // SHARE_UNIT for share in self.domains.shares]
        self.bound = [
            max(goal, share * LOAD_PERCENT_MAX // (100 * SHARE_UNIT))
            for goal, share in zip(self.goal, self.domains.shares, strict=True)
        ]
        self.ring = Ring(members, vnode_room_bytes)
        self._owners = self.ring.owners * 2
        self._starts = [self.ring.walk_from(partition_position(number, bits)) for number in range(count)]
        self._changed = [0] * count
        self._placing = [index for index, own in enumerate(self.domains.of_member) if own]

    def keep(self, number: int, column: int, member: int) -> None:
        """Fill an empty place with the home that the last table has there."""
        self.rows[number][column] = member
        self.load[member] += 1
        self.column_load[column][member] += 1

    def fill(self, number: int, column: int, member: int) -> None:
        """Fill an empty place with another home."""
        self.keep(number, column, member)
        self._changed[number] |= 1 << column

    def clear(self, number: int, column: int) -> int:
        """Empty a place; return the member that was home there."""
        member = self.rows[number][column]
        self.rows[number][column] = NO_MEMBER
        self.load[member] -= 1
        self.column_load[column][member] -= 1
        return member

    def vacate(self, number: int, column: int) -> None:
        """Empty a place that another member will have in this table."""
        self.clear(number, column)
        self._changed[number] |= 1 << column

    def begin(self) -> None:
        """Count places that are still empty as changed: the last table's homes are all in their places."""
        for number, row in enumerate(self.rows):
            if NO_MEMBER in row:
                self._changed[number] = sum(1 << column for column, member in enumerate(row) if member == NO_MEMBER)

    def is_spent(self, number: int) -> bool:
        """Return True if the row has as many changed homes as it may have."""
        return self._changed[number].bit_count() >= self.changes_max

    def may_change(self, number: int, column: int) -> bool:
        """Return True if that home of the row may be another than in the last table, or is already."""
        changed = self._changed[number]
        return bool(changed >> column & 1) or changed.bit_count() < self.changes_max

    def column_share(self, column: int, member: int) -> float:
        """Return the member's load in that column, in proportion to its share."""
        return self.column_load[column][member] / self.shares[member]

    def counts(self, number: int) -> dict[int, int]:
        """Return the places that each domain has in the row; domains without one are missing."""
        counted: dict[int, int] = {}
        for member in self.rows[number]:
            if member != NO_MEMBER:
                self.add(counted, member)
        return counted

    def add(self, counts: dict[int, int], member: int) -> None:
        """Count one more place of `member` in its domains."""
        for domain in self.domains.of_member[member]:
            counts[domain] = counts.get(domain, 0) + 1

    def fits(self, counts: dict[int, int], member: int) -> bool:
        """Return True if a row with such counts may have one more place of `member`."""
        limits = self.domains.limits
        return all(counts.get(domain, 0) < limits[domain] for domain in self.domains.of_member[member])

    def walk(self, number: int, wanted: int, counts: dict[int, int], caps: Sequence[int] | None) -> list[int]:
        """Return up to `wanted` members along the ring that fit into the row, and count them.

        Only members with a load under their cap; without caps the walk goes round the whole ring.  A member may be
        found several times.
        """
        found: list[int] = []
        for member in self._along(number, WALK_VNODES if caps else None):
            if (caps is None or self.load[member] < caps[member]) and self.fits(counts, member):
                self.add(counts, member)
                found.append(member)
                if len(found) == wanted:
                    break
        return found

    def substitutes(self, number: int) -> list[int]:
        """Return the row's substitutes, along the ring: no homes, in domains that lose least if they lose a home too.

        First members that fit beside all homes, then those of domains with fewer than m places, then any.
        """
        homes = set(self.rows[number])
        counts = self.counts(number)
        domains, width, parity = self.domains, self.protection.width, self.protection.parity
        wanted = min(SUBSTITUTE_COUNT, len(self._placing) - len(homes))
        choices = (
            (min(wanted, domains.places_max - width), 0),
            (min(wanted, domains.parity_places_max - width), parity),
            (wanted, width + wanted),
        )
        found: list[int] = []
        for wanted_now, most in choices:
            if len(found) >= wanted_now:
                continue
            for member in self._along(number, None if most > parity else WALK_VNODES):
                own = self.domains.of_member[member]
                if member in homes or any(counts.get(domain, 0) >= (most or domains.limits[domain]) for domain in own):
                    continue
                homes.add(member)
                self.add(counts, member)
                found.append(member)
                if len(found) == wanted_now:
                    break
        return found + [NO_MEMBER] * (SUBSTITUTE_COUNT - len(found))

    def _along(self, number: int, steps: int | None) -> Iterator[int]:
        """Return the members along the ring from a partition: of so many vnodes, or of all."""
        start = self._starts[number]
        count = len(self.ring.owners)
        return map(self._owners.__getitem__, range(start, start + min(steps or count, count)))
