"""Requests about shards, which heads of a lake send to its members; the engine of a single store refuses them.

A member lets in only those who hold the lake's token, over TCP, and its own user, over its Unix socket; so whoever asks
is a head.  Arguments are checked here, the rules of shards are kept in `engine.chunks.shards`, those of their gc in
`engine.upkeep.shard_gc`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence as Seq
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.chunks.manifests import checked_chunks
from engine.chunks.payload import Fill, Payload, ReceivedBody, check_body, check_lengths
from engine.chunks.shards import Incoming, Name, ShardPage
from engine.format.shards import may_be_of
from engine.memory.lent_memory import LentMemory, read_into
from engine.requests.handlers import handles
from engine.sessions.references import Client
from engine.store.store import Member, Store
from engine.upkeep.shard_gc import ShardCollector
from lakefs.errors import InvalidArgument, PermissionDenied, RequestTooLarge
from lakefs.host.buffers import PooledPayload
from lakefs.ids import DIGEST_BYTES, ID_BYTES, ChunkKind, Sequence, ShardNumber
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply

_KEY_BYTES: Final = ID_BYTES + 3
_WALK_BYTES: Final = 16


def member_of(store: Store) -> Member:
    """Return the parts for shards.  PermissionDenied unless the store is a member of a lake."""
    if store.member is None:
        raise PermissionDenied("this engine is no member of a lake: it keeps whole chunks, and no shards")
    return store.member


def checked_names(chunks: Seq[bytes], shards: Seq[int], *, up_to: int = m.SHARD_NUMBER_MAX) -> list[Name]:
    """Return shards' names from outside.  InvalidArgument, RequestTooLarge."""
    if len(chunks) != len(shards):
        raise InvalidArgument(f"{len(shards)} shard numbers for {len(chunks)} chunks")
    if shards and not 0 <= min(shards) <= max(shards) <= up_to:
        raise InvalidArgument(f"a shard has a number from 0 to {up_to}")
    return [(chunk, ShardNumber(shard)) for chunk, shard in zip(checked_chunks(chunks), shards, strict=True)]


