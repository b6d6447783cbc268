"""Requests of a replica that begins anew: a checkpoint of the names that lead, read piece by piece.

Rules kept here:
- The file is kept open for the connection that asked, so a later checkpoint does not end its reading.
- A checkpoint is written for one connection at a time; CHECKPOINTS_OPEN_MAX are kept at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from engine.group_log.log_bounds import CHECKPOINT_PIECE_BYTES, CHECKPOINTS_OPEN_MAX
from engine.metadata.checkpoint import newest_checkpoint
from engine.metadata.metadata_store import Metadata
from engine.requests.dispatch import Group
from engine.requests.handlers import handles
from engine.sessions.references import Client
from lakefs.errors import EngineBusy, InvalidArgument, SessionLost
from lakefs.ids import Sequence
from lakefs.ports import Disk, DiskFile, Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint's file, open for reading: a later checkpoint does not end that."""

    file: DiskFile
    sequence: Sequence
    file_bytes: int


def checkpoint_group(metadata: Metadata, disk: Disk, offload: Offload) -> Group:
    """Return the handlers of requests for a checkpoint of names, for `NamesService`."""
    requests = CheckpointRequests(metadata, disk, offload)
    return Group([requests], ends=[requests.disconnected])


class CheckpointRequests:
    """Handlers of OpenCheckpoint and ReadCheckpoint."""

    def __init__(self, metadata: Metadata, disk: Disk, offload: Offload) -> None:
        self._metadata = metadata
        self._disk = disk
        self._offload = offload
        self._kept: dict[Client, OpenedCheckpoint] = {}
        self._writing = trio.Lock()

    @handles(m.OpenCheckpoint)
    async def open(self, client: Client, request: m.OpenCheckpoint) -> Reply:
        async with self._writing:
            await self._forget(client)
            if len(self._kept) >= CHECKPOINTS_OPEN_MAX:
                raise EngineBusy(f"{len(self._kept)} replicas begin anew already; try again later")
            await self._metadata.checkpoint()
            kept = await self._offload.run(open_newest_checkpoint, self._disk)
            self._kept[client] = kept
        return Reply(m.CheckpointOpened(kept.sequence, kept.file_bytes))

    @handles(m.ReadCheckpoint)
    async def read(self, client: Client, request: m.ReadCheckpoint) -> Reply:
        kept = self._kept.get(client)
        if kept is None:
            raise SessionLost("no checkpoint is kept for this connection; open it anew")
        if not 0 <= request.offset <= kept.file_bytes or not 0 < request.length <= CHECKPOINT_PIECE_BYTES:
            raise InvalidArgument(f"a checkpoint of {kept.file_bytes} bytes is read by up to {CHECKPOINT_PIECE_BYTES}")
        piece = bytearray(min(request.length, kept.file_bytes - request.offset))
        count = await self._offload.run(kept.file.pread_into, memoryview(piece), request.offset)
        return Reply(m.CheckpointPiece(), Body([memoryview(piece)[:count]]))

    async def disconnected(self, client: Client) -> None:
        """Close what is kept for a connection."""
        await self._forget(client)

    async def _forget(self, client: Client) -> None:
        kept = self._kept.pop(client, None)
        if kept is not None:
            await self._offload.run(kept.file.close)


def open_newest_checkpoint(disk: Disk) -> OpenedCheckpoint:
    """Open the newest checkpoint of a store; the caller closes it.  SessionLost if there is none.  Blocks."""
    while True:
        newest = newest_checkpoint(disk)
        if newest is None:
            raise SessionLost("the checkpoint was removed before it was opened; open it anew")
        try:
            return OpenedCheckpoint(disk.open(newest.path, read_only=True), newest.sequence, newest.file_bytes)
        except FileNotFoundError:  # a later one took its place just now
            continue
