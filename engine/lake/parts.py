"""The parts of a lake on several devices of this machine: names, coordinator, members, stripes, upkeep and a head.

    head        serves clients, over stripes and names
    stripes     chunks over the members, each a process (`engine.lake.member_processes`)
    names       metadata, mirrored on some of the devices, with the coordinator's records among them
    upkeep      walker, gc, membership: beside the names

Opened in this order from below: names, coordinator, members, links to them, head; and closed in the reverse one.

Rules kept here:
- Protection is chosen when the lake is made, and its record decides from then on.
- A lake has its first table when all its members have served once.  Before that it holds nothing, and a start that was
  cut off is gone on with.  Later it begins to serve without those that cannot be started, after START_PATIENCE_S
  without those that take long.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from engine.coordinator.lake_state import NO_EPOCH, NO_GENERATION, LakeState
from engine.coordinator.names_coordinator import open_names_coordinator
from engine.coordinator.records import LakeRecord, MemberRecord
from engine.head.head import Head, open_head
from engine.head.names_link import ConnectNames, NamesConnection
from engine.host.local_disk import LocalDisk
from engine.lake.folders import NAMES_FOLDER, check_devices, holds_member, holds_names
from engine.lake.member_processes import MemberPlan, MemberProcess, MemberProcesses, Served, open_member_processes
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep, UpkeepSettings
from engine.members.lent_area import LentArea
from engine.members.member_links import MemberLinks, connect_member, open_member_links
from engine.process.embedded import EmbeddedEngine
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import open_local_names
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.store.local_store import ENGINE_THREADS
from engine.stripes.stripes import LakeStripes
from engine.superblock.superblock import survey_superblocks
from engine.walker.membership import members_of_records
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import ConfigError, LakeError, StoreUnusable
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import ThreadOffload
from lakefs.ids import MemberId
from lakefs.limits import BUFFER_POOL_BYTES, PARITY_MEMORY_BYTES
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.frames import PROTOCOL_VERSION

START_PATIENCE_S: Final = 30.0
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LakePlan:
    """A lake to open: its folders, and the member of each.

    `is_new`: no folder holds anything.  `protection` is that of a new lake.  `is_chosen`: somebody asked for it, so
    another one that is recorded is refused.  `new_devices`: of a lake that was made, folders without a member get one.
    """

    lake_id: bytes
    is_new: bool
    members: Sequence[MemberPlan]
    protection: Protection
    is_chosen: bool
    accept_loss: bool
    new_devices: bool
    upload_expiry_s: float = 0.0

    @property
    def folders(self) -> list[Path]:
        """The members' folders."""
        return [member.folder for member in self.members]

    def names_folders(self) -> list[Path]:
        """Return the folders in which names may lie: not those that hold nothing of a lake, whose disk may be away."""
        every = self.is_new or self.new_devices
        used = [folder for folder in self.folders if every or holds_member(folder) or holds_names(folder)]
        return [folder / NAMES_FOLDER for folder in used]


@dataclass(frozen=True)
class LakeParts:
    """An open lake."""

    names: LocalNames
    processes: MemberProcesses
    links: MemberLinks
    upkeep: LakeUpkeep
    head: Head
    protection: Protection
    offload: Offload
    is_made_now: bool
    """This opening made the lake's first table."""


@asynccontextmanager
async def open_lake(plan: LakePlan) -> AsyncIterator[LakeParts]:
    """Open a lake, and make it if it is new; everything ends with the block.

    Errors of `open_local_names`; ConfigError for another protection than the recorded one; StoreUnusable when a new
    lake's member cannot be started, or no member of the table was ever added.
    """
    async with AsyncExitStack() as stack:
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        names = await stack.enter_async_context(
            open_local_names(
                plan.names_folders(), lake_id=plan.lake_id, protection_losses=plan.protection.parity, is_new=plan.is_new
            )
        )
        store, gate = names.store, BindGate()
        joined = JoinedGeneration(store.metadata, gate)
        coordinator = await stack.enter_async_context(
            open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features)
        )
        state = LakeState(coordinator)
        protection = await _recorded(state, plan)
        is_made = await state.epoch() != NO_EPOCH
        members = _members(plan, protection, is_made=is_made)
        processes = await stack.enter_async_context(open_member_processes(members, _registering(state, members)))
        await _wait_for_members(processes, state, plan, protection, is_made=is_made)
        area = LentArea(BUFFER_POOL_BYTES + PARITY_MEMORY_BYTES)
        buffers = BufferPool(BUFFER_POOL_BYTES, memory=area.part(BUFFER_POOL_BYTES))
        parity = BufferPool(PARITY_MEMORY_BYTES, memory=area.part(PARITY_MEMORY_BYTES))
        links = await stack.enter_async_context(open_member_links(coordinator, partial(connect_member, area=area)))
        stripes = LakeStripes(links, state, offload, parity)
        settings = UpkeepSettings(upload_expiry_s=plan.upload_expiry_s)
        upkeep = LakeUpkeep(
            coordinator, links, stripes, store, gate, joined, offload, settings, names_state=names.state
        )
        service = NamesService(store, gate=gate, upkeep=upkeep.requests, more_status=upkeep.status)
        head = await stack.enter_async_context(
            open_head(
                _connecting(service),
                stripes,
                links,
                offload=offload,
                clock=store.clock,
                buffers=buffers,
                about_machine=partial(_about_machine, plan, processes),
            )
        )
        yield LakeParts(names, processes, links, upkeep, head, protection, offload, is_made_now=not is_made)


