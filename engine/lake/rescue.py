"""A lake whose etcd is lost for ever begins again from the replicas of its names on this machine.

    looked_at    the last group of each replica, and what is known here of the others; nothing is changed
    rescued      the table in the first shard takes charge (`engine.coordinator.rescuing`), the other shards note that,
                 then the machine's record says that the names are here, and no etcd is

Rules kept here:
- Nothing serves these folders meanwhile: the locks of machine and names are taken.
- An etcd that answers and has the lake is not lost.
- All names shards are here, or nothing is changed.
- The first change in a replica is that of the charge, before anything else of the names runs: so a replica of which
  the rescue was cut off follows no log any more, and begins anew should the etcd return.
- Numbers of nodes go on above those that the lost groups may have used: a mount knows files by them.
- The record keeps the place of the etcd that was left, until that has said so itself (`engine.lake.left_etcd`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.moving import charge_of, refuse_other_lake
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.names_shards import shards_of
from engine.coordinator.records import (
    SHARDS_KEY,
    Charge,
    ChargeRecord,
    MemberRecord,
    RepeatedRecord,
    RepeatedReplica,
    ShardsRecord,
    encode,
)
from engine.coordinator.rescuing import repeated_in, rescue
from engine.format.group_parts import FIRST_SHARD
from engine.host.clock import SystemClock
from engine.lake.etcd_place import EtcdPlace
from engine.lake.lake_etcd import open_lake_etcd
from engine.lake.machine import MachineRecord, keep_machine, rescued as rescued_record
from engine.lake.machine_lock import machine_locked
from engine.lake.names_here import TABLE, open_names
from engine.lake.plan import LakePlan
from engine.lake.shards_here import hosts_of, how_to_copy, note, noted_in, shards_with_names
from engine.metadata.metadata_store import Metadata
from engine.store.names_opening import BeginAnew
from engine.superblock.superblock import Superblock
from engine.tables.views import Transaction
from lakefs.errors import LakeError, PreconditionFailed
from lakefs.ids import NamesShard, ReplicaId, Sequence

NOT_LOST: Final = "answers, and has this lake: nothing is lost, and nothing is to be rescued"
NUMBERS_SKIPPED: Final = 1 << 20
"""Names that a lake makes within the seconds that are lost: some ten thousand each."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaHere:
    """The replica of a names shard on this machine, and its last group.

    `is_begun`: it has the note of a term; else the shard was just added, or it was to be made here and was not.
    `is_old`: its note is of another time of the lake.
    """

    shard: NamesShard
    replica: ReplicaId
    sequence: Sequence
    is_begun: bool = True
    is_old: bool = False


@dataclass(frozen=True)
class NamesFound:
    """The replicas on this machine, by their shards, and what that of the first shard has of the lake's records.

    `machine`: this one's id.  `count`: of names shards, as far as it is known here.  `repeated`: None if there is no
    copy of the lake's records.  `is_in_charge`: the first shard was rescued already.
    """

    machine: str
    replicas: tuple[ReplicaHere, ...]
    count: int
    repeated: RepeatedRecord | None = None
    members: tuple[MemberRecord, ...] = ()
    is_in_charge: bool = False
    time: bytes = b""
    """The incarnation of the charge in the first shard."""

    @property
    def missing(self) -> list[NamesShard]:
        """The shards that have no replica here, or an old one, or one that has nothing, and others may have more."""
        usable = [each for each in self.replicas if not each.is_old and (each.is_begun or self._is_the_only_one(each))]
        here = {each.shard for each in usable}
        return [shard for shard in map(NamesShard, range(self.count)) if shard not in here]

    def _is_the_only_one(self, here: ReplicaHere) -> bool:
        """Return True if it is known that no replica of a shard has more."""
        others = [each for each in self.known_of(here.shard) if each.kept > here.sequence]
        return self.repeated is not None and not others

    def known_of(self, shard: NamesShard) -> list[RepeatedReplica]:
        """Return the replicas of a shard on other machines, as the leader of the first one knew them last."""
        known = () if self.repeated is None else self.repeated.replicas
        return [each for each in known if each.shard == shard and each.machine != self.machine]


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
    """Return True if this machine has a replica of the names of some shard.  Blocks."""
    return bool(shards_with_names(plan))


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


async def looked_at(plan: LakePlan) -> NamesFound:
    """Return what the replicas on this machine have.  Errors of `open_names`, StoreLocked while the lake is served."""
    with machine_locked(plan.folders):
        return await _looked_at(plan)


async def _looked_at(plan: LakePlan) -> NamesFound:
    shards = shards_with_names(plan)
    found = NamesFound(plan.machine.machine, (), 1 + max(shards, default=FIRST_SHARD))
    for shard in shards:
        found = await _with_replica(plan, shard, found)
    return found


