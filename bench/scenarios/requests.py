"""Single requests of the native protocol over the Unix socket: locating 64 chunks, and sealing 4 MiB."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import lakefs
from bench.content import block, payload
from bench.measure import Bench, Scenario, at_most
from bench.process import EngineProcess
from bench.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target, one_by_one
from lakefs.shared_memory import Slot
from lakefs.steps import send
from lakefs.wire.messages import CloseLeases, Locate

CHUNKS: Final = 64
CHUNK_BYTES: Final = 64 << 10
SEAL_BYTES: Final = 4 << 20
SEALS_KEPT: Final = 8
T = TypeVar("T")
EMPTY: Final = "empty round trip"
SOCKET: Final = "ours, through the socket"
DIRECT: Final = "pwrite(O_DIRECT) + fdatasync"


@contextmanager
def locate_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Where 64 chunks are, and a request that asks for nothing, of one client on one engine."""
    count = bench.scale.pick(3000, 50)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        names = [f"bench/c{number}" for number in range(CHUNKS)]
        lake.put_many([(name, payload(CHUNK_BYTES)) for name in names])
        chunks = [bytes(lake.stat(name).blob) for name in names]
        yield [
            Entrant(OURS, partial(_asking, engine, count, lambda: lake.run(send(Locate(chunks))))),
            Entrant(EMPTY, partial(_asking, engine, count, lambda: lake.run(send(CloseLeases([]))))),
        ]


@contextmanager
def _asking(engine: EngineProcess, count: int, ask: Callable[[], object]) -> Iterator[Side]:
    yield Side(lambda: one_by_one(itertools.repeat(ask, count)), servers=lambda: [engine.pid])


@contextmanager
def seal_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """One chunk of 4 MiB of new content, durable; against the same written to a file and synced, not hashed."""
    count = bench.scale.pick(40, 4)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        yield [
            Entrant(OURS, partial(_sealing_shared, engine, lake, count)),
            Entrant(SOCKET, partial(_sealing, engine, lake, count)),
            Entrant(DIRECT, partial(_writing, bench, count)),
        ]


@contextmanager
def _sealing_shared(engine: EngineProcess, lake: lakefs.Lake, count: int) -> Iterator[Side]:
    """From memory that the engine copies itself."""
    numbers = itertools.cycle(range(SEALS_KEPT))
    with lake.shared_memory(count * SEAL_BYTES) as memory:
        slots = [memory.slot(number * SEAL_BYTES, SEAL_BYTES) for number in range(count)]

        def prepare() -> None:
            lake.gc()  # what rounds before have overwritten is no burden of the next
            for slot in slots:
                slot.buffer[:] = block(SEAL_BYTES)

        def put(slot: Slot) -> None:
            lake.put(f"bench/shared{next(numbers)}", slot)

        yield Side(lambda: _each(slots, put), prepare, lambda: [engine.pid])


@contextmanager
def _sealing(engine: EngineProcess, lake: lakefs.Lake, count: int) -> Iterator[Side]:
    numbers = itertools.cycle(range(SEALS_KEPT))
    contents: list[bytearray] = []

    def prepare() -> None:
        lake.gc()
        contents[:] = [block(SEAL_BYTES) for _ in range(count)]

    def put(content: bytearray) -> None:
        lake.put(f"bench/seal{next(numbers)}", content)

    yield Side(lambda: _each(contents, put), prepare, lambda: [engine.pid])


@contextmanager
def _writing(bench: Bench, count: int) -> Iterator[Side]:
    """To places of a file that were never written, as a store's segment has them."""
    path = bench.folder / "direct"
    offsets = itertools.count(0, SEAL_BYTES)
    contents: list[bytearray] = []
    with mmap.mmap(-1, SEAL_BYTES) as aligned:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)

        def write(content: bytearray) -> None:
            aligned[:] = content
            os.pwrite(descriptor, aligned, next(offsets))
            os.fdatasync(descriptor)

        def prepare() -> None:
            contents[:] = [block(SEAL_BYTES) for _ in range(count)]

        try:
            yield Side(lambda: _each(contents, write), prepare)
        finally:
            os.close(descriptor)


def _each(contents: Sequence[T], store: Callable[[T], None]) -> Run:
    return one_by_one((partial(store, content) for content in contents), bytes_each=SEAL_BYTES, stored=True)


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "locate",
        f"locate of {CHUNKS} chunks over the Unix socket",
        "p50_us",
        locate_sides,
        generator=ALONE,
        expected_s=15,
        targets=(Target("p50_us", at_most(1.5, "x"), EMPTY),),
    ),
    Sampled(
        "seal-4m",
        "durable put of 4 MiB from shared memory, one by one, hash included",
        "p50_us",
        seal_sides,
        generator=ALONE,
        expected_s=25,
        targets=(Target("p50_us", at_most(1.4, "x"), DIRECT),),
        stores=True,
    ),
)
