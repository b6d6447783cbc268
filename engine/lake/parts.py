"""The parts of a lake on this machine: names, coordinator, members, stripes, upkeep and a head.

    head        serves clients, over stripes and names
    stripes     chunks over the members; those of this machine are processes (`engine.lake.member_processes`)
    names       metadata, mirrored on some of the devices, with the coordinator's records among them; or a replica of
                them, in a lake with etcd (`engine.lake.names_replica`)
    upkeep      walker, gc, membership: beside the names, where they lead

A process has the names, or reaches those of another one (`LakePlan.names_at`): then it has no upkeep either.
Opened in this order from below: names, coordinator, members, links to them, head; and closed in the reverse one.

Rules kept here:
- Protection is chosen when the lake is made, and its record decides from then on.
- A lake that was made begins to serve without members that cannot be started, after START_PATIENCE_S without those that
  take long.  Before it has its first table it holds nothing, and a start that was cut off is gone on with.
- Members of a machine without names start before the names can be reached: other machines' heads may need them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.lake_state import NO_EPOCH, NO_GENERATION, LakeState
from engine.coordinator.moving import charge_of, refuse_unless_in_charge
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.names_leader import Leader, NamesLeaders, open_names_leaders
from engine.coordinator.names_shards import NamesShards, open_names_shards, shards_of
from engine.coordinator.records import LakeRecord
from engine.coordinator.shard_requests import shards_group
from engine.fabric.engine_fabric import EngineFabric
from engine.format.group_parts import FIRST_SHARD
from engine.format.layouts import StoreIdentity
from engine.head.head import AboutMachine, Head, open_head
from engine.head.head_tier import HeadMemory
from engine.host.clock import SystemClock
from engine.lake.all_shards import LocalShard, LocalShards, open_other_shards
from engine.lake.beside_names import learned, open_beside_names
from engine.lake.children import open_children
from engine.lake.embedded_names import embedded_names
from engine.lake.etcd_place import EtcdPlace, record_of
from engine.lake.head_memory import head_memory
from engine.lake.lake_content import Content, open_content
from engine.lake.lake_etcd import open_lake_etcd
from engine.lake.lake_members import (
    START_PATIENCE_S,
    about_machine,
    identified,
    members_to_start,
    registering,
    wait_for_members,
)
from engine.lake.lake_records import keeping_lake_records
from engine.lake.left_etcd import closing_left_etcd
from engine.lake.machine import keep_machine, made
from engine.lake.machine_lock import machine_locked
from engine.lake.member_processes import MemberProcesses
from engine.lake.moving_over import moved_over
from engine.lake.names_here import TABLE, open_names, open_table
from engine.lake.names_replica import NamesReplica, none_before
from engine.lake.names_terms import NamesTerms, lake_upkeep
from engine.lake.plan import LakePlan, refuse_other_protection
from engine.lake.presence import head_record, present, with_deadline
from engine.lake.read_shards import way_to_read
from engine.lake.reads_only import end_with_this_start, reading, recorded_protection
from engine.lake.replica_host import MachineHost
from engine.lake.shard_replicas import ShardReplicas, WayToNames, copied_from, machines_before, running_replicas
from engine.lake.shards_here import refuse_missing
from engine.lake_gc.joined_generation import JoinedGeneration
from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.members.member_links import MemberLinks
from engine.process.mirrored_names import LocalNames
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.store.local_store import ENGINE_THREADS
from lakefs.cluster.protection import Protection
from lakefs.host.offload import ThreadOffload
from lakefs.ids import BootId, NamesShard, new_id16
from lakefs.ports import Clock, Offload
from lakefs.wire.engine_port import EngineService

_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LakeNames:
    """The names of the lake on this machine, with what is beside them."""

    local: LocalNames
    """The first shard's."""
    upkeep: LakeUpkeep
    service: EngineService
    """Serves the heads of other machines, with the names of the first shard."""
    others: Mapping[NamesShard, LocalShard]
    """The other shards, where there are several."""

    @property
    def stores(self) -> dict[NamesShard, LocalNames]:
        """The names of all shards."""
        return {FIRST_SHARD: self.local} | {shard: each.local for shard, each in self.others.items()}

    @property
    def services(self) -> dict[NamesShard, EngineService]:
        """The services of all shards."""
        return {FIRST_SHARD: self.service} | {shard: each.service for shard, each in self.others.items()}


