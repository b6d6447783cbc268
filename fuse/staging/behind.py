"""Appended bytes go behind the content that is there when they are committed, whoever has written it meanwhile.

A file that was only written through O_APPEND handles has its bytes behind its base.  When the name has other content by
the time of the commit, they are staged again, behind that.
"""

from __future__ import annotations

from typing import Final

import trio

from fuse.staging.folder import StagedFile

_PIECE_BYTES: Final = 1 << 20


def appended_bytes(staged: StagedFile) -> int:
    """Return how many bytes lie behind the base of a file that was only appended to."""
    return staged.size - staged.base_bytes


async def copy_behind(source: StagedFile, target: StagedFile) -> None:
    """Stage the bytes appended in `source` behind the content of `target`.  StoreFull, LocalFileError.

    A checkpoint after each MiB; when it is cancelled, or fails, `source` is unchanged.
    """
    begin, end = source.base_bytes, source.size
    for offset in range(begin, end, _PIECE_BYTES):
        target.write(target.size, source.read(offset, min(_PIECE_BYTES, end - offset)))
        await trio.lowlevel.checkpoint()


def is_there(source: StagedFile, offset: int, content: bytes) -> bool:
    """Return True if bytes from `offset` on, read from the store, are the appended ones that begin there."""
    return source.read(offset, len(content)) == content
