"""Renames and exchanges of names: sent to the store; the table changes in the same step as the answer.

Each carries what it was decided upon, as all changes do (`fuse.names.changes`).  An exchange that is sent once more
would undo itself: its conditions have the nodes of both names, so the second one is refused, and known as done.
"""

from __future__ import annotations

import errno

from pyfuse3 import RENAME_EXCHANGE, RENAME_NOREPLACE, FUSEError

from fuse.names.changes import ATTEMPTS_MAX, Changes, at_rest, check_empty, folder_of, node_of
from fuse.names.lookups import Lookups
from fuse.state.inodes import Inode
from fuse.state.kept import Changed, note_change
from fuse.state.mount import Mount
from fuse.state.stat_fields import FOLDER
from lakefs.errors import AlreadyExists, KeyNotFound, LakeError, PreconditionFailed
from lakefs.names import Name
from lakefs.wire.messages import FEATURE_EXCHANGE, Condition, Exchange, ObjectStat, Rename


class Renames:
    """Renames and exchanges names in the store, and in the table with them."""

    def __init__(self, mount: Mount, lookups: Lookups, changes: Changes) -> None:
        self._mount = mount
        self._table = mount.table
        self._lookups = lookups
        self._changes = changes

    async def rename(self, source: Inode, old: str, target: Inode, new: str, flags: int) -> None:
        """Rename a file or folder; a file or an empty folder at the new name is replaced, or exchanged."""
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise FUSEError(errno.EINVAL)
        if self._table.holds_buckets(source) or self._table.holds_buckets(target):
            raise FUSEError(errno.EPERM)
        if flags == RENAME_EXCHANGE:
            await self._exchange(source, old, target, new)
        else:
            await self._rename(source, old, target, new, no_replace=bool(flags))

    async def _rename(self, source: Inode, old: str, target: Inode, new: str, *, no_replace: bool) -> None:
        asks = not self._mount.checks_places
        moved = await self._lookups.require(source, old, confirm=asks)
        for _ in range(ATTEMPTS_MAX):
            replaced, _ = await self._lookups.look(target, new, confirm=asks or no_replace)
            if replaced is not None and no_replace:
                raise FUSEError(errno.EEXIST)
            if moved is replaced:
                return
            if replaced is not None:
                _check_kinds(moved, replaced)
            try:
                await self._move(source, old, target, new, moved, replaced)
            except (PreconditionFailed, KeyNotFound, AlreadyExists):
                await self._look_again(source, old, moved)
                await self._changes.seen_anew(target, new)
            else:
                return
        raise FUSEError(errno.EAGAIN)

    async def _look_again(self, folder: Inode, name: str, known: Inode) -> None:
        """Look at a name after a refusal.  ENOENT; ESTALE if it has another inode than the kernel takes it for."""
        found = await self._changes.seen_anew(folder, name)
        if found is None:
            raise FUSEError(errno.ENOENT) from None
        if found is not known:
            raise FUSEError(errno.ESTALE) from None

    async def _move(
        self, source: Inode, old: str, target: Inode, new: str, moved: Inode, replaced: Inode | None
    ) -> None:
        bucket, key = self._lookups.key(source, old, folder=moved.is_folder)
        to_bucket, to_key = self._lookups.key(target, new, folder=moved.is_folder)
        async with at_rest([moved, replaced], stored=[moved]):
            upon = Condition(folder=folder_of(source), node=moved.node)
            to_upon = Condition(folder=folder_of(target), absent=replaced is None, node=node_of(replaced), alone=True)
            request = Rename(
                bucket,
                key,
                to_bucket,
                to_key,
                keep_folder=True,
                durable=False,
                condition=upon,
                to_condition=to_upon,
                folders=True,
            )
            changed = await self._send(request, Name(to_bucket, to_key), moved)
            self._mount.note_visible(source, target, moved)
            self._table.move(moved, target, new)
            self._show_renamed(moved, changed)
            if replaced is not None:
                replaced.attributes.ctime_ns = changed.changed_ns
            self._show_folders(source, target, changed)

    # --- exchanges -----------------------------------------------------------------------------------

    async def _exchange(self, source: Inode, old: str, target: Inode, new: str) -> None:
        """Exchange two names, whatever kinds they have.  EINVAL: the engine cannot; EXDEV: they are in two buckets."""
        if not self._mount.engine.hello.features & FEATURE_EXCHANGE:
            raise FUSEError(errno.EINVAL)
        if self._lookups.key(source, old)[0] != self._lookups.key(target, new)[0]:
            raise FUSEError(errno.EXDEV)
        one = await self._lookups.require(source, old, confirm=False)
        other = await self._lookups.require(target, new, confirm=False)
        if one is other:
            return
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._swap((source, old, one), (target, new, other))
            except AlreadyExists:
                raise FUSEError(errno.EEXIST) from None  # a folder would take the place of an object of its path
            except (PreconditionFailed, KeyNotFound):
                await self._look_again(source, old, one)
                await self._look_again(target, new, other)
            else:
                return
        raise FUSEError(errno.EAGAIN)

    async def _swap(self, first: tuple[Inode, str, Inode], second: tuple[Inode, str, Inode]) -> None:
        (source, old, one), (target, new, other) = first, second
        bucket, key = self._lookups.key(source, old, folder=one.is_folder)
        _, to_key = self._lookups.key(target, new, folder=other.is_folder)
        _, moved_key = self._lookups.key(target, new, folder=one.is_folder)
        async with at_rest([one, other], stored=[one, other]):
            upon = Condition(folder=folder_of(source), node=one.node)
            to_upon = Condition(folder=folder_of(target), node=other.node)
            request = Exchange(bucket, key, to_key, durable=False, condition=upon, to_condition=to_upon, folders=True)
            changed = await self._send(request, Name(bucket, moved_key), one)
            self._mount.note_visible(source, target, one, other)
            self._table.exchange(first, second)
            for inode in (one, other):
                self._show_renamed(inode, changed)
            self._show_folders(source, target, changed)

    # --- both ----------------------------------------------------------------------------------------

    async def _send(self, request: Rename | Exchange, new_name: Name, moved: Inode) -> Changed:
        async def is_done(error: LakeError) -> bool:
            (found,) = await self._mount.stat([new_name])
            return isinstance(found, ObjectStat) and found.node == moved.node

        return await self._mount.change_again(request, is_done)

    def _show_renamed(self, inode: Inode, changed: Changed) -> None:
        self._mount.touch(inode)
        inode.kept = None
        inode.attributes.ctime_ns = changed.changed_ns

    def _show_folders(self, source: Inode, target: Inode, changed: Changed) -> None:
        self._changes.show_changed(source, changed.changed_ns)
        self._changes.show_changed(target, changed.changed_ns)
        note_change(target, changed.folder, changed.epoch)
        if source is not target:
            note_change(source, changed.from_folder, changed.epoch)


def _check_kinds(moved: Inode, replaced: Inode) -> None:
    if replaced.is_folder and not moved.is_folder:
        raise FUSEError(errno.EISDIR)
    if moved.is_folder and replaced.attributes.kind != FOLDER:
        raise FUSEError(errno.ENOTDIR)
    if replaced.is_folder:
        check_empty(replaced)
