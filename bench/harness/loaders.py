"""Workers of a data loader: processes forked from this one that take batches of names and read them.

They follow the loaders of training frameworks: each worker opens its source after the fork, batches are handed to the
workers in turn, and a worker keeps what it has read (a framework passes it on by shared memory, at the same cost for
all).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType

ReadBatch = Callable[[Sequence[str]], int]
"""Reads the named objects; returns the bytes of their content."""


class Loaders:
    """`count` workers; a context manager.  `opened`, called in each worker, provides the function that reads a
    batch."""

    def __init__(self, opened: Callable[[], AbstractContextManager[ReadBatch]], count: int) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        forking = multiprocessing.get_context("fork")
        for _ in range(count):
            mine, its = forking.Pipe()
            self._pipes.append(mine)
            self._processes.append(forking.Process(target=_work, args=(its, opened), daemon=True))

    def __enter__(self) -> Loaders:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def pids(self) -> Sequence[int]:
        """Return the workers' process ids."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, batches: Sequence[Sequence[str]]) -> tuple[int, list[int]]:
        """Read all; return the bytes, and the time of each batch in ns.  RuntimeError if a worker could not read."""
        for number, pipe in enumerate(self._pipes):
            pipe.send(batches[number :: len(self._pipes)])
        moved_bytes, taken_ns = 0, list[int]()
        for pipe in self._pipes:
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(f"a worker could not read: {answer}")
            moved_bytes += answer[0]
            taken_ns += answer[1]
        return moved_bytes, taken_ns


def _work(pipe: Connection, opened: Callable[[], AbstractContextManager[ReadBatch]]) -> None:
    """Body of one worker: an answer for each order, until it is ended."""
    try:
        with opened() as read:
            while True:
                moved_bytes, taken_ns = 0, list[int]()
                for batch in pipe.recv():
                    begin = time.perf_counter_ns()
                    moved_bytes += read(batch)
                    taken_ns.append(time.perf_counter_ns() - begin)
                pipe.send((moved_bytes, taken_ns))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - sent to the parent
        pipe.send(f"{type(error).__name__}: {error}")
