"""Looking up where a chunk is, in this process: the hot index's table, and LMDB, with the same ids.

Ids are drawn at random from all that are there, and come as a list of new bytes objects, as a client's layout gives
them.  The table is read through a mapping of its own that is read-only, as a client has it; LMDB in one open read
transaction.  An operation is one id; its cost is the CPU time of the asking process, which nothing beside it prolongs.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import lmdb

from bench.measure import Bench, Scenario, at_most
from bench.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from engine.sealed_memory import HUGE_BYTES, SealedMemory
from lakefs.hot_index import HotIndexReader
from lakefs.hot_table import HotTable
from lakefs.hot_table_format import PLACE, TableHeader, capacity_for, table_bytes

BATCH: Final = 64
LMDB: Final = "LMDB get"
_PLACE: Final = struct.Struct("<QIII")
_LOAD: Final = 100_000
_NOISE_BYTES: Final = 1 << 24


def chunk_at(number: int, count: int) -> bytes:
    """Chunks in ascending order, so that LMDB is loaded quickly; random behind the first bytes, as digests are."""
    begin = number % (_NOISE_BYTES - 28)
    return b"\x01" + (number * ((1 << 32) // count)).to_bytes(4, "big") + _noise()[begin : begin + 28]


@cache
def _noise() -> bytes:
    """As many places to begin as there are ids, and more: no two share a home by construction."""
    return random.Random(1).randbytes(_NOISE_BYTES)


class Tables:
    """The same records in all three; made once for both scenarios."""

    def __init__(self, bench: Bench) -> None:
        self.count = bench.scale.pick(10_000_000, 20_000)
        self.lookups = bench.scale.pick(500_000, 5_000)
        capacity = capacity_for(self.count)
        size = -(-table_bytes(capacity) // HUGE_BYTES) * HUGE_BYTES
        self.memory = SealedMemory("bench-index", size)
        header = TableHeader(capacity, bytes(16), bytes(16)).pack()
        self.memory.view[: len(header)] = header
        put = HotTable(self.memory.view, capacity).put
        for number in range(self.count):
            place = _place(number)
            assert put(chunk_at(number, self.count), 1, *place)
        self.reader = HotIndexReader(self.memory.descriptor)
        self.folder = bench.folder.parent / "index-lmdb"
        _fill_lmdb(self.folder, self.count)

    def sample(self) -> list[bytes]:
        """Ids to ask for."""
        chooser = random.Random(3)
        return [chunk_at(chooser.randrange(self.count), self.count) for _ in range(self.lookups)]

    def close(self) -> None:
        """Give the memory back."""
        del self.reader
        self.memory.close()


def _place(number: int) -> tuple[int, int, int, int]:
    return number >> 14, (number << 16) & 0x3FFF_FFFF, 65_536, number * 40_503 & 0xFFFF_FFFF


def _fill_lmdb(folder: Path, count: int) -> None:
    environment = lmdb.open(str(folder), map_size=1 << 36, sync=False)
    for begin in range(0, count, _LOAD):
        with environment.begin(write=True) as txn:
            cursor = txn.cursor()
            numbers = range(begin, min(count, begin + _LOAD))
            cursor.putmulti(
                ((chunk_at(number, count), _PLACE.pack(*_place(number))) for number in numbers), append=True
            )
    environment.close()


def _tables(bench: Bench) -> Tables:
    if "index" not in bench.shared:
        bench.shared["index"] = Tables(bench)
    tables: Tables = bench.shared["index"]
    return tables


@contextmanager
def one_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """One id a call."""
    tables = _tables(bench)
    ids = tables.sample()
    yield [
        Entrant(OURS, partial(_calling, tables.reader.find, ids, len(ids))),
        Entrant(LMDB, partial(_in_lmdb, tables, ids)),
    ]


@contextmanager
def batch_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """64 ids a call, answered as numbers in the caller's memory; as tuples; and one by one."""
    tables = _tables(bench)
    packed = partial(_packed, tables.reader.find_packed, bytearray(BATCH * PLACE.size))
    ids = tables.sample()
    batches = [ids[begin : begin + BATCH] for begin in range(0, len(ids), BATCH)]
    yield [
        Entrant(OURS, partial(_calling, packed, batches, len(ids))),
        Entrant("as tuples", partial(_calling, tables.reader.find_many, batches, len(ids))),
        Entrant("one by one", partial(_calling, tables.reader.find, ids, len(ids))),
    ]


@contextmanager
def _calling(find: Callable[[Any], object], asked: Iterable[object], count: int) -> Iterator[Side]:
    def run() -> Run:
        for what in asked:
            find(what)
        return Run(count)

    yield Side(run)


def _packed(find: Callable[[list[bytes], bytearray], int], into: bytearray, chunks: list[bytes]) -> int:
    return find(chunks, into)


@contextmanager
def _in_lmdb(tables: Tables, ids: Sequence[bytes]) -> Iterator[Side]:
    environment = lmdb.open(str(tables.folder), readonly=True, map_size=1 << 36, readahead=False, lock=False)
    try:
        with environment.begin(buffers=True) as txn, _calling(txn.get, ids, len(ids)) as side:
            yield side
    finally:
        environment.close()


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "index",
        "index lookup of one of 10 million ids, one by one",
        "client_cpu_us",
        one_sides,
        generator=ALONE,
        expected_s=28,
        targets=(
            Target("client_cpu_us", at_most(0.2, "us")),
            Target("client_cpu_us", at_most(1, "x"), LMDB),
        ),
    ),
    Sampled(
        "index-batch",
        "index lookup of 64 of 10 million ids a call, per id",
        "client_cpu_us",
        batch_sides,
        generator=ALONE,
        expected_s=5,
        targets=(Target("client_cpu_us", at_most(0.06, "us")),),
    ),
)
