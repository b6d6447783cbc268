"""The next checkpoint of a model: the new bytes stored for what changed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from bench.harness.content import BLOCK, block
from bench.harness.measure import Bench, Figure, Scenario, Single, at_most
from bench.harness.process import EngineProcess

CHANGED_SHARE: Final = 0.05


def measure(bench: Bench) -> dict[str, float]:
    """Put a safetensors file, change whole tensors that have 5% of its bytes, and put it again."""
    size = bench.scale.pick(2 << 30, 48 << 20)
    path = bench.folder / "model.safetensors"
    chooser = random.Random(7)
    tensors = _tensor_lengths(size, chooser)
    offsets = _write_model(path, tensors)
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        first = lake.put("bench/model", path)
        changed = _change(path, tensors, offsets, chooser)
        second = lake.put("bench/model", path)
    assert first.new_bytes == path.stat().st_size
    return {"new / changed bytes": second.new_bytes / changed, "changed bytes": float(changed)}


def _tensor_lengths(size: int, chooser: random.Random) -> list[int]:
    """Return lengths of 1 MiB and more, odd ones too, like the layers of a model."""
    lengths: list[int] = []
    while sum(lengths) < size:
        lengths.append(chooser.choice((1 << 20, 4 << 20, (9 << 20) + 512, 16 << 20, (2 << 20) + 8)))
    return lengths


def _write_model(path: Path, lengths: list[int]) -> list[int]:
    """Write a safetensors file; return the tensors' offsets in it."""
    members: dict[str, object] = {}
    begin = 0
    for index, length in enumerate(lengths):
        offsets = [begin, begin + length]
        members[f"layers.{index}.weight"] = {"dtype": "U8", "shape": [length], "data_offsets": offsets}
        begin += length
    header = json.dumps(members).encode()
    places: list[int] = []
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for length in lengths:
            places.append(file.tell())
            for start in range(0, length, BLOCK):
                file.write(block(min(BLOCK, length - start)))
    return places


def _change(path: Path, lengths: list[int], offsets: list[int], chooser: random.Random) -> int:
    """Overwrite whole tensors until 5% of the file has changed; return the number of changed bytes."""
    wanted = CHANGED_SHARE * sum(lengths)
    order = list(range(len(lengths)))
    chooser.shuffle(order)
    changed = 0
    with path.open("r+b") as file:
        for index in order:
            if changed >= wanted:
                break
            file.seek(offsets[index])
            for start in range(0, lengths[index], BLOCK):
                file.write(block(min(BLOCK, lengths[index] - start)))
            changed += lengths[index]
    return changed


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "dedup-model",
        "a model of 2 GiB put again with 5% changed",
        (Figure("new / changed bytes", at_most(1.3, "x"), "x"),),
        measure,
    ),
)
