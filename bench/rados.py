"""A lake of six members beside RADOS with six OSDs, both at 4+2: `python -m bench.rados [--rounds N] [--losses N]`.

Compared is a store of content, as a client sees it, on one machine, with all data in folders of one disk:

- *Lake*: `lake serve` with six folders, as shipped.  The client sends content over a Unix socket to the lake's head,
  which hashes it by BLAKE3, encodes it, and sends shards to six members' processes.  Names are kept and made durable.
- *RADOS*: Debian's ceph tuned as `bench.peers.rados_cluster` says, one monitor and six OSDs.  The client sends content
  over a Unix socket to a gateway (`bench.peers.rados_gateway`, Python over python3-rados), which hashes it by BLAKE3
  and stores it as an object of that name in a pool that the OSDs encode.  It keeps no clients' names: it does less.

On both sides a write is durable on all shards when it is answered, and a read is compared with its BLAKE3 behind the
client's hop; the lake's client does so once more for what it reads through `get_into`.  Of puts, and of gets at RADOS,
4 MiB are 4 in flight and shorter ones 64; the lake's gets of 64 KiB and more are one at a time.  *First* gets are of
content that was put and never read; those *again* follow them: the lake's come from its DRAM tier, those of RADOS from
its OSDs' caches.

Counted is CPU (user and system) of all serving processes, the gateway and the client, while the client waits; idle
work in that time included, the kernel's own threads not.  Both sides run all the time, and take turns.  Room on disk
is all that the lake's folders take, and for RADOS what objects take, without their records in RocksDB.

Rebuilding: new sides with 1 GiB in objects of 4 MiB.  One member, or OSD, is killed with all that it has; after 5 s
an empty one is put in its place.  From then on counts the time until every chunk has all its shards, and the CPU of all
serving processes, for a GiB of what 4+2 has on one device (a quarter of what clients stored).  From the kill on
a client reads objects of 64 KiB, ten a second, one after the other of a thousand; the slowest is in the table.

Times are those of a machine as busy as this one is; CPU is the better figure.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.content import payload
from bench.harness.cpu import cpu_s
from bench.harness.machine import machine
from bench.harness.process import ROOT
from bench.peers.packages import PeerUnavailable
from bench.peers.rados_cluster import require_ceph
from bench.peers.rados_sides import IN_FLIGHT, LAKE, LONG, MIDDLE, RADOS, SHORT, SIDES, Side, wait_settled

OUT: Final = ROOT / "bench" / "out"
REPLACED_AFTER_S: Final = 5.0
READ_PAUSE_S: Final = 0.1


@dataclass(frozen=True)
class Scale:
    """Objects: of one turn by size, those whose room on disk is measured, and of 4 MiB and 64 KiB for a rebuild."""

    counts: dict[int, int]
    space_objects: int
    rebuilt_long: int
    rebuilt_middle: int

    def lost_gib(self) -> float:
        """Return what 4+2 has on one of six devices."""
        return (self.rebuilt_long * LONG + self.rebuilt_middle * MIDDLE) * 6 / 4 / 6 / (1 << 30)


FULL: Final = Scale({LONG: 16, MIDDLE: 512, SHORT: 2048}, 10_000, 256, 1000)
QUICK: Final = Scale({LONG: 4, MIDDLE: 64, SHORT: 128}, 500, 8, 50)


@dataclass(frozen=True)
class Row:
    """A figure's name, unit, and goal for the ratio lake / RADOS (None: no goal, only shown)."""

    name: str
    unit: str
    goal: float | None = None


# --- what is measured ---------------------------------------------------------------------------------------

Found = dict[str, dict[str, list[float]]]
"""Figures of each round, by row and side."""
_SIZES: Final = {LONG: "4 MiB", MIDDLE: "64 KiB", SHORT: "4 KiB"}
REBUILD: Final = (
    Row("rebuild: time to full redundancy", "s", 0.5),
    Row("rebuild: CPU a GiB rebuilt", "s", 0.5),
    Row("rebuild: slowest read meanwhile", "s", 0.3),
)
SPACE: Final = Row("stored / user bytes, 4 KiB", "", 3.2 / 6.0)


