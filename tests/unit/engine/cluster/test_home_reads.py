"""Values that homes send for a load: the memory that they are received into, and the check before they are copied."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack

import msgspec
import pytest
import trio

from engine.head.head_tier import InSlab
from engine.head.home_reads import sent_parts
from engine.head.load_memory import LoadMemory
from engine.members.ports import Got
from engine.process.embedded import EmbeddedEngine
from lakefs.content.verify import granule_crcs
from lakefs.errors import SpaceNotFound
from lakefs.host.buffers import BUFFER_BYTES
from lakefs.ids import Buffer, data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Body, Reply
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_keyed import slots_of
from tests.store_rig import ask
from tests.unit.engine.cluster.keyed_rig import KeyedHead, KeyedLake, in_keyed_lake
from tests.unit.engine.cluster.stripe_rig import Fault

ROOM = 4 * MIB
VALUES = {b"key %d" % number: bytes([number]) * (70 * KIB + number) for number in range(24)}


class Loader:
    """A client of a head that has lent memory, and a space with values."""

    def __init__(self, lake: KeyedLake, head: KeyedHead, client: EmbeddedEngine, space: int) -> None:
        self.lake = lake
        self.head = head
        self.memory = head.head.parts.load_memory
        self.space = space
        self._client = client
        self._lent = self._descriptor = 0

    async def lend(self, size_bytes: int) -> None:
        self._lent, _, self._descriptor = await slots_of(self._client, [b""], size_bytes)

    async def close(self) -> None:
        await self._client.aclose()
        os.close(self._descriptor)

    async def load(self, values: Mapping[bytes, bytes], room: int = 128 * KIB) -> list[bool]:
        """Load values into slots of `room` bytes; return for each if it was loaded: then it is right."""
        offsets = [index * room for index in range(len(values))]
        loaded = await ask(self._client, m.KeyedLoad(self._lent, self.space, list(values), offsets), m.KeyedLoaded)
        there = [count > 0 for count in loaded.counts]
        assert loaded.crcs == [
            granule_crcs(value) for value, is_in in zip(values.values(), there, strict=True) if is_in
        ]
        for offset, value, is_in in zip(offsets, values.values(), there, strict=True):
            assert not is_in or os.pread(self._descriptor, len(value), offset) == value
        return there

    async def refuse(self) -> None:
        await refused(self._client, SpaceNotFound, m.KeyedLoad(self._lent, self.space, [b"k"], [0]))


def in_loading(body: Callable[[Loader], Awaitable[None]], values: Mapping[bytes, bytes] = VALUES) -> None:
    """Run with values that are stored, and homes that were asked before; at the end no buffer is in use."""

    async def run(lake: KeyedLake) -> None:
        head, _ = lake.heads
        space = await head.open()
        await head.put(space, values)
        loader = Loader(lake, head, lake.names.client(descriptors=True), space)
        await loader.lend(24 * MIB)
        await body(loader)
        assert loader.memory.in_use == 0, "a buffer was not given back"
        await loader.close()

    in_keyed_lake(run)


def test_loads_use_the_same_memory_again() -> None:
    async def body(loader: Loader) -> None:
        for _ in range(20):
            assert all(await loader.load(VALUES))
            assert loader.memory.in_use == 0
        assert loader.memory.made <= len(loader.lake.rig.members.clients)

    in_loading(body)


def test_loads_without_a_buffer_or_longer_than_one_use_other_memory() -> None:
    async def body(loader: Loader) -> None:
        with ExitStack() as taken:
            while (buffer := loader.memory.try_take()) is not None:
                taken.callback(buffer.release)
            assert all(await loader.load(VALUES))
        home = next(iter(loader.lake.rig.members.clients))
        keys = loader.lake.keys_of(loader.space, home, len(VALUES) + 4)[-4:]
        long = {key: bytes([index]) * (3 * MIB) for index, key in enumerate(keys)}
        assert sum(map(len, long.values())) > BUFFER_BYTES
        await loader.head.put(loader.space, long)
        assert all(await loader.load(long, 4 * MIB))

    in_loading(body)


def test_a_cancelled_load_keeps_its_buffers_until_the_homes_have_answered() -> None:
    async def body(loader: Loader) -> None:
        homes = list(loader.lake.rig.members.clients)
        loader.head.lose(homes[0], fault=Fault.ANSWER_LATE)  # 2 s
        with trio.move_on_after(1) as scope:
            await loader.load(VALUES)
        assert scope.cancelled_caught
        assert loader.memory.in_use == 1, "the answer may still be received into it"
        await trio.sleep(0.5)
        assert loader.memory.in_use == 1
        await trio.sleep(1)
        assert loader.memory.in_use == 0

    in_loading(body)


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.AWAY, Fault.LYING, Fault.SHORT, Fault.SILENT])
def test_keys_of_a_home_that_fails_are_misses_and_others_are_loaded(fault: Fault) -> None:
    async def body(loader: Loader) -> None:
        lost = next(iter(loader.lake.rig.members.clients))
        loader.head.lose(lost, fault=fault)
        expected = [loader.lake.home(loader.space, key) != lost for key in VALUES]
        assert await loader.load(VALUES) == expected
        assert loader.memory.in_use == 0

    in_loading(body)


def test_a_part_that_is_not_its_chunk_is_read_anew_and_all_else_is_loaded_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first answer has wrong bytes with their right checksums."""

    async def body(loader: Loader) -> None:
        members = loader.head.members
        call = members.call

        async def lying(member: object, request: m.Request, *args: object, **options: object) -> Reply:
            reply = await call(member, request, *args, **options)  # type: ignore[arg-type]
            if not isinstance(reply.message, m.KeyedFound):
                return reply
            body = bytearray(reply.body.joined())
            body[100] ^= 1
            crcs = granule_crcs(body[: reply.message.pieces[0].length])
            pieces = [msgspec.structs.replace(reply.message.pieces[0], crcs=crcs), *reply.message.pieces[1:]]
            reply.body.release()
            return Reply(msgspec.structs.replace(reply.message, pieces=pieces), Body([body]))

        monkeypatch.setattr(members, "call", lying)
        loader.head.sent()
        assert all(await loader.load(VALUES))
        homes = len(loader.lake.rig.members.clients)
        assert loader.head.sent() == {"KeyedRead": homes, "ReadChunks": homes}, "only the first part of each again"

    in_loading(body)


