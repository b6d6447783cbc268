"""Evens out loads: as few moves as bring members that have too little, or too much, back to their share.

Rules kept here:
- Nothing happens while every load is between 0.90 and 1.10 of its share.  A new member has nothing, so it is filled up
  to its share, from members over theirs: that is the least that can move.
- A member that has too little looks at partitions in the order in which they are near to its vnodes on the ring.  So a
  member that was away gets mostly the partitions back that it had.
- A move never takes a domain over its limits, and always lessens the sum of load^2 / share.  So it ends, and a second
  run over an evened draft moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lakefs.cluster.domains import SHARE_UNIT
from lakefs.cluster.draft import LOAD_PERCENT_MAX, Draft

LOAD_PERCENT_MIN: Final = 90
_ROUNDS: Final = 4
"""A round fills and empties each member once; two nearly always suffice."""


def even_out(draft: Draft, low_percent: int = LOAD_PERCENT_MIN, high_percent: int = LOAD_PERCENT_MAX) -> None:
    """Move homes until each load is within these percents of its share, or no move gets nearer to that."""
    shares = draft.domains.shares
    low = [share * low_percent // (100 * SHARE_UNIT) for share in shares]
    high = [
        max(goal, share * high_percent // (100 * SHARE_UNIT)) for goal, share in zip(draft.goal, shares, strict=True)
    ]
    for _ in range(_ROUNDS):
        poor = [member for member, load in enumerate(draft.load) if load < low[member]]
        poor.sort(key=lambda member: (draft.load[member] / draft.shares[member], member))
        moved = 0
        for member in poor:
            moved += _pull(draft, member, low[member], high)
        for member, load in enumerate(draft.load):
            if load > high[member]:
                moved += _push(draft, member, high)
        if not moved:
            return


def _pull(draft: Draft, taker: int, low: int, high: Sequence[int]) -> int:
    """Move places to `taker`: up to its share from members over theirs, else up to `low` from any that has more."""
    moved = 0
    bits = len(draft.rows).bit_length() - 1
    for wanted, only_rich in ((draft.goal[taker], True), (low, False)):
        for number in draft.ring.partitions_near(taker, bits):
            if draft.load[taker] >= wanted:
                break
            while draft.load[taker] < wanted:
                column = _giver(draft, number, taker, high, only_rich=only_rich)
                if column is None:
                    break
                draft.clear(number, column)
                draft.fill(number, column, taker)
                moved += 1
    return moved


def _giver(draft: Draft, number: int, taker: int, high: Sequence[int], *, only_rich: bool) -> int | None:
    """Return the column whose home is best replaced by `taker`; None if none may be."""
    if draft.is_spent(number) and draft.changes_max < draft.protection.width:
        return None
    row, load, shares = draft.rows[number], draft.load, draft.shares
    of_member, limits = draft.domains.of_member, draft.domains.limits
    own = of_member[taker]
    if row.count(taker) >= limits[own[0]]:
        return None
    if only_rich:
        columns = [column for column, home in enumerate(row) if load[home] > draft.floor[home]]
    else:
        least = (2 * load[taker] + 1) / shares[taker]
        columns = [column for column, home in enumerate(row) if (2 * load[home] - 1) / shares[home] > least]
    if not columns:
        return None
    full = [
        level
        for level, domain in enumerate(own)
        if sum([of_member[home][level] == domain for home in row]) >= limits[domain]
    ]
    best, best_key = None, (False, 0.0)
    for column in columns:
        home = row[column]
        if home == taker or not draft.may_change(number, column):
            continue
        if any(of_member[home][level] != own[level] for level in full):
            continue
        key = (load[home] > high[home], draft.column_share(column, home) - draft.column_share(column, taker))
        if best is None or key > best_key:
            best, best_key = column, key
    return best


def _push(draft: Draft, giver: int, high: Sequence[int]) -> int:
    """Move places of `giver` to members under their share, else to members that stay within `high`."""
    moved = 0
    for caps in (draft.goal, high):
        for number, row in enumerate(draft.rows):
            if draft.load[giver] <= high[giver]:
                return moved
            if giver not in row:
                continue
            column = row.index(giver)
            if not draft.may_change(number, column):
                continue
            draft.clear(number, column)
            found = draft.walk(number, 1, draft.counts(number), caps)
            if found:
                draft.fill(number, column, found[0])
                moved += 1
            else:
                draft.keep(number, column, giver)
    return moved
