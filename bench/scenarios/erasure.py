"""The erasure code from Python beside libisal called from C: the same shards in the same memory, in turn.

Rates are of CPU time of the calling thread, by bytes of the chunk.  In a round both sides take turns of a few calls,
and the round has the median of each, since the machine's speed changes within it.  C makes its tables once a turn, and
has nothing to check.  4 MiB push the interpreter out of the processor's caches, so a call costs more than its
instructions: some 15 us.

`erasure-short`: chunks of one shard, whose parity is copied.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness.content import block, payload
from bench.harness.measure import Bench, Figure, Goal, Paired, Scenario, Sides, Single, at_least, at_most
from lakefs.cluster.erasure import ErasureCode
from lakefs.limits import CHUNK_BYTES, KIB

DATA: Final = 4
PARITY: Final = 2
TURNS: Final = 40
CALLS: Final = 10
SHORT_CALLS: Final = 20_000
IN_C: Final = """
#include <isa-l.h>
#include <time.h>

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

double code(int calls, int length, int sources, int rows, unsigned char **read, unsigned char **written)
{
    unsigned char coefficients[64], tables[32 * 64];
    double begin;
    int i;
    for (i = 0; i < sources * rows; i++)
        coefficients[i] = 3 + 7 * i;
    ec_init_tables(sources, rows, coefficients, tables);
    begin = now();
    for (i = 0; i < calls; i++)
        ec_encode_data(length, sources, rows, tables, read, written);
    return now() - begin;
}
"""


def _in_c(folder: Path) -> Any:
    source, built = folder / "code.c", folder / "code.so"
    source.write_text(IN_C)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(built), "-lisal"], check=True)
    code = ctypes.CDLL(str(built)).code
    code.restype = ctypes.c_double
    return code


def _pages(size: int) -> memoryview:
    """Return memory that begins at a page, as that of payload in transit does."""
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = bytes(size)
    return memory


def _addresses(parts: list[memoryview]) -> Any:
    return (ctypes.c_void_p * len(parts))(*(ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in parts))


@contextmanager
def _sides(lost: tuple[int, ...], bench: Bench) -> Iterator[Sides]:
    """Context manager: a chunk of 4 MiB is encoded, if nothing is lost, or its lost shards are made."""
    turns = bench.scale.pick(TURNS, 1)
    code, in_c = ErasureCode(DATA, PARITY), _in_c(bench.folder)
    size = code.shard_bytes(CHUNK_BYTES)
    chunk = _pages(CHUNK_BYTES)
    chunk[:] = block(CHUNK_BYTES)
    shards = [chunk[shard * size :][:size] for shard in range(DATA)]
    shards += [_pages(size) for _ in range(PARITY)]
    code.encode(chunk, shards[DATA:])
    made = lost or tuple(range(DATA, DATA + PARITY))
    read = [shard for shard in range(DATA + PARITY) if shard not in made][:DATA]
    if lost:
        present = {shard: shards[shard] for shard in read}
        wanted = {shard: shards[shard] for shard in lost}
        call: Callable[[], None] = partial(code.rebuild, CHUNK_BYTES, present, wanted)
    else:
        call = partial(code.encode, chunk, shards[DATA:])
    sources, results = (_addresses([shards[shard] for shard in some]) for some in (read, made))
    spent: tuple[list[float], list[float]] = ([], [])

    def ours() -> float:
        """Measure both sides of a round, and return ours."""
        for side in spent:
            side.clear()
        for _ in range(turns):
            spent[0].append(_cpu_s(call, CALLS))
            spent[1].append(in_c(CALLS, size, DATA, len(made), sources, results))
        return _rate(spent[0])

    yield Sides(ours=ours, theirs=lambda: _rate(spent[1]))


def _rate(spent_s: list[float]) -> float:
    return CALLS * CHUNK_BYTES / statistics.median(spent_s) / 1e9


def _cpu_s(call: Callable[[], None], calls: int) -> float:
    begin = time.thread_time()
    for _ in range(calls):
        call()
    return time.thread_time() - begin


def measure_short(bench: Bench) -> dict[str, float]:
    """Return the CPU time of a call for short chunks, in microseconds."""
    calls = bench.scale.pick(SHORT_CALLS, 100)
    code = ErasureCode(DATA, PARITY)
    found = {}
    for size in (4 * KIB, 64 * KIB):
        parity = [bytearray(size) for _ in range(PARITY)]
        spent_s = _cpu_s(partial(code.encode, payload(size), parity), calls)
        found[f"{size // KIB} KiB"] = spent_s / calls * 1e6
    return found


def _against_c(name: str, title: str, goal: Goal, lost: tuple[int, ...] = ()) -> Scenario:
    return Paired(name, f"{title}, Python / C", "GB/s of CPU", goal, partial(_sides, lost))


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _against_c("erasure-encode", "encode 4+2 of 4 MiB", at_least(0.9, "x")),
    _against_c("erasure-decode-1", "make one lost data shard of 4+2, 4 MiB", at_least(0.85, "x"), (1,)),
    _against_c("erasure-decode-2", "make two lost data shards of 4+2, 4 MiB", at_least(0.85, "x"), (0, 2)),
    Single(
        "erasure-short",
        "encode 4+2 of a short chunk, CPU",
        (Figure("4 KiB", at_most(2, " us"), "us"), Figure("64 KiB", at_most(8, " us"), "us")),
        measure_short,
        repeat=True,
    ),
)
