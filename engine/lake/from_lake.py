"""The names of a lake made anew from checkpoints that lie in the lake itself, when no replica is left.

    records      what this machine has kept: members, tables, and where the checkpoint is  (`engine.lake.lake_records`)
    members      those of this machine are started, others are asked where they serve
    names        made in this machine's folders, from the bytes of the checkpoint, each chunk proven by its BLAKE3
    rescued      as from a replica (`engine.lake.rescue`), with the kept records where they are newer

Rules kept here:
- Nothing is changed at the members; names that were made are removed again when this fails.
- Each names shard has checkpoints of its own, of another time; one that has a replica here begins with that.
- What was named since the checkpoint is lost.  Content whose names were removed since may have been freed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.kept_coordinator import KeptCoordinator
from engine.coordinator.records import NamesCheckpoint
from engine.host.clock import SystemClock
from engine.lake.children import open_children
from engine.lake.lake_content import open_content
from engine.lake.lake_members import START_PATIENCE_S, identified, members_to_start
from engine.lake.lake_records import LakeRecords, lake_records_in
from engine.lake.machine import MachineRecord
from engine.lake.machine_lock import machine_locked
from engine.lake.plan import LakePlan
from engine.lake.rescue import NamesFound, begun_again
from engine.members.ports import Stripes, Wanted
from engine.metadata.begin_anew import CheckpointCopy, take_over
from engine.store.local_store import ENGINE_THREADS
from engine.superblock.superblock import OpenedStore
from lakefs.cluster.protection import Protection
from lakefs.content.manifest import parse
from lakefs.errors import ChunkNotFound, ClusterDegraded, EngineUnreachable, LakeError, PreconditionFailed, StoreDamaged
from lakefs.host.offload import ThreadOffload
from lakefs.ids import ChunkId, ChunkKind, NamesShard, chunk_of, kind_of
from lakefs.ports import Clock, Disk, Offload

PATIENCE_S: Final = 60.0
"""Members that are being started are waited for so long."""
_PAUSE_S: Final = 1.0
_AWAY: Final = ChunkNotFound, ClusterDegraded, EngineUnreachable
_log: Final = structlog.get_logger(__name__)


class Kept(NamedTuple):
    """The records that this machine has kept, and the checkpoints of each names shard that has no replica here."""

    records: LakeRecords
    shards: int
    """Their number."""
    checkpoints: Mapping[NamesShard, tuple[NamesCheckpoint, ...]]
    """The newest first."""


def kept_records(plan: LakePlan, found: NamesFound) -> Kept:
    """Return what this machine has kept, for the shards of which no replica was `found` here.

    PreconditionFailed if all are here, or there is no checkpoint of one.  Blocks.
    """
    records = lake_records_in(plan.folders, plan.lake_id)
    found = replace(found, count=max(found.count, records.shards if records is not None else 1))
    if not found.missing:
        raise PreconditionFailed("this machine has a replica of the names, which is newer; begin with --from-here")
    checkpoints = {shard: () if records is None else records.checkpoints(shard) for shard in found.missing}
    for shard, known in checkpoints.items():
        if records is None or not known:
            of_shard = "the names" if found.count == 1 else f"names shard {shard}"
            raise PreconditionFailed(
                f"this machine has no replica of {of_shard}, and knows of no checkpoint of them in the lake; run this "
                "on one that has"
            )
    assert records is not None, "it has checkpoints"
    return Kept(records, found.count, checkpoints)


async def begun_from_lake(plan: LakePlan, kept: Kept) -> tuple[MachineRecord, Mapping[NamesShard, NamesCheckpoint]]:
    """Let the lake begin again, each shard without a replica here from its newest checkpoint that can be read.

    Returns this machine's record, and which checkpoints those are.  Errors of the oldest where none of a shard can be
    read; of `begun_again`.  StoreLocked while the lake is served.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(machine_locked(plan.folders))
        offload = await stack.enter_async_context(ThreadOffload(ENGINE_THREADS, "lake"))
        protection = Protection.parse(plan.machine.protect)
        members = members_to_start(plan, protection, is_made=True)
        processes = await stack.enter_async_context(open_children(members, identified))
        with trio.move_on_after(START_PATIENCE_S):
            await processes.wait_settled()
        content = await open_content(stack, plan, KeptCoordinator(kept.records.records), offload)
        sources = {
            shard: LakeSource(content.stripes, checkpoints, SystemClock(), offload)
            for shard, checkpoints in kept.checkpoints.items()
        }
        begin = {shard: source.begin_anew for shard, source in sources.items()}
        machine = await begun_again(plan, kept.shards, begin, newer=kept.records.records)
    return machine, {shard: source.used for shard, source in sources.items() if source.used is not None}


@dataclass
class LakeSource:
    """Checkpoints in the lake, the newest first, to make names from (`engine.store.names_opening.BeginAnew`)."""

    stripes: Stripes
    checkpoints: Sequence[NamesCheckpoint]
    clock: Clock
    offload: Offload
    used: NamesCheckpoint | None = None
    """The one that names were made from."""

    async def begin_anew(self, disk: Disk, opened: OpenedStore) -> OpenedStore:
        """Replace the metadata of a new store by the newest that can be read; returns the store as it is then.

        Errors of `Stripes.read`, StoreDamaged, StoreFull, DiskFailed: the store is as it was.
        """
        for number, checkpoint in enumerate(self.checkpoints, 1):
            try:
                begun = await self._begun_from(checkpoint, disk, opened)
            except LakeError as error:
                if number == len(self.checkpoints) or not isinstance(error, (*_AWAY, StoreDamaged)):
                    raise
                _log.error("a checkpoint of the names cannot be read; the one before it is", reason=error.message)
            else:
                self.used = checkpoint
                return begun
        raise AssertionError("the last one returns or raises")

    async def _begun_from(self, checkpoint: NamesCheckpoint, disk: Disk, opened: OpenedStore) -> OpenedStore:
        sequence = checkpoint.sequence
        _log.info("the names are made from a checkpoint in the lake", bytes=checkpoint.file_bytes)
        copy = await self.offload.run(CheckpointCopy, disk, opened.superblock.identity, sequence)
        is_whole, offset = False, 0
        try:
            async for piece in self._pieces(chunk_of(checkpoint.blob)):
                await self.offload.run(copy.write, piece, offset)
                offset += len(piece)
            if offset != checkpoint.file_bytes:
                raise StoreDamaged(f"the checkpoint in the lake has {offset} bytes, not {checkpoint.file_bytes}")
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
