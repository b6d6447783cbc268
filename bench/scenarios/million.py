"""A store of a million small objects: its memory, its folders, its listing pages, and its start after a crash.

The store is filled once for all scenarios of a run.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from typing import Final

import lakefs
from bench.harness.content import payload
from bench.harness.measure import Bench, Figure, Scenario, Single, at_most, timed
from bench.harness.process import EngineProcess, MemoryWatch
from lakefs.client.facade import driver_of

FULL: Final = 1_000_000
FEW: Final = 10_000
PAYLOAD_BYTES: Final = 64
MEMORY_LIMIT: Final = float(256 << 20)
PAGES: Final = 200
RENAMES: Final = 50


class Filled:
    """The store, its engine, and the memory peaks of filling it."""

    def __init__(self, bench: Bench) -> None:
        self.folder = bench.folder.parent / "million"
        self.folder.mkdir()
        self.count = bench.scale.pick(FULL, 3000)
        self.few = bench.scale.pick(FEW, 300)
        self.engine = EngineProcess(self.folder)
        self.engine.start()
        begin = time.monotonic()
        with self.engine.connect() as lake, MemoryWatch(self.engine) as memory:
            _fill(lake, "many", self.count)
            _fill(lake, "few", self.few)
        self.filling_s = time.monotonic() - begin
        self.peaks = memory.figures()

    def close(self) -> None:
        """Stop the engine and remove the store."""
        self.engine.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def filled(bench: Bench) -> Filled:
    """Return the store of this run, filled at the first call."""
    if "million" not in bench.shared:
        bench.shared["million"] = Filled(bench)
    found = bench.shared["million"]
    assert isinstance(found, Filled)
    return found


def _fill(lake: lakefs.Lake, folder: str, count: int) -> None:
    """Put objects in folders of a thousand."""
    for start in range(0, count, 10_000):
        names = range(start, min(start + 10_000, count))
        objects = [(f"{folder}/d/{n // 1000:05}/{n % 1000:03}", payload(PAYLOAD_BYTES)) for n in names]
        lake.put_many(objects, create_bucket=True)


def measure_memory(bench: Bench) -> dict[str, float]:
    """Return the engine's peak memory while the million was stored, and while gc walked it."""
    store = filled(bench)
    with store.engine.connect() as lake, MemoryWatch(store.engine) as memory:
        gc_s = timed(lake.gc)
    return {
        **{name: max(peak, store.peaks[name]) for name, peak in memory.figures().items()},
        "puts/s": (store.count + store.few) / store.filling_s,
        "gc s": gc_s,
    }


def measure_rename(bench: Bench) -> dict[str, float]:
    """Time the rename of a folder with a million keys below, against one with 10,000; count the commits of one
    rename."""
    store = filled(bench)
    with store.engine.connect() as lake:
        before = _sequence(lake)
        lake.move("many/d/", "many/e/")
        commits = _sequence(lake) - before
        lake.move("many/e/", "many/d/")
        many = _rename_s(lake, "many", bench)
        few = _rename_s(lake, "few", bench)
    return {"commits": float(commits), "time / with 10,000": many / few, "ms": 1000 * many}


def measure_list(bench: Bench) -> dict[str, float]:
    """Time a page of 1,000 keys from anywhere in a million, against one of 10,000."""
    store = filled(bench)
    with store.engine.connect() as lake:
        many = _page_s(lake, "many", store.count, bench)
        few = _page_s(lake, "few", store.few, bench)
    return {"time / of 10,000": many / few, "ms": 1000 * many}


def measure_open(bench: Bench) -> dict[str, float]:
    """Kill the engine and start it again; return the CPU spent until it has served a request."""
    store = filled(bench)
    engine = store.engine
    with engine.connect() as lake:
        lake.put("many/last", payload(PAYLOAD_BYTES))
    engine.kill()
    begin = time.monotonic()
    engine.start()
    ready_s = time.monotonic() - begin
    with engine.connect() as lake:
        assert len(lake.get("many/last")) == PAYLOAD_BYTES
        cpu_s = engine.cpu_s()
    return {"CPU s": cpu_s, "wall s": ready_s}


def _sequence(lake: lakefs.Lake) -> int:
    sequence: int = lake.status()["metadata"]["durable_sequence"]
    return sequence


def _rename_s(lake: lakefs.Lake, bucket: str, bench: Bench) -> float:
    names = itertools.cycle((f"{bucket}/d/", f"{bucket}/e/"))
    old = next(names)
    seconds: list[float] = []
    for _ in range(bench.scale.pick(RENAMES, 4)):  # an even number, so that the name ends as it began
        new = next(names)
        seconds.append(timed(lambda old=old, new=new: lake.move(old, new)))  # type: ignore[misc]
        old = new
    return statistics.median(seconds)


def _page_s(lake: lakefs.Lake, bucket: str, count: int, bench: Bench) -> float:
    pages = bench.scale.pick(PAGES, 5)
    step = max(1, (count - 1000) // pages)
    seconds: list[float] = []
    driver = driver_of(lake)
    for number in range(0, max(1, count - 1000), step):
        after = f"d/{number // 1000:05}/{number % 1000:03}"
        seconds.append(
            timed(lambda after=after: driver.run(driver.steps.list_page(bucket, after=after)))  # type: ignore[misc]
        )
    return statistics.median(seconds)


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "memory-million",
        "engine memory with 1,000,000 chunks",
        (Figure("RssAnon", at_most(MEMORY_LIMIT), "B"), Figure("with RssShmem", at_most(MEMORY_LIMIT), "B")),
        measure_memory,
    ),
    Single(
        "rename-million",
        "rename of a folder with 1,000,000 keys below",
        (Figure("commits", at_most(1), ""), Figure("time / with 10,000", at_most(1.5, "x"), "x")),
        measure_rename,
        repeat=True,
    ),
    Single(
        "list-million",
        "LIST of 1,000 of 1,000,000 keys",
        (Figure("time / of 10,000", at_most(1.5, "x"), "x"),),
        measure_list,
        repeat=True,
    ),
    Single(
        "open-million",
        "open after SIGKILL with 1,000,000 chunks",
        (Figure("CPU s", at_most(2, " s"), "s"),),
        measure_open,
        repeat=True,
    ),
)
