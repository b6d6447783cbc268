"""CRC32C of every granule (64 KiB) of a payload: of bytes in memory, and of bytes on their way into it.

Here are the twins in Python; `engine._granules` is the same in C and is used where it was built.  It gives the
interpreter's lock up once for a whole payload: once for each granule, threads that hash and write side by side spend
more on handing it to each other than on the checksums.
"""

from __future__ import annotations

import os

from lakefs.verify import granule_crcs as twin_granule_crcs


def twin_read_granules(descriptor: int, offset: int, target: memoryview) -> bytes:
    """Fill `target` from a file's `offset` on; what `twin_granule_crcs` says of it then.  Blocks, in any thread.

    EOFError when the file ends before, OSError; then anything may be in `target`.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise EOFError("the file ends before")
        done += count
    return twin_granule_crcs(target)


try:
    from engine._granules import granule_crcs, read_granules
except ImportError:  # not built here, or for another processor
    granule_crcs, read_granules = twin_granule_crcs, twin_read_granules

__all__ = ["granule_crcs", "read_granules", "twin_granule_crcs", "twin_read_granules"]
