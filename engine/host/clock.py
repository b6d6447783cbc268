"""The real clock: monotonic and wall time.  It does not sleep: code sleeps through trio.  The simulator has another."""

from __future__ import annotations

import time


class BoottimeClock:
    """Time of this machine whose spans count while it is suspended, too: for leases (`lakefs.ports.Clock`)."""

    wall_ns = staticmethod(time.time_ns)

    def monotonic(self) -> float:
        """Return the seconds since this boot."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class SystemClock:
    """Time of this machine (`lakefs.ports.Clock`)."""

    monotonic = staticmethod(time.monotonic)
    """Seconds since a fixed point of this boot."""
    wall_ns = staticmethod(time.time_ns)
    """Nanoseconds since 1970 UTC by the machine's clock; only stored and shown."""
