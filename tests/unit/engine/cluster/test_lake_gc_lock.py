"""One cycle of gc at a time over a lake, in whichever process; a dead one is waited for, and then the next begins."""

from __future__ import annotations

from itertools import groupby

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.records import GC_KEY
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.lake_gc_bounds import LAKE_GC_LOCK_S
from engine.lake_gc.lake_gc_lock import hold_gc_lock
from engine.lake_gc.names_in_process import NamesInProcess
from lakefs.errors import CoordinatorLost, EngineBusy, EngineUnreachable, PreconditionFailed
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.lake_rig import SmallLake, serve, small_lake
from tests.memory_coordinator import memory_coordinator
from tests.sim.world.clock import SimClock
from tests.store_rig import run


def another_process(lake: SmallLake) -> LakeGc:
    """Return the gc of another process over the same lake."""
    names = lake.names
    return LakeGc(lake.coordinator, lake.members, lake.stripes, NamesInProcess(names, lake.joined), lake.clock)


@pytest.mark.parametrize("same_process", [True, False])
def test_a_second_cycle_waits_for_the_first(same_process: bool) -> None:
    async def main() -> None:
        async with small_lake() as lake:
            other = lake.gc if same_process else another_process(lake)
            walks: list[bytes] = []

            async def slowly(member: MemberId, request: m.Request) -> Reply | None:
                if isinstance(request, m.GcBegin | m.GcSweep):
                    walks.append(request.walk)
                    await trio.sleep(5)
                return None

            lake.members.hook = slowly
            await lake.put("key", b"content")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lake.collect)
                nursery.start_soon(other.run)
            assert await lake.state.generation() == 3
            assert [len([*group]) for _, group in groupby(walks)] == [6, 6]

    run(main)


def test_the_lock_of_a_dead_process_ends_with_its_lease() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            dead = await lake.coordinator.lease(LAKE_GC_LOCK_S)
            await lake.coordinator.transact([], [Put(GC_KEY, b"dead", dead)])
            before = trio.current_time()
            await lake.collect()
            assert LAKE_GC_LOCK_S - 1 <= trio.current_time() - before <= LAKE_GC_LOCK_S + 2

    run(main)


def test_a_cycle_is_refused_while_another_process_goes_on_collecting() -> None:
    async def main() -> None:
        async with small_lake() as lake, hold_gc_lock(lake.coordinator, SimClock()):
            with pytest.raises(EngineBusy, match="one cycle runs at a time"):
                await lake.collect()
            assert await lake.state.generation() == 1

    run(main)


@pytest.mark.parametrize("at", [m.GcBegin, m.GcMark])
def test_a_cycle_that_lost_its_lock_frees_nothing(at: type[m.Request]) -> None:
    async def main() -> None:
        async with small_lake() as lake:
            await lake.put("key", b"content")

            async def hook(member: MemberId, request: m.Request) -> Reply | None:
                assert not isinstance(request, m.GcSweep)
                if isinstance(request, at):
                    lake.coordinator.close()  # it cannot be asked any more, so the lease ends
                    await trio.sleep(LAKE_GC_LOCK_S + 1)
                return None

            lake.members.hook = hook
            with pytest.raises(EngineBusy, match="the lock of this cycle of gc ended"):
                await lake.collect()
            with pytest.raises(EngineUnreachable):
                await lake.collect()

    run(main)


class LateClock(SimClock):
    """A clock that goes on while its process is stopped: no task of it runs."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.passed_s


def test_a_process_that_was_stopped_past_its_lease_sweeps_nothing_when_it_goes_on() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            await lake.put("key", b"content")
            clock = LateClock()
            names = lake.names
            parts = lake.coordinator, lake.members, lake.stripes, NamesInProcess(names, lake.joined)
            gc = LakeGc(*parts, clock)

            async def hook(member: MemberId, request: m.Request) -> Reply | None:
                assert not isinstance(request, m.GcSweep)
                if isinstance(request, m.GcMark):
                    clock.passed_s = LAKE_GC_LOCK_S + 1
                return None

            lake.members.hook = hook
            with pytest.raises(EngineBusy, match="the lock of this cycle of gc ended"):
                await gc.run()

    run(main)


@pytest.mark.parametrize("at", [None, m.GcBegin, m.GcMark])
def test_names_that_are_deposed_amid_a_cycle_free_nothing(at: type[m.Request] | None) -> None:
    """Before it begins: it is not joined.  In the walk: it ends.  Behind it: what it saw has to be durable."""

    async def main() -> None:
        async with small_lake() as lake:
            await lake.put("gone", b"content")
            lost = CoordinatorLost("another replica leads")
            sent: list[m.Request] = []

            def depose() -> None:
                lake.names.metadata.stop_leading(lost)
                lake.names.metadata.check_leader = refuse if at is not m.GcMark else None

            def refuse() -> None:
                raise lost

            async def hook(member: MemberId, request: m.Request) -> Reply | None:
                sent.append(request)
                if at is not None and isinstance(request, at) and lake.names.metadata.failed is None:
                    if at is m.GcMark:  # the walk is over: it has seen a removal that the next leader has not
                        await lake.remove_without_waiting("gone")
                    depose()
                return None

            lake.members.hook = hook
            if at is None:
                depose()
            with pytest.raises(CoordinatorLost):
                await lake.collect()
            assert not any(isinstance(request, m.GcSweep) for request in sent)
            assert at is not None or not sent, "members do not begin a cycle that names did not join"
            await lake.stop_names(crash=True)
            await lake.start_names()
            lake.members.hook = serve
            assert await lake.is_readable(b"content")
            report = await lake.collect()
            assert report.generation == 3, "the generation is the coordinator's, and goes on"

    run(main)


def test_a_lake_without_a_table_collects_nothing() -> None:
    async def main() -> None:
        async with small_lake() as lake, memory_coordinator() as empty:
            lake.coordinator = empty
            with pytest.raises(PreconditionFailed, match="the lake has no ring table yet"):
                await another_process(lake).run()

    run(main)


def test_cycles_follow_each_other_and_one_that_fails_is_tried_again_later() -> None:
    async def main() -> None:
        async with small_lake() as lake:
            blob = await lake.put("key", b"one", b"two")
            await lake.put("gone", b"three")
            await lake.delete("gone")
            lake.stripes.unreadable.add(blob)  # type: ignore[arg-type]
            with trio.move_on_after(650):
                await lake.gc.run_periodically(300)
            assert await lake.state.generation() == 3
            assert len(await lake.chunks()) == 4
            lake.stripes.unreadable.clear()
            with trio.move_on_after(350):
                await lake.gc.run_periodically(300)
            assert len(await lake.chunks()) == 3

    run(main)
