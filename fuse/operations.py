"""The operations that the kernel calls, one method each: names, attributes, folders, handles.

A method finds its inodes, does one thing to the store or to an open file, and then updates the table in one step,
without `await`.  It asks the engine for nothing that is known to stand (`fuse.state.kept`).

Rules kept here:
- Only `FUSEError` leaves a method (`fuse.answering`).
- Each method that gives the kernel an entry counts one look-up of its inode.
- Before a method begins, all that native threads have appended is known (`fuse.staging.appending`).
- Changes of names are visible to all when they are answered, and durable within a second; fsync waits for that.
"""

from __future__ import annotations

import errno
import os
import stat as modes
from collections.abc import Sequence
from typing import Final

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

from fuse.answering import answering, repeatable, step_of_repeat
from fuse.handles import Handle, release_all
from fuse.hot.hot_set import HotSet
from fuse.names.attribute_changes import AttributeChanges
from fuse.names.changes import ATTEMPTS_MAX, Changes
from fuse.names.lookups import Lookups
from fuse.names.opening import Opening
from fuse.names.readdir import COMPONENT_BYTES_MAX, FolderHandle, component_of
from fuse.names.renames import Renames
from fuse.names.repeats import Repeats
from fuse.names.xattrs import ExtendedAttributes
from fuse.native import layer
from fuse.open_file import OpenFile, may_read
from fuse.state.attributes import no_entry, to_entry, to_statvfs, without_set_id
from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from fuse.state.stat_fields import SYMLINK
from lakefs.wire.messages import SetAttributes, Status, StatusReply

_log: Final = structlog.get_logger(__name__)
_WRITING: Final = os.O_WRONLY | os.O_RDWR
_SET_ID: Final = modes.S_ISUID | modes.S_ISGID
_STORING: Final = _WRITING | os.O_TRUNC
_STATFS_S: Final = 1.0


