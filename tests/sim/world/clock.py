"""The simulator's clock: trio's own time (`SimTime`, that jumps), and a wall clock that may be set."""

from __future__ import annotations

from typing import Final

import trio

SIM_EPOCH_NS: Final = 1_800_000_000 * 1_000_000_000
"""The time at which the simulated wall clock begins: early 2027, so that no run depends on the day."""


class SimClock:
    """Time inside a simulated run (`lakefs.ports.Clock`); use with `SimTime`."""

    def __init__(self, wall_ns: int = SIM_EPOCH_NS) -> None:
        self._wall_ns = self.last_ns = wall_ns
        """`last_ns`: the wall clock's last answer."""

    def monotonic(self) -> float:
        """Return the seconds of trio's clock."""
        return trio.current_time()

    def wall_ns(self) -> int:
        """Return the wall clock, which moves with trio's clock."""
        self.last_ns = self._wall_ns + int(trio.current_time() * 1e9)
        return self.last_ns

    def jump_wall(self, ns: int) -> None:
        """Set the wall clock, forward or back, as somebody else would."""
        self._wall_ns += ns
        self.wall_ns()
