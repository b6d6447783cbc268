"""A cold model loaded tensor by tensor, by name, from a file that has them in another order.

Loaders take tensors by name; a file has them in its writer's order.  The next tensor is then anywhere in the file,
and is not read ahead: a reader of a plain file is no better off.

A loader does something between tensors that needs no processor: a copy to a device.  Here it is a pause, the same on
all sides, and part of the figure.

Pages are dropped with posix_fadvise(DONTNEED), as in `cold`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from bench.harness.content import BLOCK, block
from bench.harness.measure import Bench, Scenario
from bench.harness.mounts import forget_pages, forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side

FULL: Final = 512 << 20
QUICK: Final = 24 << 20
ROWS: Final = (1024, 4096, 1024, 2048, 1)
"""Rows of 1,024 values of 2 bytes of each tensor, in turn: 3.2 MiB on average."""
DEVICE_BYTES_PER_S: Final = 3e9
WITHOUT_TIER: Final = ("--dram-tier-bytes", "0")


class Tensor(NamedTuple):
    """The place of a tensor in the file."""

    name: str
    begin: int
    length: int


class Readable(Protocol):
    """A binary file."""

    def seek(self, offset: int, /) -> int: ...
    def readinto(self, buffer: memoryview, /) -> int | None: ...


def write_shuffled_model(path: Path, size: int) -> list[Tensor]:
    """Write a safetensors file of about that many bytes; return its tensors in the order of their names."""
    rows = itertools.cycle(ROWS)
    lengths: list[int] = []
    while sum(lengths) < size:
        lengths.append(2048 * next(rows))
    names = [f"layers.{index // len(ROWS)}.part{index % len(ROWS)}" for index in range(len(lengths))]
    random.Random(1).shuffle(names)
    begins = list(itertools.accumulate(lengths, initial=0))
    members = {
        name: {"dtype": "F16", "shape": [length // 2048, 1024], "data_offsets": [begin, begin + length]}
        for name, begin, length in zip(names, begins, lengths, strict=False)
    }
    header = json.dumps(members).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, begins[-1], BLOCK):
            file.write(block(min(BLOCK, begins[-1] - start)))
    first = 8 + len(header)
    return sorted(
        Tensor(name, first + begin, length) for name, begin, length in zip(names, begins, lengths, strict=False)
    )


def load(file: Readable, tensors: Sequence[Tensor], memory: memoryview) -> Run:
    """Read the header, then each tensor into the same memory, and pause as for a copy to a device."""
    file.readinto(memory[:8])
    file.readinto(memory[: int.from_bytes(memory[:8], "little")])
    for tensor in tensors:
        file.seek(tensor.begin)
        done = 0
        while done < tensor.length:
            done += file.readinto(memory[done : tensor.length]) or 0
        time.sleep(tensor.length / DEVICE_BYTES_PER_S)
    return Run(len(tensors), sum(tensor.length for tensor in tensors))


@contextmanager
def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: reads through `lake.open`, and the same reads of a plain file."""
    source = bench.folder / "model.safetensors"
    tensors = write_shuffled_model(source, bench.scale.pick(FULL, QUICK))
    memory = memoryview(bytearray(max(tensor.length for tensor in tensors)))
    with EngineProcess(bench.folder, *WITHOUT_TIER) as engine, engine.connect() as lake:
        lake.put("bench/model.safetensors", source)
        os.sync()
        yield [
            Entrant(OURS, partial(_ours, engine, lambda file: load(file, tensors, memory))),
            Entrant("file", partial(_of_file, source, lambda file: load(file, tensors, memory))),
        ]


@contextmanager
def _ours(engine: EngineProcess, read: Callable[[Readable], Run]) -> Iterator[Side]:
    with engine.connect() as lake:

        def run() -> Run:
            with lake.open("bench/model.safetensors") as file:
                return read(file)

        yield Side(run, lambda: forget_pages_below(engine.data), lambda: [engine.pid])


@contextmanager
def _of_file(source: Path, read: Callable[[Readable], Run]) -> Iterator[Side]:
    def run() -> Run:
        with source.open("rb") as file:
            return read(file)

    yield Side(run, lambda: forget_pages(source))


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "cold-tensors",
        "512 MiB in 160 tensors, cold, by name, in the file in another order, each copied on at 3 GB/s",
        "bytes_per_s",
        sides,
        generator=ALONE,
        expected_s=20,
    ),
)
