"""Look-ups: asks the store about names and inodes, and updates the table with the answers.

What stands is not asked again, nor, where nothing will be changed upon it, what is fresh (`fuse.state.kept`).  An
answer that the store gave before this mount, or another, changed the same names does not overwrite newer knowledge: see
`InodeTable.adopt`, `Inode.is_ahead_of` and `Inode.names_changed_at`.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Final

import trio
from pyfuse3 import FUSEError

from fuse.state.inodes import Inode
from fuse.state.kept import Answer
from fuse.state.mount import Mount
from fuse.state.stat_fields import SYMLINK
from lakefs.errors import BucketNotFound, InvalidName, KeyNotFound, LakeError
from lakefs.limits import KEY_BYTES_MAX
from lakefs.names import Name
from lakefs.wire.messages import ListEntry, ObjectStat

_LOOKUPS_MAX: Final = 3
"""Most look-ups of one name while names of its folder keep changing."""
_DEPTH_MAX: Final = 1 << 16
"""Most folders above a name: more are a circle of places that are out of date."""
_ABSENT: Final = (KeyNotFound, BucketNotFound, InvalidName)
"""The engine's answers for a name that is not there; all others are errors."""


class Lookups:
    """Finds inodes.  It never counts a look-up by the kernel."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._table = mount.table

    def inode(self, number: int) -> Inode:
        """Return the inode with this number.  ESTALE if it is not known (any more)."""
        try:
            return self._table.of(number)
        except KeyError:
            raise FUSEError(errno.ESTALE) from None

    def watch(self, inode: Inode) -> None:
        """Ask for a watch on the inode's bucket."""
        bucket = self._mount.bucket_of(inode)
        if bucket and bucket not in self._mount.watched:
            self._mount.want_watch(bucket)

    # --- by name -------------------------------------------------------------------------------------

    async def look(self, parent: Inode, name: str, *, confirm: bool = False) -> tuple[Inode | None, bool]:
        """Return the inode of a name, or None; and True if the kernel may rely on the answer for a while.

        `confirm`: something will be done upon it, so it is as of now.  ENOENT, ESTALE if the folder itself is gone.
        """
        known, found = self._known(parent, name, confirm=confirm)
        if known:
            return found, True
        for _ in range(_LOOKUPS_MAX):
            asked_at = trio.current_time()
            found = await self._asked_store(parent, name, asked_at)
            if parent.names_changed_at <= asked_at:
                return found, True
            if found is not None:
                self._table.forget(found.number, 0)
        found = await self._asked_store(parent, name, trio.current_time())
        return found, False  # names change all the time: the answer may be out of date

    def _known(self, parent: Inode, name: str, *, confirm: bool) -> tuple[bool, Inode | None]:
        """Return True, and the inode or None, if the store need not be asked for a name."""
        mount = self._mount
        present = parent.children.get(name)
        if present is not None:
            if mount.stands(present.kept):
                present.confirm(trio.current_time())
                return True, present
            return present.is_pending or (not confirm and mount.is_fresh(present)), present
        is_absent = mount.names_stand(parent) or mount.absences.stand(parent, name)
        return is_absent or (not confirm and mount.names_are_fresh(parent)), None

    async def _asked_store(self, parent: Inode, name: str, asked_at: float) -> Inode | None:
        table = self._table
        names = [Name(name, "")]
        if not table.holds_buckets(parent):
            names = [self._child_name(parent, name, folder=True), self._child_name(parent, name)]
        checked = [] if parent is table.root else [table.name_of(parent)]
        answers = await self._mount.look_up([*checked, *names])
        for answer in answers[: len(checked)]:
            self._check_folder(parent, answer, asked_at)
        for answer in answers[len(checked) :]:
            if isinstance(answer.found, ObjectStat):
                await self._mount.follow(answer.found)
                return self.adopt(parent, name, answer.found, asked_at, answer.kept)
            if not isinstance(answer.found, _ABSENT):
                raise answer.found
        present = parent.children.get(name)
        if present is not None and (present.is_pending or present.is_ahead_of(asked_at)):
            return present
        if present is not None:
            table.detach(present)
        elif not parent.is_newer_than(asked_at):
            self._mount.absences.note(parent, name, answers)
        return None

    def _check_folder(self, folder: Inode, answer: Answer, asked_at: float) -> None:
        """Take the store's record of a folder.  ENOENT, ESTALE if its name has none, or another one, by now."""
        found = answer.found
        if isinstance(found, ObjectStat):
            if found.node != folder.node and not folder.is_newer_than(asked_at):
                self._table.detach(folder)
                raise FUSEError(errno.ESTALE)  # the kernel looks the path up anew
            if folder.parent is not None:
                self.adopt(folder.parent, folder.name, found, asked_at, answer.kept)
        elif isinstance(found, (KeyNotFound, BucketNotFound)):
            if not folder.is_newer_than(asked_at):
                self._table.detach(folder)
                raise FUSEError(errno.ENOENT)
        else:
            raise found

    async def confirm_folder(self, folder: Inode) -> None:
        """Ask for a folder's own record.  ENOENT, ESTALE if its name has none, or another one, by now."""
        if folder is self._table.root:
            return
        asked_at = trio.current_time()
        (answer,) = await self._mount.look_up([self._table.name_of(folder)])
        self._check_folder(folder, answer, asked_at)

    async def require(self, parent: Inode, name: str, *, confirm: bool) -> Inode:
        """Return the inode of a name; `confirm` as in `look`.  ENOENT."""
        inode, _ = await self.look(parent, name, confirm=confirm)
        if inode is None:
            raise FUSEError(errno.ENOENT)
        return inode

    async def look_for_kernel(self, parent: Inode, name: str, *, confirm: bool) -> tuple[Inode | None, bool]:
        """Do `look` for the kernel, which does not repeat the look-up that a mkdir begins with, but the mkdir.

        So no name is found in a folder that was lost to another, if that has none of this name.
        """
        try:
            return await self.look(parent, name, confirm=confirm)
        except FUSEError as error:
            if error.errno != errno.ESTALE or not await self._is_absent_by_path(parent, name):
                raise
        return None, False

    async def _is_absent_by_path(self, folder: Inode, name: str) -> bool:
        """Return True if there is no such name in what has the path of a folder by now."""
        place = self._path_of(folder)
        if place is None:
            return False
        names = [Name(place.bucket, f"{place.key}{name}{suffix}") for suffix in ("/", "")]
        return all(isinstance(found, _ABSENT) for found in await self._mount.stat(names))

    def key(self, parent: Inode, name: str, *, folder: bool = False) -> tuple[str, str]:
        """Return bucket and key of a name in a folder.  ESTALE if the folder was lost to another."""
        return self._child_name(parent, name, folder=folder)

    def new_key(self, parent: Inode, name: str, *, folder: bool = False) -> tuple[str, str]:
        """Return bucket and key of a name that is to be made.  ENAMETOOLONG, ESTALE as `key`."""
        found = self._child_name(parent, name, folder=folder)
        if len(found.key.encode()) > KEY_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        return found

    def _child_name(self, parent: Inode, name: str, *, folder: bool = False) -> Name:
        try:
            return self._table.child_name(parent, name, folder=folder)
        except KeyNotFound:
            if self._path_of(parent) is None:
                raise
            raise FUSEError(errno.ESTALE) from None  # its path may be another folder's: the kernel looks it up anew

    def _path_of(self, folder: Inode) -> Name | None:
        """Return the name that a folder has, or had when it was lost to what others did; None if this mount removed it.

        Something else may have the name by now.
        """
        parts: list[str] = []
        at = folder
        while at is not self._table.root:
            if at.place is None or len(parts) > _DEPTH_MAX:
                return None
            at, name = at.place
            parts.append(name)
        if self._table.bucket:
            parts.append(self._table.bucket)
        if not parts:
            return None
        key = "/".join(reversed(parts[:-1]))
        return Name(parts[-1], f"{key}/" if key else "")

    # --- by inode ------------------------------------------------------------------------------------

    async def present(self, inode: Inode, kind: int) -> Inode:
        """Return the inode, of a kind, that an inode's name has now: perhaps another one.

        ESTALE: the name has none; the kernel looks the path up anew, and makes what the call makes.  ENOENT: its
        folder is gone.
        """
        if inode.place is None:
            raise FUSEError(errno.ESTALE)
        parent, name = inode.place
        if not self._table.is_below(parent, self._table.root):
            raise FUSEError(errno.ESTALE)
        found, _ = await self.look(parent, name, confirm=True)
        if found is None or (found is not inode and found.attributes.kind != kind):
            raise FUSEError(errno.ESTALE)
        return found

    async def refresh(self, inode: Inode, *, confirm: bool = False) -> None:
        """Ask for attributes that are not fresh, or with `confirm` not known to stand.

        What is open, file or folder, keeps them if its name was removed.  ESTALE: nobody has it open.
        """
        mount, is_root = self._mount, inode is self._table.root
        if (is_root and not self._table.bucket) or (inode.parent is None and not is_root):
            return
        if inode.is_pending or inode.is_dirty or (mount.stands(inode.kept) if confirm else mount.is_fresh(inode)):
            return
        asked_at, name = trio.current_time(), self._table.name_of(inode)
        ((found, kept),) = await mount.look_up([name])
        if inode.is_ahead_of(asked_at) or not mount.has_name(inode, name):
            return
        if isinstance(found, (KeyNotFound, BucketNotFound)) and not is_root:
            self._table.detach(inode)
        elif isinstance(found, LakeError):
            raise found
        elif inode.parent is None:
            mount.take(inode, found)
            inode.confirmed_at, inode.kept = asked_at, kept
        else:
            await self._mount.follow(found)
            if inode.parent is not None:
                present = self.adopt(inode.parent, inode.name, found, asked_at, kept)
                if present is not inode and inode.file is None and present.attributes.kind == inode.attributes.kind:
                    inode.attributes = replace(present.attributes)  # of what the name has now: nobody has this one open
        if isinstance(found, LakeError) and not (is_root or inode.file is not None or inode.readings):
            raise FUSEError(errno.ESTALE)

    async def refresh_for_kernel(self, inode: Inode) -> None:
        """Do `refresh` for the kernel, which drops the answer if it is made to forget the attributes meanwhile.

        So it is not, and asks again instead: the answer is not to be kept (`Inode.is_doubted`).
        """
        inode.is_doubted = inode.is_doubted and inode.asked > 0
        inode.asked += 1
        is_answered = False
        try:
            await self.refresh(inode)
            is_answered = True
        finally:
            inode.asked -= 1
            if not is_answered and inode.is_doubted:
                self._mount.forget_attributes(inode)

    async def stat_of(self, inode: Inode) -> ObjectStat:
        """Return the store's record of the inode's name, which a new file gets now.  ESTALE if the name is gone."""
        if inode.is_pending:
            if inode.file is None:
                raise FUSEError(errno.ESTALE)
            await inode.file.commit(durable=False)
        (found,) = await self._mount.stat([self._table.name_of(inode)])
        if isinstance(found, KeyNotFound):
            raise self.gone(inode)
        if isinstance(found, LakeError):
            raise found
        return found

    async def xattrs(self, inode: Inode) -> dict[str, bytes]:
        """Return the extended attributes."""
        if inode.is_pending or self._table.holds_buckets(inode):
            return {}
        if inode.xattrs is None or not (inode.is_dirty or self._mount.is_fresh(inode)):
            inode.xattrs = (await self.stat_of(inode)).xattrs
        return inode.xattrs

    async def target_of(self, link: Inode, *, confirm: bool) -> bytes:
        """Return the target of the symlink that the inode's name has now: a path through it is an open of its name.

        With `confirm` false, of the one that was looked up.  ESTALE: it has none.  A removed one keeps its target.
        """
        if confirm and link.place is not None:
            link = await self.present(link, SYMLINK)
        if not link.target:
            link.target = (await self.stat_of(link)).symlink_target
        return link.target

    # --- the table -----------------------------------------------------------------------------------

    def adopt(
        self,
        parent: Inode,
        name: str,
        found: ObjectStat | ListEntry,
        asked_at: float,
        kept: tuple[bytes, int] | None = None,
    ) -> Inode:
        """Return the inode for a record of a name that the store sent in answer to a request of `asked_at`."""
        shown = self._mount.owner.shown(found)
        inode = self._table.adopt(parent, name, found.node, shown, asked_at)
        if isinstance(found, ObjectStat) and inode.node == found.node:
            inode.seen_boot = self._mount.engine_boot()
            inode.target = found.symlink_target
            if not inode.is_ahead_of(asked_at):
                inode.xattrs = found.xattrs
            if inode.confirmed_at == asked_at and not inode.is_dirty:
                inode.kept = kept
        return inode

    def gone(self, inode: Inode) -> FUSEError:
        """Detach an inode whose name is gone; return the error to raise, so that the kernel looks the name up anew."""
        self._table.detach(inode)
        return FUSEError(errno.ESTALE)
