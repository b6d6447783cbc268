"""Changes of names and attributes: sent to the store; the table changes in the same step as the answer.

A change is answered when it is visible to all; it is durable within a second, or with the next fsync (on a mount with
the option `sync`, when it is answered).  A removal in a bucket, a rename or a change of mode, owner or times is sent
once more if the engine was lost before it answered.  A folder that loses its last name stays.  Times are the store's,
so that they are the same after a remount and elsewhere.  Times of a file that is not stored yet are this mount's, and
the store takes them over.
"""

from __future__ import annotations

import errno
import stat as modes
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import msgspec
import trio
from pyfuse3 import RENAME_NOREPLACE, FUSEError, RequestContext

from fuse.names.lookups import Lookups
from fuse.state.inodes import EXPIRED, FOLDER, OBJECT, Attributes, Inode
from fuse.state.mount import Mount, now_ns
from lakefs.errors import KeyNotFound, LakeError, PreconditionFailed
from lakefs.names import Name
from lakefs.wire.messages import (
    BucketCreate,
    BucketRemove,
    Buckets,
    Condition,
    DeleteNames,
    Done,
    MakeFolder,
    MakeSymlink,
    NameChange,
    ObjectAttributes,
    ObjectStat,
    PutObjects,
    RemoveFolder,
    Rename,
    SetAttributes,
)


class Changes:
    """Changes names and attributes in the store, and the table with them."""

    def __init__(self, mount: Mount, lookups: Lookups) -> None:
        self._mount = mount
        self._table = mount.table
        self._lookups = lookups

    # --- folders -------------------------------------------------------------------------------------

    async def make_folder(self, parent: Inode, name: str, mode: int, ctx: RequestContext) -> Inode:
        """Make a folder, which stays when it is empty; in the list of buckets, make a bucket.  EEXIST."""
        if self._table.holds_buckets(parent):
            await self._mount.ask(BucketCreate(name), Buckets)
            (found,) = await self._mount.stat([Name(name, "")])
            if isinstance(found, LakeError):
                raise found
            found = msgspec.structs.replace(found, ctime_ns=now_ns())
        else:
            _check_free(parent, name)
            bucket, key = self._lookups.key(parent, name, folder=True)
            request = MakeFolder(
                bucket, key, exclusive=True, attributes=_new_attributes(parent, mode, ctx, FOLDER), durable=False
            )
            found = await self._mount.change(request)
        made = self._made(parent, name, found)
        made.is_complete = not made.children
        made.listed_at = trio.current_time() if made.is_complete else EXPIRED
        return made

    async def remove_folder(self, parent: Inode, name: str) -> None:
        """Remove an empty folder, or bucket.  ENOTDIR, ENOTEMPTY, ENOENT."""
        present = parent.children.get(name)
        if present is not None:
            _check_empty(present)
        with _busy([present]):
            if self._table.holds_buckets(parent):
                await self._mount.ask(BucketRemove(name), Done)
                changed_ns = now_ns()
            else:
                bucket, key = self._lookups.key(parent, name, folder=True)
                request = RemoveFolder(bucket, key, keep_folder=True, durable=False)
                changed_ns = await self._mount.change_again(request, _is_gone)
            self._removed(parent, name, changed_ns)

    # --- names ---------------------------------------------------------------------------------------

    async def make_file(self, parent: Inode, name: str, mode: int, ctx: RequestContext, *, exclusive: bool) -> Inode:
        """Make an empty file: with `exclusive` its name is made at once (EEXIST), else by its first commit."""
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        bucket, key = self._lookups.key(parent, name)
        attributes = _new_attributes(parent, mode, ctx)
        if not exclusive:
            now = attributes.mtime_ns
            shown = Attributes(OBJECT, 0, attributes.mode, attributes.uid, attributes.gid, now, now)
            inode = self._table.create(parent, name, shown)
            inode.named_ns = now
            self._mount.touch(inode)
            self._changed_below(parent, now)
            return inode
        _check_free(parent, name)
        change = NameChange(bucket, key, b"", attributes, Condition(absent=True))
        try:
            found = await self._mount.change(PutObjects([0], [change], durable=False))
        except PreconditionFailed:
            raise FUSEError(errno.EEXIST) from None
        return self._made(parent, name, found)

    async def make_symlink(self, parent: Inode, name: str, target: bytes, ctx: RequestContext) -> Inode:
        """Make a symlink.  EEXIST."""
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        _check_free(parent, name)
        bucket, key = self._lookups.key(parent, name)
        request = MakeSymlink(bucket, key, target, _new_attributes(parent, 0o777, ctx), durable=False)
        return self._made(parent, name, await self._mount.change(request))

    async def unlink(self, parent: Inode, name: str) -> None:
        """Remove a file or symlink; open handles keep its content.  EISDIR, ENOENT."""
        present = parent.children.get(name)
        if self._table.holds_buckets(parent) or (present is not None and present.is_folder):
            raise FUSEError(errno.EISDIR)
        request = DeleteNames([self._lookups.key(parent, name)], keep_folder=True, durable=False)
        async with _at_rest([present]):
            try:
                changed_ns = await self._mount.change_again(request, _is_gone)
            except KeyNotFound:
                if present is None or not present.is_pending:
                    raise
                changed_ns = now_ns()
            self._removed(parent, name, changed_ns)

    async def rename(self, source: Inode, old: str, target: Inode, new: str, flags: int) -> None:
        """Rename a file or folder; a file or an empty folder at the new name is replaced."""
        if flags & ~RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        if self._table.holds_buckets(source) or self._table.holds_buckets(target):
            raise FUSEError(errno.EPERM)
        moved = await self._lookups.require(source, old)
        replaced, _ = await self._lookups.look(target, new)
        if replaced is not None and flags & RENAME_NOREPLACE:
            raise FUSEError(errno.EEXIST)
        if moved is replaced:
            return
        if replaced is not None:
            _check_kinds(moved, replaced)
        bucket, key = self._lookups.key(source, old, folder=moved.is_folder)
        to_bucket, to_key = self._lookups.key(target, new, folder=moved.is_folder)
        async with _at_rest([moved, replaced], stored=moved):
            request = Rename(bucket, key, to_bucket, to_key, keep_folder=True, durable=False)

            async def is_done(error: LakeError) -> bool:
                (found,) = await self._mount.stat([Name(to_bucket, to_key)])
                return isinstance(found, ObjectStat) and found.node == moved.node

            changed_ns = await self._mount.change_again(request, is_done)
            self._mount.note_visible(source, target, moved)
            self._table.move(moved, target, new)
            self._mount.touch(moved)
            moved.attributes.ctime_ns = changed_ns
            if replaced is not None:
                replaced.attributes.ctime_ns = changed_ns
            self._changed_below(source, changed_ns)
            self._changed_below(target, changed_ns)

    # --- attributes ----------------------------------------------------------------------------------

    async def set_attributes(self, inode: Inode, wanted: SetAttributes) -> None:
        """Set mode, owner, times; `wanted` has no name in it.  ESTALE if the inode's name is gone."""
        is_root, changed_ns = inode is self._table.root, 0
        if is_root and not self._table.bucket:
            raise FUSEError(errno.EPERM)
        if (inode.parent is not None or is_root) and not inode.is_dirty:  # else the commit stores it
            bucket, key = self._table.name_of(inode)
            try:
                with _busy([inode]):
                    request = msgspec.structs.replace(wanted, bucket=bucket, key=key)
                    changed_ns = await self._mount.change_again(request, _never)
                    self._mount.note_visible(inode)
            except KeyNotFound:
                raise self._lookups.gone(inode) from None
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
        with _busy([inode]):
            found = await self._mount.change(SetAttributes(bucket, key, xattrs={name: value}, durable=False))
            self._mount.note_visible(inode)
        if inode.file is not None:
            inode.file.note(found)
        inode.xattrs = found.xattrs
        inode.attributes.ctime_ns = found.ctime_ns or now_ns()
        self._mount.touch(inode)

    # --- the table -----------------------------------------------------------------------------------

    def _made(self, parent: Inode, name: str, found: ObjectStat) -> Inode:
        inode = self._lookups.adopt(parent, name, found, trio.current_time())
        self._mount.note_visible(parent, inode)
        self._mount.touch(inode)
        self._changed_below(parent, found.ctime_ns)
        return inode

    def _removed(self, parent: Inode, name: str, changed_ns: int) -> None:
        self._mount.note_visible(parent)
        gone = parent.children.get(name)
        if gone is not None:
            gone.attributes.ctime_ns = changed_ns
            self._mount.touch(gone)
            self._table.remove(gone)
        self._changed_below(parent, changed_ns)

    def _changed_below(self, folder: Inode, changed_ns: int) -> None:
        folder.changed_below_ns = folder.attributes.mtime_ns = folder.attributes.ctime_ns = changed_ns
        self._mount.touch(folder)


