"""The leader's log: lost answers, a coordinator that is away or full, groups of others, and a tail that is too long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from engine.coordinator.coordinator import Delete, HasRevision, Put, Transacted
from engine.format.group_parts import pack_parts
from engine.format.layouts import Table
from engine.group_log import trimming
from lakefs.errors import CoordinatorLost, EngineUnreachable, StoreFull
from lakefs.ids import Sequence
from tests.memory_coordinator import MemoryCoordinator, memory_coordinator
from tests.replica_rig import KEYS, replicas_on
from tests.unit.engine.group_log.test_replica import run
from tests.unit.support.metadata_rig import put

NAMES = Table.NAMES


def failing_appends(coordinator: MemoryCoordinator, outcomes: list[Any]) -> None:
    """Let the next appends end so: an error before they are done, or (None, error) when they are done."""
    transact = coordinator.transact

    async def fail(*args: Any, **kwargs: Any) -> Transacted:
        if not outcomes or not kwargs.get("is_repeatable"):
            return await transact(*args, **kwargs)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        await transact(*args, **kwargs)
        raise outcome[1]

    coordinator.transact = fail  # type: ignore[method-assign]


LOST = EngineUnreachable("the answer was lost")


@pytest.mark.parametrize(
    "outcomes", [[LOST], [(None, LOST)], [LOST, (None, LOST)], [(None, LOST), LOST, LOST], [StoreFull("full")] * 3]
)
def test_an_append_is_tried_again_and_done_once(outcomes: list[Any]) -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"1"))
            failing_appends(coordinator, list(outcomes))
            sequence = await put(leader.led, (NAMES, b"a", b"2"))
            assert sequence == 2
            await put(leader.led, (NAMES, b"b", b"3"))
            while follower.contents() != leader.contents():  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(0.1)

    run(scenario)


def test_while_nothing_can_be_appended_reads_go_on_until_the_lease_is_nearly_over() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 1) as (leader,):
            metadata = leader.led
            await put(metadata, (NAMES, b"a", b"1"))
            failing_appends(coordinator, [LOST] * 10_000)
            coordinator.keep_alive = _away  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_refused, lambda: put(metadata, (NAMES, b"b", b"1")))
                began = trio.current_time()
                await trio.sleep(1)
                with metadata.view() as view:
                    assert view.get(NAMES, b"a") == b"1"
                await leader.ended.wait()
                assert 3 < trio.current_time() - began < 6
            assert isinstance(leader.error, CoordinatorLost)

    run(scenario)


async def _away(lease: object) -> bool:
    await trio.lowlevel.checkpoint()
    raise LOST


async def _refused(call: Callable[[], Awaitable[object]]) -> None:
    with pytest.raises(CoordinatorLost):
        await call()


def test_a_group_of_another_in_the_place_of_the_next_ends_the_term() -> None:
    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 1) as (leader,):
            await put(leader.led, (NAMES, b"a", b"1"))
            entry = (await coordinator.get(KEYS.leader)).entry
            assert entry is not None
            [part] = pack_parts(entry.revision, Sequence(2), 0, b"")
            await coordinator.transact([HasRevision(KEYS.leader, entry.revision)], [Put(KEYS.part(2, 0), part)])
            with pytest.raises(CoordinatorLost, match="another group in the place"):
                await put(leader.led, (NAMES, b"a", b"2"))
            await coordinator.transact([], [Delete(KEYS.part(2, 0))])
            await leader.ended.wait()
            assert isinstance(leader.error, CoordinatorLost)

    run(scenario)


def test_a_tail_that_is_too_long_is_trimmed_without_the_one_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trimming, "TAIL_BYTES_MAX", 1000)

    async def scenario() -> None:
        async with memory_coordinator() as coordinator, replicas_on(coordinator, 2) as (leader, follower):
            await put(leader.led, (NAMES, b"a", b"v"))
            await trio.sleep(2)
            await follower.kill()
            for number in range(50):
                await put(leader.led, (NAMES, b"%d" % number, bytes(100)))
            await trio.sleep(3)
            left = (await coordinator.range(*KEYS.groups, limit=100)).entries
            assert 5 <= len(left) <= 10
            late = follower.again()
            await late.run()
            assert "was trimmed up to" in str(late.error)

    run(scenario)
