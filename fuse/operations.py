"""What the kernel asks, one method for each operation: names, attributes, folders, handles.

A method finds its inodes, does one thing to the store or to an open file, and brings the table up to date in one step
without `await` behind it.  What can be answered from what is known, and is fresh, is not asked.

Rules kept here:
- Only `FUSEError` leaves a method: the table `fuse.errno_map` gives each error its errno, and an unexpected one fails
  its own operation with EIO and is loud in the log.  (Anything else would take the whole mount down.)
- Each method that gives the kernel an entry counts one look-up of its inode.
- Changes of names are visible to all when they are answered, and durable within a second; fsync waits for that.
"""

from __future__ import annotations

import errno
import functools
import os
import stat as modes
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import msgspec
import pyfuse3
import structlog
import trio
from pyfuse3 import (
    EntryAttributes,
    FileHandleT,
    FileInfo,
    FileNameT,
    FlagT,
    FUSEError,
    InodeT,
    ModeT,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
    XAttrNameT,
)

from fuse.attributes import no_entry, to_entry
from fuse.errno_map import errno_of
from fuse.files import OpenFile
from fuse.inodes import FOLDER, OBJECT, SYMLINK, Attributes, Inode
from fuse.listing import FolderHandle, look_up
from fuse.mount import Mount, now_ns
from lakefs.errors import BucketNotFound, InvalidName, KeyNotFound, LakeError, PreconditionFailed
from lakefs.limits import KEY_BYTES_MAX
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
    Status,
    StatusReply,
)

P = ParamSpec("P")
R = TypeVar("R")
_log: Final = structlog.get_logger(__name__)
_COMPONENT_BYTES_MAX: Final = 255
_USER_XATTRS: Final = b"user."
_WRITING: Final = os.O_WRONLY | os.O_RDWR
_STATFS_S: Final = 1.0
_LOOKUPS_MAX: Final = 3
"""Times that a name is looked up while names of its folder change."""
_BLOCK: Final = 4096


