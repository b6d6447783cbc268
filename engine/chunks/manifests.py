"""Reads manifests, and holds the blobs that they describe for sessions: gc frees no chunk that is held.

Rules kept here:
- Manifests are checked, parsed, and the last few cached.  The cache is bounded by the number of entries it may hold; a
  chunk's bytes never change, so no entry becomes stale.
- Before a client binds a name or part to a blob, every chunk of it is seen to be stored, and held for the session.
- A manifest is walked and its sizes compared with the chunks' own; the client's figures are not trusted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar, cast

import msgspec
import trio

from engine.chunks.chunk_store import Chunks, find_chunk
from engine.metadata.metadata_store import Metadata
from lakefs.content.manifest import Manifest, check_child, check_top, parse
from lakefs.errors import ChunkDamaged, ChunkNotFound, InvalidArgument, RequestTooLarge, StaleGrant
from lakefs.ids import EMPTY_BLOB, EMPTY_CHUNK, BlobId, Buffer, ChunkId, ChunkKind, id_text, is_well_formed, kind_of
from lakefs.limits import BATCH_MAX

CACHE_ENTRIES: Final = 65_536
"""Most entries of all cached manifests, about 200 bytes each: 13 MiB."""
S = TypeVar("S", contravariant=True)
CHECK_BATCH: Final = 1024
"""Most chunks of a manifest looked up between two checkpoints: about 4 ms."""


class CachedManifests:
    """Reads manifest chunks, wherever their bytes are."""

    def __init__(self, payload_of: Callable[[ChunkId], Awaitable[Buffer]]) -> None:
        """`payload_of` returns the checked bytes of a chunk.  ChunkNotFound, ChunkDamaged."""
        self._payload_of = payload_of
        self._cache: OrderedDict[ChunkId, Manifest] = OrderedDict()
        self._cached_entries = 0

    async def read(self, chunk: ChunkId) -> Manifest:
        """Return the manifest.  ChunkNotFound, ChunkDamaged (also when its bytes are not a manifest)."""
        cached = self._cache.get(chunk)
        if cached is not None:
            self._cache.move_to_end(chunk)
            return cached
        payload = await self._payload_of(chunk)
        try:
            manifest = parse(payload)
        except InvalidArgument as error:
            raise ChunkDamaged(f"manifest {id_text(chunk)}: {error.message}", subject=id_text(chunk)) from error
        self._remember(chunk, manifest)
        return manifest

    async def layout(self, top: ChunkId, chunks_max: int) -> tuple[list[ChunkId], list[int]] | None:
        """Return data chunks and lengths of a blob in order; None when they are more than `chunks_max`."""
        chunks: list[ChunkId] = []
        lengths: list[int] = []
        pending = [await self.read(top)]
        while pending:
            manifest = pending.pop()
            if len(chunks) + len(manifest.entries) > chunks_max:
                return None
            if manifest.level == 0:
                chunks.extend(entry.chunk for entry in manifest.entries)
                lengths.extend(entry.size_bytes for entry in manifest.entries)
                continue
            children: list[Manifest] = []
            for entry in manifest.entries:
                child = await self.read(entry.chunk)
                check_child(entry, manifest, child)
                children.append(child)
            pending.extend(reversed(children))
        return chunks, lengths

    def _remember(self, chunk: ChunkId, manifest: Manifest) -> None:
        if chunk in self._cache:
            return
        self._cache[chunk] = manifest
        self._cached_entries += len(manifest.entries)
        while self._cached_entries > CACHE_ENTRIES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_entries -= len(dropped.entries)
            assert self._cached_entries >= 0


class Manifests(CachedManifests):
    """Reads the manifest chunks of one store."""

    def __init__(self, metadata: Metadata, chunks: Chunks) -> None:
        super().__init__(self._payload)
        self._metadata = metadata
        self._chunks = chunks

    async def _payload(self, chunk: ChunkId) -> bytes:
        """Return its bytes; locates them again if they were moved during the read."""
        while True:
            with self._metadata.view() as view:
                record = find_chunk(view, chunk)
            if record is None:
                raise ChunkNotFound(f"manifest {id_text(chunk)} is not in the store", subject=id_text(chunk))
            try:
                return await self._chunks.read(chunk, record)
            except StaleGrant:
                await trio.lowlevel.checkpoint()


class HeldBlob(msgspec.Struct, frozen=True):
    """A blob whose chunks a session holds."""

    blob: BlobId
    size_bytes: int
    chunk_count: int


class Holder(Protocol[S]):
    """Holds single chunks for sessions."""

    def held_bytes(self, session: S, chunk: ChunkId) -> int | None:
        """Hold a chunk for the session, and return its length; None if it is not stored."""
        ...


class HeldBlobs(Generic[S]):
    """Holds blobs for sessions of type S."""

    def __init__(
        self,
        chunks: Holder[S],
        manifests: CachedManifests,
        prepare: Callable[[S, Sequence[ChunkId]], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` is called with chunks, at most CHECK_BATCH at once, before they are held."""
        self._chunks = chunks
        self._manifests = manifests
        self._prepare = prepare

    async def hold(self, session: S, blob: bytes) -> HeldBlob:
        """Hold all chunks of a blob; returns its size and chunk count.  ChunkNotFound, InvalidArgument."""
        (top,) = checked_chunks([blob])
        if top == EMPTY_CHUNK:
            return HeldBlob(EMPTY_BLOB, 0, 1)
        if self._prepare is not None:
            await self._prepare(session, [top])
        if kind_of(top) is ChunkKind.DATA:
            return HeldBlob(BlobId(top), self._hold_chunk(session, top), 1)
        self._hold_chunk(session, top)
        root = await self._manifest(top)
        check_top(root)
        return HeldBlob(BlobId(top), root.size_bytes, await self._hold_below(session, root, {}))

    async def layout(self, top: ChunkId, chunks_max: int) -> tuple[list[ChunkId], list[int]] | None:
        """See `Manifests.layout`."""
        return await self._manifests.layout(top, chunks_max)

    async def _hold_below(self, session: S, manifest: Manifest, counted: dict[ChunkId, int]) -> int:
        """Hold all chunks below a manifest; returns the number of its data chunks.

        A child that is named again, as in a large file of zeros, is walked once: the work is bounded by what the
        client has stored, however often manifests refer to it.
        """
        if manifest.level == 0:
            await self._hold_data(session, manifest)
            return len(manifest.entries)
        chunk_count = 0
        await self._prepare_all(session, manifest)
        for entry in manifest.entries:
            self._hold_chunk(session, entry.chunk)
            child = await self._manifest(entry.chunk)
            check_child(entry, manifest, child)
            if entry.chunk not in counted:
                counted[entry.chunk] = await self._hold_below(session, child, counted)
            chunk_count += counted[entry.chunk]
        return chunk_count

    async def _prepare_all(self, session: S, manifest: Manifest) -> None:
        if self._prepare is not None:
            chunks = list(dict.fromkeys(entry.chunk for entry in manifest.entries))
            for start in range(0, len(chunks), CHECK_BATCH):
                await self._prepare(session, chunks[start : start + CHECK_BATCH])

    async def _manifest(self, chunk: ChunkId) -> Manifest:
        """Read a manifest.  InvalidArgument if its bytes are not one: the client stored them so."""
        try:
            return await self._manifests.read(chunk)
        except ChunkDamaged as error:
            if isinstance(error.__cause__, InvalidArgument):
                raise error.__cause__ from None
            raise

    async def _hold_data(self, session: S, manifest: Manifest) -> None:
        await self._prepare_all(session, manifest)
        for start in range(0, len(manifest.entries), CHECK_BATCH):
            for entry in manifest.entries[start : start + CHECK_BATCH]:
                if self._hold_chunk(session, entry.chunk) != entry.size_bytes:
                    raise InvalidArgument(f"a manifest gives chunk {id_text(entry.chunk)} a length it does not have")
            await trio.lowlevel.checkpoint()

    def _hold_chunk(self, session: S, chunk: ChunkId) -> int:
        held = self._chunks.held_bytes(session, chunk)
        if held is None:
            raise ChunkNotFound(f"chunk {id_text(chunk)} is not in the store; offer it again", subject=id_text(chunk))
        return held


def checked_chunks(identifiers: Sequence[bytes]) -> list[ChunkId]:
    """Check ids that a client sent.  InvalidArgument, RequestTooLarge."""
    if len(identifiers) > BATCH_MAX:
        raise RequestTooLarge(f"{len(identifiers)} chunks in one request; the limit is {BATCH_MAX}")
    if not all(map(is_well_formed, identifiers)):
        raise InvalidArgument("an id has 33 bytes and a known kind")
    return cast(list[ChunkId], list(identifiers))
