"""Short ways to ask a member of a lake about shards; for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lakefs.content.verify import granule_crcs
from lakefs.ids import ChunkId, ShardNumber
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.store_rig import ask

WALK = b"w" * 16
ALL_PARTITIONS = b"\xff" * 512


@dataclass(frozen=True)
class Shard:
    """A shard as a head has it in memory."""

    chunk: ChunkId
    number: int
    payload: bytes
    chunk_bytes: int = 0
    """The length of its chunk; 0: that of the payload."""

    @property
    def name(self) -> tuple[ChunkId, ShardNumber]:
        return self.chunk, ShardNumber(self.number)

    def with_payload(self, payload: bytes) -> Shard:
        return replace(self, payload=payload)


def chunk_at(partition: int, kind: int = 1, more: bytes = b"\x55") -> ChunkId:
    """Return the id of a chunk in one of the 4,096 ring partitions."""
    return ChunkId(bytes((kind,)) + (partition << 4).to_bytes(2, "big") + more.ljust(30, b"\x55"))


def names_of(shards: Sequence[Shard]) -> tuple[list[bytes], list[int]]:
    """Return the shards' names as two lists."""
    return [shard.chunk for shard in shards], [shard.number for shard in shards]


def store_request(shards: Sequence[Shard], *, epoch: int = 0, generation: int = 1) -> m.StoreShards:
    return m.StoreShards(
        epoch,
        generation,
        *names_of(shards),
        [len(shard.payload) for shard in shards],
        [granule_crcs(shard.payload) for shard in shards],
        chunk_lengths=[shard.chunk_bytes or len(shard.payload) for shard in shards],
    )


async def store(client: EngineClient, *shards: Shard, epoch: int = 0, generation: int = 1) -> list[bool]:
    """Store shards; True for each that was new."""
    request = store_request(shards, epoch=epoch, generation=generation)
    return (await ask(client, request, m.ShardsStored, *(shard.payload for shard in shards))).fresh


async def offer(client: EngineClient, *shards: Shard, epoch: int = 0, generation: int = 1) -> list[int]:
    """Offer shards; return their lengths."""
    return (await ask(client, m.OfferShards(epoch, generation, *names_of(shards)), m.ShardsOffered)).lengths


async def drop(client: EngineClient, *shards: Shard, touched: int, epoch: int = 0) -> list[int]:
    """Drop shards; return 0, or the generation that keeps it, of each."""
    request = m.DropShards(epoch, *names_of(shards), [touched] * len(shards))
    return (await ask(client, request, m.ShardsDropped)).touched


async def listed(client: EngineClient, begin: bytes = b"", end: bytes = b"", limit: int = 3) -> dict[Shard, int]:
    """Return the listed shards, without their bytes, with the generation of each; read page by page."""
    found: dict[Shard, int] = {}
    after = b""
    while True:
        page = await ask(client, m.ListShards(begin, end, after, limit), m.ShardsListed)
        names = [Shard(ChunkId(chunk), number, b"") for chunk, number in zip(page.chunks, page.shards, strict=True)]
        found.update(zip(names, page.touched, strict=True))
        after = page.next_after
        if not after:
            return found


async def read(client: EngineClient, *shards: Shard, ranges: Sequence[tuple[int, int]] = ()) -> list[bytes]:
    """Return the bytes of shards, checked by the checksums of the answer.  Raises the first failure."""
    wanted = ranges or [(0, 0)] * len(shards)
    request = m.ReadChunks(
        [shard.chunk for shard in shards],
        [offset for offset, _ in wanted],
        [length for _, length in wanted],
        [shard.number for shard in shards],
    )
    reply = await client.call(request)
    body = reply.body.joined()
    reply.body.release()
    assert isinstance(reply.message, m.ReadChunksReply)
    found: list[bytes] = []
    for piece in reply.message.pieces:
        if piece.failure is not None:
            raise piece.failure.as_error()
        payload, body = body[: piece.length], body[piece.length :]
        assert granule_crcs(payload) == piece.crcs
        found.append(payload)
    assert not body, "each byte is of a piece"
    return found


async def set_epoch(client: EngineClient, epoch: int = 0, table: bytes = b"", generation: int = 0) -> m.EpochKnown:
    """Bring an epoch and a generation; return the member's epoch."""
    return await ask(client, m.SetEpoch(epoch, table, generation), m.EpochKnown)


async def collect(
    client: EngineClient,
    generation: int,
    marked: Sequence[ChunkId] = (),
    *,
    walk: bytes = WALK,
    homes: bytes = ALL_PARTITIONS,
) -> m.ShardsSwept:
    """Run a whole cycle of gc, with these chunks marked."""
    await ask(client, m.GcBegin(generation, walk), m.Done)
    await ask(client, m.GcMark(walk, 0, list(marked)), m.Done)
    return await ask(client, m.GcSweep(walk, 1, homes), m.ShardsSwept)
