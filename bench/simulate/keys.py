"""Keyed blobs over many homes: the hit rate when a machine goes, and the price of a match of many keys.

The ring of keys is the product's, so which key has which home is exact.  What requests cost is measured
(`bench.simulate.measured`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from bench.simulate.balance import changed
from bench.simulate.hardware import Shape, members_of, table_of
from bench.simulate.measured import KEYS, Price, keys_of
from bench.simulate.rows import table, three
from lakefs.cluster.key_ring import KeyRing
from lakefs.ids import MemberId

SAMPLE: Final = 200_000
MATCHES: Final = 200
_SPACE: Final = 1


def mean_groups(ring: KeyRing, group: Callable[[MemberId], object]) -> float:
    """Return how many homes, or groups of homes, the keys of one match have on average."""
    return statistics.mean(
        len({group(ring.home(_SPACE, key)) for key in keys_of(number * KEYS, KEYS)}) for number in range(MATCHES)
    )


def hits(shapes: Sequence[Shape]) -> str:
    """Return the table of hit rates when a machine goes, and of what moves."""
    rows = []
    sample = keys_of(0, SAMPLE)
    for shape in shapes:
        first, members = table_of(shape), members_of(shape)
        lost = {member.id for member in members if member.machine == "machine 0"}
        last = changed(first, [member for member in members if member.id not in lost]).last
        before, after = first.key_ring(), last.key_ring()
        homes = [(before.home(_SPACE, key), after.home(_SPACE, key)) for key in sample]
        gone = sum(old in lost for old, _ in homes)
        moved = sum(old not in lost and old != new for old, new in homes)
        takers = {new for old, new in homes if old in lost}
        most = max(before.share(member, 1 << 40) for member in before.members) * shape.members / (1 << 40)
        rows.append(
            [
                str(shape),
                f"{100 * (1 - gone / SAMPLE):.2f}%",
                f"{100 * (1 - 1 / shape.machines):.2f}%",
                str(moved),
                str(len(takers)),
                f"{most:.2f}",
            ]
        )
    head = (
        "lake",
        "hits while a machine is away",
        "its fair share away",
        "other keys that move",
        "devices that take its keys",
        "most keys of a device / mean",
    )
    return table(head, rows)


def matches(shapes: Sequence[Shape], price: Price) -> str:
    """Return the table of what a match costs."""
    rows = []
    for shape in shapes:
        ring, machine_of = table_of(shape).key_ring(), {member.id: member.machine for member in members_of(shape)}
        for what, requests in (
            ("one request a home", mean_groups(ring, lambda home: home)),
            ("one request a machine", mean_groups(ring, machine_of.__getitem__)),
        ):
            rows.append([f"{shape.members:,} homes on {shape.machines} machines: {what}", three(requests)])
    single = Shape(96, devices=1)
    rows.append([f"{single.members} homes", three(mean_groups(table_of(single).key_ring(), lambda home: home))])
    costs = [price.of(float(row[1])) for row in rows]
    told = [[*row, f"{cost / 1000:.2f} ms", f"{cost / costs[-1]:.2f}x"] for row, cost in zip(rows, costs, strict=True)]
    head = (f"match of {KEYS} keys", "requests", "CPU, both sides", "beside 96 homes")
    note = f"A match costs {price.match_us:.0f} us of CPU, and each of its requests {price.request_us:.0f} us."
    return f"{table(head, told)}\n\n{note}"
