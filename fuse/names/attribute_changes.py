"""Changes of attributes: mode, owner, times, extended attributes.  Each is of the node that the kernel knows.

A name that has another node by now is looked up anew (ESTALE).  What is set on a file that is being written is stored
by its commit.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import trio
from pyfuse3 import FUSEError

from fuse.names.lookups import Lookups
from fuse.state.inodes import Inode
from fuse.state.kept import note_change
from fuse.state.mount import Mount, now_ns
from lakefs.errors import KeyNotFound, LakeError, PreconditionFailed
from lakefs.wire.messages import NO_CONDITION, Condition, SetAttributes


class AttributeChanges:
    """Changes attributes in the store, and the table with them."""

    def __init__(self, mount: Mount, lookups: Lookups) -> None:
        self._mount = mount
        self._table = mount.table
        self._lookups = lookups

    async def set_attributes(self, inode: Inode, wanted: SetAttributes) -> None:
        """Set mode, owner, times; `wanted` has no name in it.  ESTALE if the inode's name is gone."""
        is_root, changed_ns = inode is self._table.root, 0
        if is_root and not self._table.bucket:
            raise FUSEError(errno.EPERM)
        if inode.parent is None and inode.file is None and not is_root:
            raise FUSEError(errno.ESTALE)
        if (inode.parent is not None or is_root) and not inode.is_dirty:  # else the commit stores it
            bucket, key = self._table.name_of(inode)
            upon = NO_CONDITION if is_root else Condition(node=inode.node)
            try:
                with busy([inode]):
                    request = msgspec.structs.replace(
                        wanted, bucket=bucket, key=key, condition=upon, folders=inode.is_folder
                    )
                    changed = await self._mount.change_again(request, _never)
                    changed_ns = changed.changed_ns
                    self._mount.note_visible(inode)
            except (KeyNotFound, PreconditionFailed):
                raise self._lookups.gone(inode) from None
            note_change(inode, changed.folder, changed.epoch)
        else:
            inode.is_set = True
        shown = inode.attributes
        shown.mode = shown.mode if wanted.mode is None else wanted.mode
        shown.uid = shown.uid if wanted.uid is None else wanted.uid
        shown.gid = shown.gid if wanted.gid is None else wanted.gid
        atime_ns = shown.mtime_ns if shown.atime_ns is None else shown.atime_ns
        if wanted.atime_ns is not None or wanted.mtime_ns is not None:
            atime_ns = atime_ns if wanted.atime_ns is None else wanted.atime_ns
            shown.mtime_ns = shown.mtime_ns if wanted.mtime_ns is None else wanted.mtime_ns
            shown.atime_ns = None if atime_ns == shown.mtime_ns else atime_ns
        shown.ctime_ns = changed_ns or now_ns()
        self._mount.touch(inode)

    async def set_xattr(self, inode: Inode, name: str, value: bytes | None) -> None:
        """Set an extended attribute, or remove it.  KeyNotFound if an attribute to remove does not exist."""
        if self._table.holds_buckets(inode):
            raise FUSEError(errno.EPERM)
        if inode.file is not None and inode.is_pending:  # else its record is there; what is written waits for close
            await inode.file.commit(durable=False)
        bucket, key = self._table.name_of(inode)
        upon = NO_CONDITION if inode is self._table.root else Condition(node=inode.node)
        request = SetAttributes(bucket, key, condition=upon, xattrs={name: value}, durable=False)
        try:
            with busy([inode]):
                found = (await self._mount.change(request)).made
                self._mount.note_visible(inode)
        except PreconditionFailed:
            raise self._lookups.gone(inode) from None
        if inode.file is not None:
            inode.file.note(found)
        inode.xattrs = found.xattrs
        inode.kept = None
        inode.attributes.ctime_ns = found.ctime_ns or now_ns()
        self._mount.touch(inode)


@contextmanager
def busy(inodes: Sequence[Inode | None]) -> Iterator[None]:
    """Mark the inodes as changing: an answer about them in the block may be older or newer than the change."""
    chosen = [inode for inode in inodes if inode is not None]
    for inode in chosen:
        inode.busy += 1
    try:
        yield
    finally:
        for inode in chosen:
            inode.busy -= 1
            inode.changed_at = trio.current_time()


async def _never(error: LakeError) -> bool:
    return False
