"""Arrivals of an open loop: requests that begin at their time, whatever became of earlier ones.

`Arrivals` has the times; `Readers` are processes that read objects, or files, one after the other at such times.
A latency counts from the time that the request was meant to begin: a request that had to wait for the one before
it is charged with the wait, as its user would be (no coordinated omission; Gil Tene, "How NOT to Measure
Latency", wrk2).
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Final

import lakefs

_TIMER_SLACK: Final = 29
"""PR_SET_TIMERSLACK."""
_START_S: Final = 0.02
"""Time from the order to the first arrival, so that all processes are ready for it."""


class Arrivals:
    """Times at which requests are meant to begin: evenly spaced, whatever is answered; none at or after `end_s`."""

    __slots__ = ("_begin_s", "_end_s", "_every_s", "_number", "due_s")

    def __init__(self, begin_s: float, rate_per_s: float, end_s: float) -> None:
        self.due_s = begin_s
        """Time of the next arrival; infinite if there is none."""
        self._begin_s = begin_s
        self._end_s = end_s
        self._every_s = 1 / rate_per_s
        self._number = 0

    @property
    def ended(self) -> bool:
        """True if no arrival is left."""
        return math.isinf(self.due_s)

    def take(self) -> float:
        """Return the time of the next arrival, and advance."""
        taken_s = self.due_s
        self._number += 1
        due_s = self._begin_s + self._number * self._every_s
        self.due_s = due_s if due_s < self._end_s else math.inf
        return taken_s


def sleep_exactly() -> None:
    """Make this thread's waits end on time: without the 50 us by which Linux may delay them."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)


def paced(arrivals: Arrivals, call: Callable[[], object]) -> list[int]:
    """Call at each arrival, or as soon after it as the previous call has ended; return ns from arrival to end, of
    each."""
    taken_ns: list[int] = []
    clock = time.perf_counter
    while not arrivals.ended:
        left_s = arrivals.due_s - clock()
        if left_s > 0:
            time.sleep(left_s)
        due_s = arrivals.take()
        call()
        taken_ns.append(int((clock() - due_s) * 1e9))
    return taken_ns


class Readers:
    """Processes that read these names again and again; a context manager.

    `address`: of an engine; empty: the names are paths of files.  Each process has its own connection.
    """

    def __init__(self, address: str, names: Sequence[str], count: int = 2) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        spawning = multiprocessing.get_context("spawn")
        for _ in range(count):
            mine, its = spawning.Pipe()
            process = spawning.Process(target=_read_for, args=(its, address, names), daemon=True)
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Readers:
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            assert pipe.recv() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def pids(self) -> Sequence[int]:
        """Return the processes' ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, rate_per_s: float, for_s: float) -> list[int]:
        """Read at so many arrivals a second for so long; return the latency of each read in ns."""
        begin_s = time.perf_counter() + _START_S  # one clock for all processes
        count = len(self._pipes)
        for number, pipe in enumerate(self._pipes):
            pipe.send((begin_s + number / rate_per_s, rate_per_s / count, begin_s + for_s))
        return [taken_ns for pipe in self._pipes for taken_ns in pipe.recv()]


def _read_for(pipe: Connection, address: str, names: Sequence[str]) -> None:
    """Body of one of the processes: a run for each order, until it is ended."""
    sleep_exactly()
    with _getter(address) as get:
        left = cycle(names)
        pipe.send("ready")
        while True:
            pipe.send(paced(Arrivals(*pipe.recv()), lambda: get(next(left))))


@contextmanager
def _getter(address: str) -> Iterator[Callable[[str], bytes]]:
    if not address:
        yield lambda name: Path(name).read_bytes()
        return
    with lakefs.connect(address) as lake:
        yield lake.get
