"""The real clock.  Code sleeps through trio, not through it; the simulator's clock is with the tests."""

from __future__ import annotations

import time


class SystemClock:
    """Time of this machine (`lakefs.ports.Clock`)."""

    def monotonic(self) -> float:
        """Return the seconds since a fixed point of this boot."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Return the nanoseconds since 1970 UTC by the machine's clock; only stored and shown."""
        return time.time_ns()
