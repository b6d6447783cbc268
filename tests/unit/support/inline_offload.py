"""An `Offload` without threads, for tests that need none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class InlineOffload:
    """Runs each call where it is made."""

    async def run(self, call: Callable[..., T], *args: object) -> T:
        return call(*args)
