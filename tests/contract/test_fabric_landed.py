"""Reads by RDMA of what is not in the DRAM tier, and many objects put by it: the right bytes, whatever happens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from lakefs.content.verify import Check
from lakefs.errors import ChunkDamaged, KeyNotFound, LakeError
from lakefs.get import landed
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, CLIENT_LANDINGS, KIB, MIB
from lakefs.transport.fabric import Remote
from lakefs.trees.put_tree import PutOptions, put_tree
from lakefs.trees.walk import Fate, Observer, Walk, WalkOptions
from tests.fabric_rig import KINDS, FabricWorld, RiggedLake, Run, posted
from tests.simulated_fabric import SimulatedFabric, SimulatedLink, Weather

both_kinds = pytest.mark.parametrize("kind", KINDS)


class Posted:
    """Counts the bytes that links have written and asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.written = self.read = 0
        begin = SimulatedLink.begin

        def counted(link: SimulatedLink, operation: Any) -> None:
            if operation.is_write:
                self.written += operation.length
            else:
                self.read += operation.length
            begin(link, operation)

        patch.setattr(SimulatedLink, "begin", counted)


@pytest.fixture
def bytes_posted(monkeypatch: pytest.MonkeyPatch) -> Posted:
    return Posted(monkeypatch)


async def stored(world: FabricWorld, content: bytes, name: str = "bkt/object") -> None:
    """Store content over TCP; the tier has none of it."""
    async with world.lake("trio", open_fabric=lambda name: "none here") as lake:
        await lake.put(name, content)


async def is_got(lake: RiggedLake, content: bytes) -> None:
    """Check that an object is read right."""
    assert await lake.get("bkt/object") == content


def landings_of(lake: RiggedLake) -> list[Any]:
    """Return the regions that the engine may write to."""
    device = lake.fabric._fabric
    assert isinstance(device, SimulatedFabric)
    return [region for region in list(device.regions.values()) if Remote.WRITE in region.remote]


