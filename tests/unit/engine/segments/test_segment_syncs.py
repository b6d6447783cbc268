"""Syncs of segments: shared by all who wrote before, made by a single writer alone, and never counted for more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest
import trio
import trio.testing

from engine.format.extents import Place
from lakefs.errors import StoreFull, StoreReadOnly
from lakefs.host.offload import InlineOffload
from tests.sim.world.disk import SimDisk
from tests.sim.world.segment_world import World, drive

T = TypeVar("T")


def test_appends_of_many_callers_share_syncs() -> None:
    async def body(world: World) -> None:
        await world.store_small([b"first"])
        assert isinstance(world.disk, SimDisk)
        before = world.disk.operation_count
        async with trio.open_nursery() as nursery:
            for tag in range(50):
                nursery.start_soon(world.store_small, [bytes([tag]) * 100])
        assert world.disk.operation_count - before <= 2 * 3, "a write and a sync for each of a few groups"
        await world.check()

    drive(body)


def test_writers_of_large_payloads_share_syncs_that_began_after_their_writes() -> None:
    async def body(world: World) -> None:
        await world.store_large(world.payload(70_000))
        places = [(await world.write_large(world.payload(70_000, tag)))[0] for tag in range(3)]
        assert isinstance(world.disk, SimDisk)
        before = world.disk.operation_count
        async with trio.open_nursery() as nursery:
            for place in places:
                nursery.start_soon(world.segments.large.sync, {place.segment})
        assert world.disk.operation_count == before + 1

    drive(body)


class HeldOffload(InlineOffload):
    """Runs calls inline, but returns from syncs only when the test lets them go."""

    def __init__(self) -> None:
        self.go_on = trio.Event()
        self.syncs = 0

    async def run(self, call: Callable[..., T], *args: object) -> T:
        result = await super().run(call, *args)
        if getattr(call, "__name__", "") == "_sync_blocking":
            self.syncs += 1
            await self.go_on.wait()
        return result


def test_a_sync_that_began_before_a_write_ended_does_not_count_for_it() -> None:
    async def main() -> None:
        offload = HeldOffload()
        disk = SimDisk(1)
        world = World(disk, offload)
        await world.segments.open()
        first, _ = await world.write_large(world.payload(70_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.segments.large.sync, {first.segment})
            await trio.testing.wait_all_tasks_blocked()
            assert offload.syncs == 1
            late = await world.write_large(world.payload(70_000))
            for _ in range(2):
                nursery.start_soon(world.segments.large.sync, {late[0].segment})
            await trio.testing.wait_all_tasks_blocked()
            assert offload.syncs == 1, "one at a time"
            offload.go_on.set()
        assert offload.syncs == 2, "the late write had a sync of its own, and its callers shared it"
        await world.segments.large.sync({first.segment})
        assert offload.syncs == 2, "nothing was written since"

    trio.run(main)


class HeldWriteOffload(InlineOffload):
    """Runs calls inline; the next write to a large segment waits, before it begins or before it returns."""

    def __init__(self, *, before: bool) -> None:
        self.go_on = trio.Event()
        self.holds_next = False
        self._before = before

    async def run(self, call: Callable[..., T], *args: object) -> T:
        held = self.holds_next and getattr(call, "__name__", "") == "_write_blocking"
        if held:
            self.holds_next = False
        if held and self._before:
            await self.go_on.wait()
        result = await super().run(call, *args)
        if held and not self._before:
            await self.go_on.wait()
        return result


async def syncs_of(world: World, place: Place) -> int:
    """Return how many syncs it takes until what was written to the place's segment is durable."""
    assert isinstance(world.disk, SimDisk)
    before = world.disk.operation_count
    await world.segments.large.sync({place.segment})
    return world.disk.operation_count - before


@pytest.mark.parametrize(("is_last", "syncs"), [(True, 0), (False, 1)])
def test_the_last_write_of_a_caller_is_synced_with_it(is_last: bool, syncs: int) -> None:
    async def body(world: World) -> None:
        await world.store_large(world.payload(70_000))
        place, _ = await world.write_large(world.payload(70_000), is_last=lambda: is_last)
        assert await syncs_of(world, place) == syncs
        assert await syncs_of(world, place) == 0

    drive(body)


def test_the_last_write_of_a_caller_is_not_synced_with_it_while_another_is_under_way() -> None:
    async def main() -> None:
        world = World(SimDisk(1), offload := HeldWriteOffload(before=True))
        await world.segments.open()
        await world.store_large(world.payload(70_000))
        offload.holds_next = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.write_large, world.payload(70_000))
            await trio.testing.wait_all_tasks_blocked()
            place, _ = await world.write_large(world.payload(70_000), is_last=lambda: True)
            assert await syncs_of(world, place) == 1
            offload.go_on.set()
        assert await syncs_of(world, place) == 1, "what was under way then has no sync yet"

    trio.run(main)


def test_the_sync_of_a_callers_last_write_does_not_count_for_what_ended_behind_it() -> None:
    async def main() -> None:
        world = World(SimDisk(1), offload := HeldWriteOffload(before=False))
        await world.segments.open()
        await world.store_large(world.payload(70_000))
        offload.holds_next = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(world.write_large, world.payload(70_000), is_last=lambda: True))
            await trio.testing.wait_all_tasks_blocked()
            place, _ = await world.write_large(world.payload(70_000))
            offload.go_on.set()
        assert await syncs_of(world, place) == 1
        assert await syncs_of(world, place) == 0

    trio.run(main)


def test_a_write_whose_own_sync_fails_is_given_up_and_shuts_the_store_for_writing() -> None:
    async def body(world: World) -> None:
        assert isinstance(world.disk, SimDisk)
        await world.store_large(world.payload(70_000))
        world.disk.fail_next("sync_data", StoreFull("planted"), path="large")
        with pytest.raises(StoreFull):
            await world.write_large(world.payload(70_000), is_last=lambda: True)
        assert not any(world.segments.in_flight.count(segment) for segment in world.segments.register.kinds)
        with pytest.raises(StoreReadOnly):
            await world.write_large(world.payload(70_000))

    drive(body)
