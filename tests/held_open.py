"""Tasks that hold something open until a test stops them, or lets them crash."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import trio

T = TypeVar("T")


class Process:
    """A task that has something open until it is stopped, or crashes."""

    def __init__(self) -> None:
        self._stop = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()

    async def run(
        self, opened: AbstractAsyncContextManager[T], task_status: trio.TaskStatus[T] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with self._scope:
                async with opened as thing:
                    task_status.started(thing)
                    await self._stop.wait()
        finally:
            self._ended.set()

    async def stop(self, *, crash: bool = False) -> None:
        self._stop.set()
        if crash:
            self._scope.cancel()
        await self._ended.wait()
