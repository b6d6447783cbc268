"""Spaces of keyed blobs for the blocking client: `space = lake.space("llama-70b/tp2", quota="200G")`.

The methods are those of `lakefs.lake.spaces.SpaceSteps`.  `get_many_into` reads chunks that are in memory without a
request of their own, once the engine has said which chunks the values are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lakefs.client.facade import declare
from lakefs.errors import ChunkNotFound, CorruptionError, InvalidArgument, StaleGrant
from lakefs.get.keyed import MISS, find_values, parts_of, read_values_into, value_bytes
from lakefs.host.writable_memory import WritableBuffer
from lakefs.lake.spaces import SpaceSteps, value_memories
from lakefs.wire.messages import SpaceStat

if TYPE_CHECKING:
    from lakefs.client.blocking.chunks import Chunks
    from lakefs.client.blocking.driver import BlockingDriver
    from lakefs.steps.steps import Steps

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(steps: Callable[Concatenate[SpaceSteps, P], Steps[R]]) -> Callable[Concatenate[Space, P], R]:
    """Make a method that runs the steps and returns their result."""

    def call(self: Space, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver = self._driver
        return driver.run(steps(SpaceSteps(driver.steps, self.number), *args, **kwargs))

    return declare(call, steps)


class Space:
    """A space of keyed blobs, from `Lake.space`.  As safe for threads as its lake, which it does not outlive."""

    def __init__(self, driver: BlockingDriver, chunks: Chunks, stat: SpaceStat) -> None:
        self._driver = driver
        self._chunks = chunks
        self.name = stat.name
        self.number = stat.number
        """The engine's number for it, which is never used for another space."""

    match = _blocking(SpaceSteps.match)
    load = _blocking(SpaceSteps.load)
    put_many = _blocking(SpaceSteps.put_many)
    remove = _blocking(SpaceSteps.remove)
    pin = _blocking(SpaceSteps.pin)
    unpin = _blocking(SpaceSteps.unpin)

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[WritableBuffer]) -> list[int]:
        """Read values, each into a buffer, array or tensor at least as long; return their lengths; 0 for a miss.

        See `SpaceSteps.get_many_into`.
        """
        checked, targets = value_memories(keys, buffers)
        values = self._driver.run(find_values(self.number, checked))
        lengths = [value_bytes(pieces) for pieces in values]
        lengths = [length if length <= len(target) else MISS for length, target in zip(lengths, targets, strict=True)]
        fitting = [(values[index], targets[index]) for index, length in enumerate(lengths) if length]
        try:
            self._chunks.get_many_into(*parts_of(fitting))
        except (ChunkNotFound, CorruptionError, StaleGrant, InvalidArgument):  # one of them: try each by itself
            return self._driver.run(read_values_into(self._driver.steps.access(None), values, targets))
        return lengths
