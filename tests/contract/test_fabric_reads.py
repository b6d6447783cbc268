"""Reads by RDMA of what the engine's DRAM tier has: the right bytes whatever happens to memory, keys and wire."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
import trio

from engine.fabric import engine_fabric
from lakefs.client.trio.engine import connect_engine
from lakefs.content.verify import Check
from lakefs.errors import InvalidArgument, UnsupportedVersion
from lakefs.get.fetch import locate
from lakefs.ids import ChunkId, data_chunk_id
from lakefs.limits import BOUNCE_BUFFERS, BOUNCE_BYTES, KIB, MIB
from lakefs.transport.fabric import Remote
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIA_FABRIC, MEDIUM_FABRIC, MEDIUM_SEGMENT, MEDIUM_STREAMED
from tests.fabric_rig import KINDS, SLAB, TOKEN, FabricWorld, Run, posted
from tests.simulated_fabric import SimulatedLink, Weather

LENGTHS = [2 * MIB + 5, 4 * MIB, 6 * MIB + 300]
both_kinds = pytest.mark.parametrize("kind", KINDS)


@both_kinds
@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", LENGTHS)
def test_what_the_tier_has_is_read_by_rdma(kind: str, check: Check, length: int, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(length)
        chunks = await world.warm(content)
        async with world.lake(kind, check=check) as lake:
            assert await lake.get("bkt/object") == content
            assert await lake.get("bkt/object") == content
            assert lake.rdma == (2 * len(chunks), 2 * length, "")

    run(body, weather=Weather(loss=0.05, shuffle=True))


@both_kinds
def test_small_reads_open_no_device(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(300 * KIB)
        await world.warm(content)

        def never(name: str) -> Any:
            raise AssertionError("the device was opened")

        async with world.lake(kind, open_fabric=never) as lake:
            assert await lake.get("bkt/object") == content

    run(body)


@both_kinds
def test_once_there_is_a_queue_pair_small_reads_use_it_too(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        large, small = os.urandom(2 * MIB), os.urandom(100 * KIB)
        await world.warm(large)
        await world.warm(small, "bkt/small")
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == large
            assert await lake.get("bkt/small") == small
            assert lake.rdma.chunks == 2

    run(body)


@both_kinds
@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("way", ["spoil", "demote"])
def test_bytes_that_change_during_the_read_are_noticed(kind: str, check: Check, way: str, run: Run) -> None:
    """The cell is another chunk's by the time that the adapter reads it; nothing but the check can tell."""

    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        (chunk,) = await world.warm(content)
        async with world.lake(kind, check=check) as lake:
            assert await lake.get("bkt/object") == content
            world.wire.hold()
            found: list[bytes] = []
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    found.append(await lake.get("bkt/object"))

                nursery.start_soon(read)
                await posted(world)
                getattr(world, way)(chunk)
                world.wire.release()
            assert found == [content]
            assert lake.rdma.chunks == 1, "what was not right was counted as read"

    run(body)


@both_kinds
def test_half_of_a_chunk_that_is_replaced_during_the_read_is_noticed(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        (chunk,) = await world.warm(content)
        async with world.lake(kind, check=Check.NONE) as lake:
            assert await lake.get("bkt/object") == content
            world.wire.hold()
            found: list[bytes] = []
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    found.append(await lake.get("bkt/object"))

                nursery.start_soon(read)
                await posted(world)
                world.wire.release(3)  # of 9 slices
                while any(link.allowed for link in world.wire._links.values() if link.operations):  # noqa: ASYNC110
                    await trio.sleep(0.001)
                world.demote(chunk)
                world.wire.release()
            assert found == [content]

    run(body)


@both_kinds
def test_a_queue_pair_that_fails_is_made_anew_once_then_bytes_come_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == content
            break_links(world)
            assert await lake.get("bkt/object") == content
            assert lake.rdma == (2, 4 * MIB, ""), "the chunk was READ again, over another queue pair"
            break_links(world)
            for _ in range(2):
                assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 2
            assert "RDMA" in lake.rdma.reason

    run(body)


def break_links(world: FabricWorld) -> None:
    """Put the queue pairs of the wire in the state of errors, as an adapter does by itself."""
    with world.wire.changed:
        for link in world.wire._links.values():
            link.has_failed = True


@both_kinds
def test_a_wire_that_is_cut_in_the_middle_of_a_read_leaves_the_way_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(6 * MIB)
        await world.warm(content)
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == content
            world.wire.cut()
            assert await lake.get("bkt/object") == content
            assert await lake.get("bkt/object") == content
            assert lake.rdma.reason
            chunks = lake.rdma.chunks
            world.wire.mend()
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == chunks, "the connection was to stay with TCP"

    run(body)


@both_kinds
def test_without_a_device_on_either_side_bytes_come_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind, open_fabric=lambda name: "no RDMA device") as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma == (0, 0, "no RDMA device")

    async def engine_has_none(world: FabricWorld) -> None:
        def never(name: str) -> Any:
            raise AssertionError("the device was opened, though the engine has none")

        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind, open_fabric=never) as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 0

    run(body)
    run(engine_has_none, has_device=False)


