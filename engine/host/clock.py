"""The real clock: monotonic and wall time.  It does not sleep: code sleeps through trio.  The simulator has another."""

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
