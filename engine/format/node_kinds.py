"""The kinds of nodes and of their ETags, as numbers of the format (`engine.format.layouts`)."""

from __future__ import annotations

from enum import IntEnum


class NodeKind(IntEnum):
    """The kind of a node; HIDDEN holds the rest of names split at 480 bytes.

    From PIPE on: special nodes of file systems, without content (ReadOnlyFeature.SPECIAL_NODES).
    """

    FOLDER = 1
    OBJECT = 2
    SYMLINK = 3
    HIDDEN = 4
    PIPE = 5
    SOCKET = 6
    CHARACTER_DEVICE = 7
    BLOCK_DEVICE = 8

    @property
    def is_special(self) -> bool:
        """True for pipes, sockets and devices."""
        return self >= NodeKind.PIPE


class EtagKind(IntEnum):
    """The source of a node's ETag."""

    DERIVED = 0  # first 32 hex digits of the digest, "-", chunk count
    MD5 = 1  # attributes hold 16 bytes
    MULTIPART = 2  # attributes hold the text md5-N
