"""A lake whose etcd is lost for ever begins again from the replica of its names on this machine.

    looked_at    the replica's last group, and what it knows of the others; nothing is changed
    rescued      the table in this replica takes charge (`engine.coordinator.rescuing`), then the machine's record says
                 that the names are here, and no etcd is

Rules kept here:
- Nothing serves these folders meanwhile: the locks of machine and names are taken.
- An etcd that answers and has the lake is not lost.
- The first change in the replica is that of the charge, before anything else of the names runs: so a replica of which
  the rescue was cut off follows no log any more, and begins anew should the etcd return.
- Numbers of nodes go on above those that the lost groups may have used: a mount knows files by them.
- The record keeps the place of the etcd that was left, until that has said so itself (`engine.lake.left_etcd`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import structlog
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import charge_of, refuse_other_lake
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.names_shards import shards_of
from engine.coordinator.records import Charge, MemberRecord, RepeatedRecord
from engine.coordinator.rescuing import repeated_in, rescue
from engine.host.clock import SystemClock
from engine.lake.etcd_place import EtcdPlace
from engine.lake.folders import holds_names
from engine.lake.lake_etcd import open_lake_etcd
from engine.lake.machine import MachineRecord, keep_machine, rescued as rescued_record
from engine.lake.machine_lock import machine_locked
from engine.lake.names_here import TABLE, open_names
from engine.lake.plan import LakePlan
from engine.metadata.metadata_store import Metadata
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import Superblock
from engine.tables.views import Transaction
from lakefs.errors import LakeError, PreconditionFailed
from lakefs.ids import ReplicaId, Sequence

NOT_LOST: Final = "answers, and has this lake: nothing is lost, and nothing is to be rescued"
NUMBERS_SKIPPED: Final = 1 << 20
"""Names that a lake makes within the seconds that are lost: some ten thousand each."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaHere:
    """The replica of the names on this machine: its last group, and what it has of the lake's records.

    `repeated`: None if it has no copy of them.  `is_in_charge`: it was rescued already.
    """

    replica: ReplicaId
    sequence: Sequence
    repeated: RepeatedRecord | None
    members: tuple[MemberRecord, ...]
    is_in_charge: bool


def etcd_to_be_lost(plan: LakePlan) -> EtcdPlace | None:
    """Return the etcd that the machine's record has; None if the rescue has taken it out.

    PreconditionFailed unless the lake has an etcd.  Blocks.
    """
    place = plan.machine.etcd
    if place is None and plan.machine.left is None:
        raise PreconditionFailed("this lake has no etcd, so there is none to be lost; start it with: lake serve")
    if place is not None and not place.is_settled:
        raise PreconditionFailed(
            f"the lake was only to be moved to or from {place.words}; where it is to be without one, run lake cluster "
            "init with --no-etcd, and start it"
        )
    return place


def has_replica(plan: LakePlan) -> bool:
    """Return True if this machine has a replica of the names.  Blocks."""
    return any(holds_names(folder) for folder in plan.folders)


async def why_lost(plan: LakePlan, place: EtcdPlace) -> str:
    """Return why the etcd has nothing of this lake any more.  PreconditionFailed if it has."""
    try:
        async with open_lake_etcd(place, plan.lake_id) as etcd:
            await etcd.reach()
            found = await charge_of(etcd.side.coordinator)
            if found is None:
                return f"{place.words} holds nothing of this lake"
            refuse_other_lake(found, plan.lake_id, place.words)
    except LakeError as error:
        return error.message
    if found.state is Charge.LEFT:
        raise PreconditionFailed(f"the lake's coordinator is not {place.words} any more, but {found.place}")
    if found.incarnation.hex() != place.incarnation:
        return f"{place.words} has this lake as it was moved there another time"
    raise PreconditionFailed(f"{place.words} {NOT_LOST}; start it with: lake serve")


async def looked_at(plan: LakePlan) -> ReplicaHere:
    """Return what the replica on this machine has.  Errors of `open_names`, StoreLocked while the lake is served."""
    found: list[ReplicaHere] = []
    scope = trio.CancelScope()

    @asynccontextmanager
    async def looking(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        table = NamesCoordinator(metadata, SystemClock())
        charge = await charge_of(table)
        found.append(
            ReplicaHere(
                ReplicaId(superblock.store_id),
                metadata.durable_sequence,
                await repeated_in(table),
                tuple(await LakeState(table).members()),
                charge is not None and charge.state is Charge.SERVES,
            )
        )
        table.close()
        scope.cancel()
        await trio.lowlevel.checkpoint()  # ends here, before anything of the names runs that might change them
        yield

    with machine_locked(plan.folders), scope:
        async with open_names(plan, looking):
            pass
    return found[0]


async def rescued(plan: LakePlan) -> MachineRecord:
    """Let the lake begin again from the replica here, with its coordinator in the names; return the machine's record.

    Safe to repeat, also behind a crash.  Errors of `rescue` and `open_names`; StoreLocked while the lake is served.
    """
    with machine_locked(plan.folders):
        return await begun_again(plan)


async def begun_again(
    plan: LakePlan, begin_anew: BeginAnew | None = None, newer: Mapping[bytes, bytes] = MappingProxyType({})
) -> MachineRecord:
    """Do as `rescued`, while the machine is locked.

    `begin_anew`: names are made here, by that.  `newer`: see `rescue`.  PreconditionFailed for several names shards.
    """
    turns: list[int] = []

    @asynccontextmanager
    async def rescuing(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        table = NamesCoordinator(metadata, SystemClock())
        if (count := await shards_of(table)) > 1:
            raise PreconditionFailed(
                f"the names of this lake are in {count} shards, and the replica here has those of the first: content "
                "that only others name would be removed; this release does not rescue such a lake"
            )
        charge = await rescue(table, plan.lake_id, TABLE, newer)
        table.close()
        await skip_numbers(metadata)
        turns.append(charge.turn)
        yield

    async with open_names(plan, rescuing, begin_anew, is_new=begin_anew is not None):
        pass
    machine = rescued_record(plan.machine, turns[-1])
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)
    _log.warning("the lake begins again from this replica of its names", to=TABLE)
    return machine


async def skip_numbers(metadata: Metadata) -> None:
    """Let numbers of nodes and births go on above those that lost groups may have used; durable on return."""

    def decide(txn: Transaction) -> None:
        txn.new_node_ids(NUMBERS_SKIPPED)
        txn.new_births(NUMBERS_SKIPPED)

    _, sequence = await metadata.commit(decide)
    await metadata.wait_durable(sequence)
