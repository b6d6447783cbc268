"""Checkpoints of the names that lie in the lake itself, for the day on which no replica is left.

The replica that leads a names shard stores one now and then as a blob over the members, and records it with the
coordinator; each machine keeps that record in its folders (`engine.lake.lake_records`), where it is found without any
names.

Rules kept here:
- A blob counts when all its chunks were answered in a gc generation, and under a ring epoch, that names would bind: in
  that very step it is leased, so gc marks it from then on.  Nothing else refers to it.
- A new leader leases what is recorded before it makes another; with `begin`, before names are served, so before any
  walk of gc through them.  The newest two stay.
- One that cannot be made is logged, and tried again; nothing waits for it.
- It takes at most half of the time: names and clients come first.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Compare, Coordinator, Entry, HasRevision, IsAbsent, Put
from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import CHECKPOINTS_KEY, CheckpointsRecord, NamesCheckpoint, decode, encode
from engine.group_log.checkpoint_requests import OpenedCheckpoint, open_newest_checkpoint
from engine.members.ports import Members, NewChunk, Stripes
from engine.requests.bind import BindGate
from engine.sessions.references import Client
from engine.store.keyed_store import KeyedStore
from lakefs.content.manifest import CutKind, ManifestBuilder
from lakefs.content.verify import granule_crcs
from lakefs.errors import EngineBusy, LakeError, SessionLost
from lakefs.ids import BlobId, ChunkId, GcGeneration, data_chunk_id
from lakefs.limits import CHUNK_BYTES
from lakefs.ports import Disk, Offload
from lakefs.wire import messages as m

KEPT: Final = 2
FIRST_S: Final = 60.0
"""A lake has its first one so soon: at once its members may not be up yet."""
_RETRY_S: Final = 60.0
_APPLIED_WITHIN_S: Final = 60.0
"""The index follows within two seconds, and later under load."""
_LOOK_S: Final = 0.25
_OFFERED_AT_ONCE: Final = 256
_log: Final = structlog.get_logger(__name__)


class NamesCheckpoints:
    """The checkpoints in the lake, in the process that leads.  `run` it; used on the loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        stripes: Stripes,
        store: KeyedStore,
        disk: Disk,
        gate: BindGate,
        offload: Offload,
        every_s: float,
        key: bytes = CHECKPOINTS_KEY,
    ) -> None:
        """`store`: the names that lead, on `disk`.  `every_s`: from one checkpoint to the next; 0: none is made.

        `key`: the coordinator's for these names (`checkpoints_key` of their shard).
        """
        self._coordinator = coordinator
        self._members = members
        self._stripes = stripes
        self._store = store
        self._disk = disk
        self._gate = gate
        self._offload = offload
        self._every_s = every_s
        self._key: Final = key
        self._client: Client | None = None
        """Owner of the leases."""
        self._leases: dict[BlobId, int] = {}
        self._begun_at = trio.current_time()

    async def begin(self) -> None:
        """Lease what is recorded, before names are served.  Errors of `Coordinator.get`."""
        await self._recorded(self._owner())

    def _owner(self) -> Client:
        if self._client is None:
            connect = self._store.references.connect
            self._client = connect("checkpoints of the names", descriptors=False, trusted=True)
        return self._client

    async def run(self) -> None:
        """Lease what is recorded, and make a checkpoint whenever one is due, until cancelled."""
        client = self._owner()
        try:
            while True:
                pause_s = _RETRY_S
                try:
                    known = await self._recorded(client)
                    if self._every_s and self._due_in_s(known) <= 0:
                        known = await self._make(client, known)
                    if self._every_s:
                        pause_s = min(pause_s, max(0.1, self._due_in_s(known)))
                except LakeError as error:
                    _log.warning("no checkpoint of the names was put into the lake", reason=error.message)
                await trio.sleep(pause_s)
        finally:
            self._store.references.disconnect(client)

    def _due_in_s(self, known: CheckpointsRecord) -> float:
        """Return the time until the next is due; a clock that went back is none that waits for ever."""
        if not known.checkpoints:
            return self._begun_at + min(FIRST_S, self._every_s) - trio.current_time()
        age_s = (self._store.clock.wall_ns() - known.checkpoints[0].said_ns) / 1e9
        return self._every_s - age_s if age_s >= 0 else 0.0

    # --- the record --------------------------------------------------------------------------------

    async def _recorded(self, client: Client) -> CheckpointsRecord:
        """Return the record, each checkpoint of it leased."""
        found = decoded((await self._coordinator.get(self._key)).entry)
        for checkpoint in found.checkpoints:
            self._lease(client, checkpoint.blob)
        return found

    def _lease(self, client: Client, blob: BlobId) -> None:
        if blob not in self._leases:
            self._leases[blob] = self._store.references.lease(client, blob)

    def _end_leases(self, client: Client, kept: CheckpointsRecord) -> None:
        blobs = {checkpoint.blob for checkpoint in kept.checkpoints}
        for blob in [blob for blob in self._leases if blob not in blobs]:
            self._store.references.end_leases(client, [self._leases.pop(blob)])

    # --- one checkpoint ----------------------------------------------------------------------------

    async def _make(self, client: Client, known: CheckpointsRecord) -> CheckpointsRecord:
        """Store a checkpoint of the names as they are, and record it; returns the record.  LakeErrors."""
        said_ns = self._store.clock.wall_ns()
        await self._until_applied()
        await self._store.metadata.checkpoint()
        opened = await self._offload.run(open_newest_checkpoint, self._disk)
        try:
            blob = await self._stored(client, opened)
        finally:
            await self._offload.run(opened.file.close)
        made = NamesCheckpoint(blob, opened.sequence, opened.file_bytes, said_ns)
        wanted = CheckpointsRecord((made, *known.checkpoints[: KEPT - 1]))
        kept = known
        try:
            await self._record(known, wanted)
            kept = wanted
        finally:
            self._end_leases(client, kept)
        _log.info("a checkpoint of the names is in the lake", sequence=made.sequence, bytes=made.file_bytes)
        return kept

    async def _until_applied(self) -> None:
        """Wait until the index, of which a checkpoint is, has all that is durable now.  EngineBusy if it lags."""
        metadata = self._store.metadata
        wanted, ends_at = metadata.durable_sequence, trio.current_time() + _APPLIED_WITHIN_S
        while metadata.applied_sequence < wanted:
            if trio.current_time() > ends_at:
                raise EngineBusy("the index of the names is behind; the next checkpoint is tried later")
            await trio.sleep(_LOOK_S)

    async def _record(self, known: CheckpointsRecord, wanted: CheckpointsRecord) -> None:
        entry = (await self._coordinator.get(self._key)).entry
        if decoded(entry) != known:
            raise EngineBusy("another process has put a checkpoint of the names into the lake")
        compare: Compare = IsAbsent(self._key) if entry is None else HasRevision(self._key, entry.revision)
        if not (await self._coordinator.transact([compare], [Put(self._key, encode(wanted))])).succeeded:
            raise EngineBusy("another process has put a checkpoint of the names into the lake")

    async def _stored(self, client: Client, opened: OpenedCheckpoint) -> BlobId:
        """Store a file as a blob, and lease it.  LakeErrors of `Stripes.store` and of the disk."""
        builder, chunks = ManifestBuilder(CutKind.FIXED), list[ChunkId]()
        answered = await self._answers_from_now_on()
        for offset in range(0, opened.file_bytes, CHUNK_BYTES):
            began = trio.current_time()
            piece = await self._offload.run(_piece, opened, offset)
            manifests = builder.add(piece.chunk, len(piece.payload))
            chunks += await self._put(answered, [piece, *map(_manifest, manifests)])
            await trio.sleep(trio.current_time() - began)
        tree = builder.finish()
        chunks += await self._put(answered, [_manifest(each) for each in tree.manifests])
        while True:
            try:
                self._gate.check(answered)
            except SessionLost:  # gc has gone on meanwhile
                answered = await self._answers_from_now_on()
                await self._offer(answered, chunks)
                continue
            self._lease(client, tree.blob)
            return tree.blob

    async def _answers_from_now_on(self) -> m.Answered:
        epoch = self._members.tables[0].ring_epoch
        return m.Answered(await LakeState(self._coordinator).generation(), epoch)

    async def _put(self, answered: m.Answered, chunks: list[NewChunk]) -> list[ChunkId]:
        if chunks:
            await self._stripes.store(GcGeneration(answered.generation), chunks)
        return [each.chunk for each in chunks]

    async def _offer(self, answered: m.Answered, chunks: list[ChunkId]) -> None:
        """Let all chunks be answered in another generation.  SessionLost if one is not stored any more."""
        for first in range(0, len(chunks), _OFFERED_AT_ONCE):
            some = chunks[first : first + _OFFERED_AT_ONCE]
            if not all(await self._stripes.offer(GcGeneration(answered.generation), some)):
                raise SessionLost("parts of the checkpoint were freed before it was whole")


def decoded(entry: Entry | None) -> CheckpointsRecord:
    """Return the checkpoints in an entry; none where it is absent."""
    return CheckpointsRecord() if entry is None else decode(CheckpointsRecord, entry.value)


def _piece(opened: OpenedCheckpoint, offset: int) -> NewChunk:
    payload = bytearray(min(CHUNK_BYTES, opened.file_bytes - offset))
    count = opened.file.pread_into(memoryview(payload), offset)
    if count != len(payload):
        raise EngineBusy(f"the checkpoint ends at byte {offset + count} of {opened.file_bytes}")
    return NewChunk(data_chunk_id(payload), memoryview(payload), granule_crcs(payload))


def _manifest(manifest: tuple[ChunkId, bytes]) -> NewChunk:
    chunk, payload = manifest
    return NewChunk(chunk, memoryview(payload), granule_crcs(payload))
