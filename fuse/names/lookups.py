"""Look-ups: asks the store about names and inodes, and updates the table with the answers.

Nothing known and fresh is asked again.  An answer that the store gave before this mount, or another, changed the same
names does not overwrite newer knowledge: see `InodeTable.adopt` and `Inode.names_changed_at`.
"""

from __future__ import annotations

import errno
from typing import Final

import trio
from pyfuse3 import FUSEError

from fuse.state.inodes import Inode
from fuse.state.mount import Mount
from lakefs.errors import BucketNotFound, InvalidName, KeyNotFound, LakeError
from lakefs.limits import KEY_BYTES_MAX
from lakefs.names import Name
from lakefs.wire.messages import ListEntry, ObjectStat

_LOOKUPS_MAX: Final = 3
"""Most look-ups of one name while names of its folder keep changing."""


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

    async def look(self, parent: Inode, name: str) -> tuple[Inode | None, bool]:
        """Return the inode of a name, or None; and True if the kernel may rely on the answer for a while."""
        present = parent.children.get(name)
        if present is not None and (present.is_pending or self._mount.is_fresh(present)):
            return present, True
        if present is None and parent.is_complete and self._mount.bucket_of(parent) in self._mount.watched:
            return None, True
        for _ in range(_LOOKUPS_MAX):
            asked_at = trio.current_time()
            found = await self._asked_store(parent, name, asked_at)
            if parent.names_changed_at < asked_at:
                return found, True
            if found is not None:
                self._table.forget(found.number, 0)
        found = await self._asked_store(parent, name, trio.current_time())
        return found, False  # names change all the time: the answer may be out of date

    async def _asked_store(self, parent: Inode, name: str, asked_at: float) -> Inode | None:
        try:
            found = await self._look_up(parent, name)
        except (KeyNotFound, BucketNotFound, InvalidName):
            present = parent.children.get(name)
            if present is not None and (present.is_pending or present.is_newer_than(asked_at)):
                return present
            if present is not None:
                self._table.detach(present)
            return None
        await self._mount.follow(found)
        return self.adopt(parent, name, found, asked_at)

    async def _look_up(self, parent: Inode, name: str) -> ObjectStat:
        """Return the store's record of a name: of the folder, else of the object or symlink.  KeyNotFound."""
        table = self._table
        if table.holds_buckets(parent):
            names = [Name(name, "")]
        else:
            names = [table.child_name(parent, name, folder=True), table.child_name(parent, name)]
        refusal: LakeError = KeyNotFound(f"there is no {name!r}", subject=name)
        for found in await self._mount.stat(names):
            if isinstance(found, ObjectStat):
                return found
            if not isinstance(found, KeyNotFound):
                refusal = found
        raise refusal

    async def require(self, parent: Inode, name: str) -> Inode:
        """Return the inode of a name.  ENOENT."""
        inode, _ = await self.look(parent, name)
        if inode is None:
            raise FUSEError(errno.ENOENT)
        return inode

    def key(self, parent: Inode, name: str, *, folder: bool = False) -> tuple[str, str]:
        """Return bucket and key of a name in a folder.  ENAMETOOLONG."""
        found = self._table.child_name(parent, name, folder=folder)
        if len(found.key.encode()) > KEY_BYTES_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        return found.bucket, found.key

    # --- by inode ------------------------------------------------------------------------------------

    async def refresh(self, inode: Inode) -> None:
        """Ask for attributes that are not fresh.  An open file keeps them if its name was removed."""
        mount, is_root = self._mount, inode is self._table.root
        if (is_root and not self._table.bucket) or (inode.parent is None and not is_root):
            return
        if inode.is_pending or mount.is_fresh(inode) or inode.is_dirty:
            return
        asked_at = trio.current_time()
        (found,) = await mount.stat([self._table.name_of(inode)])
        if inode.is_newer_than(asked_at) or (inode.parent is None and not is_root):
            return
        if isinstance(found, (KeyNotFound, BucketNotFound)) and not is_root:
            refusal = self.gone(inode)
            if inode.file is None:
                raise refusal
        elif isinstance(found, LakeError):
            raise found
        elif inode.parent is None:
            inode.take(mount.owner.shown(found))
            inode.confirmed_at = asked_at
        else:
            await self._mount.follow(found)
            if inode.parent is not None:
                self.adopt(inode.parent, inode.name, found, asked_at)

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

    # --- the table -----------------------------------------------------------------------------------

    def adopt(self, parent: Inode, name: str, found: ObjectStat | ListEntry, asked_at: float) -> Inode:
        """Return the inode for a record of a name that the store sent in answer to a request of `asked_at`."""
        shown = self._mount.owner.shown(found)
        inode = self._table.adopt(parent, name, found.node, shown, asked_at)
        if isinstance(found, ObjectStat) and inode.node == found.node:
            inode.target = found.symlink_target
            inode.xattrs = found.xattrs
        return inode

    def gone(self, inode: Inode) -> FUSEError:
        """Detach an inode whose name is gone; return the error to raise, so that the kernel looks the name up anew."""
        self._table.detach(inode)
        return FUSEError(errno.ESTALE)
