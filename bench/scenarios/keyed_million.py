"""A space of a million keys: matches, puts of present keys, memory, and what a cycle of gc costs.

The keys are hashes, and share 1,000 values of 64 bytes, so that what is measured is the keys and not a million chunks
(those are `memory-million`).  The store is filled once for all scenarios of a run.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.measure import Bench, Figure, Paired, Scenario, Sides, Single, at_most, timed
from bench.harness.process import EngineProcess
from lakefs.content.verify import Check

FULL: Final = 1_000_000
VALUES: Final = 1000
VALUE_BYTES: Final = 64
PER_CALL: Final = 10_000
SPACE: Final = "million"
BATCH: Final = 64
PRESENT: Final = 16
BLOCK_BYTES: Final = 64 << 10
INDEX_WAIT_S: Final = 60.0
TURNOVER_BYTES_PER_S: Final = 200e6
GARBAGE_SHARE: Final = 8
CYCLES_APART_S: Final = 60.0
"""A cycle begins when 1/8 of the quota was evicted, and at most once a minute."""


def key_of(number: int) -> bytes:
    """Return the key of that number: a hash, and 4 bytes of a group as vLLM's keys have."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4)


class Filled:
    """The store and its engine, and its memory without a key and, started anew, with all of them."""

    def __init__(self, bench: Bench) -> None:
        self.folder = bench.folder.parent / "keyed-million"
        self.folder.mkdir()
        self.count = bench.scale.pick(FULL, 3000)
        self.engine = EngineProcess(self.folder)
        values = [payload(VALUE_BYTES) for _ in range(VALUES)]
        with self.engine, self.engine.connect() as lake:
            lake.space(SPACE).put_many([b"first"], [values[0]])
            lake.gc()
        self.without_keys = self._memory()
        began = time.monotonic()
        with self.engine, self.engine.connect() as lake:
            space = lake.space(SPACE)
            for first in range(0, self.count, PER_CALL):
                numbers = range(first, min(first + PER_CALL, self.count))
                done = space.put_many([key_of(n) for n in numbers], [values[n % VALUES] for n in numbers])
                assert not done.failures
        self.filling_s = time.monotonic() - began
        self.with_keys = self._memory()
        self.engine.start()

    def _memory(self) -> tuple[int, int]:
        """Return private and shared memory of an engine that was started on the store and has answered matches."""
        with self.engine, self.engine.connect() as lake:
            space = lake.space(SPACE)
            for first in range(0, 100 * BATCH, BATCH):
                space.match([key_of(first + index) for index in range(BATCH)])
            private, both = self.engine.memory_bytes()
            return private, both - private

    def close(self) -> None:
        """Stop the engine and remove the store."""
        self.engine.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def filled(bench: Bench) -> Filled:
    """Return the store of this run, filled at the first call."""
    if SPACE not in bench.shared:
        bench.shared[SPACE] = Filled(bench)
    found = bench.shared[SPACE]
    assert isinstance(found, Filled)
    return found


