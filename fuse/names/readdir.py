"""Folder listings for the kernel: names with their attributes, at positions that stay while the folder is open.

The names are the table's if a folder was read whole, or made here, and no name in it has changed since: its change time
is still the one as of which the table has all its names (`Inode.names_ns`).  That stands by the folder's stamps, or is
asked at each reading.  Else the store is asked for the names, page by page.  A page names folders without their
attributes, so they are looked up, all of a page in one request.  Files that were created here and are not stored yet
are listed last.  Names that cannot be in a path (empty components, `.`, `..`), and those too long for one, are left
out; where object `a` and folder `a/` both exist the folder is shown.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import pyfuse3
import trio
from pyfuse3 import FileNameT, FUSEError, ReaddirToken

from fuse.names.lookups import Lookups
from fuse.state.attributes import to_entry
from fuse.state.inodes import Inode
from fuse.state.kept import Kept
from fuse.state.mount import Mount
from fuse.state.stat_fields import FOLDER
from lakefs.limits import LIST_PAGE_MAX
from lakefs.names import Name
from lakefs.wire.messages import BucketList, Buckets, Listed, ListEntry, ListNames, ObjectStat

COMPONENT_BYTES_MAX: Final = 255
_TOGETHER_MAX: Final = 20_000
"""Names gathered before any is listed, so that an object and the folder of its name meet."""
_ADOPTED_MAX: Final = 1000
"""Most names put into the table in one step."""
_DOTS: Final = 2
"""Number of positions used by `.` and `..`, in front of the names."""

Found = ObjectStat | ListEntry | Inode


def component_of(name: bytes) -> str:
    """Return a component of a path as the kernel sends it.  ENAMETOOLONG, EILSEQ."""
    if len(name) > COMPONENT_BYTES_MAX:
        raise FUSEError(errno.ENAMETOOLONG)
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise FUSEError(errno.EILSEQ) from None


class FolderHandle:
    """One reading of a folder; entries keep their positions while it is open, and their inodes are held."""

    def __init__(self, mount: Mount, lookups: Lookups, folder: Inode) -> None:
        self._mount = mount
        self._lookups = lookups
        self.folder = folder
        self._names: list[tuple[str, Inode]] = []
        self._known: set[str] = set()
        self._pages: _Pages | None = None
        """The source of more names; None if they were all in the table."""
        self._is_confirmed = False
        """True if the folder was confirmed, and nothing has been read since."""

    async def open(self) -> None:
        """Confirm that the folder is there.  ESTALE if it was removed, or replaced by another."""
        folder, root = self.folder, self._mount.table.root
        if not self._mount.table.holds_buckets(folder):
            await self._lookups.refresh(folder, confirm=True)
        if folder.parent is None and folder is not root and not folder.is_removed:
            raise FUSEError(errno.ESTALE)
        folder.readings += 1
        self._is_confirmed = True

    async def reply(self, token: ReaddirToken, start: int) -> None:
        """Send the entries behind a position, as many as fit; none at the end.  0 starts again."""
        if start == 0:
            await self._begin()
        if not self._reply_dots(token, start):
            return
        position = max(0, start - _DOTS)
        while await self._has_entry(position):
            if self._reply_names(token, position):
                return
            position = len(self._names)  # all of these were removed

    def close(self) -> None:
        """End the reading: release the held inodes."""
        self._let_go()
        self.folder.readings -= 1

    def _let_go(self) -> None:
        for _, inode in self._names:
            self._mount.table.release(inode)
        self._names, self._known = [], set()

    # --- names ---------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._let_go()
        self._pages = None
        folder, is_confirmed = self.folder, self._is_confirmed
        self._is_confirmed = False
        if not is_confirmed and not self._mount.table.holds_buckets(folder):
            await self._lookups.refresh(folder, confirm=True)
        if folder.parent is None and folder is not self._mount.table.root:
            return  # it was removed: there is nothing in it
        if not folder.names_ns:
            self._pages = _Pages(self._mount, folder)
            return
        self._names = list(self.folder.children.items())
        for _, inode in self._names:
            inode.lookups += 1

    async def _has_entry(self, position: int) -> bool:
        pages = self._pages
        while pages is not None and position >= len(self._names) and not pages.is_last:
            await self._read(pages)
        if position < len(self._names):
            return True
        if pages is not None:
            self._note_whole(pages)
        return False

    async def _read(self, pages: _Pages) -> None:
        """Read more names and put them into the table.

        No change by this mount can happen in between: the kernel locks a folder against changes while it reads it.
        """
        folder = self.folder
        for number, (name, found) in enumerate((await pages.read()).items()):
            if number % _ADOPTED_MAX == _ADOPTED_MAX - 1:
                await trio.lowlevel.checkpoint()
            if name in self._known:
                continue
            if isinstance(found, Inode):
                inode = found
            else:
                await self._mount.follow(found)
                inode = self._lookups.adopt(folder, name, found, pages.asked_at, pages.answers.get(name))
            if inode.parent is folder and inode.name == name:
                inode.lookups += 1
                self._names.append((name, inode))
                self._known.add(name)

    def _note_whole(self, pages: _Pages) -> None:
        """Note that the table has all names of the folder, unless other clients changed some during the reading."""
        folder, table = self.folder, self._mount.table
        if not pages.as_of_ns or pages.as_of_ns != folder.stored_ns or folder.names_changed_at >= pages.begun_at:
            return
        if pages.kept is None:  # what changes during the reading is noticed then
            if not self._mount.is_watched(self._mount.bucket_of(folder)):
                return
        elif not self._mount.stands(pages.kept):
            return
        if not table.is_below(folder, table.root) or table.name_of(folder) != pages.name:
            return  # the names read may belong to another folder
        children = folder.children
        if all(name in children or _is_gone(inode) for name, inode in self._names) and all(
            name in self._known or child.is_pending or child.is_newer_than(pages.begun_at)
            for name, child in children.items()
        ):
            folder.names_ns = pages.as_of_ns

    # --- replies -------------------------------------------------------------------------------------

    def _reply_dots(self, token: ReaddirToken, start: int) -> bool:
        folder = self.folder
        for position, (name, inode) in enumerate(((b".", folder), (b"..", folder.parent or folder))):
            if start <= position:
                entry = to_entry(inode, *self._mount.timeouts(self._mount.bucket_of(inode)))
                if not pyfuse3.readdir_reply(token, FileNameT(name), entry, position + 1):
                    return False
        return True

    def _reply_names(self, token: ReaddirToken, start: int) -> bool:
        """Send names from a position on; True if any was sent, or would have been with more room."""
        mount, children = self._mount, self.folder.children
        timeouts_s = mount.timeouts(mount.bucket_of(self.folder))
        holds_buckets = mount.table.holds_buckets(self.folder)
        fresh_since = trio.current_time() - timeouts_s[1]
        if self._pages is not None:
            fresh_since = min(fresh_since, self._pages.begun_at)
        any_listed = False
        for position in range(start, len(self._names)):
            name, held = self._names[position]
            inode = children.get(name)
            if inode is None:
                if _is_gone(held):
                    continue
                inode = held  # another inode may have the name by now
            if holds_buckets:
                timeouts_s = mount.timeouts(name)
            if inode.parent is not None and (inode.confirmed_at >= fresh_since or inode.node == 0):
                entry = to_entry(inode, *timeouts_s)
            else:
                entry = to_entry(inode, 0, 0)  # its attributes may be out of date
            if not pyfuse3.readdir_reply(token, FileNameT(name.encode()), entry, position + _DOTS + 1):
                return True
            inode.lookups += 1
            any_listed = True
        return any_listed


def _is_gone(inode: Inode) -> bool:
    """Return True if an inode, missing at its place, has surely lost that name: moved or removed here."""
    return inode.parent is not None or inode.is_removed


class _Pages:
    """Reads a folder's names from the store."""

    def __init__(self, mount: Mount, folder: Inode) -> None:
        self._mount = mount
        self._folder = folder
        self._after = ""
        self.name: Name | None = None
        """Name of the folder in the first request; the folder may be renamed later."""
        self.is_last = False
        holds_buckets = mount.table.holds_buckets(folder)  # each bucket is asked for; no record tells of their names
        self.as_of_ns = 0 if holds_buckets else folder.stored_ns
        """The folder's change time before the first page; 0 if it is not known."""
        self.kept = folder.kept
        """The answer that has it."""
        self.answers: dict[str, Kept | None] = {}
        """Stamps of the last answers about folders."""
        self.begun_at = trio.current_time()
        self.asked_at = self.begun_at

    async def read(self) -> dict[str, Found]:
        """Return more names, at least one unless these are the last."""
        mount, folder = self._mount, self._folder
        pending = _pending(folder)
        self.answers = {}
        self.asked_at = trio.current_time()
        found = await (self._buckets() if mount.table.holds_buckets(folder) else self._next_names())
        if self.is_last:
            # A file that was stored during the request may be missing on the store's page.
            here: dict[str, Found] = {name: child for name, child in pending.items() if child.parent is folder}
            found = here | found | _pending(folder)
        return found

    async def _buckets(self) -> dict[str, Found]:
        answer = await self._mount.ask(BucketList(), Buckets)
        names = [bucket.name for bucket in answer.buckets]
        stats = await self._records_of(names, [Name(name, "") for name in names])
        self.is_last = True
        return {**stats}

    async def _records_of(self, components: Sequence[str], names: Sequence[Name]) -> dict[str, ObjectStat]:
        """Return the records of folders by their components, without those that are gone; note their stamps."""
        answers = dict(zip(components, await self._mount.look_up(names), strict=True)) if names else {}
        self.answers |= {component: answer.kept for component, answer in answers.items()}
        return {name: answer.found for name, answer in answers.items() if isinstance(answer.found, ObjectStat)}

    async def _next_names(self) -> dict[str, Found]:
        found: dict[str, Found] = {}
        bucket, prefix = name = self._mount.table.name_of(self._folder)
        self.name = self.name or name
        after, is_last = self._after, False
        while not is_last and len(found) < _TOGETHER_MAX:
            request = ListNames(bucket, prefix, after, "/", LIST_PAGE_MAX, folders=True, durable=False)
            page = await self._mount.ask(request, Listed)
            folders = [entry.key for entry in page.entries if entry.is_prefix]
            components = [key[len(prefix) : -1] for key in folders]
            stats = await self._records_of(components, [Name(bucket, key) for key in folders])
            for component, stat in stats.items():
                _add(found, component, stat)
            for entry in page.entries:
                if not entry.is_prefix and entry.kind != FOLDER:
                    _add(found, entry.key[len(prefix) :], entry)
            after, is_last = page.next_after, not page.next_after
        self._after, self.is_last = after, is_last
        return found


def _pending(folder: Inode) -> dict[str, Inode]:
    return {name: child for name, child in folder.children.items() if child.is_pending}


def _add(found: dict[str, Found], name: str, item: ObjectStat | ListEntry) -> None:
    if not _is_component(name):
        return
    if item.kind == FOLDER:
        found[name] = item
    else:
        found.setdefault(name, item)


def _is_component(name: str) -> bool:
    """Return True if a path can have this component."""
    return name not in ("", ".", "..") and "/" not in name and len(name.encode()) <= COMPONENT_BYTES_MAX
