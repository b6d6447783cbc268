"""The real clock.  Sleeping is trio's own and not here; the simulator's clock lives with the tests."""

from __future__ import annotations

import time


class SystemClock:
    """Time of this machine (`lakefs.ports.Clock`)."""

    def monotonic(self) -> float:
        """Seconds since some fixed point of this boot."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC as the machine believes them to be; stored and shown only."""
        return time.time_ns()
