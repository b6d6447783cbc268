"""Names that are read, and not changed: a replica without its etcd, during one start of a machine.

It neither leads nor follows, so what it has may be old, and nothing that it answers is proven to be the lake's present
state.  It is for a lake whose etcd is away for long, until that is back or the lake is rescued.

Rules kept here:
- Nothing is decided, so no group is made, and the replica follows the log again afterwards.
- Members are found by the lake's records in the names (`engine.coordinator.repeating`).
- The machine's record asks for it, and the start that does so takes that back: the next one is normal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NoReturn

from engine.coordinator.lake_state import NO_EPOCH, LakeState
from engine.coordinator.names_coordinator import NamesCoordinator
from engine.lake.machine import MachineRecord, for_reads, keep_machine
from engine.lake.plan import LakePlan
from engine.metadata.metadata_store import Metadata
from engine.superblock.superblock import Superblock
from lakefs.cluster.protection import Protection
from lakefs.errors import StoreReadOnly, StoreUnusable

READS_ONLY: Final = (
    "the names of this machine are only read, as lake cluster rescue --read-only has said; a normal start of lake "
    "serve ends that"
)


@asynccontextmanager
async def reading(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
    """Let a store of names be read, and refuse all decisions (`engine.store.metadata_life.Leading`)."""
    await metadata.lead(metadata.journal_log, lambda: None, _refuse)
    yield


async def recorded_protection(coordinator: NamesCoordinator) -> Protection:
    """Return the protection of the lake whose records a table has.  StoreUnusable where it has none."""
    state = LakeState(coordinator)
    record = await state.lake()
    if record is None or await state.epoch() == NO_EPOCH:
        raise StoreUnusable("the replica of the names here has no copy of the lake's records", subject="names")
    return Protection(record.data_shards, record.parity_shards)


def ask_for_reads(plan: LakePlan) -> None:
    """Let the next start of this machine serve reads alone.  Blocks."""
    _keep(plan, for_reads(plan.machine, reads_only=True))


def end_with_this_start(plan: LakePlan) -> None:
    """Let the start behind this one serve all again.  Blocks."""
    _keep(plan, for_reads(plan.machine, reads_only=False))


def _keep(plan: LakePlan, machine: MachineRecord) -> None:
    keep_machine([folder for folder in plan.folders if plan.is_wanted(folder)], machine, plan.token)


def _refuse() -> NoReturn:
    raise StoreReadOnly(READS_ONLY)
