"""The mark that identifies a part file, whatever its name.

A mark is the value of an extended attribute.  On a file system without attributes, the same bytes follow the content:

    content | zeros up to the next multiple of 4096 | mark

    offset  size  field
         0    16  constant
        16    16  BLAKE3 of the part's file name, its first 16 bytes
        32     8  inode number, little-endian

So these are not parts: a copy of a part, a part that was stored and fetched again, and a file that has its target's
name.  A file with a second hard link is never taken for a part, because the user refers to its content.

A mark behind the content lies in one page: a kill leaves all of it or nothing.  It is cut off before the file gets
the target's name; a kill between the two leaves the whole object under the part's name, like a file of the user's.

All functions take a regular file's descriptor.  Everything here blocks.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from typing import Final

from lakefs.ids import data_chunk_id

_ATTRIBUTE: Final = "user.lake.part"
_CONSTANT: Final = bytes.fromhex("b7c91e0d5a664f2e93d84c7a10e2f5bb")
_MARK: Final = struct.Struct("<16s16sQ")
_PAGE_BYTES: Final = 4096

assert _MARK.size <= _PAGE_BYTES


def write_mark(descriptor: int, part_name: str, size_bytes: int) -> None:
    """Mark a file as a part whose content will have `size_bytes`, and set its length to match.  OSError."""
    mark = _mark(descriptor, part_name)
    try:
        os.setxattr(descriptor, _ATTRIBUTE, mark)
    except OSError:  # a file system without attributes, or without space for one
        offset = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        # The old mark counts until the length changes; then the new one is in place.
        os.pwrite(descriptor, mark, offset)
        os.ftruncate(descriptor, offset + _MARK.size)
    else:
        os.ftruncate(descriptor, size_bytes)


def is_marked(descriptor: int, part_name: str) -> bool:
    """Return True if a file is a lake part with that name.  OSError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return False
    mark = _mark(descriptor, part_name)
    try:
        return os.getxattr(descriptor, _ATTRIBUTE) == mark
    except OSError:
        behind = status.st_size - _MARK.size
        return behind >= 0 and os.pread(descriptor, _MARK.size, behind) == mark


def remove_mark(descriptor: int) -> None:
    """Remove the attribute from a file that is no longer a part.  A mark behind the content was cut off earlier."""
    # A mark that stays is harmless: it has the part's name, not the file's.
    with contextlib.suppress(OSError):
        os.removexattr(descriptor, _ATTRIBUTE)


def _mark(descriptor: int, part_name: str) -> bytes:
    name = data_chunk_id(os.fsencode(part_name))[1:17]
    return _MARK.pack(_CONSTANT, name, os.fstat(descriptor).st_ino)