async def _recorded(state: LakeState, plan: LakePlan) -> Protection:
    """Record the lake and its first generation, if they are not; return the protection that was chosen for it."""
    asked = plan.protection
    record = await state.make_lake(LakeRecord(plan.lake_id, asked.data, asked.parity))
    chosen = Protection(record.data_shards, record.parity_shards)
    if plan.is_chosen and chosen != asked:
        raise ConfigError(
            f"this lake was made with protection {chosen}, which stays; start it without --protect", subject="protect"
        )
    await state.advance_generation(NO_GENERATION)
    return chosen


# --- members -----------------------------------------------------------------------------------------


def _members(plan: LakePlan, protection: Protection, *, is_made: bool) -> list[MemberPlan]:
    """Return the members to start: all folders' until the lake is made, later those that hold one.  Blocks."""
    if not is_made:
        check_devices(plan.folders, protection, accept_loss=plan.accept_loss)
        return list(plan.members)
    members = []
    for member in plan.members:
        if plan.new_devices or holds_member(member.folder):
            members.append(member)
            continue
        _log.error(
            "the folder holds nothing: is its disk mounted?  The lake is served without it; to add it as a new "
            "member, start with --new-devices",
            folder=str(member.folder),
        )
    return members


def _registering(state: LakeState, members: Sequence[MemberPlan]) -> Served:
    """Return the function that records where a member is each time when it begins to serve."""
    devices = Counter(os.stat(member.folder).st_dev for member in members)

    async def served(member: MemberProcess) -> None:
        folder = member.plan.folder
        try:
            disk = LocalDisk(folder)
            room_bytes = max(1, disk.total_bytes() // devices[os.stat(folder).st_dev])
            store_id = member.member_id = survey_superblocks(disk).good.store_id
            address = f"unix:{member.plan.socket}"
            domains = (f"device {os.stat(folder).st_dev}", "", "", "")
            await state.register(MemberRecord(MemberId(store_id), (address,), room_bytes, domains))
        except (LakeError, OSError) as error:
            _log.error("a member is not used: it could not be recorded", folder=str(folder), reason=str(error))

    return served


async def _wait_for_members(
    processes: MemberProcesses, state: LakeState, plan: LakePlan, protection: Protection, *, is_made: bool
) -> None:
    """Wait for the members to serve; make the first table when there is none."""
    with trio.move_on_after(START_PATIENCE_S if is_made else math.inf):
        await processes.wait_settled()
    if is_made:
        return
    for member in processes.members:
        if not member.is_serving:
            raise StoreUnusable(
                f"the lake is not made: the member in {member.plan.folder} could not be started",
                subject=str(member.plan.folder),
            )
    members = members_of_records(await state.members())
    table = first_table(protection, members, accept_loss=plan.accept_loss)
    await state.next_epoch(NO_EPOCH, pack(table))


def _about_machine(plan: LakePlan, processes: MemberProcesses) -> dict[str, Any]:
    """Return the lake's folders on this machine, and the members in them."""
    by_folder = {member.plan.folder: member for member in processes.members}
    folders = []
    for folder in plan.folders:
        member = by_folder.get(folder)
        found = (
            {"member": "", "serves": False, "restarts": 0}
            if member is None
            else {"member": member.member_id.hex(), "serves": member.is_serving, "restarts": member.restarts}
        )
        folders.append({"folder": str(folder), **found})
    return {"folders": folders}


# --- names -------------------------------------------------------------------------------------------


def _connecting(service: NamesService) -> ConnectNames:
    """Return what connects clients of a head to the names in this process."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[NamesConnection]:
        client = EmbeddedEngine(service, descriptors=False)
        try:
            hello = (await client.call(m.Hello(PROTOCOL_VERSION, "head"))).message
            assert isinstance(hello, m.HelloReply), hello
            yield NamesConnection(client, hello, trio.sleep_forever)
        finally:
            with trio.CancelScope(shield=True):
                await client.aclose()

    return connect
