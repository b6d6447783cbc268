"""Running a few calls at once and getting one plain error out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from lakefs.errors import LakeError

T = TypeVar("T")


async def run_all(call: Callable[[T], Awaitable[None]], items: Sequence[T]) -> None:
    """Call for every item, at once; when calls fail, the others finish and the first error is raised.

    Bounded by its caller: items are at most the parts of one request.
    """
    if len(items) <= 1:
        for item in items:
            await call(item)
        return
    errors: list[LakeError] = []

    async def guarded(item: T) -> None:
        try:
            await call(item)
        except LakeError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for item in items:
            nursery.start_soon(guarded, item)
    if errors:
        raise errors[0]