def cpu_row(what: str, size: int, scale: Scale) -> str:
    """Return the name of a row of CPU."""
    amount = f"{scale.counts[LONG] * 4} MiB as 4 MiB" if size == LONG else f"one of {_SIZES[size]}"
    return f"{what}, {amount}"


class Rates:
    """CPU of puts and gets, in ms: of all objects of 4 MiB together, and of each shorter one."""

    def __init__(self, found: Found, scale: Scale) -> None:
        self._found = found
        self._scale = scale

    def run(self, side: Side, size: int, *, keep: bool) -> None:
        """Do one turn of a side: put new content, read it, read it again."""
        count = self._scale.counts[size]
        contents = [payload(size) for _ in range(count)]
        target = memoryview(bytearray(size))
        names: list[str] = []
        steps: list[tuple[str, Callable[[], object]]] = [
            ("put", lambda: names.extend(side.put_all(contents, IN_FLIGHT[size]))),
            ("get, first", lambda: side.get_all(names, target)),
            ("warm up", lambda: side.get_all(names, target)),
            ("get, again", lambda: side.get_all(names, target)),
        ]
        for what, step in steps:
            own, hop, serving = time.process_time(), cpu_s(side.hop_pids()), cpu_s(side.pids())
            step()
            served = cpu_s(side.pids()) - serving
            spent = served + cpu_s(side.hop_pids()) - hop + time.process_time() - own
            if what == "warm up":
                time.sleep(1.1)  # so that notes of reads are sent, and read content is in the tier
            elif keep:
                per = 1e3 / (1 if size == LONG else count)
                row = cpu_row(what, size, self._scale)
                _note(self._found, row, side.name, spent * per)
                _note(self._found, f"{row}: serving processes alone", side.name, served * per)


def measure_space(found: Found, side: Side, scale: Scale) -> None:
    """Note the room on disk of short objects, for a byte of theirs."""
    before = side.stored_bytes()
    side.put_all([payload(SHORT) for _ in range(scale.space_objects)], IN_FLIGHT[SHORT])
    time.sleep(1)
    _note(found, SPACE.name, side.name, (side.stored_bytes() - before) / (scale.space_objects * SHORT))


def measure_rebuild(found: Found, side: Side, read: Iterator[str], scale: Scale) -> None:
    """Lose a member, and put an empty one in its place."""
    with side.reader() as reading:
        reads = Reads(reading, read)
        reads.start()
        side.lose()
        time.sleep(REPLACED_AFTER_S)
        before, began = {pid: cpu_s([pid]) for pid in side.pids()}, time.monotonic()
        side.replace()
        side.wait_whole()
        took_s = time.monotonic() - began
        spent = sum(cpu_s([pid]) - before.get(pid, 0.0) for pid in side.pids())
        slowest_s = reads.stop()
    time_row, cpu_row, slowest_row = REBUILD
    _note(found, time_row.name, side.name, took_s)
    _note(found, cpu_row.name, side.name, spent / scale.lost_gib())
    _note(found, slowest_row.name, side.name, slowest_s)


