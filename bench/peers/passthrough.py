"""A pass-through pyfuse3 file system: each operation is done on the same name below a folder, in the plainest way.

Files are identified by (parent, component), so that a folder's rename moves what lies below; a file that was unlinked
while open is reached through its descriptor.  Every system call blocks the loop, as in its model, the example of
pyfuse3's documentation.  Hard links are refused: the table holds one name per file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, ModeT

TIMEOUT_S: Final = 1.0
"""Default time for which the kernel keeps names and attributes."""
OWN_FLAGS: Final = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_DIRECT
"""Flags of open that the kernel has handled already, or that would change a pwrite at an offset."""


@dataclass
class Node:
    """A file or folder that the kernel knows: its parent and name, and its open descriptors."""

    parent: InodeT
    name: FileNameT
    source_inode: int
    lookups: int = 0
    gone: bool = False
    version: tuple[int, int] = (0, 0)
    descriptors: list[int] = field(default_factory=list)


class Passthrough(pyfuse3.Operations):
    """Does every operation on the same name below `source`."""

    supports_dot_lookup = False

    def __init__(self, source: Path, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._root = os.fsencode(source)
        root = Node(pyfuse3.ROOT_INODE, FileNameT(b""), os.stat(source).st_ino, lookups=1)
        self._nodes: dict[InodeT, Node] = {pyfuse3.ROOT_INODE: root}
        self._names: dict[tuple[InodeT, FileNameT], InodeT] = {}
        self._next_inode = pyfuse3.ROOT_INODE + 1
        self._inode_of: dict[int, InodeT] = {}
        self._listings: dict[int, list[FileNameT]] = {}
        self._folders: dict[int, InodeT] = {}
        self._next_listing = 1

    def _path(self, inode: InodeT) -> bytes:
        """Return a path to a node: by name, or through a descriptor if the name was removed."""
        node = self._nodes[inode]
        if node.gone:
            if not node.descriptors:
                raise FUSEError(errno.ESTALE)
            return b"/proc/self/fd/%d" % node.descriptors[0]
        parts: list[bytes] = []
        while inode != pyfuse3.ROOT_INODE:
            parts.append(self._nodes[inode].name)
            inode = self._nodes[inode].parent
        return b"/".join((self._root, *reversed(parts)))

    def _child(self, parent: InodeT, name: FileNameT) -> bytes:
        return self._path(parent) + b"/" + name

    def _entry(self, parent: InodeT, name: FileNameT, *, looked_up: bool = True) -> EntryAttributes:
        """Return a name's attributes, with the inode number of its file."""
        found = os.lstat(self._child(parent, name))
        inode = self._names.get((parent, name))
        if inode is None or self._nodes[inode].source_inode != found.st_ino:
            self._forget_name(parent, name)
            inode = InodeT(self._next_inode)
            self._next_inode += 1
            self._nodes[inode] = Node(parent, name, found.st_ino)
            self._names[parent, name] = inode
        if looked_up:
            self._nodes[inode].lookups += 1
        return self._attributes(inode, found)

    def _attributes(self, inode: InodeT, found: os.stat_result) -> EntryAttributes:
        entry = keep_for(self._timeout_s, EntryAttributes())
        for name in (
            "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blksize", "st_blocks",
            "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
        ):  # fmt: skip
            setattr(entry, name, getattr(found, name))
        entry.st_ino = inode
        return entry

    def _forget_name(self, parent: InodeT, name: FileNameT) -> None:
        inode = self._names.pop((parent, name), None)
        if inode is not None:
            self._nodes[inode].gone = True
            self._drop_unused(inode)

    def _drop_unused(self, inode: InodeT) -> None:
        node = self._nodes[inode]
        if node.lookups <= 0 and not node.descriptors and inode != pyfuse3.ROOT_INODE:
            del self._nodes[inode]
            if self._names.get((node.parent, node.name)) == inode:
                del self._names[node.parent, node.name]

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        with _errors():
            return self._entry(parent_inode, name)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for inode, count in inode_list:
            if inode in self._nodes:
                self._nodes[inode].lookups -= count
                self._drop_unused(inode)

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        with _node_errors():
            return self._attributes(inode, os.stat(self._path(inode), follow_symlinks=self._nodes[inode].gone))

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> EntryAttributes:
        follow = self._nodes[inode].gone
        with _node_errors():
            path = self._path(inode)
            if fields.update_size:
                self.truncate(path if fh is None else int(fh), attr.st_size)
            if fields.update_mode:
                os.chmod(path, stat.S_IMODE(attr.st_mode))
            if fields.update_uid or fields.update_gid:
                uid = attr.st_uid if fields.update_uid else -1
                gid = attr.st_gid if fields.update_gid else -1
                os.chown(path, uid, gid, follow_symlinks=follow)
            if fields.update_atime or fields.update_mtime:
                now = os.stat(path, follow_symlinks=follow)
                atime_ns = attr.st_atime_ns if fields.update_atime else now.st_atime_ns
                mtime_ns = attr.st_mtime_ns if fields.update_mtime else now.st_mtime_ns
                os.utime(path, ns=(atime_ns, mtime_ns), follow_symlinks=follow)
        return await self.getattr(inode, ctx)

    def truncate(self, file: bytes | int, size: int) -> None:
        """Cut or extend a file, given by path or descriptor."""
        os.truncate(file, size)

    async def readlink(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileNameT:
        with _node_errors():
            return FileNameT(os.readlink(self._path(inode)))

    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        with _errors():
            os.mknod(self._child(parent_inode, name), mode, rdev)
            return self._made(parent_inode, name, ctx)

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        with _errors():
            os.mkdir(self._child(parent_inode, name), mode)
            return self._made(parent_inode, name, ctx)

    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        with _errors():
            os.symlink(target, self._child(parent_inode, name))
            return self._made(parent_inode, name, ctx)

    def _made(self, parent: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        os.chown(self._child(parent, name), ctx.uid, ctx.gid, follow_symlinks=False)
        return self._entry(parent, name)

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        # Two names of one file need one inode number, which a table of (parent, component) cannot express.
        raise FUSEError(errno.EPERM)

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        with _errors():
            os.unlink(self._child(parent_inode, name))
            self._forget_name(parent_inode, name)

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        with _errors():
            os.rmdir(self._child(parent_inode, name))
            self._forget_name(parent_inode, name)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        with _errors():
            new = self._child(parent_inode_new, name_new)
            if flags and _exists(new):
                raise FUSEError(errno.EEXIST)
            os.rename(self._child(parent_inode_old, name_old), new)
            self._forget_name(parent_inode_new, name_new)
            moved = self._names.pop((parent_inode_old, name_old), None)
            if moved is not None:
                self._nodes[moved].parent, self._nodes[moved].name = parent_inode_new, name_new
                self._names[parent_inode_new, name_new] = moved

    async def open(self, inode: InodeT, flags: FlagT, ctx: pyfuse3.RequestContext) -> FileInfo:
        with _node_errors():
            descriptor = os.open(self._path(inode), flags & ~OWN_FLAGS)
        return self._opened(inode, descriptor)

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: pyfuse3.RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        with _errors():
            kept = flags & ~(os.O_APPEND | os.O_DIRECT)
            descriptor = os.open(self._child(parent_inode, name), kept | os.O_CREAT, mode)
            os.fchown(descriptor, ctx.uid, ctx.gid)
            found = self._entry(parent_inode, name)
        return self._opened(found.st_ino, descriptor), found

    def _opened(self, inode: InodeT, descriptor: int) -> FileInfo:
        node = self._nodes[inode]
        node.descriptors.append(descriptor)
        self._inode_of[descriptor] = inode
        version = _version(descriptor)
        kept = node.version == version
        node.version = version
        return FileInfo(fh=FileHandleT(descriptor), keep_cache=kept)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        with _errors():
            return os.pread(fh, size, off)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        with _errors():
            return os.pwrite(fh, buf, off)

    async def flush(self, fh: FileHandleT) -> None:
        with _errors():
            os.close(os.dup(fh))

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        with _errors():
            (os.fdatasync if datasync else os.fsync)(fh)

    async def release(self, fh: FileHandleT) -> None:
        inode = self._inode_of.pop(fh)
        node = self._nodes[inode]
        node.descriptors.remove(fh)
        node.version = _version(fh)
        self._drop_unused(inode)
        os.close(fh)

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileHandleT:
        with _node_errors():
            names = sorted(os.listdir(self._path(inode)))
        number = self._next_listing
        self._next_listing += 1
        self._listings[number] = [FileNameT(name) for name in names]
        self._folders[number] = inode
        return FileHandleT(number)

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        folder = self._folders[fh]
        names = self._listings[fh]
        for index in range(start_id, len(names)):
            try:
                found = self._entry(folder, names[index], looked_up=False)
            except FileNotFoundError:
                continue
            if not pyfuse3.readdir_reply(token, names[index], found, index + 1):
                self._drop_unused(found.st_ino)
                return
            self._nodes[found.st_ino].lookups += 1

    async def releasedir(self, fh: FileHandleT) -> None:
        del self._listings[fh], self._folders[fh]

    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        with _errors():
            descriptor = os.open(self._path(self._folders[fh]), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = os.statvfs(self._root)
        reply = pyfuse3.StatvfsData()
        for name in ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax"):
            setattr(reply, f"f_{name}", getattr(found, f"f_{name}"))
        return reply

    async def setxattr(
        self, inode: InodeT, name: pyfuse3.XAttrNameT, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        with _node_errors():
            os.setxattr(self._path(inode), name, value, follow_symlinks=self._nodes[inode].gone)

    async def getxattr(self, inode: InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext) -> bytes:
        with _node_errors():
            return os.getxattr(self._path(inode), name, follow_symlinks=self._nodes[inode].gone)

    async def listxattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> Sequence[pyfuse3.XAttrNameT]:
        with _node_errors():
            found = os.listxattr(self._path(inode), follow_symlinks=self._nodes[inode].gone)
        return [pyfuse3.XAttrNameT(os.fsencode(name)) for name in found]

    async def removexattr(self, inode: InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext) -> None:
        with _node_errors():
            os.removexattr(self._path(inode), name, follow_symlinks=self._nodes[inode].gone)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FUSEError(error.errno or errno.EIO) from None


@contextmanager
def _node_errors() -> Iterator[None]:
    """Translate errors like `_errors`, for operations on a node: ESTALE for a missing file makes the kernel look
    again."""
    try:
        yield
    except FileNotFoundError:
        raise FUSEError(errno.ESTALE) from None
    except OSError as error:
        raise FUSEError(error.errno or errno.EIO) from None


def _exists(path: bytes) -> bool:
    return os.path.lexists(path)


def _version(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_mtime_ns, found.st_size


def keep_for(timeout_s: float, found: EntryAttributes) -> EntryAttributes:
    """Set how long the kernel keeps a name and its attributes."""
    found.entry_timeout = found.attr_timeout = timeout_s
    return found
