"""A lost member's content made anew: CPU of each process, time, and bytes read: `python -m bench.rebuild [--rounds N]`.

A lake of six folders at 4+2 on this machine, as shipped.  Objects are stored, one member is killed with all that it
has, and after a moment an empty one is put in its place by `lake cluster replace`.  From then on until every chunk has
all its shards count the time, and the CPU (user and system) of the parent (head, names, walker), of the new member and
of the other five, for a GiB of what was lost.  A row with no objects shows what a loss costs whatever was stored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.harness.content import payload
from bench.harness.cpu import cpu_s
from bench.harness.machine import machine
from bench.harness.process import ROOT
from bench.peers.rados_sides import IN_FLIGHT, LONG, LOST, MIDDLE, SHORT, LakeSide, lake_as, wait_settled

OUT: Final = ROOT / "bench" / "out"
REPLACED_AFTER_S: Final = 2.0
SHARDS: Final = {LONG: LONG // 4, MIDDLE: MIDDLE, SHORT: SHORT}
"""Bytes of a shard, by the length of its chunk."""
KEPT_BY: Final = {LONG: 6, MIDDLE: 3, SHORT: 3}
"""Members that have a shard of a chunk."""


class Scale(NamedTuple):
    """Objects of one length that a lake has when it loses a member."""

    size: int
    objects: int

    def lost_bytes(self) -> float:
        """Return what one of six members has, about."""
        return SHARDS[self.size] * self.objects * KEPT_BY[self.size] / 6


class Figures(NamedTuple):
    """One loss."""

    took_s: float
    parent_s: float
    new_s: float
    others_s: float
    read_bytes: int
    written_bytes: int


SCALES: Final = {"empty": Scale(LONG, 0), "4m": Scale(LONG, 64), "64k": Scale(MIDDLE, 2000), "4k": Scale(SHORT, 8000)}


def lose_one(side: Side) -> Figures:
    """Lose a member, replace it, and wait until all is whole."""
    side.lose()
    time.sleep(REPLACED_AFTER_S)
    before, began = {pid: cpu_s([pid]) for pid in side.pids()}, time.monotonic()
    walked = side.walked()
    side.replace()
    side.wait_whole()
    took_s = time.monotonic() - began
    spent = {pid: cpu_s([pid]) - before.get(pid, 0.0) for pid in side.pids()}
    parent, new = side.pids()[0], set(side.new_pids())
    others = sum(each for pid, each in spent.items() if pid != parent and pid not in new)
    read, written = (now - then for now, then in zip(side.walked(), walked, strict=True))
    return Figures(took_s, spent[parent], sum(spent[pid] for pid in new), others, read, written)


class Side(LakeSide):
    """A lake, and what its walker has moved."""

    def walked(self) -> tuple[int, int]:
        """Return the bytes that the walker has read and written."""
        found = self._lake.status()["lake"]["walker"]["since_start"]
        return found["bytes_read"], found["bytes_written"]

    def new_pids(self) -> list[int]:
        """Return the processes of the member that took the place of the lost one."""
        return self._machine.pids_of(self._machine.devices[LOST])


def measure(scale: Scale, rounds: int) -> list[Figures]:
    """Measure so many losses of a lake with these objects."""
    with tempfile.TemporaryDirectory(dir=OUT, prefix="rebuild-") as name, lake_as(Side, Path(name)) as side:
        for begin in range(0, scale.objects, 64):
            count = min(64, scale.objects - begin)
            side.put_all([payload(scale.size) for _ in range(count)], IN_FLIGHT[scale.size])
        found = []
        for _ in range(rounds):
            wait_settled(side)
            found.append(lose_one(side))
            print(found[-1], file=sys.stderr, flush=True)
        return found


def row(name: str, scale: Scale, found: Sequence[Figures]) -> str:
    """Return a row of the table: medians."""
    took, parent, new, others, read, written = (statistics.median(column) for column in zip(*found, strict=True))
    gib = scale.lost_bytes() / (1 << 30)
    cells = [f"{took:.1f} s", *(f"{each:.2f} s" for each in (parent, new, others, parent + new + others))]
    cells.append(f"{(parent + new + others) / gib:.1f} s" if gib else "")
    cells.append(f"{read / written:.2f}" if written else "")
    return f"| {name} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.rebuild", description="CPU of a rebuild.")
    parser.add_argument("--rounds", type=int, default=3, help="losses of each row")
    parser.add_argument("--only", choices=list(SCALES), action="append", help="one of the rows")
    parser.add_argument("--count", type=int, default=0, help="objects, instead of those of the row")
    options = parser.parse_args(arguments)
    OUT.mkdir(exist_ok=True)
    facts = machine(OUT)
    print(f"{facts['kind']}; {facts['date']}, commit {facts['commit']}, load before {facts['load']}", flush=True)
    print("| | time | CPU parent | new member | other members | all | all, a GiB | read / written |\n|" + "---|" * 8)
    for name in options.only or SCALES:
        scale = SCALES[name]
        if options.count:
            scale = scale._replace(objects=options.count)
        print(row(name, scale, measure(scale, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
