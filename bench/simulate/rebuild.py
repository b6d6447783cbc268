"""Time to make a lost device, and a lost machine, anew: which members are read and written, and what bounds it.

The next table is the product's, and so is the choice of the shards that are read (`engine.walker.walker_stripe`).  Each
row stands for its stripes of whole chunks.  Bytes are counted at each disk and at each machine's link.  All work at
once, and batches are many, so the slowest gives the time.  The walker's CPU was measured by `python -m bench.rebuild
--only 4m --count 512` and `--only empty`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from bench.simulate.balance import changed
from bench.simulate.hardware import (
    DISK_BYTES,
    DISK_FULL,
    DISK_READ_BYTES_PER_S,
    DISK_WRITE_BYTES_PER_S,
    GIB,
    LINK_BYTES_PER_S,
    Shape,
    members_of,
    table_of,
)
from bench.simulate.rows import seconds, table
from engine.lake_upkeep.lake_upkeep import WALK_SHARE
from engine.walker.walker_compare import Copy
from engine.walker.walker_report import WalkReport
from engine.walker.walker_stripe import Check, Place, Stripe, next_step
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table, moves
from lakefs.ids import MemberId, data_chunk_id
from lakefs.limits import CHUNK_BYTES

WALKER_CPU_S_PER_GIB: Final = 6.3
"""CPU of the process with the walker for 0.5 GiB of shards made anew from chunks of 4 MiB, 3.75 s, less the 0.61 s of a
loss without content."""
_CHUNK: Final = data_chunk_id(b"")


class Work(NamedTuple):
    """A loss: bytes read and written at each member, in all, and places that were lost."""

    read: Counter[MemberId]
    written: Counter[MemberId]
    places: int


def work_of(first: Table, following: Table, lost: set[MemberId]) -> Work:
    """Return what is read and written to make the shards of lost members anew, by the table that follows."""
    protection = first.protection
    code = ErasureCode(protection.data, protection.parity)
    sizes = code.sizes(CHUNK_BYTES)
    places = Counter(first.members[index].id for row in first.rows for index in row[: protection.width])
    read, written = Counter[MemberId](), Counter[MemberId]()
    count = 0
    for move in moves(first, following):
        if move.before not in lost:
            continue
        count += 1
        place_bytes = int(DISK_BYTES * DISK_FULL / places[move.before])
        row = following.rows[move.partition][: protection.width]
        homes = tuple(following.members[index].id for index in row)
        copies = [
            Copy(home, shard, sizes[shard], CHUNK_BYTES, 0) for shard, home in enumerate(homes) if shard != move.shard
        ]
        step = next_step(Stripe(_CHUNK, Place(homes, set(homes)), WalkReport(), copies), code)
        assert isinstance(step, Check), "a shard is missing"
        for copy in step.reads:
            read[copy.member] += place_bytes
        written[move.after] += place_bytes
    return Work(read, written, count)


def bounds(work: Work, machines: dict[MemberId, str], walkers: int) -> dict[str, float]:
    """Return the seconds that disks, links and walkers need, each alone, if so many machines have a walker."""
    links = Counter[str]()
    for member, count in (work.read + work.written).items():
        links[machines[member]] += count
    moved = sum(work.read.values()) + sum(work.written.values())
    made = sum(work.written.values())
    reads = max(work.read.values()) / DISK_READ_BYTES_PER_S
    writes = max(work.written.values()) / DISK_WRITE_BYTES_PER_S
    link = max(*links.values(), moved / walkers) / LINK_BYTES_PER_S
    walking = made / GIB * WALKER_CPU_S_PER_GIB / WALK_SHARE / walkers
    return {"disks": max(reads, writes), "links": link, "walkers": walking}


def report(shapes: Sequence[Shape]) -> str:
    """Return the table."""
    rows = []
    for shape in shapes:
        first, members = table_of(shape), members_of(shape)
        machines = {member.id: member.machine for member in members}
        for what, lost in (
            ("a device", {members[0].id}),
            ("a machine", {member.id for member in members if member.machine == "machine 0"}),
        ):
            last = changed(first, [member for member in members if member.id not in lost]).last
            work = work_of(first, last, lost)
            one, each = bounds(work, machines, 1), bounds(work, machines, shape.machines - 1)
            made = sum(work.written.values())
            rows.append(
                [
                    f"{shape}: {what}",
                    f"{made / 1e12:.3g} TB",
                    f"{len(work.read)}",
                    f"{len(work.written)}",
                    seconds(each["disks"]),
                    seconds(one["links"]),
                    seconds(max(one.values())),
                    seconds(max(each.values())),
                ]
            )
    head = (
        "lost",
        "made anew",
        "devices read",
        "devices written",
        "disks alone",
        "one walker's link",
        "time, one walker",
        "time, a walker a machine",
    )
    return table(head, rows)