def answering(
    method: Callable[Concatenate[LakeOperations, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[LakeOperations, P], Coroutine[Any, Any, R]]:
    """Translate what a method raises."""

    @functools.wraps(method)
    async def answered(self: LakeOperations, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            return await method(self, *args, **options)
        except (FUSEError, trio.Cancelled):
            raise
        except LakeError as error:
            raise FUSEError(errno_of(error)) from error
        except OSError as error:
            raise FUSEError(error.errno or errno.EIO) from error
        except Exception as error:
            _log.exception("an operation of the mount failed unexpectedly", operation=method.__name__)
            raise FUSEError(errno.EIO) from error

    return answered


class LakeOperations(pyfuse3.Operations):
    """The operations of one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, mount: Mount) -> None:
        super().__init__()
        self._mount = mount
        self._table = mount.table
        self._files: dict[int, tuple[OpenFile, int]] = {}
        self._folders: dict[int, FolderHandle] = {}
        self._next_handle = 0
        self._statfs: StatvfsData | None = None
        self._statfs_until = 0.0

    # --- looking -------------------------------------------------------------------------------------

    @answering
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """The inode of a name; that there is none may be remembered, too."""
        parent = self._inode(parent_inode)
        component = _component(name)
        self._watch(self._mount.bucket_of(parent))
        present = parent.children.get(component)
        if present is not None and (present.is_pending or self._mount.is_fresh(present)):
            return self._known(present)
        bucket = self._mount.bucket_of(parent)
        if present is None and parent.is_complete and bucket in self._mount.watched:
            return no_entry(self._mount.timeouts(bucket)[0])
        for attempt in range(_LOOKUPS_MAX):
            asked_at = trio.current_time()
            entry = await self._looked_up(parent, component, bucket)
            if parent.names_changed_at < asked_at:
                break
            entry.entry_timeout = entry.attr_timeout = 0  # names changed meanwhile: this may be of before
            if attempt < _LOOKUPS_MAX - 1:
                self._table.forget(entry.st_ino, 0)
        if entry.st_ino:
            self._table.of(entry.st_ino).lookups += 1
        return entry

    async def _looked_up(self, parent: Inode, component: str, bucket: str) -> EntryAttributes:
        """The entry of a name as the store has it, not counted yet."""
        asked_at = trio.current_time()
        try:
            found = await look_up(self._mount, parent, component)
        except (KeyNotFound, BucketNotFound, InvalidName):
            present = parent.children.get(component)
            if present is not None and (present.is_pending or present.changed_at >= asked_at):
                return self._entry(present)
            if present is not None:
                self._table.detach(present)
            if self._table.holds_buckets(parent):
                raise FUSEError(errno.ENOENT) from None
            return no_entry(self._mount.timeouts(bucket)[0])
        return self._entry(self._adopt(parent, component, found, asked_at))

    @answering
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Attributes, asked anew when they are not fresh."""
        known = self._inode(inode)
        await self._refresh(known)
        return self._entry(known)

    async def _refresh(self, inode: Inode) -> None:
        """Have attributes of a moment ago.  What was replaced elsewhere keeps those it had, without a name."""
        mount = self._mount
        if inode is self._table.root and not self._table.bucket:
            return
        if inode.parent is None and inode is not self._table.root:
            return
        if inode.is_pending or mount.is_fresh(inode) or (inode.file is not None and inode.file.is_dirty):
            return
        asked_at = trio.current_time()
        (found,) = await mount.stat([self._table.name_of(inode)])
        if inode.changed_at >= asked_at or (inode.parent is None and inode is not self._table.root):
            return
        if inode is self._table.root:
            if isinstance(found, ObjectStat):
                inode.attributes, inode.confirmed_at = mount.owner.shown(found), asked_at
            return
        if isinstance(found, (KeyNotFound, BucketNotFound)):
            self._table.detach(inode)
            if inode.file is None:
                raise FUSEError(errno.ESTALE)  # the kernel looks the name up anew
        elif isinstance(found, LakeError):
            raise found
        else:
            assert inode.parent is not None
            self._adopt(inode.parent, inode.name, found, asked_at)

    @answering
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """Where a symlink points."""
        link = self._inode(inode)
        if link.attributes.kind != SYMLINK:
            raise FUSEError(errno.EINVAL)
        if not link.target:
            found = await self._stat_of(link)
            link.target = found.symlink_target
        return link.target

    @answering
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Room of the store's disk; asked once a second at most."""
        now = trio.current_time()
        if self._statfs is None or now >= self._statfs_until:
            answer = await self._mount.ask(Status(), StatusReply)
            disk = msgspec.json.decode(answer.status_json)["disk"]
            self._statfs = _statvfs(int(disk["free_bytes"]), int(disk["total_bytes"]))
            self._statfs_until = now + _STATFS_S
        return self._statfs

    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        """The kernel decides by mode and owner (`default_permissions`)."""
        return True

    # --- folders -------------------------------------------------------------------------------------

    @answering
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Begin to read a folder."""
        folder = self._inode(inode)
        handle = self._handle()
        self._folders[handle] = FolderHandle(self._mount, folder)
        self._watch(self._mount.bucket_of(folder))
        return FileHandleT(handle)

    @answering
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Entries behind a position, with their attributes, as many as fit."""
        handle = self._folders[fh]
        dots = (b".", handle.folder), (b"..", handle.folder.parent or handle.folder)
        for position, (name, inode) in enumerate(dots):
            if start_id <= position and not pyfuse3.readdir_reply(
                token, FileNameT(name), self._entry(inode), position + 1
            ):
                return
        for position, listing in await handle.at(max(0, start_id - len(dots))):
            found = listing.found
            if isinstance(found, Inode):
                inode = found
            else:
                inode = self._adopt(handle.folder, listing.name, found, handle.asked_at)
            name, entry = listing.name.encode(), self._entry(inode)
            if handle.folder.names_changed_at >= handle.asked_at:
                entry.entry_timeout = entry.attr_timeout = 0  # it may be of before
            if not pyfuse3.readdir_reply(token, FileNameT(name), entry, position + len(dots)):
                self._table.forget(inode.number, 0)
                return
            inode.lookups += 1

    async def releasedir(self, fh: FileHandleT) -> None:
        """The reading has ended."""
        self._folders.pop(fh, None)

    @answering
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """What was changed before is durable on return."""
        await self._mount.sync()

    @answering
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        """A folder that stays when it is empty; in the list of buckets, a bucket."""
        parent, component = self._inode(parent_inode), _component(name)
        if self._table.holds_buckets(parent):
            await self._mount.ask(BucketCreate(component), Buckets)
            (found,) = await self._mount.stat([Name(component, "")])
            if isinstance(found, LakeError):
                raise found
        else:
            self._check_free(parent, component)
            bucket, key = self._key(parent, component, folder=True)
            attributes = ObjectAttributes(
                mode=mode & 0o7777 & ~ctx.umask, uid=ctx.uid, gid=ctx.gid, mtime_ns=now_ns()
            )
            found = await self._mount.change(
                MakeFolder(bucket, key, exclusive=True, attributes=attributes, durable=False)
            )
        made = self._made(parent, component, found)
        made.is_complete = not made.children
        return self._known(made)

    @answering
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """An empty folder, or bucket."""
        parent, component = self._inode(parent_inode), _component(name)
        present = parent.children.get(component)
        if present is not None and not present.is_folder:
            raise FUSEError(errno.ENOTDIR)
        if present is not None and any(child.is_pending for child in present.children.values()):
            raise FUSEError(errno.ENOTEMPTY)
        if self._table.holds_buckets(parent):
            await self._mount.ask(BucketRemove(component), Done)
        else:
            bucket, key = self._key(parent, component, folder=True)
            await self._mount.change(RemoveFolder(bucket, key, keep_folder=True, durable=False))
        self._removed(parent, component)

    # --- names ---------------------------------------------------------------------------------------

    @answering
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a file or symlink; what is open of it goes on."""
        parent, component = self._inode(parent_inode), _component(name)
        present = parent.children.get(component)
        if self._table.holds_buckets(parent) or (present is not None and present.is_folder):
            raise FUSEError(errno.EISDIR)
        request = DeleteNames([self._key(parent, component)], keep_folder=True, durable=False)
        async with _at_rest([present]):
            try:
                await self._mount.change(request)
            except KeyNotFound:
                if present is None or not present.is_pending:
                    raise
            self._removed(parent, component)

    @answering
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Give a file or folder another name; a file there is replaced, and so is an empty folder."""
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        source, old = self._inode(parent_inode_old), _component(name_old)
        target, new = self._inode(parent_inode_new), _component(name_new)
        if self._table.holds_buckets(source) or self._table.holds_buckets(target):
            raise FUSEError(errno.EPERM)
        moved = await self._inode_of(source, old)
        replaced = await self._inode_if_any(target, new)
        if moved is replaced:
            return
        if replaced is not None:
            if flags & pyfuse3.RENAME_NOREPLACE:
                raise FUSEError(errno.EEXIST)
            _check_kinds(moved, replaced)
        bucket, key = self._key(source, old, folder=moved.is_folder)
        to_bucket, to_key = self._key(target, new, folder=moved.is_folder)
        if (
            replaced is not None
            and replaced.is_folder
            and any(c.is_pending for c in replaced.children.values())
        ):
            raise FUSEError(errno.ENOTEMPTY)
        request = Rename(bucket, key, to_bucket, to_key, keep_folder=True, durable=False)
        async with _at_rest([moved, replaced], stored=moved):
            self._mount.touch(moved)
            await self._mount.change(request)
            self._table.move(moved, target, new)
            self._mount.touch(moved)
            moved.attributes.ctime_ns = now_ns()

    @answering
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """A name that points elsewhere."""
        parent, component = self._inode(parent_inode), _component(name)
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        self._check_free(parent, component)
        bucket, key = self._key(parent, component)
        attributes = ObjectAttributes(mode=0o777, uid=ctx.uid, gid=ctx.gid, mtime_ns=now_ns())
        found = await self._mount.change(MakeSymlink(bucket, key, bytes(target), attributes, durable=False))
        inode = self._made(parent, component, found)
        inode.target = bytes(target)
        return self._known(inode)

    @answering
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Hard links are not offered: EPERM, as link(2) has it."""
        raise FUSEError(errno.EPERM)

    @answering
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """An empty file; devices, pipes and sockets are not offered: EPERM, as mknod(2) has it."""
        if not modes.S_ISREG(mode):
            raise FUSEError(errno.EPERM)
        inode = await self._make_file(self._inode(parent_inode), _component(name), mode, ctx, exclusive=True)
        return self._known(inode)

    # --- handles -------------------------------------------------------------------------------------

    @answering
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """A handle of a file.  ESTALE when the name has other content by now: the kernel looks it up anew."""
        known = self._inode(inode)
        if known.is_folder:
            raise FUSEError(errno.EISDIR)
        file = self._file_of(known)
        try:
            await file.open()
        except (KeyNotFound, BucketNotFound, PreconditionFailed):
            await file.discard()
            if known.parent is not None:
                self._table.detach(known)
            raise FUSEError(errno.ESTALE) from None
        except BaseException:
            await file.discard()
            raise
        if flags & os.O_TRUNC:
            try:
                await file.truncate(0)
            except BaseException:
                await file.release()
                raise
        return self._opened(known, file, flags)

    @answering
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """A new file and a handle of it.  With O_EXCL its name is made at once; else it comes with the first commit."""
        parent, component = self._inode(parent_inode), _component(name)
        present = parent.children.get(component)
        if present is not None and not flags & os.O_EXCL and not present.is_folder:
            info = await self.open(InodeT(present.number), flags, ctx)
            return info, self._known(present)
        exclusive = bool(flags & os.O_EXCL)
        inode = await self._make_file(parent, component, mode, ctx, exclusive=exclusive)
        file = self._file_of(inode)
        file.open_new()
        inode.lookups += 1
        return self._opened(inode, file, flags), self._entry(inode)

    @answering
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Bytes of a file."""
        file, _ = self._files[fh]
        return await file.read(off, size)  # type: ignore[return-value]  # any buffer will do

    @answering
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Bytes into a file; others see them when it is closed."""
        file, _ = self._files[fh]
        await file.write(off, buf)
        return len(buf)

    @answering
    async def flush(self, fh: FileHandleT) -> None:
        """close(2): what was written is stored, and visible to all; an error is close's."""
        file, flags = self._files[fh]
        if flags & _WRITING or file.inode.is_pending:
            await file.commit(durable=self._mount.options.sync)

    @answering
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """What was written is stored and durable on return."""
        file, _ = self._files[fh]
        await file.commit(durable=True)

    @answering
    async def release(self, fh: FileHandleT) -> None:
        """The handle is gone; nobody hears of an error any more but the log."""
        file, _ = self._files.pop(fh)
        await file.release()

    async def release_all(self) -> None:
        """The mount is gone: what is still open is stored, as far as it can be, and given back."""
        for handle in list(self._files):
            file, _ = self._files.pop(handle)
            try:
                await file.release()
            except LakeError as error:
                _log.error("an open file could not be given back", name=file.inode.name, error=error.message)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """The kernel forgets inodes."""
        for number, count in inode_list:
            self._table.forget(number, count)

    # --- attributes ----------------------------------------------------------------------------------

    @answering
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """Length, mode, owner, times.  The access time is not kept."""
        known = self._inode(inode)
        if fields.update_size:
            await self._set_size(known, attr.st_size, fh)
        wanted = SetAttributes(
            "",
            "",
            mode=attr.st_mode & 0o7777 if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            durable=False,
        )
        if not (wanted.mode is wanted.uid is wanted.gid is wanted.mtime_ns is None):
            await self._set_attributes(known, wanted)
        return self._entry(known)

    async def _set_size(self, inode: Inode, size: int, fh: FileHandleT | None) -> None:
        if inode.is_folder:
            raise FUSEError(errno.EISDIR)
        if fh is not None and fh in self._files:
            await self._files[fh][0].truncate(size)
            return
        file = self._file_of(inode)
        await file.open()
        try:
            await file.truncate(size)
            if file.handles == 1:
                await file.commit(durable=False)
        finally:
            await file.release()

    async def _set_attributes(self, inode: Inode, wanted: SetAttributes) -> None:
        has_name = inode.parent is not None or (inode is self._table.root and self._table.bucket)
        is_dirty = inode.file is not None and inode.file.is_dirty
        if has_name and not is_dirty:  # else it goes with the commit
            bucket, key = self._table.name_of(inode)
            self._mount.touch(inode)
            try:
                await self._mount.change(msgspec.structs.replace(wanted, bucket=bucket, key=key))
            except KeyNotFound:
                raise self._gone(inode) from None
        elif inode is self._table.root:
            raise FUSEError(errno.EPERM)
        shown = inode.attributes
        shown.mode = shown.mode if wanted.mode is None else wanted.mode
        shown.uid = shown.uid if wanted.uid is None else wanted.uid
        shown.gid = shown.gid if wanted.gid is None else wanted.gid
        shown.mtime_ns = shown.mtime_ns if wanted.mtime_ns is None else wanted.mtime_ns
        shown.ctime_ns = now_ns()
        self._mount.touch(inode)

    @answering
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """The value of a `user.` attribute; others are not kept."""
        if not name.startswith(_USER_XATTRS):
            raise FUSEError(pyfuse3.ENOATTR)
        value = (await self._xattrs(self._inode(inode))).get(_text(name))
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @answering
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """Names of the `user.` attributes."""
        return [XAttrNameT(name.encode()) for name in await self._xattrs(self._inode(inode))]

    async def _xattrs(self, inode: Inode) -> dict[str, bytes]:
        if inode.is_pending:
            return {}
        is_dirty = inode.file is not None and inode.file.is_dirty
        if inode.xattrs is None or not (is_dirty or self._mount.is_fresh(inode)):
            inode.xattrs = (await self._stat_of(inode)).xattrs
        return inode.xattrs

    @answering
    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        """Set a `user.` attribute; durable as names are."""
        if not name.startswith(_USER_XATTRS):
            raise FUSEError(errno.ENOTSUP)
        await self._change_xattr(self._inode(inode), _text(name), value)

    @answering
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """Remove a `user.` attribute."""
        if not name.startswith(_USER_XATTRS):
            raise FUSEError(pyfuse3.ENOATTR)
        try:
            await self._change_xattr(self._inode(inode), _text(name), None)
        except KeyNotFound:
            raise FUSEError(pyfuse3.ENOATTR) from None

    async def _change_xattr(self, inode: Inode, name: str, value: bytes | None) -> None:
        if inode.file is not None and inode.file.is_dirty:
            await inode.file.commit(durable=False)
        bucket, key = self._table.name_of(inode)
        self._mount.touch(inode)
        found = await self._mount.change(SetAttributes(bucket, key, xattrs={name: value}, durable=False))
        if inode.file is not None:
            inode.file.note(found)
        inode.xattrs = found.xattrs
        inode.attributes.ctime_ns = found.ctime_ns or now_ns()
        self._mount.touch(inode)

    # --- below ---------------------------------------------------------------------------------------

    def _inode(self, number: int) -> Inode:
        try:
            return self._table.of(number)
        except KeyError:
            raise FUSEError(errno.ESTALE) from None

    def _entry(self, inode: Inode) -> EntryAttributes:
        entry_timeout_s, attribute_timeout_s = self._mount.timeouts(self._mount.bucket_of(inode))
        return to_entry(inode, entry_timeout_s, attribute_timeout_s)

    def _known(self, inode: Inode) -> EntryAttributes:
        """The entry, which the kernel now knows once more."""
        inode.lookups += 1
        return self._entry(inode)

    def _adopt(self, parent: Inode, name: str, found: Any, asked_at: float) -> Inode:
        inode = self._table.adopt(parent, name, found.node, self._mount.owner.shown(found), asked_at)
        if isinstance(found, ObjectStat) and inode.node == found.node:
            inode.target = found.symlink_target
            inode.xattrs = found.xattrs
        return inode

    def _made(self, parent: Inode, name: str, found: ObjectStat) -> Inode:
        """The inode of what this mount has just made."""
        inode = self._adopt(parent, name, found, trio.current_time())
        self._mount.touch(inode)
        return inode

    def _removed(self, parent: Inode, name: str) -> None:
        gone = parent.children.get(name)
        if gone is not None:
            self._mount.touch(gone)
            self._table.detach(gone)

    def _key(self, parent: Inode, component: str, *, folder: bool = False) -> tuple[str, str]:
        name = self._table.child_name(parent, component, folder=folder)
        if len(name.key.encode()) > KEY_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        return name.bucket, name.key

    def _check_free(self, parent: Inode, component: str) -> None:
        present = parent.children.get(component)
        if present is not None and present.is_pending:
            raise FUSEError(errno.EEXIST)

    async def _stat_of(self, inode: Inode) -> ObjectStat:
        if inode.is_pending or (inode.file is not None and inode.file.is_dirty):
            if inode.file is None:
                raise FUSEError(errno.ESTALE)
            await inode.file.commit(durable=False)
        (found,) = await self._mount.stat([self._table.name_of(inode)])
        if isinstance(found, KeyNotFound):
            raise self._gone(inode)
        if isinstance(found, LakeError):
            raise found
        return found

    def _gone(self, inode: Inode) -> FUSEError:
        """What to answer when the name of an inode is not there any more: the kernel looks it up anew."""
        self._table.detach(inode)
        return FUSEError(errno.ESTALE)

    async def _inode_of(self, parent: Inode, component: str) -> Inode:
        present = parent.children.get(component)
        if present is not None and (present.is_pending or self._mount.is_fresh(present)):
            return present
        asked_at = trio.current_time()
        return self._adopt(parent, component, await look_up(self._mount, parent, component), asked_at)

    async def _inode_if_any(self, parent: Inode, component: str) -> Inode | None:
        try:
            return await self._inode_of(parent, component)
        except KeyNotFound:
            return None

    async def _make_file(
        self, parent: Inode, component: str, mode: int, ctx: RequestContext, *, exclusive: bool
    ) -> Inode:
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        bucket, key = self._key(parent, component)
        now = now_ns()
        permissions = mode & 0o7777 & ~ctx.umask
        if not exclusive:
            shown = Attributes(OBJECT, 0, permissions, ctx.uid, ctx.gid, now, now)
            inode = self._table.create(parent, component, shown)
            self._mount.touch(inode)
            return inode
        self._check_free(parent, component)
        attributes = ObjectAttributes(mode=permissions, uid=ctx.uid, gid=ctx.gid, mtime_ns=now)
        change = NameChange(bucket, key, b"", attributes, Condition(absent=True))
        try:
            found = await self._mount.change(PutObjects([0], [change], durable=False))
        except PreconditionFailed:
            raise FUSEError(errno.EEXIST) from None
        return self._made(parent, component, found)

    def _file_of(self, inode: Inode) -> OpenFile:
        if inode.file is None:
            inode.file = OpenFile(self._mount, inode)
        return inode.file

    def _opened(self, inode: Inode, file: OpenFile, flags: int) -> FileInfo:
        handle = self._handle()
        self._files[handle] = (file, flags)
        blob = inode.attributes.blob
        keep_cache = inode.cached_blob == blob and inode.cached_blob is not None
        inode.cached_blob = blob
        return FileInfo(fh=FileHandleT(handle), keep_cache=keep_cache)

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _watch(self, bucket: str) -> None:
        if bucket and bucket not in self._mount.watched:
            self._mount.want_watch(bucket)


@asynccontextmanager
async def _at_rest(inodes: Sequence[Inode | None], *, stored: Inode | None = None) -> AsyncIterator[None]:
    """What is open of the inodes commits nothing in the block; what was written to one of them is stored before."""
    async with AsyncExitStack() as stack:
        open_ones = [inode for inode in inodes if inode is not None and inode.file is not None]
        for inode in sorted(open_ones, key=lambda inode: inode.number):
            assert inode.file is not None
            await stack.enter_async_context(inode.file.at_rest(stored=inode is stored))
        yield


def _component(name: bytes) -> str:
    if len(name) > _COMPONENT_BYTES_MAX:
        raise FUSEError(errno.ENAMETOOLONG)
    return _text(name)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise FUSEError(errno.EILSEQ) from None


def _check_kinds(moved: Inode, replaced: Inode) -> None:
    if replaced.is_folder and not moved.is_folder:
        raise FUSEError(errno.EISDIR)
    if moved.is_folder and replaced.attributes.kind != FOLDER:
        raise FUSEError(errno.ENOTDIR)


def _statvfs(free_bytes: int, total_bytes: int) -> StatvfsData:
    stat = StatvfsData()
    stat.f_bsize = stat.f_frsize = _BLOCK
    stat.f_blocks = total_bytes // _BLOCK
    stat.f_bfree = stat.f_bavail = free_bytes // _BLOCK
    stat.f_files = stat.f_ffree = stat.f_favail = 1 << 32
    stat.f_namemax = _COMPONENT_BYTES_MAX
    return stat
