"""Fills a hot file: the mount's own checked reads of one object, from the first byte to the last.

The content is held by a lease of its own for as long as that takes, whatever happens to the name.  Pieces are read in
the loop when they are in memory, as for any reader, and written in a thread.  Afterwards the pages of the segments that
were read are dropped: memory has the content once.
"""

from __future__ import annotations

from typing import Final

from fuse.hot.hot_file import HotFile
from fuse.reading.blob_reader import BlobReader
from fuse.state.mount import Mount
from lakefs.errors import PreconditionFailed
from lakefs.get.objects import open_object
from lakefs.grants.grant_reads import drop_pages
from lakefs.limits import GRANULE_BYTES, MIB
from lakefs.names import Name

PIECE_BYTES: Final = 1 * MIB
assert PIECE_BYTES % GRANULE_BYTES == 0


async def fill(mount: Mount, name: Name, blob: bytes, hot: HotFile) -> None:
    """Fill an empty hot file with the content of `name`, and end its filling.

    PreconditionFailed if the name has other content than `blob` by now; ChunkDamaged and other errors of reading;
    OSError ENOSPC when memory is full.  Then the file is of no use, and the caller closes it.
    """
    driver = mount.driver
    access = driver.steps.access(None)
    opened = await driver.run(open_object(access, name, lease=True, durable=False))
    try:
        if opened.stat.blob != blob:
            raise PreconditionFailed(f"{name} was replaced before it was filled into memory", subject=str(name))
        reader = BlobReader(driver, mount.offload, mount.read_buffers, opened)
        size = opened.stat.size_bytes
        hot.begin_filling(size)
        while hot.size < size:
            wanted = min(PIECE_BYTES, size - hot.size)
            found = reader.read_nowait(hot.size, wanted) or await reader.read(hot.size, wanted)
            piece = bytes(found)
            if len(piece) != wanted:
                raise PreconditionFailed(f"{name} is shorter than its record says", subject=str(name))
            await mount.offload.run(hot.add, piece)
        hot.end_filling()
        await mount.offload.run(drop_pages, access.descriptors, list(opened.grants.values()))
    finally:
        mount.give_back(opened.lease)
