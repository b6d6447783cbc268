"""Runs calls concurrently, and raises one plain error instead of a group.

Calls that fail with a LakeError do not cancel the others; any other error does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import trio

from lakefs.errors import LakeError

T = TypeVar("T")


async def run_all(call: Callable[[T], Awaitable[None]], items: Sequence[T]) -> None:
    """Call for every item concurrently; when calls fail, the others finish and the first error is raised.

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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the error in a nursery's group instead of the group, if it is the only one.

    If all errors are LakeErrors, raise the first, also beside a cancellation: a scope that takes its part out of a
    group leaves a group.  (A scope that is cancelled cancels the next checkpoint, too.)  Else the group passes.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        errors = [error for error in leaves if not isinstance(error, trio.Cancelled)] or leaves
        if len(errors) > 1 and not all(isinstance(error, LakeError) for error in errors):
            raise
        if len(errors) < len(leaves) and not isinstance(errors[0], LakeError):
            raise
        raise errors[0] from errors[0].__cause__


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def cancel_after(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    """Cancel a scope once `wait` has returned."""
    await wait()
    scope.cancel()