class ShardRequests:
    """Handlers of the requests about shards."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._metadata = store.metadata

    async def receive(self, request: m.StoreShards, body_bytes: int, _: PooledPayload | None) -> ReceivedBody:
        """Allocate memory for the shards of a request that brings them in its body; see `PayloadMemory.take`."""
        if not body_bytes:
            return ReceivedBody()
        check_body(request.lengths, body_bytes)
        member_of(self._store).shards.check_request(request.epoch)  # before a byte of it is taken
        return await self._store.payload_memory.take([ChunkKind.DATA] * len(request.lengths), request.lengths)

    # --- epochs ------------------------------------------------------------------------------------

    @handles(m.SetEpoch)
    async def set_epoch(self, request: m.SetEpoch) -> Reply:
        member = member_of(self._store)
        shards, opening = member.shards, member.opening
        check_epoch_number(request.epoch)
        if not 0 <= request.generation <= m.GENERATION_MAX:
            raise InvalidArgument(f"a gc generation is from 1 to {m.GENERATION_MAX}; 0: it was not read")
        if len(request.table) > m.EPOCH_TABLE_BYTES_MAX:
            raise RequestTooLarge(f"a table of {len(request.table)} bytes; at most {m.EPOCH_TABLE_BYTES_MAX}")
        if request.generation:
            shards.touched.opened(request.generation)
        known = await shards.set_epoch(request.epoch, request.table)
        durable = self._metadata.durable_sequence
        table = b"" if request.without_table else known.table
        takes = shards.may_take()
        return Reply(m.EpochKnown(known.epoch, table, opening.boot, opening.recovered, durable, takes))

    # --- shards ------------------------------------------------------------------------------------

    @handles(m.StoreShards)
    async def store_shards(self, client: Client, request: m.StoreShards, body: Body) -> Reply:
        shards = member_of(self._store).shards
        _check_generation(request.generation)
        check_epoch_number(request.epoch)
        names = checked_names(request.chunks, request.shards)
        if not len(names) == len(request.lengths) == len(request.crcs) == len(request.chunk_lengths):
            raise InvalidArgument("chunks, shards, lengths, checksums and lengths of chunks go together")
        if len(set(names)) < len(names):
            raise InvalidArgument("a request names each shard once")
        check_lengths(request.lengths)
        for length, chunk_bytes in zip(request.lengths, request.chunk_lengths, strict=True):
            if not may_be_of(length, chunk_bytes):
                raise InvalidArgument(f"no chunk of {chunk_bytes} bytes has a shard of {length}")
        async with self._payloads(client, request, body) as payloads:
            incoming = [
                Incoming(chunk, shard, payload, crcs, chunk_bytes)
                for (chunk, shard), payload, crcs, chunk_bytes in zip(
                    names, payloads, request.crcs, request.chunk_lengths, strict=True
                )
            ]
            fresh = await shards.store(request.epoch, request.generation, incoming)
        return Reply(m.ShardsStored(fresh))

    @asynccontextmanager
    async def _payloads(self, client: Client, request: m.StoreShards, body: Body) -> AsyncIterator[list[Payload]]:
        """Yield the shards' payloads: of the body, or to be filled from slots of lent memory.

        InvalidArgument; SessionLost when the memory is not lent on this connection.
        """
        if not request.offsets:
            payloads = body.payloads if isinstance(body, ReceivedBody) else []
            if len(payloads) != len(request.lengths):
                raise InvalidArgument(f"{len(request.lengths)} shards, and neither slots nor a body for them")
            yield payloads
            return
        if len(request.offsets) != len(request.lengths):
            raise InvalidArgument(f"{len(request.offsets)} offsets for {len(request.lengths)} slots")
        shards = member_of(self._store).shards
        shards.check_request(request.epoch)
        with self._store.lent.using(client, request.memory) as memory:
            for offset, length in zip(request.offsets, request.lengths, strict=True):
                memory.check_range(offset, length)
            taken = await self._store.payload_memory.take([ChunkKind.DATA] * len(request.lengths), request.lengths)
            try:
                for payload, offset in zip(taken.payloads, request.offsets, strict=True):
                    payload.fill = _filler(memory, offset)
                yield taken.payloads
            finally:
                taken.release()

    @handles(m.OfferShards)
    async def offer_shards(self, request: m.OfferShards) -> Reply:
        shards = member_of(self._store).shards
        _check_generation(request.generation)
        check_epoch_number(request.epoch)
        names = checked_names(request.chunks, request.shards)
        return Reply(m.ShardsOffered(*await shards.offer(request.epoch, request.generation, names)))

    @handles(m.ListShards)
    async def list_shards(self, request: m.ListShards) -> Reply:
        shards = member_of(self._store).shards
        if max(len(request.begin), len(request.end)) > DIGEST_BYTES or len(request.after) not in (0, _KEY_BYTES):
            raise InvalidArgument(f"a digest has {DIGEST_BYTES} bytes; `after` is that of the answer before")
        if not 1 <= request.limit <= m.LIST_SHARDS_MAX:
            raise InvalidArgument(f"a page has 1 to {m.LIST_SHARDS_MAX} shards")
        page = ShardPage()
        after = request.after
        sequence = Sequence(0)
        while True:
            left = request.limit - len(page)
            list_some = shards.list_damaged if request.only_damaged else shards.list_page
            after, seen = list_some(page, request.begin, request.end, after, left)
            sequence = max(sequence, seen)
            if not after or len(page) == request.limit:
                break
            await trio.lowlevel.checkpoint()
        await self._metadata.wait_durable(sequence)
        chunks, numbers = _names_of(page.keys)
        damaged = _names_of(page.damaged)
        return Reply(
            m.ShardsListed(chunks, numbers, page.lengths, page.crcs, page.touched, after, page.chunk_lengths, *damaged)
        )

    @handles(m.DropShards)
    async def drop_shards(self, request: m.DropShards) -> Reply:
        shards = member_of(self._store).shards
        check_epoch_number(request.epoch)
        names = checked_names(request.chunks, request.shards)
        if len(request.touched) != len(names):
            raise InvalidArgument(f"{len(request.touched)} generations for {len(names)} shards")
        for generation in request.touched:
            _check_generation(generation)
        return Reply(
            m.ShardsDropped(await shards.drop(request.epoch, names, request.touched, only_damaged=request.only_damaged))
        )

    # --- gc ----------------------------------------------------------------------------------------

    @handles(m.GcBegin)
    async def gc_begin(self, request: m.GcBegin) -> Reply:
        collector = self._collector()
        _check_generation(request.generation)
        _check_walk(request.walk)
        collector.begin(request.generation, request.walk)
        return Reply(m.Done())

    @handles(m.GcMark)
    async def gc_mark(self, request: m.GcMark) -> Reply:
        collector = self._collector()
        if not 0 <= request.batch < m.GC_BATCHES_MAX:
            raise InvalidArgument(f"a batch of marks has a number from 0 to {m.GC_BATCHES_MAX - 1}")
        await collector.mark(request.walk, request.batch, checked_chunks(request.chunks))
        return Reply(m.Done())

    @handles(m.GcSweep)
    async def gc_sweep(self, request: m.GcSweep) -> Reply:
        collector = self._collector()
        size = len(request.homes)
        if not 1 <= size <= m.HOMES_BYTES_MAX or size & (size - 1):
            raise InvalidArgument(f"{size} bytes of partitions; there are 8 to {8 * m.HOMES_BYTES_MAX}, a power of two")
        if not 0 <= request.batches <= m.GC_BATCHES_MAX:
            raise InvalidArgument(f"a walk sends at most {m.GC_BATCHES_MAX} batches of marks")
        swept = await collector.sweep(request.walk, request.batches, request.homes)
        return Reply(m.ShardsSwept(swept.freed_shards, swept.freed_bytes, swept.kept_because))

    def _collector(self) -> ShardCollector:
        """Return the member's gc of shards.  CoordinatorLost while it takes nothing: it keeps what it has."""
        member = member_of(self._store)
        member.shards.check_taking()
        return member.collector


def _names_of(keys: Seq[bytes]) -> tuple[list[bytes], list[int]]:
    return [key[:1] + key[3:35] for key in keys], [key[-1] for key in keys]


def _check_generation(generation: int) -> None:
    if not 1 <= generation <= m.GENERATION_MAX:
        raise InvalidArgument(f"a gc generation is from 1 to {m.GENERATION_MAX}")


def check_epoch_number(epoch: int) -> None:
    """Raise InvalidArgument for what no ring epoch is."""
    if not 0 <= epoch <= m.EPOCH_MAX:
        raise InvalidArgument(f"a ring epoch is from 0 to {m.EPOCH_MAX}")


def _check_walk(walk: bytes) -> None:
    if len(walk) != _WALK_BYTES:
        raise InvalidArgument(f"a walk is named by {_WALK_BYTES} random bytes")


def _filler(memory: LentMemory, offset: int) -> Fill:
    """Return a call that fills memory of the engine from a slot; it blocks, and raises SourceChanged."""

    def fill(target: memoryview, begin: int) -> bytes:
        return read_into(memory, offset + begin, target)

    return fill
