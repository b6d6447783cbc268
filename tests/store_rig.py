"""A store in this process, on a simulated disk, and short ways to ask it; for tests of what is built on a store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from engine.format.layouts import ChunkRecord, Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import is_whole
from engine.format.sizes import MetadataSizes, SegmentSizes, StoreSizes
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.opening import open_store
from engine.store.store import Store
from engine.superblock.superblock import NO_CLUSTER
from engine.tables.views import Transaction
from engine.tiers.dram_tier import DramTier
from lakefs.host.offload import InlineOffload
from lakefs.ids import Buffer, ChunkId
from lakefs.limits import KIB, MIB
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk

M = TypeVar("M", bound=m.Message)
T = TypeVar("T")
SMALL_SIZES = StoreSizes(
    MetadataSizes(journal_fill=64 * KIB),
    SegmentSizes(large_segment=8 * MIB, small_segment=256 * KIB, large_extend=MIB, small_fill=64 * KIB),
    huge_buffers=0,
)
PLAIN = m.ObjectAttributes()


def run(main: Callable[[], Awaitable[T]]) -> T:
    """`trio.run` on a clock that jumps, so that nothing waits for real."""
    return trio.run(main, clock=MockClock(autojump_threshold=0))


@asynccontextmanager
async def simulated_store(
    disk: SimDisk | None = None,
    *,
    sizes: StoreSizes = SMALL_SIZES,
    grace_s: float = 0.0,
    offload: Offload | None = None,
    clock: SimClock | None = None,
    verify_index: bool = False,
    upload_expiry_s: float = 0.0,
    tier: DramTier | None = None,
    cluster_id: bytes = NO_CLUSTER,
) -> AsyncIterator[Store]:
    """A store, created when the disk has none, and stopped cleanly at the end."""
    async with open_store(
        disk or SimDisk(),
        clock or SimClock(),
        offload or InlineOffload(),
        grace_s=grace_s,
        verify_index=verify_index,
        upload_expiry_s=upload_expiry_s,
        sizes=sizes,
        tier=tier,
        cluster_id=cluster_id,
    ) as store:
        yield store


def client_of(store: Store) -> EmbeddedEngine:
    """Connect one more client.  Simulated segments have no descriptors."""
    return EmbeddedEngine(Service(store), descriptors=False)


async def ask(client: EngineClient, request: m.Request, answer: type[M], *body: Buffer) -> M:
    """Send a request; return the reply's message, which must be of that type.  Its body is released."""
    reply = await client.call(request, body)
    reply.body.release()
    assert isinstance(reply.message, answer), reply.message
    return reply.message


def change(
    key: str,
    blob: bytes = b"",
    *,
    bucket: str = "bkt",
    condition: m.Condition = m.NO_CONDITION,
    attributes: m.ObjectAttributes = PLAIN,
    create_bucket: bool = True,
) -> m.NameChange:
    """Bind `key`."""
    return m.NameChange(bucket, key, blob, attributes, condition, create_bucket)


def good(results: m.NameResults) -> list[m.ObjectStat]:
    """Return the stats of a batch; raise its first failure."""
    stats: list[m.ObjectStat] = []
    for result in results.results:
        if result.failure is not None:
            raise result.failure.as_error()
        assert result.stat is not None
        stats.append(result.stat)
    return stats


async def put(client: EngineClient, key: str, payload: bytes, *, bucket: str = "bkt") -> m.ObjectStat:
    """Store one object of one chunk."""
    request = m.PutObjects([len(payload)], [change(key, bucket=bucket)])
    (stat,) = good(await ask(client, request, m.NameResults, payload))
    return stat


async def delete(client: EngineClient, *keys: str, bucket: str = "bkt") -> None:
    """Remove names."""
    await ask(client, m.DeleteNames([(bucket, key) for key in keys]), m.NameResults)


async def session_of(client: EngineClient) -> bytes:
    """Begin a put session; return it."""
    return (await ask(client, m.SessionOpen(), m.SessionOpened)).session


async def store_chunks(
    client: EngineClient, session: bytes, payloads: Sequence[bytes], *, kind: int = 1
) -> list[bytes]:
    """Store payloads as chunks of a session; return their ids."""
    lengths = [len(payload) for payload in payloads]
    request = m.StoreChunks(session, [kind] * len(payloads), lengths)
    return (await ask(client, request, m.Stored, *payloads)).chunks


async def read(client: EngineClient, chunk: bytes) -> bytes:
    """Return a chunk's bytes, streamed.  Raises the failure of the piece."""
    reply = await client.call(m.ReadChunks([chunk], [0], [0]))
    payload = reply.body.joined()
    reply.body.release()
    assert isinstance(reply.message, m.ReadChunksReply)
    (piece,) = reply.message.pieces
    if piece.failure is not None:
        raise piece.failure.as_error()
    return payload


async def gc(client: EngineClient) -> dict[str, Any]:
    """Run one gc cycle; return its report."""
    report: dict[str, Any] = json.loads((await ask(client, m.RunGc(), m.ReportReply)).report_json)
    return report


async def fsck(client: EngineClient, *, full: bool = True) -> dict[str, Any]:
    """Run a check; return its report."""
    report: dict[str, Any] = json.loads((await ask(client, m.RunFsck(full), m.ReportReply)).report_json)
    return report


def records(store: Store) -> dict[ChunkId, ChunkRecord]:
    """Return the records of all whole chunks."""
    with store.metadata.view() as view:
        return {
            chunk_id_of_key(key): unpack_chunk_record(value)
            for key, value in view.scan(Table.CHUNKS, b"", b"\xff")
            if is_whole(key)
        }


async def tamper(store: Store, alter: Callable[[Transaction], object]) -> None:
    """Change records behind the back of the engine's logic; the change is durable on return."""
    _, sequence = await store.metadata.commit(alter)
    await store.metadata.wait_durable(sequence)


def in_flight(store: Store) -> int:
    """Number of extents that were handed out and are not settled."""
    return sum(store.segments.in_flight.count(segment) for segment in store.segments.register.kinds)
