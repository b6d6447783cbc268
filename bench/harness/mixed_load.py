"""A client's mixed work on small and large objects, and its effect on an engine's memory and tail latency.

The store keeps its size: names are taken from a fixed set and put again with new content, so the old content is
garbage, and gc runs every so many operations.  Operations are counted by object: a batch of 16 is 16.

Samples, each of a fiftieth of all operations, record two figures that must not grow: RssAnon of the engine, and the
99th percentile of gets of 4 KiB one at a time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bench.harness.content import payload
from bench.harness.process import EngineProcess
from lakefs.client.blocking.lake import Lake
from lakefs.errors import KeyNotFound

BUCKET: Final = "mixed"
SAMPLES: Final = 50
BATCH: Final = 16
GC_EVERY: Final = 50_000
SMALL, MIDDLE, LARGE = 4 << 10, 64 << 10, 1 << 20
NAMES: Final = {SMALL: 4096, MIDDLE: 512, LARGE: 32}
"""Live bytes: at most 16 + 32 + 32 MiB; garbage between two cycles of gc: about 2 GiB."""


@dataclass
class Sample:
    """Figures of one stretch of operations."""

    private_bytes: int
    p99_s: float
    operations_per_s: float


@dataclass
class MixedLoad:
    """One client that does a bit of everything, and compares what it reads with what it put."""

    lake: Lake
    chance: random.Random
    done: int = 0
    _stamps: dict[str, bytes] = field(default_factory=dict)
    """The first bytes of each name's content; absent if the name was removed, or never put."""
    _gets_s: list[float] = field(default_factory=list)

    def run(self, count: int) -> list[float]:
        """Do at least `count` operations; return the seconds of each single get of 4 KiB."""
        self._gets_s = []
        acts: tuple[Callable[[], int], ...] = (
            self._get, self._get_many, self._put, self._put_many, self._large, self._stat, self._list, self._remove
        )  # fmt: skip
        end = self.done + count
        while self.done < end:
            act = self.chance.choices(acts, (40, 10, 6, 3, 2, 12, 2, 5))[0]
            self.done += act()
        return self._gets_s

    def collect(self) -> None:
        """Run a cycle of gc."""
        self.lake.gc()

    def _name(self, size: int) -> str:
        return f"{BUCKET}/{size}/{self.chance.randrange(NAMES[size])}"

    def _check(self, name: str, content: bytes) -> None:
        assert content[:16] == self._stamps[name], f"{name} has other bytes"

    def _get(self) -> int:
        name = self._name(SMALL)
        begin = time.perf_counter()
        with suppress(KeyNotFound):
            content = self.lake.get(name)
            self._gets_s.append(time.perf_counter() - begin)
            self._check(name, content)
            return 1
        assert name not in self._stamps, f"{name} is gone"
        return 1

    def _get_many(self) -> int:
        names = [name for _ in range(BATCH) if (name := self._name(SMALL)) in self._stamps]
        for name, content in zip(names, self.lake.get_many(names), strict=True):
            self._check(name, content)
        return max(1, len(names))

    def _put(self) -> int:
        name = self._name(self.chance.choice((SMALL, SMALL, MIDDLE)))
        content = payload(int(name.split("/")[1]))
        self.lake.put(name, content)
        self._stamps[name] = content[:16]
        return 1

    def _put_many(self) -> int:
        objects = {self._name(SMALL): payload(SMALL) for _ in range(BATCH)}
        self.lake.put_many(list(objects.items()))
        self._stamps.update({name: content[:16] for name, content in objects.items()})
        return len(objects)

    def _large(self) -> int:
        """Put, and read back a range."""
        name = self._name(LARGE)
        content = payload(LARGE)
        self.lake.put(name, content)
        self._stamps[name] = content[:16]
        with self.lake.open(name) as file:
            begin = self.chance.randrange(LARGE - SMALL)
            file.seek(begin)
            assert file.read(SMALL) == content[begin : begin + SMALL], f"{name} has other bytes"
        return 2

    def _stat(self) -> int:
        name = self._name(MIDDLE)
        assert self.lake.exists(name) == (name in self._stamps), f"{name} is there, or not, and should not be"
        return 1

    def _list(self) -> int:
        found = sum(1 for _ in self.lake.ls(f"{BUCKET}/{LARGE}/"))
        assert found == sum(name.startswith(f"{BUCKET}/{LARGE}/") for name in self._stamps)
        return 1

    def _remove(self) -> int:
        name = self._name(self.chance.choice((SMALL, MIDDLE)))
        assert self.lake.remove(name) == (name in self._stamps), f"{name} was there, or not"
        self._stamps.pop(name, None)
        return 1


def watch_mixed(
    engine: EngineProcess, count: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> list[Sample]:
    """Run `count` operations, in samples."""
    samples: list[Sample] = []
    with engine.connect() as lake:
        lake.create_bucket(BUCKET)
        load = MixedLoad(lake, random.Random(seed))
        collected = 0
        for number in range(SAMPLES):
            before, begin = load.done, time.monotonic()
            gets_s = sorted(load.run(max(1, count // SAMPLES)))
            took_s = time.monotonic() - begin
            while load.done - collected >= GC_EVERY:
                load.collect()
                collected += GC_EVERY
            p99_s = gets_s[int(len(gets_s) * 0.99)] if gets_s else 0.0
            samples.append(Sample(engine.memory_bytes()[0], p99_s, (load.done - before) / took_s))
            say(
                f"{number + 1}/{SAMPLES}: {load.done} operations, {samples[-1].operations_per_s:.0f}/s, "
                f"RssAnon {samples[-1].private_bytes / 2**20:.1f} MiB, p99 of gets {p99_s * 1e3:.2f} ms"
            )
    return samples


def growth(samples: list[Sample]) -> float:
    """Return RssAnon at the end / RssAnon after the first tenth: medians of a tenth each."""
    tenth = len(samples) // 10
    early = statistics.median(sample.private_bytes for sample in samples[tenth : 2 * tenth])
    return statistics.median(sample.private_bytes for sample in samples[-tenth:]) / early


def slowing(samples: list[Sample]) -> float:
    """Return the 99th percentile of gets in the second half / that in the first half, without the first tenth."""
    tenth = len(samples) // 10
    middle = (len(samples) + tenth) // 2
    early = statistics.median(sample.p99_s for sample in samples[tenth:middle])
    return statistics.median(sample.p99_s for sample in samples[middle:]) / early
