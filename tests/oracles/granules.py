"""CRC32C of granules in Python: the same as `engine.format._granules`."""

from __future__ import annotations

import os

from lakefs.content.verify import granule_crcs as twin_granule_crcs

__all__ = ["twin_granule_crcs", "twin_read_granules"]


def twin_read_granules(descriptor: int, offset: int, target: memoryview) -> bytes:
    """Fill `target` from a file's `offset` on; return the `twin_granule_crcs` of it.  Blocks; may run in any thread.

    Raises EOFError when the file ends early, or OSError; then `target` may hold anything.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise EOFError("the file ends before")
        done += count
    return twin_granule_crcs(target)
