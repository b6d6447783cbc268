"""Changes of names and attributes: sent to the store; the table changes in the same step as the answer.

Each change carries what it was decided upon: the node of the folder, and the node that it replaces, or that there was
none (`fuse.state.kept`).  When the store refuses it because that has changed, it is looked at again, a few times.  An
older engine does not check that, so it is looked at before each change.

A change is answered when it is visible to all; it is durable within a second, or with the next fsync (on a mount with
the option `sync`, when it is answered).  A change is sent once more if the engine was lost before it answered, and may
then meet its own success.  A folder that loses its last name stays.  Times are the store's, so that they are the same
after a remount and elsewhere.  Times of a file that is not stored yet are this mount's, and the store takes them over.
"""

from __future__ import annotations

import errno
import stat as modes
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec
import trio
from pyfuse3 import FUSEError, RequestContext

from fuse.names.attribute_changes import busy
from fuse.names.lookups import Lookups
from fuse.state.inodes import Inode
from fuse.state.kept import Changed, Kept, note_change
from fuse.state.mount import Change, Mount, now_ns
from fuse.state.stat_fields import FOLDER, OBJECT, SYMLINK, Attributes
from lakefs.errors import AlreadyExists, KeyNotFound, LakeError, PreconditionFailed
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
)

ATTEMPTS_MAX: Final = 16
"""Most attempts at one change while others keep changing what it was decided upon; then EAGAIN."""


