"""What orders of tensors bring: tensors one by one, cold, with the next one brought in wherever it lies, or without.

A reader without orders reads while the client wants the table of no object.  Files are as the format's own library
writes them, by type and name; and one that has its tensors shuffled.  Between two tensors the reader pauses, as for a
copy to a device.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from unittest.mock import patch

from bench.harness.content import BLOCK, block
from bench.harness.gains import ALL_CPU, SHOWN, counted
from bench.harness.measure import Bench, Scenario, at_least
from bench.harness.mounts import forget_pages_below
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from bench.harness.tensors import read_tensors
from bench.scenarios.tensors import Readable, Tensor, load, write_shuffled_model
from lakefs.get import lookahead
from lakefs.limits import TABLE_OBJECT_BYTES_MIN

WITHOUT_ORDERS: Final = "without orders"
NO_TIER: Final = ("--dram-tier-bytes", "0")
LAYERS: Final = 12
_Order = Callable[[Path, int], Sequence[Tensor]]
"""Writes a model of about that many bytes; returns its tensors in the order in which they are loaded."""


_Members = dict[str, tuple[str, int]]
"""Type and bytes of each tensor, in the order in which a model's code makes them."""


def _of_layers(size: int) -> _Members:
    """Return tensors as language models have them, of one type."""
    hidden = _hidden(size)
    members: _Members = {"model.embed_tokens.weight": ("F16", 32 * hidden**2)}
    for layer in range(LAYERS):
        parts = {f"self_attn.{each}_proj": hidden for each in "qkvo"}
        parts |= {"mlp.gate_proj": 3 * hidden, "mlp.up_proj": 3 * hidden, "mlp.down_proj": 3 * hidden}
        parts |= {"input_layernorm": 1, "post_attention_layernorm": 1}
        members |= {f"model.layers.{layer}.{part}.weight": ("F16", 2 * rows * hidden) for part, rows in parts.items()}
    members["model.norm.weight"] = ("F16", 2 * hidden)
    return members


def _quantized(size: int) -> _Members:
    """Return the same with weights of 4 bits, in groups of 128 that have scales and zeros of their own."""
    members: _Members = {}
    for name, (dtype, length) in _of_layers(2 * size).items():
        if "_proj" in name:
            part = name.removesuffix(".weight")
            members[f"{part}.qweight"] = ("I32", length // 4)
            members[f"{part}.qzeros"] = ("I32", length // 4 // 128)
            members[f"{part}.scales"] = ("F16", length // 128)
        else:
            members[name] = (dtype, length)
    return members


def _hidden(size: int) -> int:
    """Return the width of a model of about that many bytes."""
    weights = 2 * LAYERS * 13 + 32
    return max(128, math.isqrt(size // weights) // 128 * 128)


def _write_model(path: Path, members: _Members) -> None:
    """Write a safetensors file; its tensors by type, widest first, then name, as the format's own library has them."""
    header, end = {}, 0
    for name in sorted(members, key=lambda name: (members[name][0] != "I32", name)):
        dtype, length = members[name]
        header[name] = {
            "dtype": dtype,
            "shape": [length // (4 if dtype == "I32" else 2)],
            "data_offsets": [end, end + length],
        }
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, BLOCK):
            file.write(block(min(BLOCK, end - start)))


def _by_code(path: Path, size: int) -> Sequence[Tensor]:
    """As a model's code asks for its tensors: layers by number, each one's parts as they are made."""
    members = _of_layers(size)
    _write_model(path, members)
    numbers = {name: number for number, name in enumerate(members)}
    return sorted(_tensors(path), key=lambda tensor: numbers[tensor.name])


def _by_number(path: Path, size: int) -> Sequence[Tensor]:
    """By name, numbers as numbers."""
    _write_model(path, _of_layers(size))
    return sorted(_tensors(path), key=lambda tensor: _natural(tensor.name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _by_name(path: Path, size: int) -> Sequence[Tensor]:
    """By name; small tensors lie apart from the large ones that they belong to."""
    _write_model(path, _quantized(size))
    return sorted(_tensors(path))


def _tensors(path: Path) -> list[Tensor]:
    return [Tensor(found.name, found.offset, found.size_bytes) for found in read_tensors(path)]


@contextmanager
def _order_sides(order: _Order, full: int, bench: Bench) -> Iterator[Sequence[Entrant]]:
    source = bench.folder / "model.safetensors"
    tensors = order(source, bench.scale.pick(full, 24 << 20))
    memory = memoryview(bytearray(max(tensor.length for tensor in tensors)))
    with EngineProcess(bench.folder, *NO_TIER) as engine, engine.connect() as lake:
        lake.put("bench/model.safetensors", source)
        os.sync()
        reading = partial(load, tensors=tensors, memory=memory)
        yield [
            Entrant(OURS, partial(_order_side, engine, reading, TABLE_OBJECT_BYTES_MIN)),
            Entrant(WITHOUT_ORDERS, partial(_order_side, engine, reading, sys.maxsize)),
        ]


@contextmanager
def _order_side(engine: EngineProcess, read: Callable[[Readable], Run], least: int) -> Iterator[Side]:
    with engine.connect() as lake:

        def run() -> Run:
            with patch.object(lookahead, "TABLE_OBJECT_BYTES_MIN", least):
                with lake.open("bench/model.safetensors") as file:
                    return read(file)

        yield counted(run, lambda: forget_pages_below(engine.data), [engine.pid])


def _orders(name: str, title: str, order: _Order, full: int) -> Sampled:
    return Sampled(
        f"gain-orders-{name}",
        f"tensors of {full >> 20} MiB one by one, cold, {title}",
        "bytes_per_s",
        partial(_order_sides, order, full),
        generator=ALONE,
        expected_s=15,
        targets=(Target("bytes_per_s", at_least(1.1, "x"), WITHOUT_ORDERS), Target(ALL_CPU, SHOWN, WITHOUT_ORDERS)),
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _orders("code", "as a model's code asks for them", _by_code, 512 << 20),
    _orders("number", "by name, numbers as numbers", _by_number, 512 << 20),
    _orders("quantized", "weights of 4 bits with their scales, by name", _by_name, 512 << 20),
    _orders("shuffled", "by name, from a file that has them shuffled", write_shuffled_model, 512 << 20),
)
