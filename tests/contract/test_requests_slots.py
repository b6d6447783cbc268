"""Requests that store from lent memory: what is stored is what was copied; on every kind of client."""

from __future__ import annotations

import os

import pytest

from engine.memory.lent_memory import LentMemory, read_into
from engine.requests import slots as storing
from lakefs.errors import InvalidArgument, RequestTooLarge, SessionLost, SourceChanged
from lakefs.ids import EMPTY_CHUNK, data_chunk_id
from lakefs.limits import CHUNK_BYTES
from lakefs.wire import messages as m
from tests.contract.engines import Body, Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_memory import lent, memory_of
from tests.store_rig import ask, change, fsck, good, put, read, session_of

CONTENTS = [b"a", b"b" * 65_535, b"c" * 65_536, b"d" * 1_100_000, b"e" * CHUNK_BYTES, b"a"]
LENGTHS = [len(content) for content in CONTENTS]
OFFSETS = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
BYTES = sum(LENGTHS)


def on_a_socket(kind: Kind, body: Body) -> None:
    """Run the body on kinds that can lend memory."""

    async def checked(engine: Engine) -> None:
        if engine.client.carries_descriptors:
            await body(engine)

    kind.run(checked)


def fill(descriptor: int) -> None:
    os.pwrite(descriptor, b"".join(CONTENTS), 0)


def test_slots_are_stored_as_chunks(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        with memory_of(BYTES) as descriptor:
            fill(descriptor)
            memory = await lent(client, descriptor, size_bytes=BYTES)
        request = m.StoreSlots(session, memory, OFFSETS, LENGTHS)
        stored = await ask(client, request, m.Stored)
        assert stored.chunks == [data_chunk_id(content) for content in CONTENTS]
        assert stored.fresh == [True] * 5 + [False]
        assert await ask(client, request, m.Stored) == m.Stored(stored.chunks, [False] * 6)
        for content in CONTENTS:
            assert await read(client, data_chunk_id(content)) == content
        await ask(client, m.ReturnMemory(memory), m.Done)
        await refused(client, SessionLost, request)

    on_a_socket(kind, body)


def test_slots_are_put_under_their_names_in_one_request(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        with memory_of(BYTES) as descriptor:
            fill(descriptor)
            memory = await lent(client, descriptor, size_bytes=BYTES, writable=True)
        names = [change(f"object {index}") for index in range(6)]
        request = m.PutSlots(memory, [*OFFSETS, 7], [*LENGTHS, 0], [*names, change("empty")])
        stats = good(await ask(client, request, m.NameResults))
        assert [stat.blob for stat in stats] == [*map(data_chunk_id, CONTENTS), EMPTY_CHUNK]
        assert [stat.size_bytes for stat in stats] == [*LENGTHS, 0]
        assert (await ask(client, m.StatNames([("bkt", "object 3")]), m.NameResults)).results[0].stat == stats[3]
        for content in CONTENTS:
            assert await read(client, data_chunk_id(content)) == content

    on_a_socket(kind, body)


def test_memory_that_shrinks_fails_its_request_and_nothing_else(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        with memory_of(BYTES) as descriptor:
            fill(descriptor)
            memory = await lent(client, descriptor, size_bytes=BYTES, writable=True)
            os.ftruncate(descriptor, OFFSETS[3] + 5)
        for offsets, lengths in ((OFFSETS, LENGTHS), (OFFSETS[4:5], LENGTHS[4:5]), ([OFFSETS[3]], [6])):
            await refused(client, SourceChanged, m.StoreSlots(session, memory, offsets, lengths))
            changes = [change(f"{offset}") for offset in offsets]
            await refused(client, SourceChanged, m.PutSlots(memory, offsets, lengths, changes))
        if engine.store is not None:
            assert engine.store.buffers.in_use == 0
        await ask(client, m.StoreSlots(session, memory, [0, OFFSETS[3]], [1, 5]), m.Stored)
        await put(client, "after", b"content" * 20_000)
        assert (await fsck(client))["damage"] == 0

    on_a_socket(kind, body)


def test_what_is_written_to_a_slot_meanwhile_changes_nothing_that_was_copied(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_of(BYTES) as descriptor:

        def read_then_change(memory: LentMemory, offset: int, buffer: memoryview) -> None:
            read_into(memory, offset, buffer)
            os.pwrite(memory.descriptor, b"changed", offset)

        monkeypatch.setattr(storing, "read_into", read_then_change)

        async def body(engine: Engine) -> None:
            client = engine.client
            fill(descriptor)
            memory = await lent(client, descriptor, size_bytes=BYTES, writable=True)
            for index in (4, 3):
                request = m.PutSlots(memory, [OFFSETS[index]], [LENGTHS[index]], [change("object")])
                (stat,) = good(await ask(client, request, m.NameResults))
                if engine.store is not None:  # a blocking client's engine is elsewhere
                    assert stat.blob == data_chunk_id(CONTENTS[index])
                assert data_chunk_id(await read(client, stat.blob)) == stat.blob
            assert (await fsck(client))["damage"] == 0

        on_a_socket(kind, body)


def test_slots_that_cannot_be_are_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        session = await session_of(client)
        with memory_of(BYTES) as descriptor:
            memory = await lent(client, descriptor, size_bytes=BYTES)
        odd = [
            ([0, 1], [1]),
            ([-1], [2]),
            ([BYTES], [1]),
            ([0], [BYTES + 1]),
            ([1 << 62], [1]),
            ([0], [-1]),
            ([0], [CHUNK_BYTES + 1]),
        ]
        for offsets, lengths in odd:
            changes = [change("x") for _ in lengths]
            await refused(client, InvalidArgument, m.StoreSlots(session, memory, offsets, lengths))
            await refused(client, InvalidArgument, m.PutSlots(memory, offsets, lengths, changes))
        await refused(client, InvalidArgument, m.StoreSlots(session, memory, [0], [0]))
        await refused(client, InvalidArgument, m.PutSlots(memory, [0], [1], []))
        await refused(client, RequestTooLarge, m.StoreSlots(session, memory, [0] * 5, [CHUNK_BYTES] * 5))
        await refused(client, SessionLost, m.PutSlots(4711, [0], [1], [change("x")]))
        await refused(client, SessionLost, m.StoreSlots(b"x" * 16, memory, [0], [1]))
        if engine.store is not None:
            assert engine.store.buffers.in_use == 0

    on_a_socket(kind, body)


def test_memory_is_lent_to_its_connection_only(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        if engine.store is None:
            return  # this kind has only one connection
        with memory_of(BYTES) as descriptor:
            memory = await lent(engine.client, descriptor, size_bytes=BYTES)
        async with engine.connect() as other:
            await refused(other, SessionLost, m.PutSlots(memory, [0], [1], [change("x")]))

    on_a_socket(kind, body)
