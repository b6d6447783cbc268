"""`python -m bench.head_hot [--rounds N]`: hot reads at a head of a lake beside one engine, sides interleaved.

The lake has six members at 4+2 and a DRAM tier at its head; one engine has a tier as large, another one none, so that
its content comes from the page cache.  All content is read until it is hot.  Counted is CPU of client and server
together (all processes, also the members'), and the time of a call.  Nothing is checked by the client, so that what
differs is not hidden by what is the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.process import ROOT, EngineProcess
from lakefs.client.facade import driver_of
from lakefs.ids import data_chunk_id

KIB: Final = 1 << 10
BLOCK: Final = 64 * KIB
BLOCKS: Final = 256
"""Blocks of 64 KiB: more than the processor's caches hold."""
AT_ONCE: Final = 16
"""Blocks of one load into a pool."""
WARM_UP: Final = 4
TIER: Final = ("--dram-tier-bytes", "512M")
HEAD, ENGINE, CACHE = "head", "one engine", "one engine, page cache"
BY_ID, POOL, MOVED = "GET 64 KiB by id", "16 x 64 KiB into a pool", "the same, by request"
CALLS: Final = {BY_ID: 4096, POOL: 256, MOVED: 128}
"""Calls of one side before the next side's turn."""

Call = Callable[[int], object]
"""Does one call of a row; its number says which content is read."""


@dataclass
class Side:
    """A server and a client of it; CPU and time of a call in us, of each turn by row."""

    calls: dict[str, Call]
    pids: list[int]
    turn: dict[str, Iterator[int]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    time_us: dict[str, list[float]] = field(default_factory=dict)

    def run(self, row: str) -> None:
        """Do the calls of one turn."""
        call, turn = self.calls[row], self.turn.setdefault(row, itertools.count())
        cpu, begin = cpu_s(self.pids) + time.process_time(), time.perf_counter()
        for _ in range(CALLS[row]):
            call(next(turn))
        self.time_us.setdefault(row, []).append((time.perf_counter() - begin) / CALLS[row] * 1e6)
        spent = cpu_s(self.pids) + time.process_time() - cpu
        self.cpu_us.setdefault(row, []).append(spent / CALLS[row] * 1e6)


@contextmanager
def side_of(folder: Path, blocks: Sequence[bytes], *flags: str) -> Iterator[Side]:
    """Context manager: a server with the blocks, and a client by which they were read until they are hot."""
    folder.mkdir()
    chunks: list[bytes] = [data_chunk_id(block) for block in blocks]
    with EngineProcess(folder, *flags) as engine, engine.connect(check=lakefs.Check.NONE) as lake:
        for first in range(0, BLOCKS, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            lake.put_many([(f"bench/{number}", blocks[number]) for number in numbers])
        os.sync()
        with lake.pool(size_bytes=BLOCKS * BLOCK) as pool:
            target = memoryview(bytearray(BLOCK))
            driver = driver_of(lake)

            def slots(number: int) -> tuple[list[bytes], list[int]]:
                taken = [(number * AT_ONCE + each) % BLOCKS for each in range(AT_ONCE)]
                return [chunks[each] for each in taken], [each * BLOCK for each in taken]

            def load(number: int) -> None:
                wanted, offsets = slots(number)
                assert lake.load_many(wanted, pool, offsets) == [BLOCK] * AT_ONCE

            def load_by_request(number: int) -> None:
                wanted, offsets = slots(number)
                assert driver.run(driver.steps.load_many(wanted, pool, offsets)) == [BLOCK] * AT_ONCE

            rows: dict[str, Call] = {
                BY_ID: lambda number: lake.chunks.get_into(chunks[number % BLOCKS], target),
                POOL: load,
                MOVED: load_by_request,
            }
            side = Side(rows, process_tree(engine.pid))
            for _ in range(WARM_UP):
                for row in rows:
                    side.run(row)
                time.sleep(1.1)  # so that notes of reads are sent
            side.cpu_us.clear()
            side.time_us.clear()
            yield side


def main() -> None:
    """Print a line for each row: CPU and time of a call at the head, and its ratio to each engine's."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_hot")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    blocks = [payload(BLOCK) for _ in range(BLOCKS)]
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".head-") as name, ExitStack() as stack:
        folder = Path(name)
        devices = [part for number in range(2, 7) for part in ("--data", str(folder / "devices" / str(number)))]
        (folder / "devices").mkdir()
        sides = {
            HEAD: side_of(folder / "lake", blocks, *TIER, *devices, "--accept-loss"),
            ENGINE: side_of(folder / "engine", blocks, *TIER),
            CACHE: side_of(folder / "cache", blocks, "--dram-tier-bytes", "0"),
        }
        entered = {side: stack.enter_context(opened) for side, opened in sides.items()}
        for _ in range(rounds):
            for row in CALLS:
                for one in entered.values():
                    one.run(row)
        for row in CALLS:
            for what, unit in (("cpu_us", "CPU"), ("time_us", "time")):
                print(_line(row, unit, {side: getattr(one, what)[row] for side, one in entered.items()}))


def _line(row: str, unit: str, found: dict[str, list[float]]) -> str:
    """Return medians of all sides, and the median of the head's ratio to each other one in the same round."""
    text = f"{row:<26} {unit:<5}" + "".join(f"  {side} {statistics.median(us):6.1f} us" for side, us in found.items())
    for side in (ENGINE, CACHE):
        ratios = [head / other for head, other in zip(found[HEAD], found[side], strict=True)]
        text += f"  / {side} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return text


if __name__ == "__main__":
    main()
