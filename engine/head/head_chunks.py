"""Chunks as a head stores them: hashed in its memory, stored over members, and held by sessions as long as that lasts.

Rules kept here:
- What a session holds was answered by members in its generation, with the ring epoch that was known before they were
  asked.  No memory of the head's answers an offer.
- A chunk's length is known from the members, or from its bytes; never from a client.
- A chunk that a blob refers to, and that its session was not answered, is offered to the members before it is bound:
  so blobs of other names, and parts of uploads, are bound as on one engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from engine.chunks.hashing import bytes_of, granule_crcs_of, hash_payloads
from engine.chunks.manifests import CHECK_BATCH
from engine.chunks.payload import Hashed, Payload
from engine.head.head_clients import NOT_BEGUN, HeadSession
from engine.host.user_shares import Shares
from engine.members.ports import Known, NewChunk, Stripes
from engine.sessions.references import Session
from lakefs.errors import SessionLost
from lakefs.ids import EMPTY_CHUNK, ChunkId, GcGeneration, RingEpoch, id_text
from lakefs.limits import HEAD_ANSWERS_MAX, HEAD_LENGTHS_MAX
from lakefs.ports import Offload
from lakefs.wire import messages as m


class KnownLengths:
    """Lengths of chunks, which never change; those used last are kept."""

    def __init__(self, count_max: int = HEAD_LENGTHS_MAX) -> None:
        self._lengths: OrderedDict[ChunkId, int] = OrderedDict()
        self._count_max = count_max

    def of(self, chunk: ChunkId) -> int:
        """Return the length of a chunk; 0 if it is not known."""
        length = self._lengths.get(chunk, 0)
        if length:
            self._lengths.move_to_end(chunk)
        return length

    def note(self, chunks: Iterable[tuple[ChunkId, int]]) -> None:
        """Keep lengths."""
        for chunk, length in chunks:
            self._lengths[chunk] = length
        while len(self._lengths) > self._count_max:
            self._lengths.popitem(last=False)


class HeadChunks:
    """Stores chunks over members (`engine.requests.put.StoredChunks`)."""

    def __init__(self, stripes: Stripes, known: Known, offload: Offload) -> None:
        self._stripes = stripes
        self._known = known
        self._offload = offload
        self._shares: Final = Shares(HEAD_ANSWERS_MAX, "chunks of puts in progress", own_quarters=3)
        self._learned = known.generation
        """The latest generation that names were found to have joined."""
        self.lengths: Final = KnownLengths()

    @property
    def epoch(self) -> RingEpoch:
        """The newest ring epoch that is known."""
        return self._known.tables[0].ring_epoch

    @property
    def generation(self) -> GcGeneration:
        """The gc generation that is known; it may be stale."""
        return max(self._known.generation, self._learned)

    def learn(self, generation: GcGeneration) -> GcGeneration:
        """Note a generation that names have joined; return the latest that is known."""
        self._learned = max(self._learned, generation)
        return self.generation

    @property
    def answers(self) -> int:
        """Number of chunks that sessions hold."""
        return len(self._shares)

    # --- for sessions ------------------------------------------------------------------------------

    async def offer(self, session: Session, chunks: Sequence[ChunkId]) -> list[bool]:
        """Return True for each chunk that is stored, and hold it for the session."""
        assert isinstance(session, HeadSession)
        found = await self._offer(session, [chunk for chunk in dict.fromkeys(chunks) if chunk != EMPTY_CHUNK])
        return [chunk == EMPTY_CHUNK or chunk in found for chunk in chunks]

    async def store(self, session: Session, payloads: Sequence[Payload]) -> list[tuple[ChunkId, bool]]:
        """Store payloads for a session: (id, True if it was new) in order.  Durable and held on return.

        ClusterDegraded, StoreFull: nothing is held.
        """
        assert isinstance(session, HeadSession)
        hashed = await hash_payloads(payloads, self._offload)
        generation = self.generation_of(session)
        fresh, answered = await self.store_hashed(hashed, generation)
        lengths = {item.chunk: item.payload.length for item in hashed if item.chunk != EMPTY_CHUNK}
        session.note(self._shares, lengths, generation, RingEpoch(answered.epoch))
        return [(item.chunk, is_new) for item, is_new in zip(hashed, fresh, strict=True)]

    async def prepare(self, session: HeadSession, chunks: Sequence[ChunkId]) -> None:
        """Offer those of these chunks that the session does not hold.

        SessionLost if it was answered one of them in an earlier generation, and that is gone.
        """
        missing = [chunk for chunk in dict.fromkeys(chunks) if chunk not in session.chunks and chunk != EMPTY_CHUNK]
        for start in range(0, len(missing), CHECK_BATCH):
            batch = missing[start : start + CHECK_BATCH]
            found = await self._offer(session, batch)
            gone = next((chunk for chunk in batch if chunk in session.earlier and chunk not in found), None)
            if gone is not None:
                raise SessionLost(
                    f"chunk {id_text(gone)} was freed while the put waited; offer the chunks again",
                    subject=id_text(gone),
                )

    def held_bytes(self, session: HeadSession, chunk: ChunkId) -> int | None:
        """Return the length of a chunk that the session holds, else None."""
        return session.chunks.get(chunk)

    def generation_of(self, session: HeadSession) -> GcGeneration:
        """Return the generation of a session, which begins with its first answer."""
        if session.generation == NOT_BEGUN:
            session.generation = self.generation
        return session.generation

    async def _offer(self, session: HeadSession, chunks: Sequence[ChunkId]) -> dict[ChunkId, int]:
        """Offer chunks to the members, hold those that are stored, and return their lengths."""
        if not chunks:
            return {}
        generation, epoch = self.generation_of(session), self.epoch
        lengths = await self._stripes.offer(generation, chunks)
        found = {chunk: length for chunk, length in zip(chunks, lengths, strict=True) if length}
        session.note(self._shares, found, generation, epoch)
        self.lengths.note(found.items())
        return found

    # --- without a session -------------------------------------------------------------------------

    async def store_hashed(self, hashed: Sequence[Hashed], generation: GcGeneration) -> tuple[list[bool], m.Answered]:
        """Store payloads that were hashed; return for each if it was new, and when the members answered."""
        epoch = self.epoch
        first = {item.chunk: item for item in reversed(hashed) if item.chunk != EMPTY_CHUNK}
        new = [NewChunk(item.chunk, bytes_of(item.payload), granule_crcs_of(item)) for item in first.values()]
        stored = await self._stripes.store(generation, new) if new else []
        fresh = {id(item) for item, is_new in zip(first.values(), stored, strict=True) if is_new}
        self.lengths.note((chunk, item.payload.length) for chunk, item in first.items())
        return [id(item) in fresh for item in hashed], m.Answered(generation, epoch)
