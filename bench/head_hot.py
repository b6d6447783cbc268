"""`python -m bench.head_hot [--rounds N]`: hot reads at a head of a lake beside one engine, sides interleaved.

The lake has six members at 4+2 and a DRAM tier at its head; one engine has a tier as large, another one none, so that
its content comes from the page cache.  All content is read until it is hot.  Counted is CPU of client and server
together (all processes, also the members'), and the time of a call.  Nothing is checked by the client, so that what
differs is not hidden by what is the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.cpu import process_tree
from bench.harness.process import ROOT, EngineProcess
from bench.harness.turns import Call, Turns, lines, take_turns
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


@contextmanager
def side_of(folder: Path, blocks: Sequence[bytes], *flags: str) -> Iterator[Turns]:
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
            side = Turns(process_tree(engine.pid), rows, CALLS)
            side.warm_up(WARM_UP, pause_s=1.1)  # so that notes of reads are sent
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
        take_turns(entered, [*CALLS], rounds)
        for row in CALLS:
            print(*lines(entered, row), sep="\n")


if __name__ == "__main__":
    main()
