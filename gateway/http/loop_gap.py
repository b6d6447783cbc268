"""The gap in trio's loop: the moment in which it has no task to run, and would wait for the system.

A server that waits there itself, in native code, serves a connection without a turn of the loop, which costs 20 us.  It
must watch all that trio would wait for: trio's own epoll is one more descriptor in the server's.  trio calls an
instrument just before each wait; that it waits itself is not foreseen, and neither the epoll nor the queue of tasks is
public.  Where they are not found there is no gap, and the server waits in a task like any other.

Rules kept here:
- The server gives the gap back when trio's own wait would end: when there is a task to run, trio's epoll is ready, or
  its time is up.
- One server has the gap of a loop; for a second one there is none.
- An error of the server ends its task.  trio would only log it, and call the instrument no more.
- A server with nothing to wait for leaves the gap (`Gap.leave`): each turn of the loop then costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import trio

HasTasks = Callable[[], bool]
"""Returns True if a task is ready to run."""
Serve = Callable[[float, HasTasks], bool]
"""Serves for at most so many seconds; returns True if trio must not wait now."""
_taken: Final = trio.lowlevel.RunVar("lake_loop_gap", default=False)


class Gap(trio.abc.Instrument):
    """Calls a server in the gap of the present loop, between `enter` and `leave`."""

    def __init__(self, tasks: Collection[Any], serve: Serve, failed: Callable[[BaseException], None]) -> None:
        self._tasks = tasks
        self._serve = serve
        self._failed = failed
        self._token = trio.lowlevel.current_trio_token()
        self._is_entered = False

    def enter(self) -> None:
        """Have the server called from the loop's next wait on; does nothing if it is."""
        if not self._is_entered:
            self._is_entered = True
            trio.lowlevel.add_instrument(self)

    def leave(self) -> None:
        """Have the server called no more; does nothing if it is not."""
        if self._is_entered:
            self._is_entered = False
            trio.lowlevel.remove_instrument(self)

    def _has_tasks(self) -> bool:
        return bool(self._tasks)

    def before_io_wait(self, timeout: float) -> None:
        """Serve; tasks that it has woken run at once, though trio is about to wait for so many seconds."""
        try:
            must_not_wait = self._serve(timeout, self._has_tasks)
        except BaseException as error:  # noqa: BLE001 - raised in the server's task
            self._failed(error)
            must_not_wait = True
        if must_not_wait and timeout > 0:
            self._token.run_sync_soon(_go_on, idempotent=True)


def _go_on() -> None:
    """Do nothing: the loop has been woken."""


@contextmanager
def gap(watch: Callable[[int], None], serve: Serve, failed: Callable[[BaseException], None]) -> Iterator[Gap | None]:
    """Take the gap of the present loop for a server, which enters and leaves it; yields None if there is none.

    `watch` is called with the descriptor that is readable when trio's loop has work.  `failed` gets the server's error.
    """
    found = None if _taken.get() else _inside()
    if found is None:
        yield None
        return
    descriptor, tasks = found
    watch(descriptor)
    taken = Gap(tasks, serve, failed)
    _taken.set(True)
    try:
        yield taken
    finally:
        _taken.set(False)
        taken.leave()


def _inside() -> tuple[int, Collection[Any]] | None:
    """Return trio's descriptor and its queue of tasks; None if this trio is another one inside."""
    try:
        from trio._core._run import GLOBAL_RUN_CONTEXT  # noqa: PLC0415 - another trio may not have it

        runner: Any = GLOBAL_RUN_CONTEXT.runner
        descriptor, tasks = runner.io_manager._epoll.fileno(), runner.runq
    except (ImportError, AttributeError):
        return None
    return (descriptor, tasks) if isinstance(descriptor, int) and isinstance(tasks, Collection) else None
