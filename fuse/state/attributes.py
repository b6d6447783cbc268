"""Attributes: from the store's record of a name to the fields of `stat`, and back; the bits that a change clears.

The set-user-id and set-group-id bits of a file whose content changes: the kernel clears most of them itself, by setting
a mode.  It leaves three cases to the mount: open with O_TRUNC, writes past the page cache, and the set-group-id bit of
a file that its group may not execute.  The rule is the kernel's for local file systems: root keeps both bits; other
users lose both, but a member of the file's group keeps set-group-id on a file that the group may not execute.
"""

from __future__ import annotations

import stat
from typing import Final

import pyfuse3

from fuse.state.inodes import ROOT, Inode
from fuse.state.stat_fields import FOLDER, OBJECT, SYMLINK, Attributes
from lakefs.wire.messages import ListEntry, ObjectAttributes, ObjectStat

BLOCK_BYTES: Final = 1 << 20
"""Size of one read or write that `st_blksize` suggests."""
_STATFS_BLOCK: Final = 4096


class Owner:
    """The uid and gid shown for records that have none: those of the user who mounted."""

    def __init__(self, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid

    def shown(self, found: ObjectStat | ListEntry) -> Attributes:
        """Return the attributes of a record."""
        unowned = found.uid == 0 and found.gid == 0
        return Attributes(
            kind=found.kind,
            size_bytes=found.size_bytes,
            mode=found.mode,
            uid=self.uid if unowned else found.uid,
            gid=self.gid if unowned else found.gid,
            mtime_ns=found.mtime_ns,
            ctime_ns=found.ctime_ns or found.mtime_ns,
            blob=found.blob,
            atime_ns=found.atime_ns,
            device=found.device,
        )

    def bare_folder(self, mode: int, now_ns: int) -> Attributes:
        """Return attributes for a folder without a record in the store: the list of buckets."""
        return Attributes(FOLDER, 0, mode, self.uid, self.gid, now_ns, now_ns)


def to_store(attributes: Attributes, kept: ObjectStat | None) -> ObjectAttributes:
    """Attributes for new content of a file: the mount's, and those of the old record that a file system has not."""
    return ObjectAttributes(
        mode=attributes.mode & 0o7777,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime_ns=attributes.mtime_ns,
        content_type=kept.content_type if kept else "",
        user_metadata=kept.user_metadata if kept else {},
        headers=kept.headers if kept else {},
        xattrs=kept.xattrs if kept else {},
        ctime_ns=attributes.ctime_ns,
        atime_ns=attributes.atime_ns,
        tags=kept.tags if kept else {},
    )


def to_entry(inode: Inode, entry_timeout_s: float, attribute_timeout_s: float) -> pyfuse3.EntryAttributes:
    """Return the kernel's entry of an inode."""
    shown = inode.attributes
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(inode.number)
    entry.generation = 0
    entry.entry_timeout = entry_timeout_s
    # The kernel asks for the attributes of an inode whose `st_ino` is not its number: this entry can have one of them.
    entry.attr_timeout = attribute_timeout_s if inode.st_ino == inode.number else 0
    entry.st_mode = pyfuse3.ModeT(shown.st_mode)
    entry.st_nlink = 2 if inode.is_folder else int(inode.parent is not None or inode.number == ROOT)
    entry.st_uid = shown.uid
    entry.st_gid = shown.gid
    entry.st_rdev = shown.device
    entry.st_size = len(inode.target) if shown.kind == SYMLINK and inode.target else shown.st_size
    entry.st_blksize = BLOCK_BYTES
    entry.st_blocks = -(-entry.st_size // 512)
    entry.st_atime_ns = shown.mtime_ns if shown.atime_ns is None else shown.atime_ns
    entry.st_mtime_ns = shown.mtime_ns
    entry.st_ctime_ns = shown.ctime_ns
    return entry


def no_entry(timeout_s: float) -> pyfuse3.EntryAttributes:
    """Return the entry that makes the kernel remember that a name does not exist."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(0)
    entry.entry_timeout = timeout_s
    return entry


def without_set_id(attributes: Attributes, ctx: pyfuse3.RequestContext, mode: int | None = None) -> int:
    """Return the mode (the file's, or the one given) after this caller changed the content; unchanged if not a file."""
    mode = attributes.mode if mode is None else mode
    if attributes.kind != OBJECT or ctx.uid == 0 or not mode & (stat.S_ISUID | stat.S_ISGID):
        return mode
    mode &= ~stat.S_ISUID
    if mode & stat.S_ISGID and (mode & stat.S_IXGRP or not _is_member(attributes.gid, ctx)):
        mode &= ~stat.S_ISGID
    return mode


def _is_member(gid: int, ctx: pyfuse3.RequestContext) -> bool:
    if gid == ctx.gid:
        return True
    try:
        return gid in pyfuse3.get_sup_groups(ctx.pid)
    except OSError:  # the caller has ended, or is in another namespace of processes
        return False


def to_statvfs(free_bytes: int, total_bytes: int, name_bytes_max: int) -> pyfuse3.StatvfsData:
    """Return the fields of `statvfs` for a store's disk."""
    found = pyfuse3.StatvfsData()
    found.f_bsize = found.f_frsize = _STATFS_BLOCK
    found.f_blocks = total_bytes // _STATFS_BLOCK
    found.f_bfree = found.f_bavail = free_bytes // _STATFS_BLOCK
    found.f_files = found.f_ffree = found.f_favail = 1 << 32
    found.f_namemax = name_bytes_max
    return found