@dataclass(frozen=True)
class LakeParts:
    """The open parts of a lake on this machine.  `names` is None where they are another machine's."""

    plan: LakePlan
    processes: MemberProcesses
    links: MemberLinks
    head: Head
    protection: Protection
    offload: Offload
    names: LakeNames | None
    is_made_now: bool
    """This opening made the lake's first table."""
    replicas: ShardReplicas | None = None
    """The replicas of the names on this machine, in a lake with etcd."""
    reads_only: bool = False
    """The names are those of a replica that takes no changes."""


def open_lake(
    plan: LakePlan, about: AboutMachine | None = None, fabric: EngineFabric | None = None
) -> AbstractAsyncContextManager[LakeParts]:
    """Open a lake on this machine, and make it if it is new; everything ends with the block.

    `about`: returns what status says of the machine, where another process has its members.  `fabric`: the head's RDMA
    device, which the caller closes afterwards.
    Errors of `open_local_names`, on a machine that has joined of `machine_locked`; ConfigError for another protection
    than the recorded one; StoreUnusable when a new lake's member cannot be started, or no member of the table was ever
    added.  Waits for names of another machine until they can be reached: PermissionDenied, and PreconditionFailed for
    names of another lake.
    """
    fabric = fabric or EngineFabric(None, "it is off")
    return _open_lake(plan, about, fabric)


@asynccontextmanager
async def _open_lake(plan: LakePlan, about: AboutMachine | None, fabric: EngineFabric) -> AsyncIterator[LakeParts]:
    async with AsyncExitStack() as stack:
        if plan.machine.reads_only and plan.machine.etcd is not None and not plan.is_head:
            yield await stack.enter_async_context(_open_for_reads(plan, fabric))
            return
        if not plan.is_head:
            if plan.names_at:
                stack.enter_context(machine_locked(plan.folders))
                plan = await learned(plan)
            else:
                plan = await moved_over(plan)
            await stack.enter_async_context(closing_left_etcd(plan))
        if plan.is_head or (plan.names_at and plan.machine.etcd is None):
            opening = _open_beside_names(plan, about, fabric)
        elif plan.machine.etcd is None:
            opening = _open_with_names(plan, fabric)
        else:
            opening = _open_with_replica(plan, plan.machine.etcd, fabric)
        yield await stack.enter_async_context(opening)


# --- the machine with the names ----------------------------------------------------------------------


@asynccontextmanager
async def _open_with_names(plan: LakePlan, fabric: EngineFabric) -> AsyncIterator[LakeParts]:
    async with AsyncExitStack() as stack:
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        names = await stack.enter_async_context(open_names(plan))
        store, gate = names.store, BindGate()
        joined = JoinedGeneration(store.metadata, gate)
        coordinator = await stack.enter_async_context(open_table(store))
        if (charge := await charge_of(coordinator)) is not None:
            refuse_unless_in_charge(charge, plan.lake_id, TABLE)
        count = await shards_of(coordinator)
        refuse_missing(plan, count)
        state = LakeState(coordinator)
        protection = await _recorded(state, plan)
        is_made = await state.epoch() != NO_EPOCH
        processes = await _open_processes(stack, plan, state, protection, is_made=is_made)
        await wait_for_members(processes, state, plan, protection, is_made=is_made)
        plan = _kept(plan, processes, protection)
        content = await open_content(stack, plan, coordinator, offload)
        others = await open_other_shards(stack, plan, store, coordinator, content, charge, count)
        upkeep = lake_upkeep(
            plan, names, coordinator, None, gate, joined, content, offload, others.others, partial(others.state, names)
        )
        serving = partial(
            NamesService,
            store,
            gate=gate,
            upkeep=upkeep.requests,
            more_status=upkeep.status,
            buckets=others.first_buckets,
            more=[shards_group(None, plan.lake_id)],
        )
        memory = await stack.enter_async_context(head_memory(plan.tier, store.superblock.identity, offload, fabric))
        way = await _way(stack, coordinator, serving(), others, count)
        about = partial(about_machine, plan, processes)
        head = await _open_head(stack, plan, about, way, content, offload, store.clock, memory, fabric)
        service = serving(coordinator=coordinator_group(coordinator))
        with_names = LakeNames(names, upkeep, service, others.all)
        yield LakeParts(plan, processes, content.links, head, protection, offload, with_names, is_made_now=not is_made)