async def _with_replica(plan: LakePlan, shard: NamesShard, before: NamesFound) -> NamesFound:
    """Return what was found, with what the replica of one more shard has."""
    found: list[NamesFound] = []
    scope = trio.CancelScope()

    @asynccontextmanager
    async def looking(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        charge, replica = await noted_in(metadata), ReplicaId(superblock.store_id)
        is_old = charge is not None and shard != FIRST_SHARD and charge.incarnation not in _times(plan, before)
        here = ReplicaHere(shard, replica, metadata.durable_sequence, charge is not None, is_old)
        with_it = replace(before, replicas=(*before.replicas, here))
        found.append(await _with_records(metadata, with_it) if shard == FIRST_SHARD else with_it)
        scope.cancel()
        await trio.lowlevel.checkpoint()  # ends here, before anything of the names runs that might change them
        yield

    with scope:
        async with open_names(plan, looking, shard=shard):
            pass
    return found[0]


def _times(plan: LakePlan, found: NamesFound) -> set[bytes]:
    """Return the incarnations of which replicas of other shards may be: of the lost etcd's time, or rescued already."""
    place = plan.machine.etcd or plan.machine.left
    return {found.time, b"" if place is None else bytes.fromhex(place.incarnation)}


async def _with_records(metadata: Metadata, before: NamesFound) -> NamesFound:
    """Return what was found, with the records of the lake in the names of the first shard."""
    table = NamesCoordinator(metadata, SystemClock())
    try:
        charge = await charge_of(table)
        return replace(
            before,
            count=max(before.count, await shards_of(table)),
            repeated=await repeated_in(table),
            members=tuple(await LakeState(table).members()),
            is_in_charge=charge is not None and charge.state is Charge.SERVES,
            time=b"" if charge is None else charge.incarnation,
        )
    finally:
        table.close()


async def rescued(plan: LakePlan) -> MachineRecord:
    """Let the lake begin again from the replicas here, with its coordinator in the names; return the machine's record.

    Safe to repeat, also behind a crash.  PreconditionFailed where a names shard has no replica here: nothing is
    changed.  Errors of `rescue` and `open_names`; StoreLocked while the lake is served.
    """
    with machine_locked(plan.folders):
        found = await _looked_at(plan)
        if found.missing:
            raise PreconditionFailed(why_not_from_here(found), subject=f"names shard {found.missing[0]}")
        return await begun_again(plan, found.count)


def why_not_from_here(found: NamesFound) -> str:
    """Return why the lake does not begin again from the replicas here, of which some are missing."""
    shard = found.missing[0]
    last = max(found.known_of(shard), key=lambda each: each.kept, default=None)
    how = how_to_copy(shard, None if last is None else last.machine, hosts_of(found.members))
    group = "" if last is None else f"; that had group {last.kept} at the last report"
    return (
        f"this machine has no replica of names shard {shard}, and without its names the content that they have would "
        f"be removed: {how} lake cluster rescue --from-here --restored{group}"
    )


async def begun_again(
    plan: LakePlan,
    count: int,
    sources: Mapping[NamesShard, BeginAnew] = MappingProxyType({}),
    newer: Mapping[bytes, bytes] = MappingProxyType({}),
) -> MachineRecord:
    """Do as `rescued`, while the machine is locked, and has names of so many shards.

    `sources`: the names of these shards are made here, by that.  `newer`: see `rescue`.  The first shard is changed
    before the others: their notes repeat what its table says.
    """
    charges: list[ChargeRecord] = []
    if count > 1:  # a shard may have been added behind the last record that was repeated
        newer = {**newer, SHARDS_KEY: encode(ShardsRecord(count))}

    @asynccontextmanager
    async def rescuing(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        table = NamesCoordinator(metadata, SystemClock())
        charges.append(await rescue(table, plan.lake_id, TABLE, newer))
        table.close()
        await skip_numbers(metadata)
        yield

    @asynccontextmanager
    async def noting(shard: NamesShard, metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        await note(metadata, shard, charges[-1])
        await skip_numbers(metadata)
        yield

    for shard in map(NamesShard, range(count)):
        leading = rescuing if shard == FIRST_SHARD else partial(noting, shard)
        async with open_names(plan, leading, sources.get(shard), shard=shard, is_new=shard in sources):
            pass
    machine = rescued_record(plan.machine, charges[-1].turn)
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)
    _log.warning("the lake begins again from the replicas of its names here", shards=count, to=TABLE)
    return machine


async def skip_numbers(metadata: Metadata) -> None:
    """Let numbers of nodes and births go on above those that lost groups may have used; durable on return."""

    def decide(txn: Transaction) -> None:
        txn.new_node_ids(NUMBERS_SKIPPED)
        txn.new_births(NUMBERS_SKIPPED)

    _, sequence = await metadata.commit(decide)
    await metadata.wait_durable(sequence)
