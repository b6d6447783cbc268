"""Look-ups of chunks: the shared index's table from Python, beside LMDB with the same ids in it.

An operation is one existing id, picked at random; each round looks up new ids, so that neither side finds them in the
processor's caches.  The time is that of a Python loop with the calls in it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import lmdb

from bench.harness.measure import Bench, Scenario, at_most
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from engine.memory.backing import open_backing
from lakefs.host.aligned_mapping import map_aligned
from lakefs.ids import ChunkKind
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import PLACE, capacity_for, table_bytes

FULL: Final = 10_000_000
QUICK: Final = 2_000
DIGEST_BYTES: Final = 32
TOGETHER: Final = 64
LOOKED_UP: Final = 64 * 4000
NANOSECONDS: Final = "ns an id"
BATCHED: Final = "ours, 64 in a call"
PACKED: Final = "ours, 64 in a call, as numbers"
MAP_BYTES: Final = 4 << 30
_Look = Callable[[Sequence[bytes]], None]


class Ids:
    """Many ids, made from one run of random bytes, so that they take no more memory than that."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._digests = os.urandom(count * DIGEST_BYTES)
        self._kind = bytes([ChunkKind.DATA])

    def __getitem__(self, index: int) -> bytes:
        return self._kind + self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def some(self, count: int) -> list[bytes]:
        """Return ids picked at random."""
        return [self[random.randrange(self.count)] for _ in range(count)]


@contextmanager
def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: the same ids in each table."""
    ids = Ids(bench.scale.pick(FULL, QUICK))
    count = bench.scale.pick(LOOKED_UP, 2 * TOGETHER)
    capacity = capacity_for(ids.count)
    # Allocated as the engine does it, and read through a mapping as clients do.
    shared = open_backing("memory", table_bytes(capacity))
    writer = SharedTable(shared.memory, capacity)
    for index in range(ids.count):
        writer.put(ids[index], 1, index, index & 0xFFFFFFFF, 4096, index & 0xFFFFFFFF)
    shared.gather(0, len(shared.memory))
    assert shared.descriptor is not None
    mapping, first = map_aligned(shared.descriptor, table_bytes(capacity))
    table = SharedTable(memoryview(mapping).toreadonly()[first : first + table_bytes(capacity)], capacity)
    try:
        yield [
            Entrant(OURS, partial(_looking, ids, count, partial(_one_by_one, table.find))),
            Entrant(BATCHED, partial(_looking, ids, count, partial(_in_batches, table))),
            Entrant(PACKED, partial(_looking, ids, count, partial(_as_numbers, table))),
            Entrant("LMDB, in an open transaction", partial(_in_lmdb, bench, ids, count)),
        ]
    finally:
        shared.close()


@contextmanager
def _looking(ids: Ids, count: int, look: _Look) -> Iterator[Side]:
    wanted: list[list[bytes]] = [[]]

    def prepare() -> None:
        wanted[0] = ids.some(count)

    def run() -> Run:
        begin = time.perf_counter()
        look(wanted[0])
        elapsed_s = time.perf_counter() - begin
        return Run(count, elapsed_s=elapsed_s, more={NANOSECONDS: elapsed_s / count * 1e9})

    yield Side(run, prepare)


def _one_by_one(find: Callable[[bytes], object], wanted: Sequence[bytes]) -> None:
    for chunk in wanted:
        if find(chunk) is None:
            raise AssertionError("an id that was put is not found")


def _in_batches(table: SharedTable, wanted: Sequence[bytes]) -> None:
    for begin in range(0, len(wanted), TOGETHER):
        if None in table.find_many(wanted[begin : begin + TOGETHER]):
            raise AssertionError("an id that was put is not found")


def _as_numbers(table: SharedTable, wanted: Sequence[bytes]) -> None:
    """Look up places as numbers in the caller's memory: no tuple is made for each."""
    places = bytearray(TOGETHER * PLACE.size)
    for begin in range(0, len(wanted), TOGETHER):
        if table.find_packed(wanted[begin : begin + TOGETHER], places) != TOGETHER:
            raise AssertionError("an id that was put is not found")


@contextmanager
def _in_lmdb(bench: Bench, ids: Ids, count: int) -> Iterator[Side]:
    """Context manager: LMDB with values of 32 bytes; filled without syncs."""
    path = str(bench.folder / "lmdb")
    with lmdb.open(path, map_size=MAP_BYTES, sync=False, metasync=False, writemap=True) as environment:
        with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            ordered = sorted(ids[index] for index in range(ids.count))
            cursor.putmulti(((chunk, chunk[:DIGEST_BYTES]) for chunk in ordered), append=True)
            del ordered
        with environment.begin(buffers=True) as reading:
            with _looking(ids, count, partial(_one_by_one, reading.get)) as side:
                yield side


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "lookup",
        "look-up of one of 10,000,000 ids from Python",
        "operations_per_s",
        sides,
        generator=ALONE,
        expected_s=45,
        targets=(Target(NANOSECONDS, at_most(200, " ns")), Target(NANOSECONDS, at_most(60, " ns"), side=PACKED)),
    ),
)
