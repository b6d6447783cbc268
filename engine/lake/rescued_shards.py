"""Names shards other than the first when a lake whose etcd is lost for ever begins again on one machine.

looked_at_shard     the replica's last group, and of which time of the lake it is; nothing is changed
rescued_shard       it is of the time that begins, so it follows no log of before any more
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.coordinator_table import entry_of
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.coordinator.records import CHARGE_KEY, Charge, ChargeRecord, decode, encode
from engine.host.clock import SystemClock
from engine.lake.folders import holds_names
from engine.lake.names_here import open_names
from engine.lake.names_terms import begin_shard
from engine.lake.plan import LakePlan
from engine.lake.skipped_numbers import skip_numbers
from engine.metadata.metadata_store import Metadata
from engine.superblock.superblock import Superblock
from lakefs.errors import PreconditionFailed
from lakefs.ids import NamesShard, ReplicaId, Sequence


@dataclass(frozen=True)
class ShardHere:
    """The replica of a names shard on this machine: its last group.

    `incarnation`: of the lake's coordinator, of whose time it is; empty: it was never led.
    """

    shard: NamesShard
    replica: ReplicaId
    sequence: Sequence
    incarnation: bytes


def is_here(plan: LakePlan, shard: NamesShard) -> bool:
    """Return True if this machine has a replica of a shard.  Blocks."""
    return any(holds_names(folder, shard) for folder in plan.folders)


async def looked_at_shard(plan: LakePlan, shard: NamesShard) -> ShardHere:
    """Return what the replica of a shard has.  PreconditionFailed if none is here; errors of `open_names`."""
    if not is_here(plan, shard):
        raise PreconditionFailed(
            f"this machine has no replica of names shard {shard}; begin on one that has replicas of all shards"
        )
    found: list[ShardHere] = []
    scope = trio.CancelScope()

    @asynccontextmanager
    async def looking(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        with metadata.view() as view:
            entry = entry_of(view, CHARGE_KEY)
        incarnation = b"" if entry is None else decode(ChargeRecord, entry.value).incarnation
        found.append(ShardHere(shard, ReplicaId(superblock.store_id), metadata.durable_sequence, incarnation))
        scope.cancel()
        await trio.lowlevel.checkpoint()  # ends here, before anything of the names runs that might change them
        yield

    with scope:
        async with open_names(plan, looking, shard=shard, is_new=False):
            pass
    return found[0]


async def rescued_shard(plan: LakePlan, shard: NamesShard, charge: ChargeRecord) -> None:
    """Let a shard be of the time of `charge`, which is that of the first one; safe to repeat, durable on return."""
    record = ChargeRecord(charge.lake, Charge.LEFT, charge.turn, charge.incarnation)

    @asynccontextmanager
    async def rescuing(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        with metadata.view() as view:
            was_led = entry_of(view, CHARGE_KEY) is not None
        if was_led:
            await note_time(metadata, record)
            await skip_numbers(metadata)
        yield

    async with open_names(plan, rescuing, shard=shard, is_new=False) as names:
        await begin_shard(shard, names.store, record)


async def note_time(metadata: Metadata, record: ChargeRecord) -> None:
    """Let names say of which time of the lake they are; durable on return."""
    table = NamesCoordinator(metadata, SystemClock())
    try:
        await table.transact([], [Put(CHARGE_KEY, encode(record))])
    finally:
        table.close()
