"""Where the copies of a mirrored disk may lie: folders on the devices of one machine, and the best of them for a copy.

Rules kept here:
- Copies lie on different devices as long as there are enough of them; only then two lie on one, and are lost together.
- A mirror is made only where no folder has a list of good copies, and only if its owner is new: else its copies lie
  elsewhere, and empty ones would take their place.

All functions block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from engine.mirror.copy_calls import CopyCalls
from engine.mirror.copy_list import LIST_FILE
from engine.mirror.mirror_opening import make_mirror, open_mirror
from engine.mirror.mirrored_disk import MirroredDisk
from lakefs.errors import LakeError, StoreUnusable
from lakefs.ids import CopyId
from lakefs.ports import Disk


class CopyFolder(Protocol):
    """A folder in which a copy lies, or may be made."""

    @property
    def name(self) -> str:
        """The folder's name, for people; each folder has another one."""
        ...

    def device(self) -> int | None:
        """Return a number of the device, equal for folders that are lost together; None if it is not here."""
        ...

    def disk(self) -> Disk:
        """Return the folder as a disk, a new object each time."""
        ...

    def set_aside(self) -> None:
        """Move the folder with all that is in it away, and remove what was moved there before.  LakeError."""
        ...


def open_or_make(
    folders: Sequence[CopyFolder],
    calls: CopyCalls,
    *,
    copies: int,
    is_new: bool,
    without: frozenset[CopyId] = frozenset(),
    restored: bool = False,
) -> MirroredDisk:
    """Open the mirror that lies in these folders; with `is_new` make one of so many copies if there is none.

    Errors: as of `open_mirror` and `make_mirror`.
    """
    disks = {folder.name: folder.disk() for folder in folders}
    if not any(_has_list(disk, is_new=is_new) for disk in disks.values()):
        if not is_new:
            raise StoreUnusable(
                f"the names of this lake lie on other devices than these: {', '.join(disks)}; give all --data folders "
                "of the lake, or bring the devices back that have them"
            )
        make_mirror({folder.name: disks[folder.name] for folder in best_folders(folders, copies)})
    return open_mirror(disks, calls, without=without, restored=restored)


def best_folders(
    folders: Sequence[CopyFolder], count: int, taken: Collection[str] = (), last: Collection[str] = ()
) -> list[CopyFolder]:
    """Return folders for so many more copies, the best first; those in `taken`, by name, have one already.

    Best is a device that has none; folders in `last` come behind others.
    """
    devices = {folder.name: folder.device() for folder in folders}
    used = [devices[name] for name in taken if name in devices]
    free = [folder for folder in folders if folder.name not in taken and devices[folder.name] is not None]
    chosen: list[CopyFolder] = []
    while free and len(chosen) < count:
        best = min(free, key=lambda folder: (used.count(devices[folder.name]), folder.name in last))
        free.remove(best)
        used.append(devices[best.name])
        chosen.append(best)
    return chosen


def _has_list(disk: Disk, *, is_new: bool) -> bool:
    """Return True if a copy with a list lies there; an error counts as none, but not where a mirror would be made."""
    try:
        return disk.exists(LIST_FILE)
    except LakeError:
        if is_new:
            raise
        return False
