"""The folders of a lake on several devices of this machine: their lake, and their devices.

A folder holds one member's store, and in `names/` a copy of the lake's names, if it has one.  Looking changes nothing.

Rules kept here:
- All folders that hold something are of one lake.  The store of one engine is not made a part of a lake.
- A lake is made only of folders that hold nothing: with names lost from sight, all content would be garbage.
- Folders on one file system are lost together, so they count as one device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from engine.host.local_disk import LocalDisk
from engine.superblock.superblock import NO_CLUSTER, SUPERBLOCK_PATH, refuse_other_role, survey_superblocks
from lakefs.cluster.protection import Protection
from lakefs.errors import InvalidArgument, StoreUnusable
from lakefs.ids import new_id16

NAMES_FOLDER: Final = "names"
_log: Final = structlog.get_logger(__name__)


class LakeFolders(NamedTuple):
    """The lake of some folders.  `is_new`: it is to be made, of folders that hold nothing."""

    lake_id: bytes
    is_new: bool


def look_at_folders(folders: Sequence[Path]) -> LakeFolders:
    """Return the lake of the folders, or the id of one that is to be made of them.

    StoreUnusable, StoreDamaged, naming a folder that is of another lake or of one engine.  Blocks.
    """
    lake_id = NO_CLUSTER
    for folder in folders:
        for place, has_names in ((folder, False), (folder / NAMES_FOLDER, True)):
            if not os.path.lexists(place / SUPERBLOCK_PATH):
                continue
            found = survey_superblocks(LocalDisk(place)).good
            try:
                if found.cluster_id == NO_CLUSTER:
                    raise StoreUnusable(
                        "the folder is the store of one engine, and is not made a part of a lake; copy its objects "
                        "over S3, or give an empty folder"
                    )
                lake_id = found.cluster_id if lake_id == NO_CLUSTER else lake_id
                refuse_other_role(found, lake_id, has_names=has_names)
            except StoreUnusable as error:
                raise StoreUnusable(f"{place}: {error.message}", subject=str(place)) from error
    return LakeFolders(new_id16() if lake_id == NO_CLUSTER else lake_id, lake_id == NO_CLUSTER)


def check_devices(folders: Sequence[Path], protection: Protection, *, accept_loss: bool) -> None:
    """Refuse to make a lake that the loss of one device would harm, unless `accept_loss`.  The folders exist.

    InvalidArgument says which folders share a device, and how many devices are needed.  Blocks.
    """
    by_device: dict[int, list[Path]] = {}
    for folder in folders:
        by_device.setdefault(os.stat(folder).st_dev, []).append(folder)
    for shared in by_device.values():
        if len(shared) > 1:
            _log.warning("folders on one file system are lost together", folders=[str(folder) for folder in shared])
    if len(by_device) < protection.members_min and not accept_loss:
        raise InvalidArgument(
            f"protection {protection} needs {protection.members_min} devices, and these {len(folders)} folders lie on "
            f"{len(by_device)}; give more, choose another with --protect, or accept with --accept-loss that content "
            "is lost with one device",
            subject=str(folders[0]),
        )


def holds_member(folder: Path) -> bool:
    """Return True if the folder holds a member's store.  Blocks."""
    return os.path.lexists(folder / SUPERBLOCK_PATH)


def holds_names(folder: Path) -> bool:
    """Return True if the folder holds a copy of the names.  Blocks."""
    return os.path.lexists(folder / NAMES_FOLDER / SUPERBLOCK_PATH)
