"""Services that offer a part of what goes by memory: clients use that part, ask for no other, and get all bytes.

Each service here is a whole engine that refuses, and counts, what it does not offer.  So a request for it is noticed,
and the bytes are right all the same.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.process.embedded import EmbeddedEngine
from engine.process.shared_index_life import run_keyed_index, run_shared_index
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.opening import open_store
from engine.store.store import Store
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import InvalidArgument
from lakefs.host.offload import ThreadOffload
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from lakefs.put.shared_memory import SharedMemory
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply, ServedClient
from lakefs.wire.offers import EVERYTHING, Offers
from tests.store_rig import SMALL_SIZES

GIVEN: dict[type[m.Request], int] = {
    m.OpenSegments: m.FEATURE_SEGMENTS,
    m.PinChunks: m.FEATURE_SEGMENTS,
    m.OpenSlabs: m.FEATURE_SLABS,
    m.SourceOpen: m.FEATURE_SOURCES,
    m.LendMemory: m.FEATURE_LENT_MEMORY,
    m.OpenSharedIndex: m.FEATURE_SHARED_INDEX,
    m.OpenKeyedIndex: m.FEATURE_KEYED_INDEX,
    m.OpenStamps: m.FEATURE_STAMPS,
}
EACH = m.FEATURE_EACH
OFFERS = {
    "everything": EVERYTHING,
    "nothing": EACH,
    "puts": EACH | m.FEATURE_SOURCES | m.FEATURE_LENT_MEMORY,
    "head": EACH | m.FEATURE_SOURCES | m.FEATURE_LENT_MEMORY | m.FEATURE_SLABS,
    "slabs": EACH | m.FEATURE_SLABS,
    "segments": EACH | m.FEATURE_SEGMENTS,
    "indexes": EVERYTHING & ~(m.FEATURE_SOURCES | m.FEATURE_LENT_MEMORY),
    "no stamps": EVERYTHING & ~m.FEATURE_STAMPS,
    "no segments": EVERYTHING & ~m.FEATURE_SEGMENTS,
}
SIZES = [0, 1, 20 * KIB, 300 * KIB, CHUNK_BYTES + 70_000]
SLAB = 9 * MIB
AGAIN = 3
"""Reads of everything: the tier has what is read twice."""


class Partial(Service):
    """An engine that refuses, and notes, what it does not offer."""

    def __init__(self, store: Store, features: int) -> None:
        super().__init__(store)
        self.features = features
        self.not_offered: list[type[m.Request]] = []
        self.asked: list[type[m.Request]] = []

    async def serve(self, client: ServedClient, request: m.Request, body: Body, descriptors: Sequence[int]) -> Reply:
        self.asked.append(type(request))
        if not GIVEN.get(type(request), EACH) & (self.features | EACH):
            self.not_offered.append(type(request))
            if isinstance(request, m.OpenSegments):
                return Reply(m.SegmentsOpened([]))
            request = m.Watch("")  # which `serve` refuses; it closes the descriptors
        reply = await super().serve(client, request, body, descriptors)
        if isinstance(reply.message, m.HelloReply):
            kept = reply.message.features & ~EVERYTHING
            reply.message = msgspec.structs.replace(reply.message, features=kept | self.features)
        return reply


@dataclass
class Served:
    """A partial service at a socket."""

    service: Partial
    address: str
    folder: Path
    offload: ThreadOffload
    contents: dict[str, bytes] = field(default_factory=dict)


Clients = Callable[[Served], Any]


@asynccontextmanager
async def by_trio(served: Served) -> AsyncIterator[TrioLake]:
    async with connect_reconnecting(served.address) as engine:
        lake = TrioLake(engine, served.offload)
        yield lake
        await lake.aclose()


@asynccontextmanager
async def embedded(served: Served) -> AsyncIterator[TrioLake]:
    engine = EmbeddedEngine(served.service, features=served.service.features)
    lake = TrioLake(engine, served.offload)
    yield lake
    await lake.aclose()
    await engine.aclose()


@asynccontextmanager
async def serving(features: int) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, tier = Path(name), DramTier(Arena(3, SLAB))
        async with AsyncExitStack() as stack:
            offload = await stack.enter_async_context(ThreadOffload(3, "offers"))
            opening = open_store(
                LocalDisk(folder / "store"), SystemClock(), offload, verify_index=False, sizes=SMALL_SIZES, tier=tier
            )
            store = await stack.enter_async_context(opening)
            nursery = await stack.enter_async_context(trio.open_nursery())
            await nursery.start(run_shared_index, store, "memory", 0)
            await nursery.start(run_keyed_index, store)
            service = Partial(store, features)
            server = Server(service, TrioNetwork(), token=None)
            address = await nursery.start(server.listen_and_serve, f"unix:{folder}/socket")
            try:
                yield Served(service, address, folder, offload)
            finally:
                with trio.CancelScope(shield=True):
                    await server.drain(5)
                nursery.cancel_scope.cancel()
            assert store.buffers.in_use == 0
        tier.close()


def run(features: int, body: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(features) as served:
            with trio.fail_after(60):
                await body(served)

    trio.run(main)


def contents_of() -> Iterator[bytes]:
    return (random.Random(size).randbytes(size) for size in SIZES)


async def put_all(served: Served, lake: TrioLake) -> None:
    """Put content in each way that there is."""
    async with lake.shared_memory(2 * CHUNK_BYTES) as memory:
        await put_each_way(served, lake, memory)
    many = [(f"bkt/many-{number}", bytes([number]) * 3000) for number in range(20)]
    await lake.put_many(many)
    served.contents.update(many)


async def put_each_way(served: Served, lake: TrioLake, memory: SharedMemory) -> None:
    for number, content in enumerate(contents_of()):
        path = served.folder / f"file-{number}"
        path.write_bytes(content)
        slot = memory.allocate(len(content))
        slot.buffer[:] = content
        await lake.put(f"bkt/bytes-{number}", content, create_bucket=True)
        await lake.put(f"bkt/file-{number}", path)
        await lake.put(f"bkt/slot-{number}", slot)
        served.contents |= {f"bkt/{way}-{number}": content for way in ("bytes", "file", "slot")}


async def get_all(served: Served, lake: TrioLake) -> None:
    """Get content in each way that there is."""
    names = list(served.contents)
    for _ in range(AGAIN):
        for name, content in served.contents.items():
            assert await lake.get(name) == content
            await get_ranges(lake, name, content)
        assert await lake.get_many(names) == list(served.contents.values())
        chunks = [data_chunk_id(content) for content in served.contents.values() if 0 < len(content) <= CHUNK_BYTES]
        for chunk in chunks:
            assert data_chunk_id(await lake.chunks.get(chunk)) == chunk
        await load(lake, served.contents)


async def get_ranges(lake: TrioLake, name: str, content: bytes) -> None:
    async with await lake.open(name) as opened:
        for begin, end in (0, len(content)), (len(content) // 2, len(content) // 2 + 3), (5, len(content) - 4):
            assert await opened.read(begin, max(end - begin, 0)) == content[begin : max(begin, end)]


async def load(lake: TrioLake, contents: dict[str, bytes]) -> None:
    """Load everything into one pool."""
    offsets = list(accumulate((-(-len(content) // 4096) * 4096 for content in contents.values()), initial=0))
    async with lake.pool(size_bytes=offsets[-1]) as pool:
        await lake.load_many(list(contents), pool, offsets[:-1])
        for offset, content in zip(offsets, contents.values(), strict=False):
            assert pool.buffer[offset : offset + len(content)] == content


async def map_all(served: Served, lake: TrioLake) -> None:
    """Map what can be mapped; what cannot is refused by an error that says what to do, without a request."""
    for name, content in served.contents.items():
        if served.service.features & m.FEATURE_SEGMENTS:
            async with lake.map(name) as mapped:
                assert b"".join(mapped.pieces) == content
        else:
            with pytest.raises(InvalidArgument, match="read it instead"):
                async with lake.map(name):
                    pass


async def use_keys(lake: TrioLake) -> None:
    """Put, find and load values under keys."""
    space = await lake.space("kv")
    values = {b"key-%d" % number: bytes([number]) * (40_000 + number) for number in range(1, 9)}
    await space.put_many(list(values), list(values.values()))
    for _ in range(AGAIN):
        buffers = [bytearray(len(value)) for value in values.values()]
        assert await space.get_many_into(list(values), buffers) == list(map(len, buffers))
        assert [bytes(buffer) for buffer in buffers] == list(values.values())
        assert (await space.match([*values, b"none"])).present == [True] * 8 + [False]
        async with lake.pool(size_bytes=MIB) as pool:
            offsets = [number * 64 * KIB for number in range(8)]
            assert await space.load(list(values), pool, offsets) == list(map(len, buffers))
            for offset, value in zip(offsets, values.values(), strict=True):
                assert pool.buffer[offset : offset + len(value)] == value


@pytest.mark.parametrize(("offers", "clients"), [*((offers, by_trio) for offers in OFFERS), ("head", embedded)])
def test_what_is_offered_is_used_and_what_is_not_is_not_asked_for(offers: str, clients: Clients) -> None:
    async def body(served: Served) -> None:
        async with clients(served) as lake:
            await put_all(served, lake)
            await get_all(served, lake)
            await map_all(served, lake)
            await use_keys(lake)
        assert served.service.not_offered == []
        used = {request for request in GIVEN if request in served.service.asked}
        offered = {request for request, bit in GIVEN.items() if bit & served.service.features}
        assert used <= offered
        assert used & {m.SourceOpen, m.LendMemory} == offered & {m.SourceOpen, m.LendMemory}
        if offers in ("head", "slabs"):
            assert m.OpenSlabs in used

    run(OFFERS[offers], body)


@pytest.mark.parametrize("features", [EVERYTHING, EVERYTHING & ~m.FEATURE_SEGMENTS, OFFERS["head"], EACH])
def test_a_blocking_client_asks_for_nothing_that_is_not_offered(features: int) -> None:
    def use(served: Served) -> None:
        with connect(served.address) as lake:
            for number, content in enumerate(contents_of()):
                path = served.folder / f"file-{number}"
                path.write_bytes(content)
                lake.put(f"bkt/bytes-{number}", content, create_bucket=True)
                lake.put(f"bkt/file-{number}", path)
                for name in (f"bkt/bytes-{number}", f"bkt/file-{number}"):
                    for _ in range(AGAIN):
                        assert lake.get(name) == content
                        with lake.open(name) as opened:
                            assert opened.read() == content
                        if 0 < len(content) <= CHUNK_BYTES:
                            load_chunk(lake, data_chunk_id(content), content)

    async def body(served: Served) -> None:
        await trio.to_thread.run_sync(use, served)
        assert served.service.not_offered == []

    run(features, body)


def load_chunk(lake: Lake, chunk: bytes, content: bytes) -> None:
    with lake.pool(size_bytes=CHUNK_BYTES) as pool:
        for _ in range(2):
            assert lake.load_many([chunk], pool, [0]) == [len(content)]
            assert pool.buffer[: len(content)] == content


def test_what_lies_in_a_segment_that_is_not_given_is_streamed_at_once() -> None:
    async def body(served: Served) -> None:
        async with by_trio(served) as lake:
            content = random.Random(1).randbytes(2 * CHUNK_BYTES + 5)
            await lake.put("bkt/cold", content, create_bucket=True)
            served.service.asked.clear()
            assert await lake.get("bkt/cold") == content
            async with await lake.open("bkt/cold") as opened:
                assert await opened.read(70_000, 9) == content[70_000:70_009]
        assert m.Locate not in served.service.asked, "a read here was tried in vain"

    run(OFFERS["head"], body)


def test_an_engine_that_does_not_name_each_is_asked_for_everything_and_may_refuse() -> None:
    """So does a client that does not know the bits: what is refused, and segments that are not given, are sent."""

    async def body(served: Served) -> None:
        async with by_trio(served) as lake:
            await put_bytes(served, lake)
            for name, content in served.contents.items():
                for _ in range(AGAIN):
                    assert await lake.get(name) == content
                if 0 < len(content) <= CHUNK_BYTES:
                    assert await lake.chunks.get(data_chunk_id(content)) == content
        assert {m.OpenStamps, m.OpenSharedIndex} <= set(served.service.not_offered)

    run(m.FEATURE_SLABS, body)


async def put_bytes(served: Served, lake: TrioLake) -> None:
    for number, content in enumerate(contents_of()):
        await lake.put(f"bkt/{number}", content, create_bucket=True)
        served.contents[f"bkt/{number}"] = content


def test_offers_are_those_of_the_present_connection() -> None:
    offers = Offers()
    assert shown(offers) == (False, False, False, [], 0)
    offers.take(EVERYTHING, by_memory=True)
    everything = (True, True, True, [m.MEDIUM_SEGMENT, m.MEDIUM_DRAM], m.MEDIA_DRAM)
    assert shown(offers) == everything
    offers.take(EACH | m.FEATURE_SLABS, by_memory=True)
    assert shown(offers) == (False, False, False, [m.MEDIUM_DRAM], m.MEDIA_DRAM)
    offers.take(m.FEATURE_PLACES, by_memory=True)  # an older engine
    assert shown(offers) == everything
    offers.take(EVERYTHING, by_memory=False)  # over TCP
    assert shown(offers) == (False, False, False, [], 0)


def shown(offers: Offers) -> tuple[bool, bool, bool, list[int], int]:
    return offers.segments, offers.stamps, offers.lent_memory, sorted(offers.places), offers.media
