"""The kinds of inodes, and the fields of `stat`."""

from __future__ import annotations

import stat as modes
from dataclasses import dataclass
from typing import Final

from lakefs.wire.messages import SPECIAL_KINDS

FOLDER: Final = 1
OBJECT: Final = 2
SYMLINK: Final = 3
SPECIAL: Final = {modes.S_IFIFO: 5, modes.S_IFSOCK: 6, modes.S_IFCHR: 7, modes.S_IFBLK: 8}
"""Kinds of special nodes, by their type bits."""
_TYPE_BITS: Final = {
    FOLDER: modes.S_IFDIR,
    OBJECT: modes.S_IFREG,
    SYMLINK: modes.S_IFLNK,
    **{kind: bits for bits, kind in SPECIAL.items()},
}
assert SPECIAL_KINDS.keys() == set(SPECIAL.values()), "the kinds of special nodes are those of the protocol"
_FOLDER_BYTES: Final = 4096


@dataclass(slots=True)
class Attributes:
    """The fields of `stat` of an inode, except its number.  Times in ns."""

    kind: int
    size_bytes: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    blob: bytes = b""
    atime_ns: int | None = None
    """The access time, if one was set; None: it is the modification time."""
    device: int = 0
    """The number of a device."""

    @property
    def st_mode(self) -> int:
        """Type and permission bits."""
        return _TYPE_BITS[self.kind] | (0o777 if self.kind == SYMLINK else self.mode & 0o7777)

    @property
    def st_size(self) -> int:
        """Size as `stat` shows it."""
        return _FOLDER_BYTES if self.kind == FOLDER else self.size_bytes
