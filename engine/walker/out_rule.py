"""The rule by which silent members stay in the lake: too many are away at once, so it is the network or a power line.

What such members have is made anew elsewhere: that takes room and hours, and is in vain if all are back a minute later.

Rules kept here:
- None is made out while a row of a table in use has more than m homes away: what lies there cannot be made anew.
- None is while more members are away than the largest domain of a level has, or m; the level is the rack, unless an
  operator says otherwise.  A rack without a name is the machine.  Where all are in one domain, only m may be away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Final

from engine.coordinator.records import MemberRecord
from lakefs.cluster.table import Table
from lakefs.ids import MemberId

_LEVELS: Final = {"machine": 1, "rack": 2, "zone": 3}
"""Place of a level's name in `MemberRecord.domains`."""
_OFF: Final = "off"


def stopped_because(tables: Sequence[Table], records: Sequence[MemberRecord], away: Set[MemberId], stops: str) -> str:
    """Return why no member may be made out while these are away; empty: it may.

    `records` are of the lake's members; `stops` is `SettingsRecord.out_stops`.
    """
    parity = tables[0].protection.parity
    if stops != _OFF:
        most = max(parity, _largest(records, stops))
        if len(away) > most:
            worth = f"the largest {stops} has" if most > parity else "may be lost"
            return f"{len(away)} members are away at once, more than {worth} ({most})"
    if any(_has_lost_row(table, away) for table in tables):
        return f"{len(away)} members are away at once, and some content has more than {parity} shards at them"
    return ""


def _largest(records: Sequence[MemberRecord], stops: str) -> int:
    """Return the number of members of the level's largest domain; 0 if it has only one."""
    level = _LEVELS.get(stops, _LEVELS["rack"])
    sizes = Counter(_domain(record, level) for record in records)
    return max(sizes.values()) if len(sizes) > 1 else 0


def _domain(record: MemberRecord, level: int) -> tuple[str, ...]:
    """Return the domain of a member on a level, or on the widest one below that has a name."""
    while level and not "".join(record.domains[level : level + 1]):
        level -= 1
    return tuple(record.domains[level:]) if level else (record.member.hex(),)


def _has_lost_row(table: Table, away: Set[MemberId]) -> bool:
    """Return True if more than m homes of a row are away."""
    lost = {index for index, member in enumerate(table.members) if member.id in away}
    width, parity = table.protection.width, table.protection.parity
    return bool(lost) and any(sum([index in lost for index in row[:width]]) > parity for row in table.rows)
