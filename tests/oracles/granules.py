"""CRC32C of granules in Python: the same as `engine._granules`."""

from __future__ import annotations

import os
import struct

from crc32c import crc32c

from lakefs.ids import Buffer
from lakefs.limits import GRANULE_BYTES


def twin_granule_crcs(payload: Buffer) -> bytes:
    """CRC32C of every granule from the start of `payload`, 4 bytes each, little-endian; the last may be short."""
    view = memoryview(payload)
    crcs = [crc32c(view[at : at + GRANULE_BYTES]) for at in range(0, len(view), GRANULE_BYTES)]
    return struct.pack(f"<{len(crcs)}I", *crcs)


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
