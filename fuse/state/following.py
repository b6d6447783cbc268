"""Appends elsewhere to a file that is open here: opens the content that its name has now, if that is a longer one."""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog

from fuse.reading.blob_reader import BlobReader
from fuse.reading.following import appended
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.wire.messages import ListEntry, ObjectStat

_log: Final = structlog.get_logger(__name__)


class Longer(NamedTuple):
    """The longer content, and what it has behind the earlier one, b"" unless that was asked for."""

    reader: BlobReader
    added: bytes


async def open_longer(
    mount: Mount, inode: Inode, own: BlobReader, found: ObjectStat | ListEntry, *, keep: bool
) -> Longer | None:
    """Open what the inode's name has now; None if it is another node's, or does not begin with all of `own`.

    `found`: a record of it that may be out of date.  The caller closes the reader, and gives its lease back.
    EngineUnreachable; no other error leaves it.
    """
    if found.node != inode.node or found.size_bytes < inode.attributes.size_bytes:
        return None
    reader = None
    try:
        opened = await mount.opened(mount.table.name_of(inode), found.size_bytes)
        reader = BlobReader(mount.driver, mount.offload, mount.read_buffers, opened)
        added = await appended(own, reader, keep=keep) if opened.stat.node == inode.node else None
        if added is not None:
            kept, reader = reader, None
            return Longer(kept, added)
    except EngineUnreachable:
        raise
    except (LakeError, OSError) as error:
        _log.info("an open file keeps its content", name=inode.name, reason=str(error))
    finally:
        if reader is not None:
            give_back(mount, reader)
    return None


def give_back(mount: Mount, reader: BlobReader) -> None:
    """Close a reader, and give its lease back."""
    reader.close()
    mount.give_back(reader.opened.lease)
