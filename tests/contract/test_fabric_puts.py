"""Puts by RDMA: the engine READs what the client announces, stores what it has READ, and believes nothing else."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import trio

from lakefs.errors import EngineUnreachable, InvalidArgument, KeyNotFound, LakeError, SessionLost
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB
from lakefs.transport.fabric import Remote
from lakefs.wire import messages as m
from tests.fabric_liar import Liar, liar
from tests.fabric_rig import KINDS, FabricWorld, Run, posted
from tests.simulated_fabric import SimulatedFabric, SimulatedLink, Weather

SIZES = (MIB, 4 * MIB, 4 * MIB + 1, 20 * MIB + 7)
both_kinds = pytest.mark.parametrize("kind", KINDS)


class Read:
    """Counts what links have asked for."""

    def __init__(self) -> None:
        self.bytes = 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found = Read()
    begin = SimulatedLink.begin

    def counted(link: SimulatedLink, operation: Any) -> None:
        found.bytes += operation.length if not operation.is_write else 0
        begin(link, operation)

    monkeypatch.setattr(SimulatedLink, "begin", counted)
    return found


@both_kinds
@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_by_rdma_is_what_was_given(kind: str, size: int, read: Read, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(size)
        async with world.lake(kind) as lake:
            await lake.put("bkt/object", content)
            assert read.bytes == lake.rdma.bytes >= size - MIB, "the payload went another way"
        async with world.lake("trio", open_fabric=lambda name: "none") as other:
            assert await other.get("bkt/object") == content
        assert not world.held_bytes

    run(body, weather=Weather(loss=0.02, shuffle=True))


@both_kinds
def test_small_puts_go_in_bodies(kind: str, read: Read, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake(kind) as lake:
            await lake.put("bkt/object", bytes(MIB - 1))
            assert read.bytes == 0
            assert len(await lake.get("bkt/object")) == MIB - 1

    run(body)


@both_kinds
def test_what_the_engine_has_is_not_read_again(kind: str, read: Read, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(8 * MIB)
        async with world.lake(kind) as lake:
            await lake.put("bkt/one", content)
            before = read.bytes
            await lake.put("bkt/two", content)
            assert read.bytes == before

    run(body)


def test_puts_at_once_share_one_memory_and_mix_nothing(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(9 * MIB + number) for number in range(6)]
        async with world.lake("trio") as lake:
            async with trio.open_nursery() as nursery:
                for number, content in enumerate(contents):
                    nursery.start_soon(lake.put, f"bkt/{number}", content)
            for number, content in enumerate(contents):
                assert await lake.get(f"bkt/{number}") == content

    run(body, weather=Weather(delay_s=0.002))


@both_kinds
def test_a_wire_that_is_cut_in_a_put_leaves_the_way_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake(kind) as lake:
            await lake.put("bkt/first", os.urandom(2 * MIB))
            world.wire.cut()
            for number in range(3):
                content = os.urandom(9 * MIB)
                await lake.put(f"bkt/{number}", content)
                assert await lake.get(f"bkt/{number}") == content
            assert lake.rdma.reason
        assert not world.held_bytes

    run(body)


@both_kinds
def test_memory_that_may_not_be_registered_is_sent_in_bodies(kind: str, read: Read, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(9 * MIB)
        opens = lambda name: world.wire.fabric(registered_bytes_max=MIB)  # noqa: E731
        async with world.lake(kind, open_fabric=opens) as lake:
            await lake.put("bkt/object", content)
            assert await lake.get("bkt/object") == content
            assert "registered" in lake.rdma.reason
            assert read.bytes == 0

    run(body)


def test_a_cancelled_put_binds_no_name_later_and_the_next_one_is_whole(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake("trio") as lake:
            await lake.put("bkt/first", os.urandom(2 * MIB))
            world.wire.hold()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(lake.put, "bkt/cancelled", os.urandom(2 * MIB))
                    await posted(world)
                    scope.cancel()
            device = lake.fabric._fabric
            assert isinstance(device, SimulatedFabric)
            readable = [region for region in device.regions.values() if Remote.READ in region.remote]
            assert not readable, "the engine may READ what the next put fills in"
            world.wire.release()
            content = os.urandom(2 * MIB)
            await lake.put("bkt/next", content)
            assert await lake.get("bkt/next") == content
            with pytest.raises(KeyNotFound):
                await lake.get("bkt/cancelled")
        assert not world.held_bytes

    run(body)


@both_kinds
@pytest.mark.parametrize("size", [2 * MIB, 9 * MIB])
def test_a_connection_lost_in_a_put_leaves_the_whole_object_or_none(kind: str, size: int, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with world.lake(kind) as lake:
            await lake.put("bkt/first", os.urandom(2 * MIB))
            content = os.urandom(size)
            is_put = False
            world.wire.hold()
            async with trio.open_nursery() as nursery:

                async def put() -> None:
                    nonlocal is_put
                    with suppress(EngineUnreachable):
                        await lake.put("bkt/object", content)
                        is_put = True

                nursery.start_soon(put)
                await posted(world)
                for connection in list(world.server._connections):
                    connection.close()
                world.wire.release()
            if is_put or await lake.call("exists", "bkt/object"):
                assert await lake.get("bkt/object") == content

    run(body)


# --- clients that lie --------------------------------------------------------------------------------


async def session_of(client: Liar) -> bytes:
    opened = (await client.engine.call(m.SessionOpen())).message
    assert isinstance(opened, m.SessionOpened)
    return opened.session


async def store(client: Liar, session: bytes, offsets: list[int], lengths: list[int], **named: int) -> m.Stored:
    request = m.StoreSlots(session, 0, offsets, lengths, client.named(**named))
    stored = (await client.engine.call(request)).message
    assert isinstance(stored, m.Stored)
    return stored


def test_a_slot_that_changes_during_the_read_is_stored_as_it_was_read(run: Run) -> None:
    """The id names the bytes that were stored, whatever the client does to its memory meanwhile."""

    async def body(world: FabricWorld) -> None:
        async with liar(world) as client:
            await client.connect()
            session = await session_of(client)
            client.memory[:] = os.urandom(MIB)
            found: list[m.Stored] = []
            world.wire.hold()
            async with trio.open_nursery() as nursery:

                async def put() -> None:
                    found.append(await store(client, session, [0, 100], [MIB, 70_000]))

                nursery.start_soon(put)
                await posted(world)
                world.wire.release(2)
                await trio.sleep(0.01)
                client.memory[:] = os.urandom(MIB)
                world.wire.release()
            for chunk in found[0].chunks:
                answer = await client.engine.call(m.ReadChunks([chunk], [0], [0]))
                assert data_chunk_id(answer.body.joined()) == chunk

    run(body)


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (MIB, 1), (MIB - 5, 6), (1 << 62, 1)])
def test_slots_outside_the_memory_are_refused(offset: int, length: int, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with liar(world) as client:
            await client.connect()
            session = await session_of(client)
            with pytest.raises(InvalidArgument):
                await store(client, session, [offset], [length])
            await store(client, session, [0], [MIB])

    run(body)


@pytest.mark.parametrize(
    "way", ["unregisters", "announces too much", "registers for writing", "dies", "names another's"]
)
def test_a_client_that_announces_memory_it_does_not_have_stores_nothing(way: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with liar(world) as client, liar(world) as other:
            await client.connect()
            await other.connect()
            other.memory[:] = os.urandom(MIB)
            session = await session_of(client)
            named: dict[str, int] = {"size_bytes": 4 * MIB}
            if way == "unregisters":
                client.region.close()
            elif way == "registers for writing":
                client.region = client.fabric.register(client.memory, Remote.WRITE)
            elif way == "dies":
                world.wire.kill(client.fabric)
            elif way == "names another's":
                named = {"key": other.region.remote_key, "address": other.region.address}
            length = MIB if way == "names another's" else 4 * MIB
            with pytest.raises(SessionLost):
                await store(client, session, [0], [length], **named)
            assert not world.held_bytes
            await store(other, await session_of(other), [0], [MIB])

    run(body)


def test_put_slots_without_a_queue_pair_or_with_lists_that_do_not_fit_are_refused(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        async with liar(world) as client:
            change = m.NameChange("bkt", "key", b"", m.ObjectAttributes(), create_bucket=True)
            with pytest.raises(SessionLost):
                await client.engine.call(m.PutSlots(0, [0], [10], [change], fabric=client.named()))
            await client.connect()
            for offsets, lengths in (([0, 1], [10]), ([0], []), ([], [10])):
                with pytest.raises(LakeError):
                    await client.engine.call(m.PutSlots(0, offsets, lengths, [change], fabric=client.named()))
            client.memory[:] = os.urandom(MIB)
            await client.engine.call(m.PutSlots(0, [0], [64 * KIB], [change], fabric=client.named()))
            await client.engine.call(m.PutSlots(0, [0], [0], [change], fabric=client.named()))
        async with world.lake("trio") as lake:
            assert await lake.get("bkt/key") == b""

    run(body)