def test_a_home_that_has_lost_its_spaces_is_given_them_and_asked_again() -> None:
    async def body(loader: Loader) -> None:
        members = loader.lake.rig.members
        lost = next(iter(members.clients))
        await ask(members.clients[lost], m.SpaceRemove("space"), m.Done)
        await trio.sleep(20)  # until upkeep has removed the values
        loader.head.sent()
        expected = [loader.lake.home(loader.space, key) != lost for key in VALUES]
        assert await loader.load(VALUES) == expected
        assert loader.head.sent()["KeyedRead"] == len(members.clients) + 1
        await ask(loader.head.client, m.SpaceRemove("space"), m.Done)
        await loader.refuse()

    in_loading(body)


# --- an answer's parts ----------------------------------------------------------------------------------


def found_of(payloads: list[bytes], chunks: list[bytes] | None = None) -> m.KeyedFound:
    pieces = [m.ReadPiece(0, len(payload), granule_crcs(payload)) for payload in payloads]
    ids = [data_chunk_id(payload) for payload in payloads]
    return m.KeyedFound([1] * len(ids), [*(chunks or ids)], [len(payload) for payload in payloads], pieces)


PAYLOADS = [b"one" * 30_000, b"two" * 10, b"three" * 50_000]


def test_parts_in_the_memory_are_named_by_their_place_and_others_are_not() -> None:
    memory = LoadMemory(BUFFER_BYTES * 2)
    first, second = memory.try_take(), memory.try_take()
    assert first is not None
    assert second is not None
    joined: Buffer = b"".join(PAYLOADS)
    second.view[: len(joined)] = joined
    for body, is_placed in ((second.view[: len(joined)], True), (memoryview(bytes(joined)), False)):
        parts = dict(sent_parts(found_of(PAYLOADS), Body([body]), memory))
        for payload in PAYLOADS:
            got = parts[data_chunk_id(payload)].checked()
            assert isinstance(got, InSlab if is_placed else Got)
            assert (bytes(got.payload), got.crcs) == (payload, granule_crcs(payload))
            if isinstance(got, InSlab):
                assert os.pread(got.descriptor, len(payload), got.at) == payload
    first.release()
    second.release()


@pytest.mark.parametrize("wrong", ["short", "long", "bytes", "id", "checksums", "more pieces"])
def test_an_answer_that_is_not_what_was_asked_for_gives_no_part(wrong: str) -> None:
    memory, body, found = LoadMemory(BUFFER_BYTES), b"".join(PAYLOADS), found_of(PAYLOADS)
    bad = {data_chunk_id(payload) for payload in PAYLOADS}
    if wrong == "short":
        body = body[:-1]
    elif wrong == "long":
        body += b"?"
    elif wrong == "more pieces":
        found = msgspec.structs.replace(found, chunks=found.chunks[:2], lengths=found.lengths[:2])
    elif wrong == "bytes":
        body, bad = b"?" + body[1:], {data_chunk_id(PAYLOADS[0])}
    elif wrong == "id":
        found = found_of(PAYLOADS, [data_chunk_id(b"?"), *found.chunks[1:]])
        bad = {data_chunk_id(PAYLOADS[0]), data_chunk_id(b"?")}
    else:
        found.pieces[1] = msgspec.structs.replace(found.pieces[1], crcs=b"none")
        bad = {data_chunk_id(PAYLOADS[1])}
    parts = dict(sent_parts(found, Body([body]), memory))
    good = {chunk for chunk, part in parts.items() if part.checked() is not None}
    assert good == {data_chunk_id(payload) for payload in PAYLOADS} - bad
