"""The simulator's time and scheduler: tasks wait and are woken in turn, and nothing depends on addresses in memory."""

from __future__ import annotations

import trio
from trio.lowlevel import Abort

from tests.sim.world.determinism import run_seeded
from tests.sim.world.sim_time import SimTime, pause

COUNT = 40


def test_the_tasks_of_a_cancelled_scope_are_told_in_order_of_age() -> None:
    told: list[int] = []

    async def wait(number: int) -> None:
        await trio.lowlevel.wait_task_rescheduled(lambda _: _note(told, number))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(COUNT):
                nursery.start_soon(wait, number)
            await pause(1.0)
            nursery.cancel_scope.cancel()

    run_seeded(main, 1, clock=SimTime())
    assert told == list(range(COUNT))


def test_deadlines_that_come_together_come_in_order_of_age() -> None:
    told: list[int] = []

    async def wait(number: int, turn: trio.Event) -> None:
        await turn.wait()
        with trio.move_on_at(5.0):
            await trio.lowlevel.wait_task_rescheduled(lambda _: _note(told, number))

    async def main() -> None:
        turns = [trio.Event() for _ in range(COUNT)]
        async with trio.open_nursery() as nursery:
            for number, turn in enumerate(turns):
                nursery.start_soon(wait, number, turn)
            for turn in turns:
                turn.set()
                await pause(0.001)
        assert trio.current_time() == 5.0

    run_seeded(main, 1, clock=SimTime())
    assert told == list(range(COUNT))


def test_pauses_end_in_their_order_and_time_jumps_to_each() -> None:
    ended: list[tuple[float, float]] = []

    async def wait(seconds: float) -> None:
        await pause(seconds)
        ended.append((seconds, trio.current_time()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for seconds in (3.0, 0.5, 7.0, 0.0):
                nursery.start_soon(wait, seconds)

    run_seeded(main, 1, clock=SimTime())
    assert ended == [(0.0, 0.0), (0.5, 0.5), (3.0, 3.0), (7.0, 7.0)]


def test_a_pause_ends_when_it_is_cancelled_and_a_shielded_one_does_not() -> None:
    async def main() -> None:
        with trio.move_on_after(1.0) as scope:
            await pause(10.0)
        assert scope.cancelled_caught
        assert trio.current_time() == 1.0
        with trio.move_on_after(1.0) as scope:
            await pause(10.0, shielded=True)
            assert trio.current_time() == 11.0
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught

    run_seeded(main, 1, clock=SimTime())


def _note(told: list[int], number: int) -> Abort:
    told.append(number)
    return Abort.SUCCEEDED
