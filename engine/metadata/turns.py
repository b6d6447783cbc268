"""The port `Turns`: stamps that are repeated elsewhere, by heads of a lake; an engine by itself has none of it.

The implementation is `engine.metadata.head_turns`.
"""

from __future__ import annotations

from typing import Protocol


class Turns(Protocol):
    """Turns of stamps that others have to make, numbered from 1."""

    @property
    def last(self) -> int:
        """The number of the last turn that somebody has to make; 0: none yet."""
        ...

    async def wait_settled(self, number: int) -> None:
        """Return when all have made the turns up to this one, or may use no stamps; without a checkpoint if so now."""
        ...


class _NoTurns:
    last = 0

    async def wait_settled(self, _: int) -> None:
        return


NO_TURNS: Turns = _NoTurns()