async def _way(
    stack: AsyncExitStack, coordinator: Coordinator, first: EngineService, others: LocalShards, count: int
) -> WayToNames:
    """Return the way to the names of so many shards here, of which the first has that service, until the stack ends."""
    if count == 1:
        return WayToNames(embedded_names(first))
    return others.way(first, await stack.enter_async_context(open_names_shards(coordinator)))


def _kept(plan: LakePlan, processes: MemberProcesses, protection: Protection) -> LakePlan:
    """Let the members' folders have the machine's record, as of a lake that was made; returns the plan with it."""
    plan = replace(plan, machine=made(plan.machine, protection))
    keep_machine([member.plan.folder for member in processes.all], plan.machine, plan.token)
    return plan


async def _recorded(state: LakeState, plan: LakePlan) -> Protection:
    """Record the lake and its first generation, if they are not; return the protection that was chosen for it."""
    asked = plan.protection
    record = await state.make_lake(LakeRecord(plan.lake_id, asked.data, asked.parity))
    chosen = Protection(record.data_shards, record.parity_shards)
    if plan.is_chosen:
        refuse_other_protection(chosen, asked)
    if plan.machine.name:
        await state.name_lake(plan.machine.name)
    await state.advance_generation(NO_GENERATION)
    return chosen


# --- a machine with a replica of the names -------------------------------------------------------------


@asynccontextmanager
async def _open_with_replica(plan: LakePlan, place: EtcdPlace, fabric: EngineFabric) -> AsyncIterator[LakeParts]:
    async with AsyncExitStack() as stack:
        if not plan.names_at:
            stack.enter_context(machine_locked(plan.folders))
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        etcd = await stack.enter_async_context(open_lake_etcd(place, plan.lake_id))
        coordinator = etcd.coordinator
        state, processes = LakeState(coordinator), None
        plan, deadline = with_deadline(plan, stack)
        if plan.machine.is_made or plan.names_at:  # other machines' heads may need the members before etcd answers
            processes = await _open_processes(stack, plan, state, plan.protection, is_made=True)
        await etcd.wait()
        protection = await _recorded(state, plan)
        await state.record_etcd(record_of(place))
        is_made = await state.epoch() != NO_EPOCH
        processes = processes or await _open_processes(stack, plan, state, protection, is_made=is_made)
        own = head_record(plan, SystemClock(), has_members=True)
        await stack.enter_async_context(present(coordinator, own, deadline))
        if not plan.names_at:
            await wait_for_members(processes, state, plan, protection, is_made=is_made)
        plan = _kept(plan, processes, protection)
        content = await open_content(stack, plan, coordinator, offload)
        leaders = await stack.enter_async_context(open_names_leaders(coordinator))
        leaders.was_deposed = partial(_ask_members, content.links)
        shards = await stack.enter_async_context(open_names_shards(coordinator))
        terms = NamesTerms(plan, etcd, content, offload, lambda shard: replicas.connect(shard))
        replicas = ShardReplicas(shards, partial(_replica, terms, leaders, shards))
        identity = StoreIdentity(plan.lake_id, BootId(new_id16()))
        memory = await stack.enter_async_context(head_memory(plan.tier, identity, offload, fabric))
        about = partial(about_machine, plan, processes)
        head = await _open_head(stack, plan, about, replicas.way, content, offload, SystemClock(), memory, fabric)
        await stack.enter_async_context(running_replicas(replicas))
        await stack.enter_async_context(keeping_lake_records(plan, coordinator, offload, SystemClock()))
        with trio.move_on_after(START_PATIENCE_S):
            await leaders.of(FIRST_SHARD).wait()
        yield LakeParts(
            plan, processes, content.links, head, protection, offload, None, is_made_now=not is_made, replicas=replicas
        )


def _replica(terms: NamesTerms, leaders: NamesLeaders, shards: NamesShards, shard: NamesShard) -> NamesReplica:
    """Return the replica of a shard on this machine."""
    plan, etcd = terms.plan, terms.etcd
    before = none_before  # machines join the first shard one after the other
    if shard != FIRST_SHARD:
        before = partial(machines_before, etcd.coordinator, shard, shards, plan.machine.machine)
    return NamesReplica(
        MachineHost(plan, terms.offload, shard),
        plan.lake_id,
        etcd.coordinator,
        leaders.of(shard),
        partial(terms.open, shard),
        failure=lambda: etcd.failure,
        make_room=etcd.make_room,
        incarnation=bytes.fromhex(etcd.place.incarnation),
        leads=terms.leads,
        machines_before=before,
        copied_from=partial(copied_from, etcd.coordinator, shard, plan.machine.machine),
    )