class Reads:
    """A thread that reads objects of 64 KiB, ten a second."""

    def __init__(self, side: Side, names: Iterator[str]) -> None:
        self._side = side
        self._names = names
        self._ended = threading.Event()
        self._slowest_s = 0.0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def stop(self) -> float:
        """End it; return the seconds that the slowest read took.  Raises the failure of a read."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._slowest_s

    def _run(self) -> None:
        target = memoryview(bytearray(MIDDLE))
        try:
            while not self._ended.wait(READ_PAUSE_S):
                began = time.monotonic()
                self._side.get_all([next(self._names)], target)
                self._slowest_s = max(self._slowest_s, time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - raised again by stop
            self._failure = error


def _note(found: Found, row: str, side: str, figure: float) -> None:
    found.setdefault(row, {LAKE: [], RADOS: []})[side].append(figure)
    print(f"{row}: {side} {figure:.3g}", file=sys.stderr, flush=True)


# --- the command ------------------------------------------------------------------------------------------


def measure_rates(found: Found, folder: Path, scale: Scale, rounds: int) -> None:
    """Measure CPU and room on disk: the sides take turns, and who begins changes."""
    with ExitStack() as stack:
        sides = [stack.enter_context(made(folder)) for made in SIDES]
        for side in sides:
            measure_space(found, side, scale)
        rates = Rates(found, scale)
        for turn in range(1 + rounds):
            for size in _SIZES:
                for side in sides if turn % 2 else reversed(sides):
                    rates.run(side, size, keep=turn > 0)  # the first turn is to warm up


def measure_rebuilds(found: Found, folder: Path, scale: Scale, rounds: int) -> None:
    """Measure losses, on both sides in turn."""
    with ExitStack() as stack:
        sides = [stack.enter_context(made(folder)) for made in SIDES]
        read: dict[str, Iterator[str]] = {}
        for side in sides:
            for _ in range(scale.rebuilt_long // IN_FLIGHT[LONG]):
                side.put_all([payload(LONG) for _ in range(IN_FLIGHT[LONG])], IN_FLIGHT[LONG])
            names = side.put_all([payload(MIDDLE) for _ in range(scale.rebuilt_middle)], IN_FLIGHT[MIDDLE])
            read[side.name] = itertools.cycle(names)
            wait_settled(side)
        for turn in range(rounds):
            for side in sides if turn % 2 else reversed(sides):
                measure_rebuild(found, side, read[side.name], scale)
                wait_settled(side)


PARTS: Final = {"cpu": measure_rates, "loss": measure_rebuilds}
"""Both measure a part of the figures, into a folder, so many times."""


def table(found: Found, goals: dict[str, Row]) -> str:
    """Return the figures as Markdown: medians, lowest and highest of the rounds, and the ratio of the medians."""
    lines = ["| | lake | RADOS | lake / RADOS | goal | |", "|---|---|---|---|---|---|"]
    for name, by_side in found.items():
        lake, rados = by_side[LAKE], by_side[RADOS]
        ratio = statistics.median(lake) / statistics.median(rados)
        row = goals.get(name, Row(name, "ms"))
        goal, verdict = "", ""
        if row.goal is not None:
            goal, verdict = f"<= {row.goal:.2g}x", "met" if ratio <= row.goal else "**missed**"
        lines.append(f"| {name} | {_cell(lake, row)} | {_cell(rados, row)} | {ratio:.2f}x | {goal} | {verdict} |")
    return "\n".join(lines)


def _cell(figures: Sequence[float], row: Row) -> str:
    unit = f" {row.unit}" if row.unit else ""
    middle = f"{statistics.median(figures):.3g}{unit}"
    return middle if len(figures) == 1 else f"{middle} ({min(figures):.3g} to {max(figures):.3g})"


def goals_of(scale: Scale) -> dict[str, Row]:
    """Return the rows that have goals, or another unit than ms."""
    rows = [*REBUILD, SPACE]
    for size, goal in ((LONG, 0.7), (MIDDLE, 0.3), (SHORT, 0.3)):
        rows.append(Row(cpu_row("put", size, scale), "ms", goal))
    rows += [Row(cpu_row("get, first", LONG, scale), "ms", 0.7), Row(cpu_row("get, again", LONG, scale), "ms", 0.7)]
    return {row.name: row for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 also where ceph is not installed, which is said."""
    parser = argparse.ArgumentParser(prog="python -m bench.rados", description="A lake beside RADOS.")
    parser.add_argument("--rounds", type=int, default=7, help="turns of puts and gets on each side")
    parser.add_argument("--losses", type=int, default=3, help="losses on each side")
    parser.add_argument("--only", choices=list(PARTS), help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="few objects, to try the command; figures mean nothing")
    options = parser.parse_args(arguments)
    try:
        require_ceph()
    except PeerUnavailable as reason:
        print(f"bench.rados: skipped: {reason}")
        return 0
    scale = QUICK if options.quick else FULL
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT, prefix="rados-") as name:
        facts = machine(Path(name))
        print(f"{facts['kind']}; {facts['date']}, commit {facts['commit']}, load before {facts['load']}", flush=True)
        for part, measure in PARTS.items():
            if options.only not in (None, part):
                continue
            folder = Path(name) / part  # short, as a socket's path must be
            folder.mkdir()
            found: Found = {}
            measure(found, folder, scale, options.rounds if part == "cpu" else options.losses)
            print("\n" + table(found, goals_of(scale)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
