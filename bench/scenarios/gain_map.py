"""Mappings, a gain measured: an object as memory of the engine's segments, against a copy in the reader's memory.

Each side gets all of the object, checked, and gives it back.  The plainer way is `get_into`: into memory that is new
each time, as a mapping is, or into memory that the reader keeps and has written to before.  A mapping pins its chunks;
what that costs of it stands beside: the two requests alone.  Content lies in the segments, not in the DRAM tier.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Final

from bench.harness.accounting import memory_of
from bench.harness.content import write_file
from bench.harness.gains import ALL_CPU, SHOWN, WORTH_IT, counted
from bench.harness.measure import Bench, Scenario
from bench.harness.mounts import forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.get.opened import Piece
from lakefs.steps.steps import send
from lakefs.wire.messages import PinChunks, UnpinChunks

NO_TIER: Final = ("--dram-tier-bytes", "0")
INTO_NEW: Final = "get_into, new memory"
PINS_ALONE: Final = "its pins alone"
INTO_USED: Final = "get_into, memory used before"
OWN_MEMORY: Final = "own memory, MiB"
_Read = Callable[[Lake, int, Callable[[memoryview], None]], None]
"""Gets an object of that many bytes and hands them, as a view, to what uses them."""


def _mapped(lake: Lake, size: int, use: Callable[[memoryview], None]) -> None:
    with lake.map("bench/x") as found:
        view = found.view
        use(view)
        del view


def _into_new(lake: Lake, size: int, use: Callable[[memoryview], None]) -> None:
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with memoryview(memory) as view:
            lake.get_into("bench/x", view)
            use(view)


def _pins_alone(lake: Lake, size: int, use: Callable[[memoryview], None]) -> None:
    """Pin the object's chunks and unpin them, as a mapping does."""
    chunks = [bytes(piece.chunk) for piece in _pieces(lake)]
    driver_of(lake).run(send(PinChunks(chunks)))
    driver_of(lake).run(send(UnpinChunks(chunks)))
    use(memoryview(b""))


@cache
def _pieces(lake: Lake) -> Sequence[Piece]:
    driver = driver_of(lake)
    opened = driver.run(driver.steps.open("bench/x"))
    driver.run(driver.steps.close(opened))
    return opened.pieces


class _IntoUsed:
    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytearray(size))

    def __call__(self, lake: Lake, size: int, use: Callable[[memoryview], None]) -> None:
        lake.get_into("bench/x", self._memory)
        use(self._memory)


@contextmanager
def _map_sides(full: int, repeats: int, bench: Bench, *, cold: bool) -> Iterator[Sequence[Entrant]]:
    size = bench.scale.pick(full, 4 << 20)
    source = bench.folder / "x"
    write_file(source, size)
    with EngineProcess(bench.folder, *NO_TIER) as engine, engine.connect() as lake:
        lake.put("bench/x", source)
        source.unlink()
        os.sync()
        side = partial(_map_side, engine, size, repeats, cold)
        yield [
            Entrant(OURS, partial(side, _mapped)),
            Entrant(INTO_NEW, partial(side, _into_new)),
            Entrant(INTO_USED, lambda: side(_IntoUsed(size))),
            Entrant(PINS_ALONE, partial(side, _pins_alone)),
        ]


@contextmanager
def _map_side(engine: EngineProcess, size: int, repeats: int, cold: bool, read: _Read) -> Iterator[Side]:
    with engine.connect() as lake:

        def run() -> Run:
            own: list[int] = []
            before = _own_bytes()
            for _ in range(repeats):
                read(lake, size, lambda _: own.append(_own_bytes()))
            return Run(repeats, repeats * size, more={OWN_MEMORY: (max(own) - before) / (1 << 20)})

        prepare = partial(forget_pages_below, engine.data) if cold else _nothing
        yield counted(run, prepare, [engine.pid])


def _own_bytes() -> int:
    return memory_of([os.getpid()]).private_bytes


def _nothing() -> None:
    return None


def _maps(name: str, size: int, repeats: int, *, cold: bool) -> Sampled:
    return Sampled(
        f"gain-map-{name}",
        f"map of {size >> 20} MiB, {'cold' if cold else 'hot'}",
        "bytes_per_s",
        partial(_map_sides, size, repeats, cold=cold),
        generator=ALONE,
        expected_s=20,
        targets=(
            Target(ALL_CPU, WORTH_IT, INTO_NEW),
            Target("bytes_per_s", SHOWN, INTO_NEW),
            Target(ALL_CPU, SHOWN, INTO_USED),
            Target("bytes_per_s", SHOWN, INTO_USED),
            Target(ALL_CPU, SHOWN, PINS_ALONE),
        ),
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _maps("64m", 64 << 20, 8, cold=False),
    _maps("64m-first", 64 << 20, 1, cold=True),
    _maps("1g", 1 << 30, 1, cold=False),
    _maps("1g-first", 1 << 30, 1, cold=True),
)