class Changes:
    """Changes names and attributes in the store, and the table with them."""

    def __init__(self, mount: Mount, lookups: Lookups) -> None:
        self._mount = mount
        self._table = mount.table
        self._lookups = lookups

    # --- folders -------------------------------------------------------------------------------------

    async def make_folder(self, parent: Inode, name: str, mode: int, ctx: RequestContext) -> Inode:
        """Make a folder, which stays when it is empty; in the list of buckets, make a bucket.  EEXIST, ENOENT."""
        if self._table.holds_buckets(parent):
            return await self._make_bucket(parent, name)
        _check_free(parent, name)
        bucket, key = self._lookups.key(parent, name, folder=True)
        attributes = _new_attributes(parent, mode, ctx, FOLDER)

        def request() -> MakeFolder:
            upon = Condition(folder=folder_of(parent))
            return MakeFolder(
                bucket, key, exclusive=True, attributes=attributes, durable=False, condition=upon, folders=True
            )

        changed = await self._make(parent, name, request, attributes, FOLDER)
        made = self._made(parent, name, changed)
        if changed.stamps and not made.children:
            made.names_ns = made.stored_ns
            made.kept = Kept(changed.stamps, changed.epoch)
        return made

    async def _make_bucket(self, parent: Inode, name: str) -> Inode:
        await self._mount.ask(BucketCreate(name), Buckets)
        (found,) = await self._mount.stat([Name(name, "")])
        if isinstance(found, LakeError):
            raise found
        found = msgspec.structs.replace(found, ctime_ns=now_ns())
        return self._made(parent, name, Changed(found, found.ctime_ns))

    async def remove_folder(self, parent: Inode, name: str) -> None:
        """Remove an empty folder, or bucket.  ENOTDIR, ENOTEMPTY, ENOENT."""

        async def attempt(present: Inode | None) -> None:
            if present is not None:
                check_empty(present)
            with busy([present]):
                if self._table.holds_buckets(parent):
                    await self._mount.ask(BucketRemove(name), Done)
                    changed = Changed(None, now_ns())
                else:
                    bucket, key = self._lookups.key(parent, name, folder=True)
                    upon = Condition(folder=folder_of(parent), node=node_of(present))
                    request = RemoveFolder(bucket, key, keep_folder=True, durable=False, condition=upon, folders=True)
                    changed = await self._mount.change_again(request, self._is_done(parent, name, present, FOLDER))
                self._removed(parent, name, changed)

        await self._upon_what_is_there(parent, name, attempt)

    # --- names ---------------------------------------------------------------------------------------

    def begin_file(self, parent: Inode, name: str, mode: int, ctx: RequestContext) -> Inode:
        """Add an empty file whose name is made by its first commit; the caller has seen just now that it is absent."""
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        self._lookups.key(parent, name)
        attributes = _new_attributes(parent, mode, ctx)
        now = attributes.mtime_ns
        shown = Attributes(OBJECT, 0, attributes.mode, attributes.uid, attributes.gid, now, now)
        inode = self._table.create(parent, name, shown)
        inode.named_ns = now
        self._mount.touch(inode)
        self.show_changed(parent, now)
        return inode

    async def make_node(self, parent: Inode, name: str, mode: int, ctx: RequestContext) -> Inode:
        """Make what mknod(2) makes: an empty file.  EPERM for devices, pipes and sockets."""
        if not modes.S_ISREG(mode):
            raise FUSEError(errno.EPERM)
        return await self.make_file(parent, name, mode, ctx)

    async def make_file(self, parent: Inode, name: str, mode: int, ctx: RequestContext) -> Inode:
        """Make an empty file with its name at once.  EEXIST, ENOENT."""
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        _check_free(parent, name)
        bucket, key = self._lookups.key(parent, name)
        attributes = _new_attributes(parent, mode, ctx)

        def request() -> PutObjects:
            upon = Condition(absent=True, alone=True, folder=folder_of(parent))
            return PutObjects([0], [NameChange(bucket, key, b"", attributes, upon)], durable=False, folders=True)

        return self._made(parent, name, await self._make(parent, name, request, attributes, OBJECT))

    async def make_symlink(self, parent: Inode, name: str, target: bytes, ctx: RequestContext) -> Inode:
        """Make a symlink.  EEXIST, ENOENT."""
        if self._table.holds_buckets(parent):
            raise FUSEError(errno.EPERM)
        _check_free(parent, name)
        bucket, key = self._lookups.key(parent, name)
        attributes = _new_attributes(parent, 0o777, ctx)

        def request() -> MakeSymlink:
            upon = Condition(folder=folder_of(parent))
            return MakeSymlink(bucket, key, target, attributes, durable=False, condition=upon, folders=True)

        return self._made(parent, name, await self._make(parent, name, request, attributes, SYMLINK))

    async def _make(
        self, parent: Inode, name: str, request: Callable[[], Change], attributes: ObjectAttributes, kind: int
    ) -> Changed:
        """Send a request that makes a name.  EEXIST if another client has made it; then this mount knows it."""
        at = self._table.child_name(parent, name, folder=kind == FOLDER)

        async def own(error: LakeError) -> bool | ObjectStat:
            (found,) = await self._mount.stat([at])
            return found if isinstance(found, ObjectStat) and _is_own(found, attributes, kind) else False

        for _ in range(ATTEMPTS_MAX):
            if not self._mount.checks_places and (await self._lookups.look(parent, name, confirm=True))[0] is not None:
                raise FUSEError(errno.EEXIST)
            try:
                return await self._mount.change_again(request(), own)
            except (AlreadyExists, PreconditionFailed, KeyNotFound):
                if await self.seen_anew(parent, name) is not None:
                    raise FUSEError(errno.EEXIST) from None
        raise FUSEError(errno.EAGAIN)

    async def unlink(self, parent: Inode, name: str) -> None:
        """Remove a file or symlink; open handles keep its content.  EISDIR, ENOENT."""

        async def attempt(present: Inode | None) -> None:
            if self._table.holds_buckets(parent) or (present is not None and present.is_folder):
                raise FUSEError(errno.EISDIR)
            upon = Condition(folder=folder_of(parent), node=node_of(present))
            names = [self._lookups.key(parent, name)]
            request = DeleteNames(names, keep_folder=True, durable=False, conditions=[upon], folders=True)
            async with at_rest([present]):
                try:
                    changed = await self._mount.change_again(request, self._is_done(parent, name, present, OBJECT))
                except KeyNotFound:
                    if present is None or not present.is_pending:
                        raise
                    changed = Changed(None, now_ns())
                self._removed(parent, name, changed)

        await self._upon_what_is_there(parent, name, attempt)

    def _is_done(
        self, parent: Inode, name: str, removed: Inode | None, kind: int
    ) -> Callable[[LakeError], Awaitable[bool]]:
        """Return the question if a removal whose answer was lost was done: the name has that node no more."""

        async def is_done(error: LakeError) -> bool:
            if not isinstance(error, (KeyNotFound, PreconditionFailed)):
                return False
            if parent is not self._table.root:
                await self._lookups.confirm_folder(parent)
            (found,) = await self._mount.stat([self._table.child_name(parent, name, folder=kind == FOLDER)])
            return isinstance(found, KeyNotFound) or (isinstance(found, ObjectStat) and found.node != node_of(removed))

        return is_done

    async def _upon_what_is_there(
        self, parent: Inode, name: str, attempt: Callable[[Inode | None], Awaitable[None]]
    ) -> None:
        """Make a change of what a name has; look at it again when it has something else by now.  ENOENT."""
        present = parent.children.get(name)
        if not self._mount.checks_places:
            present = await self._lookups.require(parent, name, confirm=True)
        for _ in range(ATTEMPTS_MAX):
            try:
                await attempt(present)
            except (PreconditionFailed, KeyNotFound):
                present = await self.seen_anew(parent, name)
                if present is None:
                    raise FUSEError(errno.ENOENT) from None
            else:
                return
        raise FUSEError(errno.EAGAIN)

    async def seen_anew(self, parent: Inode, name: str) -> Inode | None:
        """Return the inode of a name as the store has it now, whatever was known.  ENOENT, ESTALE: as `look`."""
        parent.kept = None
        parent.doubt_names()
        present = parent.children.get(name)
        if present is not None:
            present.kept = None
        return (await self._lookups.look(parent, name, confirm=True))[0]

    # --- the table -----------------------------------------------------------------------------------

    def _made(self, parent: Inode, name: str, changed: Changed) -> Inode:
        found = changed.made
        inode = self._lookups.adopt(parent, name, found, trio.current_time())
        self._mount.note_visible(parent, inode)
        self._mount.touch(inode)
        self.show_changed(parent, found.ctime_ns)
        note_change(parent, changed.folder, changed.epoch)
        return inode

    def _removed(self, parent: Inode, name: str, changed: Changed) -> None:
        self._mount.note_visible(parent)
        gone = parent.children.get(name)
        if gone is not None:
            gone.attributes.ctime_ns = changed.changed_ns
            self._mount.touch(gone)
            self._table.remove(gone)
        self.show_changed(parent, changed.changed_ns)
        note_change(parent, changed.folder, changed.epoch)

    def show_changed(self, folder: Inode, changed_ns: int) -> None:
        """Show a folder's times as those of a change of its names by this mount."""
        folder.changed_below_ns = folder.attributes.mtime_ns = folder.attributes.ctime_ns = changed_ns
        self._mount.touch(folder)