@both_kinds
def test_connections_beyond_the_queue_pairs_go_over_tcp(kind: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(engine_fabric, "FABRIC_LINKS_MAX", 2)

    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind) as one, world.lake(kind) as two:
            for lake in (one, two):
                assert await lake.get("bkt/object") == content
                assert lake.rdma.chunks == 1
            async with world.lake(kind) as three:
                assert await three.get("bkt/object") == content
                assert three.rdma.chunks == 0
                assert "queue pairs are in use" in three.rdma.reason

    run(body)


@both_kinds
def test_an_adapter_without_queue_pairs_is_no_error(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 0
            assert "no more queue pairs" in lake.rdma.reason

    run(body, links_max=0)


@both_kinds
def test_slabs_that_may_not_be_registered_are_read_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await world.warm(content)
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 0
        assert "may be locked" in world.fabric.statistics()["reason"]

    run(body, registered_bytes_max=64 * KIB)


@both_kinds
def test_grants_of_a_lost_connection_are_not_used_with_the_next_one(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(6 * MIB)
        await world.warm(content)
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/object") == content
            steps = lake.lake._driver.steps
            opened = await lake.run(steps.open("bkt/object"))
            chunks = [piece.chunk for piece in opened.pieces]
            assert all(grant.medium == MEDIUM_FABRIC for grant in opened.grants.values())
            for connection in list(world.server._connections):
                connection.close()
            read = lake.rdma.chunks
            assert await lake.get("bkt/object") == content  # connects anew, with another queue pair
            assert lake.rdma.chunks > read
            await lake.run(locate(steps.access(None), opened, chunks))
            link = lake.fabric.link
            assert link is not None
            assert not any(link.may_read(grant) for grant in opened.grants.values())

    run(body)


def test_only_clients_with_a_queue_pair_that_ask_for_it_get_grants_to_read(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        chunks: list[bytes] = list(await world.warm(os.urandom(2 * MIB)))
        other = world.wire.fabric()
        async with connect_engine(world.address, token=TOKEN) as engine:
            assert engine.hello.features & m.FEATURE_FABRIC
            plain = await media(engine, chunks, MEDIA_FABRIC)
            assert plain in ({MEDIUM_SEGMENT}, {MEDIUM_STREAMED})
            link = other.open_link(Remote.READ)
            await engine.call(m.FabricOpen(link.end))
            assert await media(engine, chunks, 0) == plain
            assert await media(engine, chunks, MEDIA_FABRIC) == {MEDIUM_FABRIC}
            opened = (await engine.call(m.OpenObjects([("bkt", "object")], media=MEDIA_FABRIC))).message
            assert isinstance(opened, m.OpenResults)
            assert opened.results[0].opened is not None
            assert [grant.medium for grant in opened.results[0].opened.grants] == [MEDIUM_FABRIC]
            assert world.fabric.statistics()["queue_pairs"] == 1
            await engine.call(m.FabricOpen(other.open_link(Remote.READ).end))
            assert world.fabric.statistics()["queue_pairs"] == 1, "the second replaces the first"

    run(body)


async def media(engine: Any, chunks: list[bytes], asked: int) -> set[int]:
    located = (await engine.call(m.Locate(chunks, asked))).message
    assert isinstance(located, m.Located)
    return {grant.medium for grant in located.grants}


def test_a_client_reaches_slabs_and_nothing_else_and_writes_nothing(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        (chunk,) = await world.warm(os.urandom(2 * MIB))
        async with world.lake("trio") as lake:
            assert len(await lake.get("bkt/object")) == 2 * MIB
            engine = world.fabric._fabric
            assert engine is not None
            rights = {region.remote for region in engine.regions.values()}  # type: ignore[attr-defined]
            assert rights <= {Remote.READ, Remote.NONE}
            links = engine.links  # type: ignore[attr-defined]
            assert [link.peer_may for link in links if isinstance(link, SimulatedLink)] == [Remote.READ]
        assert chunk in world.tier

    run(body)


BROKEN_ENDS: list[dict[str, Any]] = [
    {"kind": "iwarp"},
    {"kind": "token ring"},
    {"queue_pair": 0},
    {"queue_pair": 1 << 24},
    {"gid": b""},
    {"gid": bytes(16)},
    {"lid": -1},
    {"mtu_bytes": 1500},
    {"first_packet": 1 << 24},
    {"reads_max": 256},
]


@pytest.mark.parametrize("change", BROKEN_ENDS, ids=str)
def test_an_end_that_cannot_be_is_refused_and_leaves_nothing(change: dict[str, Any], run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        end = world.wire.fabric().open_link(Remote.READ).end
        async with connect_engine(world.address, token=TOKEN) as engine:
            with pytest.raises(InvalidArgument):
                await engine.call(m.FabricOpen(msgspec.structs.replace(end, **change)))
            assert world.fabric.statistics()["queue_pairs"] == 0
            assert not world.fabric._fabric.links  # type: ignore[union-attr]
            await engine.call(m.FabricOpen(end))

    run(body)


def test_an_engine_without_a_device_says_so(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        end = world.wire.fabric().open_link(Remote.READ).end
        async with connect_engine(world.address, token=TOKEN) as engine:
            assert not engine.hello.features & m.FEATURE_FABRIC
            with pytest.raises(UnsupportedVersion, match="no device"):
                await engine.call(m.FabricOpen(end))
            status = (await engine.call(m.Status())).message
            assert isinstance(status, m.StatusReply)
            assert json.loads(status.status_json)["rdma"] == {"state": "off", "reason": "no device"}

    run(body, has_device=False)


def test_many_open_requests_at_once_leave_one_queue_pair_and_none_behind_the_connection(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        other = world.wire.fabric()
        async with connect_engine(world.address, token=TOKEN) as engine, trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(engine.call, m.FabricOpen(other.open_link(Remote.READ).end))
        engine_side = world.fabric._fabric
        assert engine_side is not None
        while world.fabric.statistics()["queue_pairs"]:  # noqa: ASYNC110 - closed behind the connection
            await trio.sleep(0.001)
        assert not engine_side.links  # type: ignore[attr-defined]

    run(body)


def test_the_engine_registers_no_more_than_the_tier_and_the_buffers(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        for number in range(3):
            await world.warm(os.urandom(4 * MIB), f"bkt/{number}")
        async with world.lake("trio") as lake:
            for number in range(3):
                await lake.get(f"bkt/{number}")
        assert world.fabric.statistics()["registered_bytes"] == world.tier.arena.memory_bytes > SLAB
        assert BOUNCE_BUFFERS * BOUNCE_BYTES <= 64 * MIB

    run(body)


def test_a_damaged_cell_is_told_from_a_damaged_disk(run: Run) -> None:
    """The tier's memory was changed behind the engine's back: the client reads the right bytes over TCP."""

    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        (chunk,) = await world.warm(content)
        assert chunk == data_chunk_id(content)
        world.spoil(ChunkId(chunk))
        async with world.lake("trio") as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 0

    run(body)