def measure_match(bench: Bench) -> dict[str, float]:
    """Return the median time of a match of 64 keys, all present, and the keys that the engine was asked for."""
    store = filled(bench)
    calls = bench.scale.pick(3000, 20)
    with store.engine.connect() as lake, store.engine.connect() as other:
        space = lake.space(SPACE)
        batches = itertools.cycle(
            [[key_of(first + index) for index in range(BATCH)] for first in range(0, store.count - BATCH, 640)]
        )
        _wait_for_index(other, lambda: [space.match(keys) for keys in itertools.islice(batches, 200)])
        before = _asked(other)
        taken = [timed(lambda keys=keys: space.match(keys)) for keys in itertools.islice(batches, calls)]  # type: ignore[misc]
        asked = _asked(other) - before
        assert all(space.match(next(batches)).present)
    taken.sort()
    return {
        "p50 us": 1e6 * taken[calls // 2],
        "keys asked for a call": asked / calls,
        "p99 us": 1e6 * taken[calls * 99 // 100],
    }


def _wait_for_index(other: lakefs.Lake, match: Callable[[], object]) -> None:
    """Match until no key is asked for: an engine that has just started is still filling its index of keys."""
    end = time.monotonic() + INDEX_WAIT_S
    while time.monotonic() < end:
        before = _asked(other)
        match()
        if _asked(other) == before:
            return
        time.sleep(0.5)


def _asked(lake: lakefs.Lake) -> int:
    counts = lake.status()["keyed"]
    return int(counts["matched"]) + int(counts["missed"])


def measure_present(bench: Bench) -> dict[str, float]:
    """Return the median time of a put of 16 present keys from slots, and the bytes that the engine read meanwhile."""
    store = filled(bench)
    calls = bench.scale.pick(1000, 10)
    keys = [b"present %d" % number for number in range(PRESENT)]
    with store.engine.connect(check=Check.CRC32C) as lake, lake.shared_memory(PRESENT * BLOCK_BYTES) as memory:
        space = lake.space(SPACE)
        slots = [memory.slot(index * BLOCK_BYTES, BLOCK_BYTES) for index in range(PRESENT)]
        for slot in slots:
            slot.buffer[:] = payload(BLOCK_BYTES)
        space.put_many(keys, slots)
        for _ in range(20):
            space.put_many(keys, slots)
        before = _read_bytes(store.engine)
        taken = sorted(timed(lambda: space.put_many(keys, slots)) for _ in range(calls))
        read = _read_bytes(store.engine) - before
        space.remove(keys)
    copied = read // (calls * BLOCK_BYTES)
    return {"p50 us": 1e6 * taken[calls // 2], "blocks copied": float(copied), "bytes read a put": read / calls}


def _read_bytes(engine: EngineProcess) -> int:
    """Return the bytes that the engine's system calls have read, those of lent memory among them."""
    lines = Path(f"/proc/{engine.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def measure_memory(bench: Bench) -> dict[str, float]:
    """Return the memory that the keys take in an engine that was started on them."""
    store = filled(bench)
    private, shared = (
        after - before for after, before in zip(store.with_keys, store.without_keys, strict=True)
    )  # fmt: skip
    return {
        "shared memory for keys": float(shared), "RssAnon for keys": float(private),
        "puts/s": store.count / store.filling_s,
    }  # fmt: skip


def measure_cycle(bench: Bench) -> dict[str, float]:
    """Return the share of a core that cycles of gc take, were 200 MB/s of blocks of 64 KiB evicted and put."""
    store = filled(bench)
    spent: list[float] = []
    seconds: list[float] = []
    with store.engine.connect() as lake:
        for _ in range(bench.scale.pick(3, 1)):
            before = store.engine.cpu_s()
            seconds.append(timed(lake.gc))
            spent.append(store.engine.cpu_s() - before)
    apart_s = max(CYCLES_APART_S, store.count * BLOCK_BYTES / GARBAGE_SHARE / TURNOVER_BYTES_PER_S)
    return {
        "share of a core": statistics.median(spent) / apart_s, "CPU s of a cycle": statistics.median(spent),
        "s of a cycle": statistics.median(seconds),
    }  # fmt: skip


@contextmanager
def beside_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: durable puts of 16 x 64 KiB by keys; the figure is the 99th percentile of each round.

    Our side runs while cycles of gc follow each other.
    """
    store = filled(bench)
    count = bench.scale.pick(300, 5)
    numbers = itertools.count()
    cycles: list[int] = []
    with store.engine.connect() as lake, lake.shared_memory(PRESENT * BLOCK_BYTES) as memory:
        space = lake.space("beside")
        slots = [memory.slot(index * BLOCK_BYTES, BLOCK_BYTES) for index in range(PRESENT)]

        def put() -> None:
            keys = []
            for slot in slots:
                keys.append(key_of(next(numbers)))
                slot.buffer[:36] = keys[-1]
            taken.append(timed(partial(space.put_many, keys, slots)))

        taken: list[float] = []

        def puts() -> float:
            taken.clear()
            for _ in range(count):
                put()
            return sorted(taken)[int(count * 0.99)]

        def prepare() -> None:
            lake.remove_space("beside")
            lake.gc()
            nonlocal space
            space = lake.space("beside")

        yield Sides(
            lambda: _beside(store.engine, puts, cycles), puts, prepare,
            lambda: {"cycles in a round": sum(cycles) / len(cycles)},
        )  # fmt: skip


def _beside(engine: EngineProcess, work: Callable[[], float], cycles: list[int]) -> float:
    ended = threading.Event()

    def collect() -> None:
        with engine.connect() as lake:
            count = 0
            while not ended.is_set():
                lake.gc()
                count += 1
            cycles.append(count)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        return work()
    finally:
        ended.set()
        collector.join()


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "keyed-match",
        "match of 64 keys of 1,000,000",
        (Figure("p50 us", at_most(40, " us"), "us"), Figure("keys asked for a call", at_most(0), "")),
        measure_match,
        repeat=True,
    ),
    Single(
        "keyed-present",
        "put of 16 x 64 KiB whose keys are present",
        (Figure("p50 us", at_most(100, " us"), "us"), Figure("blocks copied", at_most(0), "")),
        measure_present,
        repeat=True,
    ),
    Single(
        "keyed-memory",
        "engine memory with 1,000,000 keys",
        (Figure("shared memory for keys", at_most(140e6), "B"), Figure("RssAnon for keys", at_most(20e6), "B")),
        measure_memory,
    ),
    Single(
        "keyed-cycle",
        "cycle of gc over 1,000,000 keys, at 200 MB/s of turnover",
        (Figure("share of a core", at_most(0.1), ""),),
        measure_cycle,
    ),
    Paired(
        "keyed-beside",
        "p99 of durable puts of 16 x 64 KiB beside cycles of gc over 1,000,000 keys / without",
        "s",
        at_most(1.5, "x"),
        beside_sides,
    ),
)