def folder_of(folder: Inode) -> int:
    """Return the node for the condition on a name's folder; 0, none, for the root of a mount."""
    return 0 if folder.parent is None else folder.node


def node_of(present: Inode | None) -> int:
    """Return the node for the condition on what a name has; 0, none, for nothing, and for what is not stored yet."""
    return 0 if present is None else present.node


@asynccontextmanager
async def at_rest(inodes: Sequence[Inode | None], *, stored: Sequence[Inode] = ()) -> AsyncIterator[None]:
    """Keep open files of the inodes from being committed in the block; those in `stored` are committed before."""
    async with AsyncExitStack() as stack:
        open_ones = [inode for inode in inodes if inode is not None and inode.file is not None]
        for inode in sorted(open_ones, key=lambda inode: inode.number):
            if inode.file is not None:  # nobody has closed it while another one came to rest
                await stack.enter_async_context(inode.file.at_rest(stored=inode in stored))
        with busy(inodes):
            yield


def _is_own(found: ObjectStat, attributes: ObjectAttributes, kind: int) -> bool:
    """Return True if a record is the one that a request with these attributes made; times are compared to the ns."""
    return (found.kind, found.mtime_ns, found.uid, found.gid) == (
        kind,
        attributes.mtime_ns,
        attributes.uid,
        attributes.gid,
    )


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


def check_empty(folder: Inode) -> None:
    """Raise ENOTDIR for what is no folder, ENOTEMPTY for one with a file that is not stored yet."""
    if not folder.is_folder:
        raise FUSEError(errno.ENOTDIR)
    if any(child.is_pending for child in folder.children.values()):
        raise FUSEError(errno.ENOTEMPTY)
