"""Reading from Python: an object of 64 MiB by grant, against a local file read and checked the same way.

Both sides use the same number of threads, piece size and check, and a buffer allocated before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import blake3
from crc32c import crc32c

from bench.harness.content import write_file
from bench.harness.measure import Bench, Paired, Scenario, Sides, at_least, timed
from bench.harness.process import EngineProcess
from lakefs.content.verify import Check
from lakefs.limits import CHUNK_BYTES, CLIENT_THREADS, GRANULE_BYTES

FULL: Final = 64 << 20
QUICK: Final = 8 << 20
REPEATS: Final = 8
"""Gets in one round: one takes about 20 ms."""


def _blake3(piece: memoryview) -> None:
    blake3.blake3(piece).digest()


def _crc32c(piece: memoryview) -> None:
    for offset in range(0, len(piece), GRANULE_BYTES):
        crc32c(piece[offset : offset + GRANULE_BYTES])


def repeat(call: Callable[[], object]) -> None:
    """Call it as often as a round does."""
    for _ in range(REPEATS):
        call()


def sides_with(
    check: Check, local_check: Callable[[memoryview], None]
) -> Callable[[Bench], AbstractContextManager[Sides]]:
    """Return the set-up of the scenario with one of the checks."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sides]:
        size = bench.scale.pick(FULL, QUICK)
        path = bench.folder / "source"
        write_file(path, size)
        buffer = memoryview(bytearray(size))
        with (
            EngineProcess(bench.folder) as engine,
            engine.connect(check=check) as lake,
            ThreadPoolExecutor(CLIENT_THREADS) as threads,
        ):
            lake.put("bench/x", path)

            def local(descriptor: int, offset: int) -> None:
                piece = buffer[offset : offset + CHUNK_BYTES]
                assert os.preadv(descriptor, [piece], offset) == len(piece)
                local_check(piece)

            def read_local() -> None:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    offsets = range(0, size, CHUNK_BYTES)
                    list(threads.map(lambda offset: local(descriptor, offset), offsets))
                finally:
                    os.close(descriptor)

            def ours() -> float:
                return REPEATS * size / timed(lambda: repeat(lambda: lake.get_into("bench/x", buffer)))

            def theirs() -> float:
                return REPEATS * size / timed(lambda: repeat(read_local))

            yield Sides(ours, theirs)
            buffer.release()

    return sides


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Paired(
        "grant-blake3",
        "Python get of 64 MiB by grant, verified BLAKE3 / local file read with the same check",
        "B/s",
        at_least(0.85, "x"),
        sides_with(Check.BLAKE3, _blake3),
    ),
    Paired(
        "grant-crc32c",
        "Python get of 64 MiB by grant, verified CRC32C / local file read with the same check",
        "B/s",
        at_least(0.85, "x"),
        sides_with(Check.CRC32C, _crc32c),
    ),
)
