"""Spaces of keyed blobs for the trio client: `space = await lake.space("llama-70b/tp2", quota="200G")`.

The methods are those of `lakefs.lake.spaces.SpaceSteps`, awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lakefs.client.facade import declare
from lakefs.lake.spaces import SpaceSteps
from lakefs.wire.messages import SpaceStat

if TYPE_CHECKING:
    from lakefs.client.trio.driver import TrioDriver
    from lakefs.steps.steps import Steps

P = ParamSpec("P")
R = TypeVar("R")


def _awaited(
    steps: Callable[Concatenate[SpaceSteps, P], Steps[R]],
) -> Callable[Concatenate[TrioSpace, P], Coroutine[Any, Any, R]]:
    """Make an async method that runs the steps and returns their result."""

    async def call(self: TrioSpace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return await driver.run(steps(SpaceSteps(driver.steps, self.number), *args, **kwargs))

    return declare(call, steps)


class TrioSpace:
    """A space of keyed blobs, from `TrioLake.space`.  Safe for use by many tasks at once."""

    def __init__(self, driver: TrioDriver, stat: SpaceStat) -> None:
        self._driver = driver
        self.name = stat.name
        self.number = stat.number
        """The engine's number for it, which is never used for another space."""

    match = _awaited(SpaceSteps.match)
    load = _awaited(SpaceSteps.load)
    get_many_into = _awaited(SpaceSteps.get_many_into)
    put_many = _awaited(SpaceSteps.put_many)
    remove = _awaited(SpaceSteps.remove)
    pin = _awaited(SpaceSteps.pin)
    unpin = _awaited(SpaceSteps.unpin)
