"""A request that is cancelled, at any point, or that fails, leaves nothing held: memory, extents, leases, claims."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from engine.format.layouts import Table, chunk_key
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.tables.merged_tables import TableView
from lakefs.content.manifest import CutKind, build
from lakefs.errors import DiskFailed, IndexDamaged, SourceChanged, StoreReadOnly
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import KIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.descriptors import open_descriptors
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimDisk
from tests.store_rig import (
    SMALL_SIZES,
    ask,
    change,
    client_of,
    fsck,
    good,
    in_flight,
    put,
    run,
    session_of,
    simulated_store,
    store_chunks,
)

SMALL, LARGE, NEW = b"small", b"large" * 20_000, b"new content" * 10_000


async def prepared(client: EmbeddedEngine) -> bytes:
    """Put objects of every kind; return a session that holds two chunks and their manifest, to be committed."""
    await put(client, "small", SMALL)
    await put(client, "large", LARGE)
    session = await session_of(client)
    chunks = await store_chunks(client, session, [LARGE, SMALL])
    tree = build(CutKind.FIXED, [(ChunkId(chunks[0]), len(LARGE)), (ChunkId(chunks[1]), len(SMALL))])
    await store_chunks(client, session, [payload for _, payload in tree.manifests], kind=2)
    good(await ask(client, m.Commit(session, [change("many", tree.blob)]), m.NameResults))
    return session


MANY = build(CutKind.FIXED, [(data_chunk_id(LARGE), len(LARGE)), (data_chunk_id(SMALL), len(SMALL))]).blob
NAMES = [("bkt", key) for key in ("small", "large", "many", "missing")]
REQUESTS: dict[str, Callable[[bytes], tuple[m.Request, list[bytes]]]] = {
    "StoreChunks": lambda s: (m.StoreChunks(s, [1, 1, 1], [len(NEW), 5, 5]), [NEW, b"new-1", b"new-2"]),
    "PutObjects": lambda s: (m.PutObjects([len(NEW), 5, 0], [change("a"), change("b"), change("c")]), [NEW, b"new-1"]),
    "Offer": lambda s: (m.Offer(s, [data_chunk_id(LARGE), data_chunk_id(NEW)]), []),
    "Commit": lambda s: (m.Commit(s, [change("again", MANY), change("two", data_chunk_id(SMALL))]), []),
    "OpenObjects": lambda s: (m.OpenObjects(NAMES), []),
    "ReadChunks": lambda s: (m.ReadChunks([data_chunk_id(LARGE), data_chunk_id(SMALL)], [0, 0], [0, 0]), []),
    "DeleteNames": lambda s: (m.DeleteNames(NAMES), []),
    "Rename": lambda s: (m.Rename("bkt", "small", "other", "moved", create_bucket=True), []),
    "Status": lambda s: (m.Status(), []),
}


async def nothing_held(store: Store, client: EmbeddedEngine) -> None:
    assert store.buffers.in_use == 0
    assert in_flight(store) == 0
    assert store.references.statistics()["leases"] == 0
    with trio.fail_after(1000):
        for _ in range(2):
            session = await session_of(client)
            await store_chunks(client, session, [NEW, LARGE, b"new-1"])
        await put(client, "after", NEW)
    assert (await fsck(client))["damage"] == 0


@pytest.mark.parametrize("name", [*REQUESTS, "StoreChunks, written ahead", "PutObjects, written ahead"])
def test_a_request_may_be_cancelled_at_each_of_its_waits(name: str) -> None:
    request, _, ahead = name.partition(", ")
    sizes = replace(SMALL_SIZES, write_ahead_bytes=64 * KIB) if ahead else SMALL_SIZES
    ended = False
    delay = 0

    async def main() -> None:
        nonlocal ended
        async with simulated_store(sizes=sizes) as store:
            client = client_of(store)
            message, body = REQUESTS[request](await prepared(client))
            replies: list[Reply] = []

            async def call() -> None:
                replies.append(await client.call(message, body))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            ended = bool(replies)
            for reply in replies:
                reply.body.release()
                if isinstance(reply.message, m.OpenResults):
                    leases = [result.opened.lease for result in reply.message.results if result.opened]
                    await ask(client, m.CloseLeases(leases), m.Done)
            await nothing_held(store, client)

    while not ended:
        run_seeded(main, delay, clock=MockClock(autojump_threshold=0))
        delay += 1
        assert delay < 500


def test_a_source_may_be_cancelled_and_closed_at_each_wait(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(NEW)
    before = open_descriptors()
    ended = False
    delay = 0

    async def main() -> None:
        nonlocal ended
        async with simulated_store() as store:
            client = EmbeddedEngine(client_of(store)._service)
            session = await session_of(client)
            stored: list[bytes] = []

            async def put_from_source(descriptor: int) -> None:
                reply = await client.call(m.SourceOpen(), (), [descriptor])
                assert isinstance(reply.message, m.SourceOpened)
                request = m.StoreFromSource(session, reply.message.source, [0, 70_000], [70_000, 1000])
                stored.extend((await ask(client, request, m.Stored)).chunks)

            descriptor = os.open(tmp_path / "source", os.O_RDONLY)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put_from_source, descriptor)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            os.close(descriptor)
            ended = bool(stored)
            await nothing_held(store, client)
            await client.aclose()

    while not ended:
        run_seeded(main, delay, clock=MockClock(autojump_threshold=0))
        delay += 1
        assert delay < 500
    assert open_descriptors() <= before


@pytest.mark.parametrize("name", ["StoreSlots", "PutSlots"])
def test_a_request_about_lent_memory_may_be_cancelled_at_each_of_its_waits(name: str) -> None:
    before = open_descriptors()
    ended = False
    delay = 0

    async def main() -> None:
        nonlocal ended
        async with simulated_store() as store:
            client = EmbeddedEngine(client_of(store)._service)
            session = await session_of(client)
            answers: list[Reply] = []

            async def put_from_memory(descriptor: int) -> None:
                reply = await client.call(m.LendMemory(len(NEW)), (), [descriptor])
                assert isinstance(reply.message, m.MemoryLent)
                slots = reply.message.memory, [0, 70_000], [70_000, 1000]
                request = (
                    m.StoreSlots(session, *slots)
                    if name == "StoreSlots"
                    else m.PutSlots(*slots, [change("a"), change("b")])
                )
                answers.append(await client.call(request))

            descriptor = os.memfd_create("of a client")
            os.write(descriptor, NEW)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(put_from_memory, descriptor)
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            os.close(descriptor)
            ended = bool(answers)
            await nothing_held(store, client)
            await client.aclose()
            assert store.lent.statistics()["count"] == 0

    while not ended:
        run_seeded(main, delay, clock=MockClock(autojump_threshold=0))
        delay += 1
        assert delay < 500
    assert open_descriptors() <= before


def test_a_payload_that_fails_takes_its_request_along_and_nothing_else() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await prepared(client)
            session = await session_of(client)
            store_both = m.StoreChunks(session, [1, 1], [len(NEW), len(NEW) - 1])
            waiter: list[object] = []

            async def other() -> None:
                with pytest.raises((DiskFailed, StoreReadOnly)):
                    waiter.append(await client.call(store_both, [NEW, NEW[1:]]))

            disk.fail_next("sync_data", DiskFailed("planted"), path=".large")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                nursery.start_soon(other)
            assert waiter == []
            assert store.buffers.in_use == 0
            assert in_flight(store) == 0

    run(main)


def test_a_record_that_cannot_be_read_keeps_nobody_waiting_for_its_request() -> None:
    """The first chunk of the request is claimed, the second is not read because of damage in the index."""

    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            session = await session_of(client)
            bad = chunk_key(data_chunk_id(b"bad"))
            get = TableView.get

            def damaged(self: TableView, table: Table, key: bytes) -> bytes | None:
                if key == bad:
                    raise IndexDamaged("planted")
                return get(self, table, key)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TableView, "get", damaged)
                with pytest.raises(IndexDamaged):
                    await store_chunks(client, session, [NEW, b"bad"])
            with trio.fail_after(100):
                assert await store_chunks(client, session, [NEW, b"bad"])

    run(main)


def test_a_source_that_shrinks_while_it_is_read_stores_nothing(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(NEW)

    async def main() -> None:
        async with simulated_store() as store:
            client = EmbeddedEngine(client_of(store)._service)
            session = await session_of(client)
            with path.open("rb") as file:
                reply = await client.call(m.SourceOpen(), (), [file.fileno()])
            assert isinstance(reply.message, m.SourceOpened)
            os.truncate(path, 80_000)
            request = m.StoreFromSource(session, reply.message.source, [0, 70_000], [70_000, 20_000])
            with pytest.raises(SourceChanged):
                await client.call(request)
            assert store.buffers.in_use == 0
            await client.aclose()

    run(main)
