"""Content streamed over a network: the stored bytes or an error, whatever clients and disk do; in bounded memory."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from engine.chunks.chunk_store import find_chunk
from engine.format.layouts import SegmentKind
from engine.host.local_disk import LocalDisk, LocalFile
from engine.requests import read_chunks
from engine.requests.answer_memory import AnswerMemory
from engine.requests.table import Service
from engine.segments.files import segment_path
from engine.server.listener import Server
from engine.store.store import Store
from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.content.verify import granule_crcs, granules_around
from lakefs.errors import ChunkDamaged, ChunkNotFound, DiskFailed
from lakefs.ids import Buffer, ChunkId, data_chunk_id
from lakefs.limits import ANSWER_CLIENT_BYTES, GRANULE_BYTES, INFLIGHT_PER_CONNECTION, KIB, MIB
from lakefs.ports import Network
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from lakefs.wire.connection import FailureReceived, ReplyReceived
from tests.contract.engines import TCP, TOKEN, _local_store, _simulated_network, _simulated_store
from tests.contract.test_dram import World as DramWorld, run as run_with_tier
from tests.raw_client import RawClient, raw_client
from tests.sim.world.disk import SimDisk
from tests.store_rig import delete, gc, put, read

SIZES = (5, 64 * KIB, 100_000, 300 * KIB, 700 * KIB, MIB + 7, 3 * MIB + 1, 4 * MIB)


def content_of(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


CONTENTS = [content_of(number, size_bytes) for number, size_bytes in enumerate(SIZES)]
CHUNKS = [data_chunk_id(content) for content in CONTENTS]
LARGE, LARGEST = CHUNKS[-2], CHUNKS[-1]


@dataclass
class World:
    """An engine that serves a network, and its memory of answers."""

    store: Store
    memory: AnswerMemory
    client: RemoteEngine
    connect: Callable[[], AbstractAsyncContextManager[RemoteEngine]]
    raw: Callable[[], AbstractAsyncContextManager[RawClient]]
    is_simulated: bool

    async def settled(self) -> None:
        """Wait until the engine does nothing more."""
        if self.is_simulated:
            await trio.testing.wait_all_tasks_blocked()
            return
        before = -1
        while before != self.memory.held_bytes:
            before = self.memory.held_bytes
            await trio.sleep(0.2)

    async def until_free(self) -> None:
        """Wait until no answer holds memory; it fails the test if that takes long."""
        with trio.fail_after(20):
            while self.memory.held_bytes or self.memory.waiting:  # noqa: ASYNC110 - the engine tells nobody
                await trio.sleep(0.01)

    def place(self, chunk: ChunkId) -> tuple[str, int]:
        """Return the file of a chunk's segment in the store, and the chunk's offset there."""
        with self.store.metadata.view() as view:
            record = find_chunk(view, chunk)
        assert record is not None
        return segment_path(record.segment, SegmentKind.LARGE), record.offset

    def flip(self, chunk: ChunkId, at: int) -> None:
        """Flip a bit of byte `at` of a stored chunk, on the disk."""
        path, offset = self.place(chunk)
        disk = self.store.disk
        if isinstance(disk, SimDisk):
            disk.flip_bit(path, offset + at, 3)
            return
        assert isinstance(disk, LocalDisk)
        with Path(disk.local_path(path)).open("r+b") as file:
            file.seek(offset + at)
            (byte,) = file.read(1)
            file.seek(offset + at)
            file.write(bytes([byte ^ 8]))


Body = Callable[[World], Awaitable[None]]


@asynccontextmanager
async def serving(folder: Path, memory: AnswerMemory, *, is_simulated: bool) -> AsyncIterator[World]:
    """Run an engine for the block, with CONTENTS stored.  Afterwards no memory is held."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context((_simulated_store if is_simulated else _local_store)(folder))
        network: Network = _simulated_network() if is_simulated else TrioNetwork()
        server = Server(Service(store), network, token=TOKEN)
        nursery = await stack.enter_async_context(trio.open_nursery())
        address = await nursery.start(server.listen_and_serve, "tcp://sim:1" if is_simulated else TCP)

        @asynccontextmanager
        async def raw() -> AsyncIterator[RawClient]:
            async with raw_client(network, address) as client:
                await client.hello(m.Hello(1, "raw", 0, TOKEN))
                yield client

        def connect() -> AbstractAsyncContextManager[RemoteEngine]:
            return connect_engine(address, token=TOKEN, network=network)

        async with connect() as client:
            world = World(store, memory, client, connect, raw, is_simulated)
            for number, content in enumerate(CONTENTS):
                await put(client, f"{number}", content)
            yield world
        await server.drain(5)
        assert (memory.held_bytes, memory.waiting) == (0, 0), "memory of an answer was not given back"


