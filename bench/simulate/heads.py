"""Connections and memory of a head, and of the members that it reaches.

A head connects to a member when it asks it, and closes what was unused for MEMBER_IDLE_S; counted is a head that has
used all within that time.  Memory of a connection is measured (`bench.simulate.measured`); tables, the ring of keys and
the times of members' answers are those of the product, weighed here.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence

from bench.simulate.hardware import Shape, table_of
from bench.simulate.measured import Measured
from bench.simulate.rows import size, table
from engine.stripes.answer_times import AnswerTimes
from lakefs.cluster.table_format import pack, unpack
from lakefs.limits import MEMBER_LINKS_MAX


def weight(make: Callable[[], object]) -> int:
    """Return the bytes that an object takes with all that it refers to and nobody else does."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return taken


def answer_times(shape: Shape) -> AnswerTimes:
    """Return the times of a head to which each member has answered often."""
    times = AnswerTimes()
    for member in table_of(shape).members:
        for number in range(20):
            times.note(member.id, number * 1e-4)
    return times


def report(shapes: Sequence[Shape], found: Measured) -> str:
    """Return the table."""
    rows = []
    for shape in shapes:
        packed = pack(table_of(shape))
        unpacked = unpack(packed)
        links = min(shape.members, MEMBER_LINKS_MAX)
        weights = weight(lambda packed=packed: unpack(packed)), weight(unpacked.key_ring)  # type: ignore[misc]
        times = weight(lambda shape=shape: answer_times(shape))  # type: ignore[misc]
        head = links * found.head_bytes
        rows.append(
            [
                str(shape),
                f"{links:,}",
                size(head),
                size(weights[0]),
                size(weights[1]),
                size(times),
                size(head + sum(weights) + times),
                f"{shape.machines}",
                size(shape.machines * found.member_bytes),
                f"{shape.machines * links:,}",
            ]
        )
    head_row = (
        "lake",
        "connections of a head",
        "their memory",
        "a table",
        "ring of keys",
        "answer times",
        "in all",
        "connections of a member",
        "their memory",
        "connections in the lake",
    )
    return table(head_row, rows)