@asynccontextmanager
async def _at_rest(inodes: Sequence[Inode | None], *, stored: Inode | None = None) -> AsyncIterator[None]:
    """Keep open files of the inodes from being committed in the block; `stored` is committed before."""
    async with AsyncExitStack() as stack:
        open_ones = [inode for inode in inodes if inode is not None and inode.file is not None]
        for inode in sorted(open_ones, key=lambda inode: inode.number):
            assert inode.file is not None
            await stack.enter_async_context(inode.file.at_rest(stored=inode is stored))
        with _busy(inodes):
            yield


@contextmanager
def _busy(inodes: Sequence[Inode | None]) -> Iterator[None]:
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


async def _is_gone(error: LakeError) -> bool:
    return isinstance(error, KeyNotFound)


async def _never(error: LakeError) -> bool:
    return False


def _new_attributes(parent: Inode, mode: int, ctx: RequestContext, kind: int = OBJECT) -> ObjectAttributes:
    """Attributes of a new name in a folder.  In a folder with the set-group-id bit it gets that group; a folder also
    gets the bit."""
    mode, gid = mode & 0o7777 & ~ctx.umask, ctx.gid
    if parent.attributes.mode & modes.S_ISGID:
        gid = parent.attributes.gid
        mode |= modes.S_ISGID if kind == FOLDER else 0
    return ObjectAttributes(mode=mode, uid=ctx.uid, gid=gid, mtime_ns=now_ns())


def _check_free(parent: Inode, name: str) -> None:
    present = parent.children.get(name)
    if present is not None and present.is_pending:
        raise FUSEError(errno.EEXIST)


def _check_empty(folder: Inode) -> None:
    if not folder.is_folder:
        raise FUSEError(errno.ENOTDIR)
    if any(child.is_pending for child in folder.children.values()):
        raise FUSEError(errno.ENOTEMPTY)


def _check_kinds(moved: Inode, replaced: Inode) -> None:
    if replaced.is_folder and not moved.is_folder:
        raise FUSEError(errno.EISDIR)
    if moved.is_folder and replaced.attributes.kind != FOLDER:
        raise FUSEError(errno.ENOTDIR)
    if replaced.is_folder:
        _check_empty(replaced)
