"""`python -m bench.head_keyed [--rounds N]`: keys at a head of a lake beside one engine, sides interleaved.

The lake has three members at 2+1 on this machine, so keys have three homes.  All values are in the page cache.  Counted
is CPU of client and server together (all processes, also the members'), and the median time of a call.  Values are
checked by CRC32C, as a KV cache's are.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.process import ROOT, EngineProcess
from lakefs.client.facade import driver_of
from lakefs.get.keyed import find_values
from lakefs.lake.spaces import SpaceSteps

KIB: Final = 1 << 10
BLOCK: Final = 64 * KIB
KEYS: Final = 128
"""Keys of one match."""
AT_ONCE: Final = 16
"""Blocks of one load."""
WARM_UP: Final = 3
HEAD, ENGINE = "head", "one engine"
MATCH, ASKED = f"match of {KEYS} keys", "the same, by request"
LOAD, MOVED = f"load of {AT_ONCE} x 64 KiB", "the same load, by request"
CALLS: Final = {MATCH: 256, ASKED: 64, LOAD: 128, MOVED: 64}
"""Calls of one side before the next side's turn."""

Call = Callable[[int], object]
"""Does one call of a row; its number says which keys are used."""


@dataclass
class Side:
    """A server and a client of it; CPU and median time of a call in us, of each turn by row."""

    calls: dict[str, Call]
    pids: list[int]
    turn: dict[str, Iterator[int]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    time_us: dict[str, list[float]] = field(default_factory=dict)

    def run(self, row: str) -> None:
        """Do the calls of one turn."""
        call, turn, times = self.calls[row], self.turn.setdefault(row, itertools.count()), list[float]()
        cpu = cpu_s(self.pids) + time.process_time()
        for _ in range(CALLS[row]):
            begin = time.perf_counter()
            call(next(turn))
            times.append((time.perf_counter() - begin) * 1e6)
        spent = cpu_s(self.pids) + time.process_time() - cpu
        self.time_us.setdefault(row, []).append(statistics.median(times))
        self.cpu_us.setdefault(row, []).append(spent / CALLS[row] * 1e6)


@contextmanager
def side_of(folder: Path, *flags: str) -> Iterator[Side]:
    """Context manager: a server with the values, and a client that has used them."""
    folder.mkdir()
    keys = [os.urandom(32) for _ in range(KEYS)]
    with EngineProcess(folder, *flags) as engine, engine.connect(check=lakefs.Check.CRC32C) as lake:
        space, driver = lake.space("bench"), driver_of(lake)
        for first in range(0, KEYS, AT_ONCE):
            space.put_many(keys[first : first + AT_ONCE], [payload(BLOCK) for _ in range(AT_ONCE)])
        with lake.pool(size_bytes=AT_ONCE * BLOCK) as pool:
            offsets = [each * BLOCK for each in range(AT_ONCE)]

            def some(number: int) -> list[bytes]:
                begin = number * AT_ONCE % KEYS
                return keys[begin : begin + AT_ONCE]

            def load(number: int) -> None:
                assert space.load(some(number), pool, offsets) == [BLOCK] * AT_ONCE

            def load_by_request(number: int) -> None:
                steps = SpaceSteps(driver.steps, space.number).load(some(number), pool, offsets)
                assert driver.run(steps) == [BLOCK] * AT_ONCE

            side = Side(
                {
                    MATCH: lambda _: space.match(keys),
                    ASKED: lambda _: driver.run(find_values(space.number, keys)),
                    LOAD: load,
                    MOVED: load_by_request,
                },
                process_tree(engine.pid),
            )
            for _ in range(WARM_UP):
                for row in side.calls:
                    side.run(row)
            side.cpu_us.clear()
            side.time_us.clear()
            yield side


def main() -> None:
    """Print a line for each row: CPU and time of a call at the head and at one engine, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_keyed")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".keyed-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "devices").mkdir()
        devices = [part for number in (2, 3) for part in ("--data", str(folder / "devices" / str(number)))]
        head = stack.enter_context(side_of(folder / "lake", *devices, "--protect", "2+1", "--accept-loss"))
        engine = stack.enter_context(side_of(folder / "engine"))
        for _ in range(rounds):
            for row in CALLS:
                head.run(row)
                engine.run(row)
        for row in CALLS:
            print(_line(row, "CPU", head.cpu_us[row], engine.cpu_us[row]))
            print(_line(row, "p50", head.time_us[row], engine.time_us[row]))


def _line(row: str, unit: str, head: list[float], engine: list[float]) -> str:
    """Return medians of both sides, and the median of their ratios in the same round."""
    ratios = [one / other for one, other in zip(head, engine, strict=True)]
    text = f"{row:<26} {unit}  {HEAD} {statistics.median(head):7.1f} us  {ENGINE} {statistics.median(engine):7.1f} us"
    return text + f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
