"""Time limits of one blocking client: of an engine's silence, and of a job that its caller has begun.

The silence that one request may meet has a limit always.  A job has one only where its caller cannot wait (`until`):
its requests together, with connecting, end then.
"""

from __future__ import annotations

import time
from math import inf

from lakefs.client.silence import WAITS, given_up
from lakefs.config.values import checked_timeout
from lakefs.limits import ENGINE_SILENCE_S, HELLO_TIMEOUT_S


class TimeLimits:
    """The limits of one client; its jobs are begun by one thread at a time."""

    __slots__ = ("timeout_s", "until")

    def __init__(self, timeout_s: float = ENGINE_SILENCE_S) -> None:
        """`timeout_s`: the most silence.  InvalidArgument."""
        self.timeout_s = checked_timeout(timeout_s)
        self.until: float | None = None
        """Moment of the monotonic clock at which the present job ends; None: it has no limit."""

    def begin(self, limit_s: float) -> None:
        """Begin a job of so many seconds."""
        self.until = time.monotonic() + limit_s

    def end(self) -> None:
        """End the job."""
        self.until = None

    @property
    def wait_s(self) -> float:
        """Most seconds of one wait in the kernel."""
        return self.timeout_s / WAITS

    def left_s(self) -> float:
        """Return the seconds that the present job has left."""
        until = self.until
        return inf if until is None else max(0.0, until - time.monotonic())

    def hello_s(self) -> float:
        """Return the most seconds that connecting may wait, and Hello after it.  Above 0."""
        return max(0.001, min(HELLO_TIMEOUT_S, self.timeout_s, self.left_s()))

    def check(self, address: str) -> None:
        """Raise EngineUnreachable if the present job's time is over."""
        if self.until is not None and not self.left_s():
            raise given_up(f"the engine at {address} takes too long", address)
