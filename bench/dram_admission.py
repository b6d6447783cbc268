"""Compares admission policies for the DRAM tier: hit rates on synthetic traces.

    python -m bench.dram_admission [--seed N]

Nothing is timed or read: each trace is played through a tier of 1,000 equal places with demotion by CLOCK.
Candidates: admit everything (`all`); admit what a ghost list of the last reads has seen twice (`ghost`, as long as
the tier, or four times); and the engine's TinyLFU.  `fills` are copies into the tier for 100 reads: the cost of
admission.  Traces:

- `checkpoint`: checkpoints of 3,000 chunks, each read in order once or twice, by turns, while one read in five is of
  a working set of 800 other chunks (zipf);
- `kv-reuse`: requests for the first blocks of 600 chains (zipf 0.9) of 4 to 64 blocks, whose ranks change slowly;
- `loader`: six epochs of 4,000 chunks, each in a new random order;
- `loader-fits`: the same with 900 chunks, which fit.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from engine.tiers.admission import Admission
from lakefs.ids import ChunkId

PLACES = 1000
Trace = Callable[[random.Random], Iterator[int]]


class Policy(Protocol):
    """Decides which keys get places."""

    def note(self, key: int) -> None:
        """Record a read of a chunk."""

    def admits(self, key: int, victim: int | None) -> bool:
        """Return True if the key gets the victim's place."""
        ...


class AdmitAll:
    """Admits everything: plain CLOCK."""

    def note(self, key: int) -> None:
        """Record nothing."""

    def admits(self, key: int, victim: int | None) -> bool:
        """Return True."""
        return True


class Ghost:
    """Admits a chunk at its second read within a window of the last distinct ones."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: OrderedDict[int, int] = OrderedDict()

    def note(self, key: int) -> None:
        """Count the read, and forget the oldest key."""
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > self._window:
            self._seen.popitem(last=False)

    def admits(self, key: int, victim: int | None) -> bool:
        """Return True if the key was seen twice."""
        return self._seen.get(key, 0) >= 2


class TinyLfu:
    """The engine's own policy."""

    def __init__(self) -> None:
        self._admission = Admission(PLACES)

    def note(self, key: int) -> None:
        """Record the read in the engine's sketch."""
        self._admission.note(_digest(key))

    def admits(self, key: int, victim: int | None) -> bool:
        """Return the engine's decision."""
        return self._admission.admits(_digest(key), None if victim is None else _digest(victim))


_digests: dict[int, ChunkId] = {}


def _digest(key: int) -> ChunkId:
    if key not in _digests:
        _digests[key] = ChunkId(b"\x01" + hashlib.blake2b(key.to_bytes(8, "little"), digest_size=32).digest())
    return _digests[key]


POLICIES: dict[str, Callable[[], Policy]] = {
    "all": AdmitAll,
    "ghost x1": lambda: Ghost(PLACES),
    "ghost x4": lambda: Ghost(4 * PLACES),
    "tinylfu": TinyLfu,
}


def play(trace: Iterator[int], policy: Policy) -> tuple[float, float]:
    """Return hits and fills per 100 reads, of a tier with demotion by CLOCK."""
    slots: list[int] = []
    used: list[bool] = []
    where: dict[int, int] = {}
    hand = reads = hits = fills = 0
    for key in trace:
        reads += 1
        policy.note(key)
        if key in where:
            hits += 1
            used[where[key]] = True
            continue
        if len(slots) < PLACES:
            if policy.admits(key, None):
                where[key] = len(slots)
                slots.append(key)
                used.append(False)
                fills += 1
            continue
        while used[hand]:
            used[hand] = False
            hand = (hand + 1) % PLACES
        if policy.admits(key, slots[hand]):
            del where[slots[hand]]
            slots[hand], where[key] = key, hand
            fills += 1
            hand = (hand + 1) % PLACES
    return 100 * hits / reads, 100 * fills / reads


def checkpoint(rng: random.Random) -> Iterator[int]:
    """Yield checkpoints read once or twice, mixed with a working set."""
    working = _Zipf(rng, 800, 0.9)
    for number in range(8):
        for _ in range(1 + number % 2):
            for chunk in range(3000):
                yield 10_000_000 + 3000 * number + chunk
                if rng.random() < 0.25:
                    yield working.draw()


def kv_reuse(rng: random.Random) -> Iterator[int]:
    """Yield prefixes of chains of blocks, by popularity that drifts."""
    chains = [rng.randint(4, 64) for _ in range(600)]
    popularity = _Zipf(rng, len(chains), 0.9)
    ranks = list(range(len(chains)))
    for request in range(6000):
        if request % 20 == 0:
            first, second = rng.randrange(len(ranks)), rng.randrange(len(ranks))
            ranks[first], ranks[second] = ranks[second], ranks[first]
        chain = ranks[popularity.draw()]
        for block in range(rng.randint(1, chains[chain])):
            yield chain * 100 + block


def loader(count: int) -> Trace:
    """Return a trace of epochs of `count` chunks, each in its own order."""

    def trace(rng: random.Random) -> Iterator[int]:
        chunks = list(range(count))
        for _ in range(6):
            rng.shuffle(chunks)
            yield from chunks

    return trace


class _Zipf:
    def __init__(self, rng: random.Random, count: int, exponent: float) -> None:
        self._rng = rng
        self._ranks = range(count)
        self._weights = list(accumulate(1 / (rank + 1) ** exponent for rank in range(count)))

    def draw(self) -> int:
        """Return a rank; small ones are more likely."""
        return self._rng.choices(self._ranks, cum_weights=self._weights)[0]


TRACES: dict[str, Trace] = {
    "checkpoint": checkpoint,
    "kv-reuse": kv_reuse,
    "loader": loader(4000),
    "loader-fits": loader(900),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    print("| trace | " + " | ".join(f"{name}: hits, fills" for name in POLICIES) + " |")
    print("|---" * (len(POLICIES) + 1) + "|")
    for name, trace in TRACES.items():
        row = [play(trace(random.Random(seed)), make()) for make in POLICIES.values()]
        print(f"| {name} | " + " | ".join(f"{hits:.1f}, {fills:.1f}" for hits, fills in row) + " |")


if __name__ == "__main__":
    main()
