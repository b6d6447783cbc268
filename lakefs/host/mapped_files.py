"""Proof that a range of this process's memory is a mapping of a file, as the kernel tells it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")


def maps_file(memory: memoryview, descriptor: int) -> bool:
    """Return True if the memory is a shared mapping of the descriptor's file from its first byte on.

    `memory` is contiguous and writable, with 1 byte at least.  False where it is not, or that cannot be found out.
    Reads all mappings of the process: for start-up, not for each use.
    """
    try:
        found = os.fstat(descriptor)
        lines = _MAPS.read_bytes().split(b"\n")[:-1]  # a name may have any bytes but that one, which is escaped
    except OSError:
        return False
    device = b"%02x:%02x" % (os.major(found.st_dev), os.minor(found.st_dev))
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at, end = begin, begin + memory.nbytes
    for line in lines:  # ascending: FROM-TO MODE OFFSET DEVICE INODE NAME
        addresses, mode, offset, at_device, inode = line.split(maxsplit=5)[:5]
        low, high = (int(text, 16) for text in addresses.split(b"-"))
        if not low <= at < high:
            continue
        is_same = (at_device, int(inode)) == (device, found.st_ino) and mode.endswith(b"s")
        if not is_same or int(offset, 16) + at - low != at - begin:
            return False
        at = high
        if at >= end:
            return True
    return False
