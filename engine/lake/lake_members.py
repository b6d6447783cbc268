"""The members of this machine in their lake: which ones are started, how each is recorded, and the first table.

Rules kept here:
- The folder of a lake that was made is not made a member when it holds nothing, unless the operator says so: most
  likely its disk is not mounted.
- A member is recorded each time when it begins to serve, with the addresses at which it is found now.  While the
  coordinator is away, that is tried again.
- A lake has its first table when all members of the machine that makes it have served once.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from engine.coordinator.lake_state import NO_EPOCH, LakeState
from engine.coordinator.records import MemberRecord
from engine.host.local_disk import LocalDisk
from engine.lake.children import LOOK_S, Served
from engine.lake.folders import check_devices, names_folder
from engine.lake.machine import keep_machine
from engine.lake.member_processes import MemberPlan, MemberProcess, MemberProcesses
from engine.lake.plan import LakePlan
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import LocalFolder
from engine.superblock.superblock import survey_superblocks
from engine.walker.membership import members_of_records
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import EngineUnreachable, LakeError, StoreUnusable
from lakefs.ids import MemberId, NamesShard

START_PATIENCE_S: Final = 30.0
"""Time for which the start of a lake that was made waits for members that take long."""
BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
HOLDS_NOTHING: Final = "the folder holds nothing: is its disk mounted?"
IT_STARTS: Final = "its process is starting"
ADD_IT: Final = "to make it a new member: lake cluster add DIR"
_TO_ADD_IT: Final = ADD_IT[0].upper() + ADD_IT[1:]
RECORD_PAUSE_S: Final = 0.1
RECORD_PAUSE_S_MAX: Final = 10.0
_log: Final = structlog.get_logger(__name__)


def members_to_start(plan: LakePlan, protection: Protection, *, is_made: bool) -> list[MemberPlan]:
    """Return the members to start: all folders' until the lake is made, later those that are wanted.  Blocks."""
    if not is_made:
        if not plan.is_new:  # else they were looked at before
            check_devices(plan.folders, protection, accept_loss=plan.accept_loss)
        return list(plan.members)
    members = []
    for member in plan.members:
        if plan.is_wanted(member.folder):
            members.append(member)
            continue
        _log.error(f"{HOLDS_NOTHING}  The lake is served without it; {ADD_IT}", folder=str(member.folder))
    return members


def registering(state: LakeState, plan: LakePlan) -> Served[MemberPlan]:
    """Return the function that records where a member is each time when it begins to serve."""

    async def served(member: MemberProcess) -> None:
        folder = member.plan.folder
        try:
            record = _record(member, plan)
            member.member_id = record.member
            await _register(state, record)
        except (LakeError, OSError) as error:
            _log.error("a member is not used: it could not be recorded", folder=str(folder), reason=str(error))

    return served


async def identified(member: MemberProcess) -> None:
    """Note the id of a member that serves, and record nothing."""
    folder = member.plan.folder
    try:
        member.member_id = MemberId(survey_superblocks(LocalDisk(folder)).good.store_id)
    except (LakeError, OSError) as error:
        _log.error("a member is not shown: its store does not say its id", folder=str(folder), reason=str(error))


async def take_new_folders(plan: LakePlan, processes: MemberProcesses, names: Mapping[NamesShard, LocalNames]) -> None:
    """Start members in folders that become wanted: prepared ones, and those whose disk is mounted late.

    `names`, those of the shards that are here, may have a copy there too.  Runs until cancelled.
    """
    while True:
        await trio.sleep(LOOK_S)
        served = {member.plan.folder for member in processes.all}
        for member in plan.members:
            if member.folder not in served and member.is_wanted():
                _log.info("a member is started in a folder that held none", folder=str(member.folder))
                keep_machine([member.folder], plan.machine, plan.token)
                processes.add(member)
                for shard, local in names.items():
                    local.add_folder(LocalFolder(names_folder(member.folder, shard), plan.may_have_names))


async def wait_for_members(
    processes: MemberProcesses, state: LakeState, plan: LakePlan, protection: Protection, *, is_made: bool
) -> None:
    """Wait for the members to serve; make the first table when there is none."""
    with trio.move_on_after(START_PATIENCE_S if is_made else math.inf):
        await processes.wait_settled()
    if is_made:
        return
    for member in processes.all:
        if not member.is_serving:
            raise StoreUnusable(
                f"the lake is not made: the member in {member.plan.folder} could not be started",
                subject=str(member.plan.folder),
            )
    members = members_of_records(await state.members())
    table = first_table(protection, members, accept_loss=plan.accept_loss)
    await state.next_epoch(NO_EPOCH, pack(table))


def about_machine(plan: LakePlan, processes: MemberProcesses) -> dict[str, Any]:
    """Return the lake's folders on this machine, and the members in them."""
    by_folder = {member.plan.folder: member for member in processes.all}
    folders = []
    for folder in plan.folders:
        member = by_folder.get(folder)
        found = (
            {"member": "", "serves": False, "restarts": 0, "reason": f"{HOLDS_NOTHING}  {_TO_ADD_IT}"}
            if member is None
            else {
                "member": member.member_id.hex(),
                "serves": member.is_serving,
                "restarts": member.restarts,
                "reason": member.reason or ("" if member.is_serving else IT_STARTS),
            }
        )
        folders.append({"folder": str(folder), **found})
    return {"folders": folders}


def _record(member: MemberProcess, plan: LakePlan) -> MemberRecord:
    """Return the record of a member that serves.  StoreDamaged, OSError.  Blocks."""
    folder = member.plan.folder
    disk = LocalDisk(folder)
    device = os.stat(folder).st_dev
    sharing = Counter(_device_of(each) for each in plan.members)
    return MemberRecord(
        MemberId(survey_superblocks(disk).good.store_id),
        tuple(member.addresses),
        max(1, disk.total_bytes() // max(1, sharing[device])),
        (f"device {device} of boot {_boot()}", plan.machine.machine, plan.machine.rack, plan.machine.zone),
    )


def _boot() -> str:
    """Return the id of this machine's last start: numbers of devices mean nothing behind it."""
    return BOOT_FILE.read_text().strip()


def _device_of(member: MemberPlan) -> int:
    """Return the number of a folder's file system; -1 if it is missing."""
    try:
        return os.stat(member.folder).st_dev
    except OSError:
        return -1


async def _register(state: LakeState, record: MemberRecord) -> None:
    pause_s = RECORD_PAUSE_S
    while True:
        try:
            await state.register(record)
        except EngineUnreachable as error:
            if pause_s == RECORD_PAUSE_S:
                _log.warning("a member waits to be recorded", member=record.member.hex(), reason=error.message)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECORD_PAUSE_S_MAX)
        else:
            return
