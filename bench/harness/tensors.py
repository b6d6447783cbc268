"""A minimal safetensors reader: finds a file's tensors, and changes some."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tensor:
    """A tensor's name and the place of its bytes in the file."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Changed:
    """Number of changed tensors, and their bytes."""

    count: int
    size_bytes: int


def read_tensors(path: Path) -> list[Tensor]:
    """Return the tensors of a file, in file order."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    begin = 8 + header_bytes
    members = [(name, entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"]
    found = [Tensor(name, begin + first, last - first) for name, (first, last) in members]
    return sorted(found, key=lambda tensor: tensor.offset)


def change_tensors(path: Path, tensors: list[Tensor], *, share: float) -> Changed:
    """Change every byte of neighbouring tensors, except the largest, until `share` of all bytes has changed.

    Training changes whole layers, which lie together; a frozen embedding is most of a small model.
    """
    largest = max(tensors, key=lambda tensor: tensor.size_bytes)
    wanted = share * sum(tensor.size_bytes for tensor in tensors)
    first = random.Random(1).randrange(len(tensors) // 2)
    count = changed = 0
    table = bytes(byte ^ 0x5A for byte in range(256))
    with path.open("r+b") as file:
        for tensor in tensors[first:]:
            if changed >= wanted:
                break
            if tensor == largest:
                continue
            file.seek(tensor.offset)
            content = file.read(tensor.size_bytes)
            file.seek(tensor.offset)
            file.write(content.translate(table))
            count += 1
            changed += tensor.size_bytes
    return Changed(count, changed)
