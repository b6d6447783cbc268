"""A process that binds keys in the names of a lake in FOLDER..., and prints `bound KEY` when one is acknowledged."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import trio

from engine.process.names_place import open_local_names
from tests.store_rig import SMALL_SIZES
from tests.unit.engine.process.names_machine import bind
from tests.unit.support.metadata_rig import NAMES_OF

WRITERS = 4


async def main(folders: list[Path]) -> None:
    """Bind keys for ever, four at a time."""
    opened = open_local_names(folders, lake_id=NAMES_OF, protection_losses=1, is_new=True, sizes=SMALL_SIZES)
    async with opened as names, trio.open_nursery() as nursery:

        async def write(writer: int) -> None:
            for number in count():
                key = f"{writer}-{number}"
                await bind(names.store, key)
                sys.stdout.write(f"bound {key}\n")
                sys.stdout.flush()

        for writer in range(WRITERS):
            nursery.start_soon(write, writer)


if __name__ == "__main__":
    trio.run(main, [Path(folder) for folder in sys.argv[1:]])