@both_kinds
@pytest.mark.parametrize("check", list(Check))
@pytest.mark.parametrize("length", [MIB, 4 * MIB, 9 * MIB + 1])
def test_what_is_on_disk_alone_is_got_by_rdma(
    kind: str, check: Check, length: int, bytes_posted: Posted, run: Run
) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(length)
        await stored(world, content)
        async with world.lake(kind, check=check) as lake:
            assert await lake.get("bkt/object") == content
            assert bytes_posted.written == length
            assert bytes_posted.read == 0
            assert lake.rdma == (-(-length // CHUNK_BYTES), length, "")
            assert len(landings_of(lake)) <= CLIENT_LANDINGS

    run(body, weather=Weather(loss=0.02, shuffle=True))


@both_kinds
def test_what_is_got_often_so_comes_into_the_tier(kind: str, bytes_posted: Posted, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        await stored(world, content)
        async with world.lake(kind) as lake:
            for _ in range(3):
                assert await lake.get("bkt/object") == content
            await world.is_admitted(data_chunk_id(content))
            before = bytes_posted.read
            assert await lake.get("bkt/object") == content
            assert bytes_posted.read == before + len(content)

    run(body)


@both_kinds
def test_many_chunks_are_got_at_once_each_to_its_own_memory(kind: str, bytes_posted: Posted, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(50_000 + 1_000 * number) for number in range(60)]
        for number, content in enumerate(contents):
            await stored(world, content, f"bkt/{number}")
        async with world.lake(kind) as lake:
            await lake.put("bkt/opens", os.urandom(MIB))
            assert await lake.call("get_many", [f"bkt/{number}" for number in range(60)]) == contents
            assert bytes_posted.written > sum(map(len, contents)) / 2

    run(body)


@both_kinds
def test_what_fails_its_check_in_the_landing_is_streamed(kind: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    deliver = landed._deliver

    def spoiled(check: Check, landing: memoryview, *rest: Any) -> Any:
        landing[5] ^= 1
        return deliver(check, landing, *rest)

    monkeypatch.setattr(landed, "_deliver", spoiled)

    async def body(world: FabricWorld) -> None:
        for check in (Check.BLAKE3, Check.CRC32C):
            content = os.urandom(6 * MIB)
            await stored(world, content)
            async with world.lake(kind, check=check) as lake:
                assert await lake.get("bkt/object") == content
                assert lake.rdma == (0, 0, ""), "what was not right was counted"

    run(body)


@both_kinds
def test_a_chunk_that_is_damaged_on_disk_is_damaged(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(6 * MIB)
        await stored(world, content)
        world.asked.damage(data_chunk_id(content[:CHUNK_BYTES]))
        async with world.lake(kind) as lake:
            with pytest.raises(ChunkDamaged, match="bkt/object"):
                await lake.get("bkt/object")
            assert len(landings_of(lake)) <= CLIENT_LANDINGS

    run(body)


@both_kinds
def test_a_wire_that_is_cut_in_a_get_leaves_the_way_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(9 * MIB) for _ in range(3)]
        for number, content in enumerate(contents):
            await stored(world, content, f"bkt/{number}")
        async with world.lake(kind) as lake:
            assert await lake.get("bkt/0") == contents[0]
            world.wire.hold()
            async with trio.open_nursery() as nursery:

                async def get() -> None:
                    assert await lake.get("bkt/1") == contents[1]

                nursery.start_soon(get)
                await posted(world)
                world.wire.cut()
                world.wire.release()
            assert await lake.get("bkt/2") == contents[2]
            assert lake.rdma.reason
            assert not landings_of(lake), "the engine may write to memory of requests that failed"

    run(body)


@both_kinds
def test_a_connection_lost_in_a_get_writes_no_more_and_the_bytes_come_over_the_next_one(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(9 * MIB)
        await stored(world, content)
        async with world.lake(kind) as lake:
            await lake.put("bkt/opens", os.urandom(MIB))
            world.wire.hold()
            found: list[bytes] = []
            async with trio.open_nursery() as nursery:

                async def get() -> None:
                    found.append(await lake.get("bkt/object"))

                nursery.start_soon(get)
                await posted(world)
                for connection in list(world.server._connections):
                    connection.close()
                await trio.sleep(0.05)
                world.wire.release()
            assert found == [content]
            assert await lake.get("bkt/object") == content
            assert not lake.rdma.reason

    run(body)


def test_a_cancelled_get_gives_its_landings_up_and_the_next_one_goes_by_rdma(run: Run) -> None:
    """Nothing is checked: a late WRITE of what was cancelled would be seen."""

    async def body(world: FabricWorld) -> None:
        async with world.lake("trio", check=Check.NONE) as lake:
            await lake.put("bkt/opens", os.urandom(MIB))
            for turn in range(3):
                cancelled, content = os.urandom(9 * MIB), os.urandom(9 * MIB)
                await stored(world, cancelled, "bkt/cancelled")
                await stored(world, content)
                world.wire.hold()
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(lake.get, "bkt/cancelled")
                        await posted(world)
                        scope.cancel()
                assert turn or not landings_of(lake), "the engine may write to memory that is used again"
                before = lake.rdma.bytes
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(is_got, lake, content)
                    await trio.sleep(0.05)
                    world.wire.release()
                assert lake.rdma.bytes == before + len(content), lake.rdma.reason
        assert not lake.rdma.reason

    run(body)


@both_kinds
def test_landings_that_may_not_be_registered_are_streamed_past(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(9 * MIB)
        await stored(world, content)
        opens = lambda name: world.wire.fabric(registered_bytes_max=MIB)  # noqa: E731
        async with world.lake(kind, open_fabric=opens) as lake:
            assert await lake.get("bkt/object") == content
            assert lake.rdma.bytes == 0
            assert "registered" in lake.rdma.reason

    run(body)


def test_gets_at_once_share_the_landings_and_mix_nothing(run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = [os.urandom(9 * MIB + number) for number in range(6)]
        for number, content in enumerate(contents):
            await stored(world, content, f"bkt/{number}")
        async with world.lake("trio", check=Check.NONE) as lake:
            await lake.put("bkt/opens", os.urandom(MIB))
            async with trio.open_nursery() as nursery:

                async def get(number: int) -> None:
                    assert await lake.get(f"bkt/{number}") == contents[number]

                for number in range(6):
                    nursery.start_soon(get, number)
            assert lake.rdma.bytes > 0
            assert len(landings_of(lake)) <= CLIENT_LANDINGS

    run(body, weather=Weather(delay_s=0.001))


# --- many objects put at once ----------------------------------------------------------------------------


@both_kinds
def test_many_objects_are_put_by_rdma(kind: str, bytes_posted: Posted, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = {f"bkt/{number}": os.urandom(number * 17_000) for number in range(100)}
        async with world.lake(kind) as lake:
            await lake.call("put_many", list(contents.items()), create_bucket=True)
            assert bytes_posted.read == lake.rdma.bytes > sum(map(len, contents.values())) - 2 * MIB
        async with world.lake("trio", open_fabric=lambda name: "none") as other:
            assert {name: await other.get(name) for name in contents} == contents
        assert not world.held_bytes

    run(body, weather=Weather(loss=0.02, shuffle=True))


@both_kinds
def test_one_name_that_is_refused_of_many_fails_alone(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        async with world.lake(kind) as lake:
            await lake.put("bkt/first", content)
            with pytest.raises(LakeError):
                await lake.call("put_many", [("bkt/a", content), ("missing/b", content), ("bkt/c", content)])
            assert await lake.get("bkt/a") == await lake.get("bkt/c") == content
            with pytest.raises(KeyNotFound):
                await lake.get("bkt/b")

    run(body)


@both_kinds
def test_a_wire_that_is_cut_in_many_puts_leaves_the_way_over_tcp(kind: str, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = {f"bkt/{number}": os.urandom(300_000) for number in range(60)}
        async with world.lake(kind) as lake:
            await lake.put("bkt/first", os.urandom(2 * MIB))
            world.wire.cut()
            await lake.call("put_many", list(contents.items()))
            assert {name: await lake.get(name) for name in contents} == contents
            assert lake.rdma.reason
        assert not world.held_bytes

    run(body)


@both_kinds
def test_a_folder_of_small_files_is_put_by_rdma(kind: str, tmp_path: Path, bytes_posted: Posted, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        contents = {f"{number:02}": os.urandom(200 * KIB) for number in range(20)}
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        async with world.lake(kind) as lake:
            await lake.put("bkt/first", b"")
            walk = Walk(str(tmp_path), "tree/", WalkOptions())
            totals = await lake.run(put_tree(lake.lake._driver.steps, [walk], "bkt", PutOptions(), Observer()))
            assert totals.files[Fate.STORED] == 20
            assert bytes_posted.read >= sum(map(len, contents.values())) - MIB
            assert {name: await lake.get(f"bkt/tree/{name}") for name in contents} == contents

    run(body)
