"""The folders of a lake on several devices of this machine: their lake, and their devices.

A folder holds one member's store, in `names/` a copy of the lake's names, if it has one, in `names.1/` and on those of
other names shards, and the record of its machine (`engine.lake.machine`).  Looking changes nothing.

Rules kept here:
- All folders that hold something are of one lake.  The store of one engine is not made a part of a lake.
- A lake is made only of folders that hold nothing, and once: with names lost from sight, all content would be garbage.
- Folders on one file system are lost together, so they count as one device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from engine.format.group_parts import FIRST_SHARD
from engine.host.local_disk import LocalDisk
from engine.lake.machine import MACHINE_FILE, MachineRecord, machine_of, new_machine, read_machine
from engine.superblock.store_role import refuse_other_role
from engine.superblock.superblock import NO_CLUSTER, SUPERBLOCK_PATH, survey_superblocks
from lakefs.cluster.protection import Protection
from lakefs.errors import InvalidArgument, LakeError, StoreUnusable
from lakefs.ids import NamesShard, new_id16

NAMES_FOLDER: Final = "names"
_OF_SHARDS: Final = re.compile(rf"{NAMES_FOLDER}\.([1-9][0-9]*)")
"""Folders of names of shards from 1 on; others that begin so were set aside."""
_log: Final = structlog.get_logger(__name__)


class LakeFolders(NamedTuple):
    """The lake of some folders, and their machine.  `is_new`: it is to be made, of folders that hold nothing."""

    machine: MachineRecord
    is_new: bool

    @property
    def lake_id(self) -> bytes:
        """The lake's id."""
        return bytes.fromhex(self.machine.lake)


def look_at_folders(folders: Sequence[Path]) -> LakeFolders:
    """Return the lake and the machine of the folders, or new ones that are to be made of them.

    StoreUnusable, StoreDamaged, naming a folder that is of another lake or of one engine; StoreUnusable when the lake
    was made, and none of the folders holds anything of it.  Blocks.
    """
    lake_id = NO_CLUSTER
    holds_anything = False
    for folder in folders:
        for place, shard in ((folder, None), *((names_folder(folder, shard), shard) for shard in shards_in(folder))):
            if not os.path.lexists(place / SUPERBLOCK_PATH):
                continue
            holds_anything = True
            found = survey_superblocks(LocalDisk(place)).good
            try:
                if found.cluster_id == NO_CLUSTER:
                    raise StoreUnusable(
                        "the folder is the store of one engine, and is not made a part of a lake; copy its objects "
                        "over S3, or give an empty folder"
                    )
                lake_id = found.cluster_id if lake_id == NO_CLUSTER else lake_id
                refuse_other_role(found, lake_id, has_names=shard is not None, names_shard=shard or FIRST_SHARD)
            except StoreUnusable as error:
                raise StoreUnusable(f"{place}: {error.message}", subject=str(place)) from error
    machine = machine_of(records_in(folders, lake_id))
    if machine is None:
        machine = new_machine(new_id16() if lake_id == NO_CLUSTER else lake_id)
    if not holds_anything and machine.is_made and not machine.names_at:
        raise StoreUnusable(
            "the lake of these folders was made, and none of them holds anything of it: are their disks mounted?",
            subject=str(folders[0]),
        )
    return LakeFolders(machine, is_new=not holds_anything and not machine.names_at)


def records_in(folders: Sequence[Path], lake_id: bytes = NO_CLUSTER) -> list[MachineRecord]:
    """Return the machine's records that the folders have; one that cannot be read is logged.

    StoreUnusable for one of another lake than `lake_id`, or than the others.  Blocks.
    """
    records: list[MachineRecord] = []
    for folder in folders:
        try:
            record = read_machine(folder)
        except LakeError as error:
            _log.error("the machine's record is not used", reason=error.message)
            continue
        if record is None:
            continue
        lake_id = bytes.fromhex(record.lake) if lake_id == NO_CLUSTER else lake_id
        if record.lake != lake_id.hex():
            raise StoreUnusable(
                f"{folder / MACHINE_FILE} is of another lake, {record.lake}, not of {lake_id.hex()}",
                subject=str(folder),
            )
        records.append(record)
    return records


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


def is_prepared(folder: Path) -> bool:
    """Return True if the folder is to become a member's: it holds the record of a machine, and no member.  Blocks."""
    return os.path.lexists(folder / MACHINE_FILE) and not holds_member(folder)


def is_wanted(folder: Path) -> bool:
    """Return True if a member lies in the folder, or is to be made in it; else its disk may be away.  Blocks."""
    return holds_member(folder) or is_prepared(folder)


def names_folder(folder: Path, shard: NamesShard) -> Path:
    """Return the folder of a copy of the names of a shard."""
    return folder / (NAMES_FOLDER if shard == FIRST_SHARD else f"{NAMES_FOLDER}.{shard}")


def shards_in(folder: Path) -> list[NamesShard]:
    """Return the shards of which names may lie in the folder, the first one always among them.  Blocks."""
    found = {FIRST_SHARD}
    with suppress(OSError):
        matches = (_OF_SHARDS.fullmatch(name) for name in os.listdir(folder))
        found |= {NamesShard(int(match[1])) for match in matches if match is not None}
    return sorted(found)


def holds_names(folder: Path, shard: NamesShard = FIRST_SHARD) -> bool:
    """Return True if the folder holds a copy of the names of a shard.  Blocks."""
    return os.path.lexists(names_folder(folder, shard) / SUPERBLOCK_PATH)


def holds_any_names(folder: Path) -> bool:
    """Return True if the folder holds a copy of the names of some shard.  Blocks."""
    return any(holds_names(folder, shard) for shard in shards_in(folder))
