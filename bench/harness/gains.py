"""Shared by scenarios that measure what a mechanism brings: the same work with it and without, in turn.

The product has no setting that switches these mechanisms off, so a scenario does it from outside.  A mechanism is
worth its code if it saves a tenth of the CPU that all processes spend on the work, where users would feel that.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from bench.harness.cpu import cpu_s
from bench.harness.measure import Goal, at_most
from bench.harness.sampled import Run, Side

ALL_CPU: Final = "all CPU/op, us"
"""CPU of this process, of the programs that it ran, and of the servers, for an operation."""
WORTH_IT: Final = at_most(0.9, "x")
NO_DEARER: Final = at_most(1.1, "x")
"""Goal of the work beside that, for which the mechanism does nothing."""
SHOWN: Final = Goal("-", 0, at_least=True)
"""No goal: the figure stands beside the one that counts."""


def counted(run: Callable[[], Run], prepare: Callable[[], None], servers: Sequence[int]) -> Side:
    """Return a side whose rounds have the figure `ALL_CPU`, too."""

    def measured() -> Run:
        before = _cpu_us(servers)
        done = run()
        return replace(done, more={**done.more, ALL_CPU: (_cpu_us(servers) - before) / done.operations})

    return Side(measured, prepare, lambda: servers)


def _cpu_us(servers: Sequence[int]) -> float:
    ran = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e6 * (cpu_s([os.getpid(), *servers]) + ran.ru_utime + ran.ru_stime)
