"""Balance of homes, and what moves when machines go and come: exact, by the product's own tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bench.simulate.hardware import Shape, members_of, table_of
from bench.simulate.rows import table
from lakefs.cluster.losses import losses_outlived
from lakefs.cluster.members import Level, Member
from lakefs.cluster.placing import next_table
from lakefs.cluster.table import Table, moves


class Change(NamedTuple):
    """A change of members: homes that had to move, homes that did, tables that it took, and the last of them."""

    needed: int
    moved: int
    tables: int
    last: Table


def loads(found: Table, group: Callable[[Member], object] = lambda member: member.id) -> list[int]:
    """Return the number of homes of each member, or of each group of members, in any order."""
    width = found.protection.width
    counted = Counter(group(found.members[index]) for row in found.rows for index in row[:width])
    return [counted[key] for key in {group(member) for member in found.members}]


def spread(counts: Sequence[int]) -> float:
    """Return the greatest of some counts, in proportion to their mean."""
    return max(counts) * len(counts) / sum(counts)


def changed(first: Table, members: Iterable[Member]) -> Change:
    """Return what happens when the lake has these members from now on: tables, until no row changes any more."""
    wanted = list(members)
    stay = {member.id for member in wanted}
    width = first.protection.width
    needed = sum(first.members[index].id not in stay for row in first.rows for index in row[:width])
    moved, last, count = 0, first, 0
    while True:
        following = next_table(last, wanted)
        step = sum(1 for _ in moves(last, following))
        if not step and count:
            return Change(needed, moved, count, last)
        moved, last, count = moved + step, following, count + 1


def report(shapes: Sequence[Shape]) -> str:
    """Return the table."""
    rows = []
    for shape in shapes:
        first, members = table_of(shape), members_of(shape)
        gone = changed(first, [member for member in members if member.machine != "machine 0"])
        back = changed(gone.last, members)
        share = len(gone.last.rows) * first.protection.width // shape.machines
        rows.append(
            [
                str(shape),
                f"{min(loads(first))} to {max(loads(first))}",
                f"{spread(loads(gone.last)):.3f}",
                f"{gone.moved / gone.needed:.3f}",
                f"{back.moved / share:.3f}",
                f"{spread(loads(back.last)):.3f}",
                ", ".join(str(losses_outlived(first, level)) for level in (Level.MEMBER, Level.MACHINE, Level.RACK)),
            ]
        )
    head = (
        "lake",
        "homes of a device",
        "most / mean, a machine gone",
        "moved / least, gone",
        "moved / its share, back",
        "most / mean, back",
        "devices, machines, racks outlived",
    )
    return table(head, rows)
