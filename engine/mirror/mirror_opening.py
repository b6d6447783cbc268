"""Makes and opens mirrored disks: locks the copies, chooses those that are good, makes their names equal.

    open   lock each folder  --  sync and read its list  --  choose (`engine.mirror.list_choice`)  --  that list, as
           it is, durable on those used  --  the next list, of the copies used, durable on them  --  make their names
           equal, unless the mirror was closed in order

Rules kept here:
- Nothing is changed before each folder that could be read is locked.  A folder that another process has locked ends the
  opening: StoreLocked.
- A list is read behind a sync of its folder.  A killed process may have renamed it, and not synced: what it was before
  could return with the next power loss, and would be one that nobody counted with.
- The list that was chosen is made durable as it is on the copies used that do not have it, before the next one is
  written.  More than half of its copies must have it then.  Else those that have an older one could open without those
  that went on from this one; and lists that were not finished would add up, until nobody has the last one that was.
- Folders that are not used, since they are stale, empty or foreign, are unlocked and left as they are.
- Behind a crash, names may differ that were never durable.  The first copy is right (any state of a copy is one that
  a single disk could have been left in).  What another copy has besides is set aside in `mirror.aside`, not removed;
  what it lacks is copied.  Content is left alone: it differs behind the last sync only, where recovery trusts nothing.

All functions block.  `AtOnce` with a patience also bounds how long a device is waited for that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import structlog

from engine.mirror.copy import Copy
from engine.mirror.copy_calls import CopyCalls
from engine.mirror.copy_list import (
    COPY_FILE,
    LIST_FILE,
    LOCK_FILE,
    Member,
    first_list,
    new_id,
    read_copy_file,
    read_list,
    write_copy_file,
    write_list,
)
from engine.mirror.equal_names import make_equal, tree
from engine.mirror.good_copies import GoodCopies
from engine.mirror.list_choice import Choice, FoundCopy, choose
from engine.mirror.mirror_bounds import COPIES_MAX
from engine.mirror.mirrored_disk import MirroredDisk, is_mirrored
from lakefs.errors import LakeError, StoreLocked, StoreUnusable
from lakefs.ids import CopyId
from lakefs.ports import Disk, DiskLock

_log: Final = structlog.get_logger(__name__)


def make_mirror(disks: Mapping[str, Disk]) -> None:
    """Make a mirror of empty folders, by name of their device; durable on return.  StoreUnusable, StoreLocked.

    All folders have their ids before one has a list.  So one that is cut short opens, or is made anew.
    """
    if not 1 <= len(disks) <= COPIES_MAX:
        raise StoreUnusable(f"a mirror has 1 to {COPIES_MAX} copies, not {len(disks)}")
    with ExitStack() as locks:
        for name, disk in disks.items():
            disk.make_folder("")
            locks.callback(disk.lock(LOCK_FILE).close)
            refuse_used(name, disk)
        mirror_id = new_id()
        members: dict[CopyId, Member] = {}
        for name, disk in disks.items():
            copy_id = CopyId(new_id())
            members[copy_id] = Member(write_copy_file(disk, mirror_id, copy_id), name)
        listed = first_list(mirror_id, members)
        for disk in disks.values():
            write_list(disk, listed)


def refuse_used(name: str, disk: Disk) -> None:
    """Raise StoreUnusable for a folder that holds anything but the beginning of a copy."""
    used = [path for path, size in tree(disk, is_mirrored).items() if size is not None]
    if used or disk.exists(LIST_FILE):
        raise StoreUnusable(
            f"{name} is not empty ({', '.join(used[:3]) or LIST_FILE}): give an empty folder, or remove what is in it",
            subject=name,
        )


def open_mirror(
    disks: Mapping[str, Disk], calls: CopyCalls, *, without: frozenset[CopyId] = frozenset(), restored: bool = False
) -> MirroredDisk:
    """Open the mirror that lies in these folders, by name of their device, in any order.

    `without`: copies that the operator gives up for ever.  `restored`: the operator's word that the folders were put
    back from a backup.  Errors: StoreLocked; StoreUnusable names the devices that are missed, and how to go on.
    """
    with ExitStack() as opened:
        found, locks, absent = _found_copies(disks, calls, opened)
        choice = choose(found, absent, without=without, restored=restored)
        copies = [_copy(copy_id, found, disks, locks) for copy_id in choice.used]
        good = GoodCopies(copies, choice.listed, calls, choice.eligible)
        for copy_id, reason in choice.lost.items():
            good.note_absent(copy_id, choice.listed.members[copy_id].name, reason)
            _log.error("a copy of the names is lost; make a new one", copy=copy_id.hex(), reason=reason)
        failed = good.settle([copy for copy in copies if copy.id in choice.behind])
        left = [copy for copy in copies if copy not in failed]
        good.install(left, failed, by_operator=choice.by_operator or restored)
        if not choice.listed.is_equal:
            _make_equal(good)
        _release_others(choice, found, locks)
        opened.pop_all()
        return MirroredDisk(good)


def _found_copies(
    disks: Mapping[str, Disk], calls: CopyCalls, opened: ExitStack
) -> tuple[list[FoundCopy], dict[str, DiskLock], dict[str, str]]:
    """Lock the folders and read what they say; returns copies, locks by name, and what could not be read.

    Everything runs by `calls`, so that a device that hangs is not waited for.
    """
    probes = [Copy(CopyId(b""), name, disk, _NoLock(), 0) for name, disk in disks.items()]
    locks: dict[str, DiskLock] = {}
    outcomes = calls.each(probes, partial(_look_at, locks), slow=True)
    for lock in locks.values():
        opened.callback(lock.close)
    absent: dict[str, str] = {}
    found: list[FoundCopy] = []
    for outcome in outcomes:
        if isinstance(outcome.error, StoreLocked):
            raise outcome.error
        if outcome.error is not None:
            absent[outcome.copy.name] = str(outcome.error)
        else:
            found += outcome.values[0]
    return found, locks, absent


def _look_at(locks: dict[str, DiskLock], probe: Copy) -> list[FoundCopy]:
    """Return the copy in a folder, or nothing if there is none.  A folder that is no copy is not touched."""
    if not probe.disk.exists(COPY_FILE):
        return []
    locks[probe.name] = probe.disk.lock(LOCK_FILE)
    own = read_copy_file(probe.disk)
    listed = None
    probe.disk.sync_folder("")
    with suppress(FileNotFoundError):
        listed = read_list(probe.disk)
    return [FoundCopy(probe.name, own.copy_id, own.inode, listed)]


def _copy(copy_id: CopyId, found: Sequence[FoundCopy], disks: Mapping[str, Disk], locks: dict[str, DiskLock]) -> Copy:
    (own,) = [copy for copy in found if copy.copy_id == copy_id]
    return Copy(copy_id, own.name, disks[own.name], locks[own.name], own.inode)


def _make_equal(good: GoodCopies) -> None:
    """Make the names of all copies those of the first; a copy that fails at that is thrown out."""
    right = good.good[0]
    for copy in good.good[1:]:
        try:
            make_equal(right.disk, copy.disk, is_mirrored)
        except (LakeError, FileNotFoundError, FileExistsError) as error:
            good.throw_out({copy: f"its names could not be made those of the other copies: {error}"})


def _release_others(choice: Choice, found: Sequence[FoundCopy], locks: dict[str, DiskLock]) -> None:
    for copy in found:
        if copy.copy_id not in choice.used:
            locks[copy.name].close()
            _log.warning("a folder is not used: it is stale, or not the one that it was", folder=copy.name)


class _NoLock:
    """The lock of a folder that was not looked at yet."""

    def close(self) -> None:
        return
