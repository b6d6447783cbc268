"""Making a run a function of its seed: trio's scheduler takes its turns from a seeded source.

Trio runs ready tasks in random order on purpose; under this switch (trio's own, meant for property tests) the
order is drawn from `_r`, on tasks sorted by age.  No threads may take part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
import trio._core._run as trio_run
import trio.abc

T = TypeVar("T")


def run_seeded(main: Callable[[], Awaitable[T]], seed: int, *, clock: trio.abc.Clock | None = None) -> T:
    """`trio.run`, the order of tasks drawn from `seed`."""
    allowed, state = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # declared Final, and meant for this
    trio_run._r.seed(seed)
    try:
        return trio.run(main, clock=clock)
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed  # type: ignore[misc]
        trio_run._r.setstate(state)
