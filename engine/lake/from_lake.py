"""The names of a lake made anew from a checkpoint that lies in the lake itself, when no replica is left.

    records      what this machine has kept: members, tables, and where the checkpoint is  (`engine.lake.lake_records`)
    members      those of this machine are started, others are asked where they serve
    names        made in this machine's folders, from the bytes of the checkpoint, each chunk proven by its BLAKE3
    rescued      as from a replica (`engine.lake.rescue`), with the kept records where they are newer

Rules kept here:
- Nothing is changed at the members; names that were made are removed again when this fails.
- What was named since the checkpoint is lost.  Content whose names were removed since may have been freed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog
import trio

from engine.coordinator.kept_coordinator import KeptCoordinator
from engine.coordinator.records import NamesCheckpoint
from engine.host.clock import SystemClock
from engine.lake.children import open_children
from engine.lake.folders import holds_names
from engine.lake.lake_members import START_PATIENCE_S, identified, members_to_start
from engine.lake.lake_records import LakeRecords, lake_records_in
from engine.lake.machine import MachineRecord
from engine.lake.machine_lock import machine_locked
from engine.lake.parts import open_content
from engine.lake.plan import LakePlan
from engine.lake.rescue import begun_again
from engine.members.ports import Stripes, Wanted
from engine.metadata.begin_anew import CheckpointCopy, take_over
from engine.store.local_store import ENGINE_THREADS
from engine.superblock.superblock import OpenedStore
from lakefs.cluster.protection import Protection
from lakefs.content.manifest import parse
from lakefs.errors import ChunkNotFound, ClusterDegraded, EngineUnreachable, LakeError, PreconditionFailed, StoreDamaged
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, ChunkKind, chunk_of, kind_of
from lakefs.ports import Clock, Disk, Offload

PATIENCE_S: Final = 60.0
"""Members that are being started are waited for so long."""
_PAUSE_S: Final = 1.0
_AWAY: Final = ChunkNotFound, ClusterDegraded, EngineUnreachable
_log: Final = structlog.get_logger(__name__)


def kept_records(plan: LakePlan) -> LakeRecords:
    """Return the records that this machine has kept, with a checkpoint in them.  PreconditionFailed.  Blocks."""
    if any(holds_names(folder) for folder in plan.folders):
        raise PreconditionFailed("this machine has a replica of the names, which is newer; begin with --from-here")
    records = lake_records_in(plan.folders, plan.lake_id)
    if records is None or not records.checkpoints.checkpoints:
        raise PreconditionFailed(
            "this machine has no replica of the names, and knows of no checkpoint of them in the lake; run this on one "
            "that has"
        )
    return records


async def begun_from_lake(plan: LakePlan, records: LakeRecords) -> tuple[MachineRecord, NamesCheckpoint]:
    """Let the lake begin again from the newest checkpoint that can be read; return this machine's record, and which.

    Errors of the newest that cannot be read, if none can; of `begun_again`.  StoreLocked while the lake is served.
    """
    checkpoints = records.checkpoints.checkpoints
    for number, checkpoint in enumerate(checkpoints, 1):
        try:
            return await _begun_from(plan, records, checkpoint), checkpoint
        except LakeError as error:
            if number == len(checkpoints) or not isinstance(error, (*_AWAY, StoreDamaged)):
                raise
            _log.error("a checkpoint of the names cannot be read; the one before it is", reason=error.message)
    raise AssertionError("the last one returns or raises")


async def _begun_from(plan: LakePlan, records: LakeRecords, checkpoint: NamesCheckpoint) -> MachineRecord:
    async with AsyncExitStack() as stack:
        stack.enter_context(machine_locked(plan.folders))
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        protection = Protection.parse(plan.machine.protect)
        members = members_to_start(plan, protection, is_made=True)
        processes = await stack.enter_async_context(open_children(members, identified))
        with trio.move_on_after(START_PATIENCE_S):
            await processes.wait_settled()
        content = await open_content(stack, plan, KeptCoordinator(records.records), offload)
        source = LakeSource(content.stripes, checkpoint, SystemClock(), offload)
        _log.info("the names are made from a checkpoint in the lake", bytes=checkpoint.file_bytes)
        return await begun_again(plan, source.begin_anew, newer=records.records)


@dataclass(frozen=True)
class LakeSource:
    """A checkpoint in the lake, to make names from (`engine.store.names_opening.BeginAnew`)."""

    stripes: Stripes
    checkpoint: NamesCheckpoint
    clock: Clock
    offload: Offload

    async def begin_anew(self, disk: Disk, opened: OpenedStore) -> OpenedStore:
        """Replace the metadata of a new store by the checkpoint; returns the store as it is then.

        Errors of `Stripes.read`, StoreDamaged, StoreFull, DiskFailed: the store is as it was.
        """
        sequence = self.checkpoint.sequence
        copy = await self.offload.run(CheckpointCopy, disk, opened.superblock.identity, sequence)
        is_whole, offset = False, 0
        try:
            async for piece in self._pieces(chunk_of(self.checkpoint.blob)):
                await self.offload.run(copy.write, piece, offset)
                offset += len(piece)
            if offset != self.checkpoint.file_bytes:
                raise StoreDamaged(f"the checkpoint in the lake has {offset} bytes, not {self.checkpoint.file_bytes}")
            is_whole = True
        finally:
            with trio.CancelScope(shield=True):
                await self.offload.run(partial(copy.close, whole=is_whole))
        superblock = await self.offload.run(take_over, disk, self.clock, opened.superblock, sequence)
        return replace(opened, superblock=superblock)

    async def _pieces(self, top: ChunkId) -> AsyncIterator[bytes]:
        """Yield the bytes below a chunk, in order; at most one manifest of each level is in memory."""
        pending = [top]
        while pending:
            chunk = pending.pop()
            payload = await self._read(chunk)
            if kind_of(chunk) is ChunkKind.DATA:
                yield payload
            else:
                pending += [entry.chunk for entry in reversed(parse(payload).entries)]

    async def _read(self, chunk: ChunkId) -> bytes:
        """Read a whole chunk, which is proven by its id; members that are being started are waited for."""
        ends_at = trio.current_time() + PATIENCE_S
        while True:
            [got] = await self.stripes.read([Wanted(chunk, 0)])
            if not isinstance(got, LakeError):
                return bytes(got.payload)
            if not isinstance(got, _AWAY) or trio.current_time() > ends_at:
                raise got
            await trio.sleep(_PAUSE_S)
