"""Makes a run a function of its seed: trio's scheduler chooses the next task by a seeded source.

Trio runs ready tasks in random order on purpose; under this switch (trio's own, meant for property tests) the order is
drawn from `_r`, on tasks sorted by age.  What trio orders by address is ordered by age here: deadlines at the same
time, and the tasks of a scope that is cancelled.  No threads may take part.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import heappush
from typing import Any, Final, TypeVar
from unittest import mock

import trio
import trio._core._run as trio_run
import trio.abc
from trio._core._io_epoll import EpollIOManager

from tests.sim.world.sim_time import SimTime

T = TypeVar("T")
_NO_EVENTS: Final[list[tuple[int, int]]] = []


def run_seeded(main: Callable[[], Awaitable[T]], seed: int, *, clock: trio.abc.Clock | None = None) -> T:
    """Run `trio.run` with the order of tasks drawn from `seed`.  Under `SimTime` nothing outside may wake a task."""
    with _in_order_of_age(), ExitStack() as stack:
        if isinstance(clock, SimTime):
            stack.enter_context(mock.patch.object(EpollIOManager, "get_events", _get_no_events))
        allowed, state = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # declared Final, and meant for this
        trio_run._r.seed(seed)
        try:
            return trio.run(main, clock=clock)
        finally:
            trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed  # type: ignore[misc]
            trio_run._r.setstate(state)


@contextmanager
def _in_order_of_age() -> Iterator[None]:
    """Order by age what trio does not order by the seed: sets of children and tasks, and equal deadlines (by `id`)."""
    ages = itertools.count()
    prepare = trio_run.CancelStatus.__attrs_post_init__

    def prepare_ordered(self: trio_run.CancelStatus) -> None:
        self._children, self._tasks = _Ordered(), _Ordered()  # type: ignore[assignment]
        prepare(self)

    def add(self: trio_run.Deadlines, deadline: float, scope: trio.CancelScope) -> None:
        heappush(self._heap, (deadline, next(ages), scope))
        self._active += 1

    with (
        mock.patch.object(trio_run.CancelStatus, "__attrs_post_init__", prepare_ordered),
        mock.patch.object(trio_run.Deadlines, "add", add),
    ):
        yield


class _Ordered(dict[Hashable, None]):
    """A set that remembers the order in which its members were added."""

    __slots__ = ()

    def add(self, member: Hashable) -> None:
        """Put it last, unless it is there."""
        self[member] = None

    def remove(self, member: Hashable) -> None:
        """Take it out."""
        del self[member]


def _get_no_events(manager: Any, timeout: float) -> list[tuple[int, int]]:
    """Report no events, since nothing outside of the run ever happens; instead of a wait, jump to the next deadline."""
    runner = trio_run.GLOBAL_RUN_CONTEXT.runner
    if runner.entry_queue.queue or runner.entry_queue.idempotent_queue:  # a generator was dropped, or Ctrl-C
        return manager._epoll.poll(0, 1)  # type: ignore[no-any-return]
    if timeout > 0:
        assert isinstance(runner.clock, SimTime)
        runner.clock.jump()
    return _NO_EVENTS
