"""A process that keeps changing a shared index's table: `python -m tests.shared_index_churn DESCRIPTOR CLASS`.

The first `STEADY` chunks are always there, at places that change; others are added and removed between them and push
them about.  When its input is closed the process prints the number of its changes and ends.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import sys
from typing import Final

from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import Found, table_bytes
from tests.oracles.shared_table import TwinTable

TABLES: Final = {kind.__name__: kind for kind in (SharedTable, TwinTable)}
CAPACITY: Final = 1024
STEADY: Final = 350
_COMING_AND_GOING: Final = 420


def key_at(number: int) -> bytes:
    """Return a chunk's id: in no order, but one in eight of them in one part of the table."""
    chooser = random.Random(number)
    head = chooser.randrange(1 << 64 if number % 8 else 1 << 61)
    return b"\x01" + head.to_bytes(8, "little") + chooser.randbytes(24)


def place_of(number: int, turn: int) -> Found:
    """Return a place that names its chunk in each field."""
    mixed = (number * 0x9E3779B1 + turn * 0x85EBCA77) & 0xFFFF_FFFF
    return 1 + number % 200, mixed << 32 | number, turn, mixed ^ 0xFFFF_FFFF, mixed


def main() -> None:
    """Change until the input ends."""
    descriptor, name = int(sys.argv[1]), sys.argv[2]
    table = TABLES[name](mmap.mmap(descriptor, table_bytes(CAPACITY)), CAPACITY)
    chunks = [key_at(number) for number in range(STEADY + _COMING_AND_GOING)]
    for number in range(STEADY):
        assert table.put(chunks[number], *place_of(number, 0))
    os.write(1, b"ready\n")
    chooser = random.Random(2)
    turn = 0
    while not turn or not select.select([0], [], [], 0)[0]:  # once at least: on a busy machine readers may be first
        for _ in range(200):
            turn += 1
            number = chooser.randrange(len(chunks))
            if number < STEADY or chooser.random() < 0.5:
                table.put(chunks[number], *place_of(number, turn))
            else:
                table.remove(chunks[number])
    assert table.audit()
    os.write(1, str(turn).encode())


if __name__ == "__main__":
    main()