# --- a replica that is only read ------------------------------------------------------------------------


@asynccontextmanager
async def _open_for_reads(plan: LakePlan, fabric: EngineFabric) -> AsyncIterator[LakeParts]:
    async with AsyncExitStack() as stack:
        stack.enter_context(machine_locked(plan.folders))
        end_with_this_start(plan)
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        names = await stack.enter_async_context(open_names(plan, reading, is_new=False))
        store, gate = names.store, BindGate()
        coordinator = stack.enter_context(closing(NamesCoordinator(store.metadata, store.clock)))
        protection = await recorded_protection(coordinator)
        members = members_to_start(plan, protection, is_made=True)
        processes = await stack.enter_async_context(open_children(members, identified))
        await wait_for_members(processes, LakeState(coordinator), plan, protection, is_made=True)
        content = await open_content(stack, plan, coordinator, offload)
        joined = JoinedGeneration(store.metadata, gate)
        # It never runs: its status is asked for.
        upkeep = lake_upkeep(plan, names, coordinator, None, gate, joined, content, offload)
        service = NamesService(store, gate=gate, upkeep=upkeep.requests, more_status=upkeep.status)
        memory = await stack.enter_async_context(head_memory(plan.tier, store.superblock.identity, offload, fabric))
        about = partial(about_machine, plan, processes)
        way = await way_to_read(stack, plan, coordinator, embedded_names(service), offload)
        head = await _open_head(stack, plan, about, way, content, offload, store.clock, memory, fabric)
        _log.warning("the names are only read, and may be old", sequence=store.metadata.durable_sequence)
        yield LakeParts(
            plan, processes, content.links, head, protection, offload, None, is_made_now=False, reads_only=True
        )


# --- a machine beside it -----------------------------------------------------------------------------


@asynccontextmanager
async def _open_beside_names(
    plan: LakePlan, about: AboutMachine | None, fabric: EngineFabric
) -> AsyncIterator[LakeParts]:
    async with AsyncExitStack() as stack:
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        lake = await open_beside_names(stack, plan)
        coordinator = lake.coordinator
        processes = await _open_processes(stack, plan, LakeState(coordinator), plan.protection, is_made=True)
        record = await lake.wait_for_lake()
        content = await open_content(stack, plan, coordinator, offload)
        if lake.leaders is not None:
            lake.leaders.was_deposed = partial(_ask_members, content.links)
        if plan.machine.etcd is not None:
            own = head_record(plan, SystemClock(), has_members=False)
            await stack.enter_async_context(present(coordinator, own))
        protection = Protection(record.data_shards, record.parity_shards)
        identity = StoreIdentity(plan.lake_id, BootId(new_id16()))
        memory = await stack.enter_async_context(head_memory(plan.tier, identity, offload, fabric))
        about = about or partial(about_machine, plan, processes)
        head = await _open_head(
            stack, plan, about, await lake.way(stack), content, offload, SystemClock(), memory, fabric
        )
        yield LakeParts(plan, processes, content.links, head, protection, offload, None, is_made_now=False)


# --- both --------------------------------------------------------------------------------------------


def _ask_members(links: MemberLinks, deposed: Leader) -> None:
    """Let the members beside names that lead no more say if they are there: their whole machine may be gone."""
    links.ask_machine(deposed.record.machine)


async def _open_processes(
    stack: AsyncExitStack, plan: LakePlan, state: LakeState, protection: Protection, *, is_made: bool
) -> MemberProcesses:
    members = members_to_start(plan, protection, is_made=is_made)
    keep_machine([member.folder for member in members], plan.machine, plan.token)
    return await stack.enter_async_context(open_children(members, registering(state, plan)))


async def _open_head(
    stack: AsyncExitStack,
    plan: LakePlan,
    about: AboutMachine,
    way: WayToNames,
    content: Content,
    offload: Offload,
    clock: Clock,
    memory: HeadMemory,
    fabric: EngineFabric,
) -> Head:
    opening = open_head(
        way.connect,
        content.stripes,
        content.links,
        shards=way.shards,
        connect_shard=way.connect_shard,
        offload=offload,
        clock=clock,
        buffers=content.buffers,
        about_machine=about,
        memory=memory,
        machine=plan.machine.machine,
        fabric=fabric,
    )
    head = await stack.enter_async_context(opening)
    stack.callback(content.links.view.on_change(head.parts.homes.look))
    return head
