"""Opens and closes a store whose disk is full: uses the reserve, and says in the error what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.superblock import superblock as superblocks
from engine.superblock.reserve import Reserve
from engine.superblock.superblock import Superblock
from lakefs.errors import StoreFull
from lakefs.ports import Disk


@contextmanager
def telling_full() -> Iterator[None]:
    """Add to StoreFull the advice for a disk too full to open the store, when no engine runs to remove objects."""
    try:
        yield
    except StoreFull as error:
        raise StoreFull(
            f"the store cannot be opened, its disk is full: {error.message.partition(';')[0]}; "
            "make a few MiB of room on that disk and start again; nothing is lost",
            subject=error.subject,
        ) from error


def write_superblock(disk: Disk, superblock: Superblock, reserve: Reserve) -> None:
    """Write the superblock; on a full disk, release the reserve and write again."""
    while True:
        try:
            superblocks.write_superblock(disk, superblock)
            return
        except StoreFull:
            if not reserve.release():
                raise
