"""Folders as the kernel reads them: names in pages, each with its attributes, as they were when the reading began.

A page of the store names folders without their attributes, so they are looked up, all of a page in one request.  Files
that were created here and are not stored yet are listed behind.  What a path cannot say (empty components, `.`, `..`)
and what is too long for a path is left out; where object `a` and folder `a/` coexist the folder is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import trio

from fuse.inodes import FOLDER, Inode
from fuse.mount import Mount
from lakefs.errors import KeyNotFound, LakeError
from lakefs.limits import LIST_PAGE_MAX
from lakefs.names import Name
from lakefs.wire.messages import BucketList, Buckets, Listed, ListEntry, ListNames, ObjectStat

COMPONENT_BYTES_MAX: Final = 255
_TOGETHER_MAX: Final = 20_000
"""Names looked at together, so that an object and the folder of its name meet."""


@dataclass(frozen=True)
class Listing:
    """One name of a folder."""

    name: str
    found: ObjectStat | ListEntry | Inode


class FolderHandle:
    """One reading of a folder; entries keep their positions while it is open."""

    def __init__(self, mount: Mount, folder: Inode) -> None:
        self.folder = folder
        self.asked_at = 0.0
        self._mount = mount
        self._entries: list[Listing] = []
        self._after: str | None = None
        self._is_complete = False

    async def at(self, position: int) -> Iterator[tuple[int, Listing]]:
        """Entries from a position on, with the position behind each; none at the end.  0 begins anew."""
        if position == 0:
            self._entries, self._after, self._is_complete = [], None, False
        while len(self._entries) <= position and not self._is_complete:
            await self._read_more()
        return ((number + 1, self._entries[number]) for number in range(position, len(self._entries)))

    async def _read_more(self) -> None:
        mount, folder = self._mount, self.folder
        pending = _pending(folder)
        self.asked_at = trio.current_time()
        if mount.table.holds_buckets(folder):
            found = await self._buckets()
            self._is_complete = True
        else:
            found = await self._names()
        if self._is_complete:
            # One that was stored meanwhile may be missing on the store's page.
            found = {name: child for name, child in pending.items() if child.parent is folder} | found
            found |= _pending(folder)
        known = {listing.name for listing in self._entries}
        self._entries += [Listing(name, item) for name, item in found.items() if name not in known]

    async def _buckets(self) -> dict[str, ObjectStat | ListEntry | Inode]:
        answer = await self._mount.ask(BucketList(), Buckets)
        names = [bucket.name for bucket in answer.buckets]
        stats = await self._mount.stat([Name(name, "") for name in names])
        return {
            name: stat for name, stat in zip(names, stats, strict=True) if not isinstance(stat, LakeError)
        }

    async def _names(self) -> dict[str, ObjectStat | ListEntry | Inode]:
        found: dict[str, ObjectStat | ListEntry | Inode] = {}
        bucket, prefix = self._mount.table.name_of(self.folder)
        while not self._is_complete and len(found) < _TOGETHER_MAX:
            request = ListNames(
                bucket, prefix, self._after or "", "/", LIST_PAGE_MAX, folders=True, durable=False
            )
            page = await self._mount.ask(request, Listed)
            folders = [entry.key for entry in page.entries if entry.is_prefix]
            stats = await self._mount.stat([Name(bucket, key) for key in folders]) if folders else []
            for stat in stats:
                if isinstance(stat, ObjectStat):
                    _add(found, stat.key[len(prefix) : -1], stat)
            for entry in page.entries:
                if not entry.is_prefix and entry.kind != FOLDER:
                    _add(found, entry.key[len(prefix) :], entry)
            self._after = page.next_after
            self._is_complete = not page.next_after
        return found


def _pending(folder: Inode) -> dict[str, Inode]:
    return {name: child for name, child in folder.children.items() if child.is_pending}


def _add(found: dict[str, ObjectStat | ListEntry | Inode], name: str, item: ObjectStat | ListEntry) -> None:
    if not is_component(name):
        return
    if item.kind == FOLDER:
        found[name] = item
    else:
        found.setdefault(name, item)


def is_component(name: str) -> bool:
    """Whether a path can have this component."""
    return name not in ("", ".", "..") and "/" not in name and len(name.encode()) <= COMPONENT_BYTES_MAX


async def look_up(mount: Mount, parent: Inode, name: str) -> ObjectStat:
    """What the store has of a name in a folder: the folder of that name, else the object or symlink.  KeyNotFound."""
    if mount.table.holds_buckets(parent):
        names = [Name(name, "")]
    else:
        names = [mount.table.child_name(parent, name, folder=True), mount.table.child_name(parent, name)]
    refusal: LakeError = KeyNotFound(f"there is no {name!r}", subject=name)
    for found in await mount.stat(names):
        if isinstance(found, ObjectStat):
            return found
        if not isinstance(found, KeyNotFound):
            refusal = found
    raise refusal