@pytest.fixture(params=["simulated", "tcp"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Runs a test's body with an engine on a simulated machine, or on this one and TCP."""
    is_simulated = request.param == "simulated"

    def run_it(body: Body) -> None:
        async def main() -> None:
            memory = AnswerMemory()
            monkeypatch.setattr(read_chunks, "AnswerMemory", lambda: memory)
            async with serving(tmp_path, memory, is_simulated=is_simulated) as world:
                await body(world)

        trio.run(main, clock=MockClock(autojump_threshold=0) if is_simulated else None)

    return run_it


async def answers(client: RawClient, count: int) -> list[tuple[m.ReadPiece, bytes]]:
    """Receive answers to requests for one piece each."""
    found: list[tuple[m.ReadPiece, bytes]] = []
    for _ in range(count):
        client.body = b""
        event = await client.answer()
        assert not isinstance(event, FailureReceived), event.error
        assert isinstance(event, ReplyReceived)
        assert isinstance(event.message, m.ReadChunksReply)
        (piece,) = event.message.pieces
        found.append((piece, client.body))
    return found


def whole(chunk: bytes) -> m.ReadChunks:
    return m.ReadChunks([chunk], [0], [0])


def test_any_mix_of_ranges_comes_as_it_was_stored(run: Callable[[Body], None]) -> None:
    rng = random.Random(7)

    def drawn() -> tuple[int, int, int]:
        number = rng.randrange(len(SIZES))
        offset = rng.choice((0, rng.randrange(SIZES[number])))
        return number, offset, rng.choice((0, rng.randint(1, SIZES[number] - offset)))

    async def ask(client: RemoteEngine, pieces: Sequence[tuple[int, int, int]]) -> None:
        chunks = [bytes(CHUNKS[number]) for number, _, _ in pieces]
        request = m.ReadChunks(chunks, [piece[1] for piece in pieces], [piece[2] for piece in pieces])
        reply = await client.call(request)
        payload, end = reply.body.joined(), 0
        reply.body.release()
        assert isinstance(reply.message, m.ReadChunksReply)
        for (number, offset, length), piece in zip(pieces, reply.message.pieces, strict=True):
            content = CONTENTS[number]
            wide = granules_around(offset, length or len(content) - offset, len(content))
            assert piece.failure is None
            assert (piece.offset, piece.offset + piece.length) == wide
            begin, end = end, end + piece.length
            assert payload[begin:end] == content[slice(*wide)]
            assert piece.crcs == granule_crcs(content[slice(*wide)])
        assert end == len(payload)

    async def body(world: World) -> None:
        async with world.connect() as second, world.connect() as third, trio.open_nursery() as nursery:
            for index in range(90):
                pieces = [drawn() for _ in range(rng.randint(1, 3))]
                nursery.start_soon(ask, (world.client, second, third)[index % 3], pieces)
        # The simulated disk has no two reads in a row cached.
        assert world.is_simulated or world.store.segments.batches.from_loop > 20, "cached ranges are read on the loop"
        await world.until_free()

    run(body)


def test_a_client_that_takes_nothing_holds_little_and_delays_nobody(run: Callable[[Body], None]) -> None:
    async def body(world: World) -> None:
        count = INFLIGHT_PER_CONNECTION - 1
        async with world.raw() as slow:
            for _ in range(count):
                await slow.ask(whole(LARGEST))
            await world.settled()
            assert 0 < world.memory.held_bytes <= ANSWER_CLIENT_BYTES
            for _ in range(3):
                assert await read(world.client, LARGEST) == CONTENTS[-1]
            for piece, content in await answers(slow, count):
                assert piece.failure is None
                assert content == CONTENTS[-1]
        await world.until_free()

    run(body)


def test_clients_that_vanish_leave_nothing_behind(run: Callable[[Body], None]) -> None:
    async def body(world: World) -> None:
        for _ in range(5):
            async with world.raw() as client:
                for _ in range(20):
                    await client.ask(whole(LARGEST))
                memory = memoryview(bytearray(100_000))
                assert await client.stream.receive_into(memory)
        await world.until_free()
        assert await read(world.client, LARGEST) == CONTENTS[-1]

    run(body)


def test_requests_that_are_cancelled_while_they_wait_for_memory_stop_no_other(run: Callable[[Body], None]) -> None:
    rng = random.Random(3)

    async def body(world: World) -> None:
        done = Counter[str]()

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                assert await read(world.client, LARGEST) == CONTENTS[-1]
                done["read"] += 1

        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(40)]
            for scope in scopes:
                nursery.start_soon(ask, scope)
            for scope in rng.sample(scopes, 25):
                await trio.lowlevel.checkpoint()
                scope.cancel()
        assert done["read"] >= 15
        await world.until_free()
        assert await read(world.client, LARGE) == CONTENTS[-2]

    run(body)


def test_content_that_is_collected_while_answers_wait_comes_whole_or_not_at_all(run: Callable[[Body], None]) -> None:
    async def body(world: World) -> None:
        count = 30
        async with world.raw() as slow:
            for _ in range(count):
                await slow.ask(whole(LARGEST))
            await world.settled()
            await delete(world.client, f"{len(SIZES) - 1}")
            assert (await gc(world.client))["freed_chunks"] == 1
            for other in range(3):  # in the room that was freed
                await put(world.client, f"other-{other}", content_of(100 + other, 4 * MIB))
            found = await answers(slow, count)
        kinds = Counter(type(piece.failure.as_error()) if piece.failure else None for piece, _ in found)
        assert set(kinds) == {None, ChunkNotFound}
        assert kinds[None] >= 2, "what was read before is sent"
        for piece, content in found:
            assert content == (b"" if piece.failure else CONTENTS[-1])

    run(body)


@pytest.mark.parametrize("at", [0, MIB - 1, MIB, 3 * MIB + 9, 4 * MIB - 1, 4 * MIB + 5])
def test_a_flipped_bit_on_the_disk_is_never_sent(run: Callable[[Body], None], at: int) -> None:
    async def body(world: World) -> None:
        assert await read(world.client, LARGEST) == CONTENTS[-1]
        world.flip(LARGEST, at)
        reply = await world.client.call(m.ReadChunks([LARGE, LARGEST, CHUNKS[3]], [0] * 3, [0] * 3))
        payload = reply.body.joined()
        reply.body.release()
        assert payload == CONTENTS[-2] + CONTENTS[3]
        for _ in range(2):
            with pytest.raises(ChunkDamaged):
                await read(world.client, LARGEST)
        if at < 4 * MIB:  # what the damage does not touch
            offset = (at // GRANULE_BYTES * GRANULE_BYTES + 2 * MIB) % (4 * MIB)
            reply = await world.client.call(m.ReadChunks([LARGEST], [offset], [1]))
            assert reply.body.joined() in (b"", CONTENTS[-1][offset : offset + GRANULE_BYTES])
            reply.body.release()

    run(body)


@pytest.mark.parametrize("step", range(5))
def test_rot_in_the_page_cache_is_never_sent_and_heals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int
) -> None:
    """The cached read number `step` of a long chunk (its checksums, then each step of its bytes) is rotten."""
    original = LocalFile.preadv_cached_into
    calls = 0

    def rotten(file: LocalFile, buffers: Sequence[memoryview], offset: int) -> bool:
        nonlocal calls
        is_read = original(file, buffers, offset)
        if is_read and calls == step:
            buffers[0][len(buffers[0]) // 2] ^= 16
        calls += 1
        return is_read

    async def main() -> None:
        memory = AnswerMemory()
        monkeypatch.setattr(read_chunks, "AnswerMemory", lambda: memory)
        async with serving(tmp_path, memory, is_simulated=False) as world:
            assert await read(world.client, LARGEST) == CONTENTS[-1]  # now it is cached
            before = world.store.segments.batches.statistics()
            with monkeypatch.context() as patch:
                patch.setattr(LocalFile, "preadv_cached_into", rotten)
                assert await read(world.client, LARGEST) == CONTENTS[-1]
            assert calls == step + 1, "after a mismatch nothing more is read there"
            after = world.store.segments.batches.statistics()
            assert int(after["threads"]) == int(before["threads"]) + 1
            assert await read(world.client, LARGEST) == CONTENTS[-1]

    trio.run(main)


def test_a_disk_that_fails_cached_reads_is_asked_by_a_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(file: LocalFile, buffers: Sequence[memoryview], offset: int) -> bool:
        raise DiskFailed("planted")

    async def main() -> None:
        memory = AnswerMemory()
        monkeypatch.setattr(read_chunks, "AnswerMemory", lambda: memory)
        async with serving(tmp_path, memory, is_simulated=False) as world:
            with monkeypatch.context() as patch:
                patch.setattr(LocalFile, "preadv_cached_into", failing)
                assert await read(world.client, LARGEST) == CONTENTS[-1]

    trio.run(main)


def test_bytes_that_wait_to_be_brought_in_are_no_later_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed answers lie in memory that is used again; what the tier was offered must not lie there."""
    offered: list[tuple[ChunkId, Buffer]] = []

    async def body(world: DramWorld) -> None:
        client = world.client(descriptors=False)
        contents = [os.urandom(4 * MIB) for _ in range(4)]
        async with world.lake(descriptors=False) as lake:
            for index, content in enumerate(contents):
                await lake.put(f"bkt/{index}", content, create_bucket=True)
        monkeypatch.setattr(world.store.dram, "offer", lambda chunk, _, payload, *__: offered.append((chunk, payload)))
        for _ in range(3):
            for content in contents:
                assert await read(client, data_chunk_id(content)) == content
        assert {chunk for chunk, _ in offered} == set(map(data_chunk_id, contents))
        assert all(data_chunk_id(payload) == chunk for chunk, payload in offered), "its memory was used again"
        await client.aclose()

    run_with_tier(body)
