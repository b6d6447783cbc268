"""A server and its client, whose calls are measured in turns with those of other sides.

Each turn of a side does the calls of one row.  Counted are the CPU of all its processes and of this one, in which the
clients are, and the median time of a call.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from bench.harness.cpu import cpu_s

Call = Callable[[int], object]
"""Does one call of a row; its number says which content is used."""


class Turns:
    """One side: its rows, and what each turn of a row took, for a call, in us."""

    def __init__(self, pids: Sequence[int], rows: Mapping[str, Call], calls: Mapping[str, int]) -> None:
        """`calls`: the calls of one turn, for each row."""
        self._pids: Final = pids
        self._rows: Final = rows
        self._calls: Final = calls
        self._numbers: dict[str, Iterator[int]] = {}
        self.cpu_us: dict[str, list[float]] = {}
        self.time_us: dict[str, list[float]] = {}

    def run(self, row: str) -> None:
        """Do the calls of one turn; nothing for a row that this side does not have."""
        if row not in self._rows:
            return
        call, count, times = self._rows[row], self._calls[row], list[float]()
        numbers = self._numbers.setdefault(row, itertools.count())
        cpu = cpu_s(self._pids) + time.process_time()
        for _ in range(count):
            begin = time.perf_counter()
            call(next(numbers))
            times.append((time.perf_counter() - begin) * 1e6)
        spent = cpu_s(self._pids) + time.process_time() - cpu
        self.time_us.setdefault(row, []).append(statistics.median(times))
        self.cpu_us.setdefault(row, []).append(spent / count * 1e6)

    def warm_up(self, turns: int, pause_s: float = 0.0) -> None:
        """Do turns of all rows that do not count."""
        for _ in range(turns):
            for row in self._rows:
                self.run(row)
            time.sleep(pause_s)
        self.cpu_us.clear()
        self.time_us.clear()


def take_turns(sides: Mapping[str, Turns], rows: Sequence[str], rounds: int) -> None:
    """Let each side do each row, in turn, so many times."""
    for _ in range(rounds):
        for row in rows:
            for side in sides.values():
                side.run(row)


def lines(sides: Mapping[str, Turns], row: str) -> Iterator[str]:
    """Iterate over a line for CPU and one for time: medians of all sides, the first one's ratio to each other one."""
    having = {name: side for name, side in sides.items() if row in side.cpu_us}
    for what, unit in (("cpu_us", "CPU"), ("time_us", "p50")):
        found: dict[str, list[float]] = {name: getattr(side, what)[row] for name, side in having.items()}
        (_, ours), *others = found.items()
        text = f"{row:<28} {unit}" + "".join(f"  {name} {statistics.median(us):.1f} us" for name, us in found.items())
        for name, theirs in others:
            ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
            text += f"  / {name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield text