class LakeOperations(pyfuse3.Operations):
    """The operations of one mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, mount: Mount) -> None:
        super().__init__()
        self.hot: HotSet | None = None
        """Contents in memory that the kernel reads by itself; None: every read is asked for."""
        self._mount = mount
        self._table = mount.table
        self._lookups = Lookups(mount)
        self._changes = Changes(mount, self._lookups)
        self._renames = Renames(mount, self._lookups, self._changes)
        self._attribute_changes = AttributeChanges(mount, self._lookups)
        self._repeats = Repeats()
        self._opening = Opening(mount, self._lookups, self._file_of, self._is_held, self._repeats)
        self._xattrs = ExtendedAttributes(self._lookups, self._attribute_changes)
        self._files: dict[int, Handle] = {}
        self._folders: dict[int, FolderHandle] = {}
        self._next_handle = 0
        self._statfs: StatvfsData | None = None
        self._statfs_until = 0.0

    # --- looking up ----------------------------------------------------------------------------------

    @step_of_repeat
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """Return the entry of a name.  The kernel may also remember that the name does not exist."""
        parent = self._lookups.inode(parent_inode)
        self._lookups.watch(parent)
        confirm = self._repeats.is_repeating(ctx.pid)  # what an open may then rest on
        inode, is_reliable = await self._lookups.look_for_kernel(parent, component_of(name), confirm=confirm)
        if inode is not None:
            entry = self._known(inode)
        elif self._table.holds_buckets(parent):
            raise FUSEError(errno.ENOENT)
        else:
            self._repeats.note_absent(ctx.pid, parent_inode, name)
            entry = no_entry(self._mount.timeouts(self._mount.bucket_of(parent))[0])
        if not is_reliable:
            entry.entry_timeout = entry.attr_timeout = 0
        return entry

    @answering
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Return the attributes; they are asked anew if they are not fresh."""
        known = self._lookups.inode(inode)
        await self._repeats.reading(ctx.pid, self._lookups.refresh_for_kernel(known))
        return self._attributes(known)

    @answering
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        """Return the target of the symlink that the name has now.  ESTALE: the kernel looks the path up anew, once."""
        link = self._lookups.inode(inode)
        if link.attributes.kind != SYMLINK:
            raise FUSEError(errno.EINVAL)
        confirm = not self._repeats.is_repeating(ctx.pid)  # else its look-up asked just now
        return await self._repeats.reading(ctx.pid, self._lookups.target_of(link, confirm=confirm))

    @answering
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Return the room of the store's disk; asked once a second at most."""
        now = trio.current_time()
        if self._statfs is None or now >= self._statfs_until:
            answer = await self._mount.ask(Status(), StatusReply)
            disk = msgspec.json.decode(answer.status_json)["disk"]
            self._statfs = to_statvfs(int(disk["free_bytes"]), int(disk["total_bytes"]), COMPONENT_BYTES_MAX)
            self._statfs_until = now + _STATFS_S
        return self._statfs

    async def access(self, inode: InodeT, mode: ModeT, ctx: RequestContext) -> bool:
        """Return True: the kernel checks mode and owner itself (`default_permissions`)."""
        return True

    # --- folders -------------------------------------------------------------------------------------

    @repeatable
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """Open a folder for reading, as it is now.  ESTALE: the kernel looks the path up anew."""
        folder = self._lookups.inode(inode)
        opened = FolderHandle(self._mount, self._lookups, folder)
        await opened.open()
        handle = self._handle()
        self._folders[handle] = opened
        self._lookups.watch(folder)
        return FileHandleT(handle)

    @answering
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        """Send the entries behind a position, with their attributes, as many as fit."""
        await self._folders[fh].reply(token, start_id)

    @answering
    async def releasedir(self, fh: FileHandleT) -> None:
        """Close a folder."""
        self._folders.pop(fh).close()

    @answering
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Make earlier changes in the folder durable."""
        await self._mount.sync(self._folders[fh].folder)

    @repeatable
    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        """Make a folder, which stays when it is empty; in the list of buckets, make a bucket."""
        parent = self._lookups.inode(parent_inode)
        return self._known(await self._changes.make_folder(parent, component_of(name), mode, ctx))

    @repeatable
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove an empty folder, or bucket."""
        await self._changes.remove_folder(self._lookups.inode(parent_inode), component_of(name))

    # --- names ---------------------------------------------------------------------------------------

    @repeatable
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """Remove a file or symlink; open handles keep its content."""
        await self._changes.unlink(self._lookups.inode(parent_inode), component_of(name))

    @repeatable
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """Rename a file or folder; a file or an empty folder at the new name is replaced, or exchanged."""
        source, target = self._lookups.inode(parent_inode_old), self._lookups.inode(parent_inode_new)
        await self._renames.rename(source, component_of(name_old), target, component_of(name_new), flags)

    @repeatable
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Make a symlink."""
        parent = self._lookups.inode(parent_inode)
        return self._known(await self._changes.make_symlink(parent, component_of(name), bytes(target), ctx))

    @answering
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """Raise EPERM, as link(2) has it: hard links are not offered."""
        raise FUSEError(errno.EPERM)

    @repeatable
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """Make an empty file; devices, pipes and sockets are not offered: EPERM, as mknod(2) has it."""
        parent = self._lookups.inode(parent_inode)
        return self._known(await self._changes.make_node(parent, component_of(name), mode, ctx))

    # --- handles -------------------------------------------------------------------------------------

    @repeatable
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Open what the name of a file has now.  ESTALE: the kernel looks the path up anew, once."""
        known = self._lookups.inode(inode)
        if known.is_folder:
            raise FUSEError(errno.EISDIR)
        if known.parent is not None:
            self._mount.raise_failure(known.parent, known.name)
        file = await self._opening.open(known, ctx.pid)
        try:
            if flags & os.O_TRUNC:
                await self._drop_set_id(known, ctx)
                await file.truncate(0)
            elif self.hot is not None and file.is_stored and not flags & _WRITING:
                await self.hot.seen(known)
            return self._opened(known, file, flags, ctx, changed=bool(flags & os.O_TRUNC))
        except BaseException:
            await self._opening.close(known, file)
            raise

    @repeatable
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Make a file, at once with O_EXCL, else by its first commit, and open it; or open the one there by now."""
        parent, component = self._lookups.inode(parent_inode), component_of(name)
        self._mount.raise_failure(parent, component)
        if flags & os.O_EXCL:
            inode = await self._changes.make_file(parent, component, mode, ctx)
            return self._opened_new(inode, flags, ctx)
        for _ in range(ATTEMPTS_MAX):
            present = parent.children.get(component)
            if present is None:
                present, _ = await self._lookups.look(parent, component, confirm=True)
            if present is None:
                return self._opened_new(self._changes.begin_file(parent, component, mode, ctx), flags, ctx)
            if present.attributes.kind == SYMLINK:
                raise FUSEError(errno.ESTALE)  # the kernel has not followed it: it looks the path up anew
            try:
                return await self.open(InodeT(present.number), flags, ctx), self._known(present)
            except FUSEError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                self._table.detach(present)  # it was removed or replaced just now
                self._repeats.begin_look_up(ctx.pid, parent_inode, name)  # by the next open here
        raise FUSEError(errno.EAGAIN)

    def _opened_new(self, inode: Inode, flags: int, ctx: RequestContext) -> tuple[FileInfo, EntryAttributes]:
        file = self._file_of(inode)
        file.open_new()
        inode.lookups += 1
        return self._opened(inode, file, flags, ctx, changed=file.is_dirty), self._entry(inode)

    @answering
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Return bytes of a file.  They are sent before anything else runs in the loop and need not live longer."""
        file = self._files[fh].file
        content = file.read_nowait(off, size) or await file.read(off, size)
        file.teach(fh, off, size)
        return content  # type: ignore[return-value]

    @answering
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """Write bytes; other handles of this mount see them at once, other clients after close."""
        _, file, flags, opener, _ = self._files[fh]
        is_mapped = layer.write_is_mapped()
        await self._drop_set_id(file.inode, opener)
        forgets = file.readers and not may_read(flags) and file.hot is None
        is_there = await file.write(off, buf, 0 if forgets else fh, appends=bool(flags & os.O_APPEND))
        file.writers.changed(fh, is_mapped=is_mapped)
        if not is_there:
            self._mount.forget_attributes(file.inode)  # the kernel took another length for the file's
        if forgets or not is_there:
            await self._mount.forget_pages(file.inode)  # a reader may have cached pages of it before this write
        return len(buf)

    @answering
    async def flush(self, fh: FileHandleT) -> None:
        """Store written bytes at close(2), visible to all; an error is close's.

        Not while the program that opened the handle still has a descriptor of it.
        """
        file, sync = self._files[fh].file, self._mount.options.sync
        if await file.is_stored_at_flush(fh):
            await file.commit(durable=sync)
        elif sync and not file.is_dirty:
            await file.commit(durable=True)  # an earlier commit may be only visible

    @answering
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Store written bytes and make them durable."""
        file = self._files[fh].file
        await file.commit(durable=True)
        if self._mount.unsettled.concerns(file.inode.number):  # its name or attributes
            await self._mount.sync(file.inode)

    @answering
    async def release(self, fh: FileHandleT) -> None:
        """Close a handle, and store what was written through it and is not stored; an error is the next open's."""
        inode, file, flags, _, hot = self._files.pop(fh)
        stores = file.is_changed_by(fh)
        file.writers.closed(fh)
        file.answered -= 1
        layer.remove(fh)
        file.readers -= may_read(flags)
        if self.hot is not None and hot is not None:
            self.hot.closed(hot, flags)
        await self._opening.close(inode, file, stores=stores)

    async def release_all(self, within_s: float) -> None:
        """Close all open files when the mount has ended; files not stored within `within_s` stay staged."""
        handles = list(self._files.values())
        self._files.clear()
        await release_all(handles, self._mount, self.hot, within_s)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Subtract the kernel's look-ups of inodes that it forgets."""
        for number, count in inode_list:
            self._table.forget(number, count)

    # --- attributes ----------------------------------------------------------------------------------

    @repeatable
    async def setattr(
        self, inode: InodeT, attr: EntryAttributes, fields: SetattrFields, fh: FileHandleT | None, ctx: RequestContext
    ) -> EntryAttributes:
        """Set length, mode, owner, times.  A call without any: content changes, or the owner is set to itself."""
        known = self._lookups.inode(inode)
        if fields.update_size:
            await self._drop_set_id(known, ctx)
            await self._set_size(known, attr.st_size, fh, ctx)
            if not (fields.update_mode or fields.update_mtime or fields.update_atime):
                return self._attributes(known)
        mode = attr.st_mode & 0o7777
        if (
            fields.update_size or ctx.uid != known.attributes.uid
        ):  # the kernel clears bits for a caller that may not chmod
            mode = without_set_id(known.attributes, ctx, mode)
        wanted = SetAttributes(
            "",
            "",
            mode=mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            durable=False,
        )
        if wanted.mode is wanted.uid is wanted.gid is wanted.mtime_ns is wanted.atime_ns is None:
            wanted = msgspec.structs.replace(wanted, mode=without_set_id(known.attributes, ctx))
        await self._attribute_changes.set_attributes(known, wanted)
        if known.attributes.mode & _SET_ID and isinstance(known.file, OpenFile):
            known.file.end_appends()  # the next write clears these bits
        return self._attributes(known)

    async def _drop_set_id(self, inode: Inode, ctx: RequestContext) -> None:
        """Clear the set-id bits where a change of content needs it and the kernel leaves it to the mount."""
        mode = without_set_id(inode.attributes, ctx)
        if mode != inode.attributes.mode:
            await self._attribute_changes.set_attributes(inode, SetAttributes("", "", mode=mode, durable=False))

    async def _set_size(self, inode: Inode, size: int, fh: FileHandleT | None, ctx: RequestContext) -> None:
        if inode.is_folder:
            raise FUSEError(errno.EISDIR)
        if fh is not None and fh in self._files:
            file = self._files[fh].file
            await file.truncate(size)
            file.writers.changed(fh)
            return
        file = await self._opening.open(inode, ctx.pid)
        try:
            await file.truncate(size)
            if not file.writers.is_changed:  # else it is stored with what is being written
                await file.commit(durable=False)
        finally:
            await self._opening.close(inode, file)

    @answering
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        """Return the value of an extended attribute."""
        return await self._xattrs.value(self._lookups.inode(inode), name)

    @answering
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        """Return the names of the extended attributes."""
        names = await self._xattrs.names(self._lookups.inode(inode), for_root=ctx.uid == 0)
        return [XAttrNameT(name) for name in names]

    @repeatable
    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        """Set an extended attribute."""
        await self._xattrs.set(self._lookups.inode(inode), name, value)

    @repeatable
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        """Remove an extended attribute."""
        await self._xattrs.remove(self._lookups.inode(inode), name)

    # --- shared --------------------------------------------------------------------------------------

    def _entry(self, inode: Inode) -> EntryAttributes:
        """Return the entry of a name: its `st_ino` is the inode's number for the kernel too."""
        entry_timeout_s, attribute_timeout_s = self._mount.timeouts(self._mount.bucket_of(inode))
        return to_entry(inode, entry_timeout_s, attribute_timeout_s)

    def _attributes(self, inode: Inode) -> EntryAttributes:
        """Return the entry for an answer that has attributes only."""
        entry = self._entry(inode)
        entry.st_ino = InodeT(inode.st_ino)
        entry.attr_timeout = 0 if inode.is_doubted else self._mount.timeouts(self._mount.bucket_of(inode))[1]
        return entry

    def _known(self, inode: Inode) -> EntryAttributes:
        """Return the entry, and count one more look-up by the kernel."""
        inode.lookups += 1
        return self._entry(inode)

    def _file_of(self, inode: Inode) -> OpenFile:
        if not isinstance(inode.file, OpenFile):
            inode.file = OpenFile(self._mount, inode, None if self.hot is None else self.hot.held(inode))
        return inode.file

    def _is_held(self, inode: Inode) -> bool:
        return self.hot is not None and self.hot.is_held(inode)

    def _opened(
        self, inode: Inode, file: OpenFile, flags: int, ctx: RequestContext, *, changed: bool = False
    ) -> FileInfo:
        handle = self._handle()
        hot = None
        if self.hot is not None and not inode.borrowers:
            begins = not (file.answered or flags & _WRITING) and file.is_stored
            file.hot = hot = self.hot.pass_through(inode, file.hot, handle, flags, begins=begins)
        stores = changed or flags & _STORING
        if stores:
            file.writers.opened(handle, flags, ctx.pid)
        if changed:
            file.writers.changed(handle)
        self._files[handle] = Handle(inode, file, flags, ctx, hot)
        file.readers += may_read(flags)
        file.answered += 1
        if hot is not None:
            inode.cached_blob = None
            return FileInfo(fh=FileHandleT(handle))
        if not stores:
            layer.leave_out_flush(handle)
        if file.inode is not inode:  # the kernel's pages of this inode are of other content
            return FileInfo(fh=FileHandleT(handle), direct_io=True)
        before, inode.cached_blob = inode.cached_blob, inode.attributes.blob
        keeps = before is not None and before == inode.cached_blob
        return FileInfo(fh=FileHandleT(handle), keep_cache=keeps, direct_io=not may_read(flags))

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle
