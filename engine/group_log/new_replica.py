"""A replica that begins anew: from a checkpoint of the replica that leads, and then from the log.

    hold        the leader trims nothing               --  until this replica has caught up
    copy        OpenCheckpoint  --  ReadCheckpoint ... --  take over (`engine.metadata.begin_anew`)

Rules kept here:
- The hold is put before the checkpoint is asked for, on a lease: so the log has all that comes behind the checkpoint,
  and a replica that dies on the way holds nothing.  Beyond TAIL_BYTES_MAX the leader trims all the same.
- What the store had is replaced only when the copy is whole and was checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import structlog

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.held_lease import hold_key
from engine.format.group_parts import LogKeys
from engine.group_log.log_bounds import CHECKPOINT_PIECE_BYTES, HOLD_LEASE_S
from engine.metadata.begin_anew import CheckpointCopy, take_over
from engine.superblock.superblock import OpenedStore
from lakefs.errors import StoreDamaged
from lakefs.ids import ReplicaId, Sequence
from lakefs.ports import Clock, Disk, Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient

_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def holding_log(coordinator: Coordinator, clock: Clock, keys: LogKeys, replica: ReplicaId) -> AsyncIterator[None]:
    """Let nothing be trimmed during the block, as long as the tail is not too long.  EngineUnreachable, EngineBusy."""
    async with hold_key(coordinator, clock, HOLD_LEASE_S, keys.hold(replica), b""):
        yield


@dataclass(frozen=True)
class CheckpointSource:
    """The names that lead, to copy a checkpoint from; used once a store's lock is held, before it is recovered."""

    client: EngineClient
    clock: Clock
    offload: Offload

    async def begin_anew(self, disk: Disk, opened: OpenedStore) -> OpenedStore:
        """Replace the metadata of a store by a copy; returns the store as it is now.

        StoreDamaged for a copy that arrived damaged, EngineUnreachable, SessionLost: the store is as it was.
        StoreFull, DiskFailed.
        """
        reply = await self.client.call(m.OpenCheckpoint())
        assert isinstance(reply.message, m.CheckpointOpened), "the answer to OpenCheckpoint"
        sequence, file_bytes = Sequence(reply.message.sequence), reply.message.file_bytes
        _log.info("this replica begins anew from the leader's checkpoint", sequence=sequence, bytes=file_bytes)
        identity = opened.superblock.identity
        copy = await self.offload.run(CheckpointCopy, disk, identity, sequence)
        is_whole = False
        try:
            await self._copy(copy, file_bytes)
            is_whole = True
        finally:
            await self.offload.run(partial(copy.close, whole=is_whole))
        superblock = await self.offload.run(take_over, disk, self.clock, opened.superblock, sequence)
        return replace(opened, superblock=superblock)

    async def _copy(self, copy: CheckpointCopy, file_bytes: int) -> None:
        offset = 0
        while offset < file_bytes:
            reply = await self.client.call(m.ReadCheckpoint(offset, CHECKPOINT_PIECE_BYTES))
            try:
                piece = reply.body.joined()
            finally:
                reply.body.release()
            if not piece:
                raise StoreDamaged(f"the leader's checkpoint ends at byte {offset} of {file_bytes}")
            await self.offload.run(copy.write, piece, offset)
            offset += len(piece)
