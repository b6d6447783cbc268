"""The waits of one connection's threads: how long the engine has been silent, and if the caller's time is over.

The kernel ends each receive and send after `wait_s`.  Only then anything is counted here, so a request that is answered
at once costs no call.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from lakefs.client.blocking.time_limits import TimeLimits
from lakefs.client.silence import Asked, Silence, silent_error


class Waits:
    """Waits of the thread that sends and of the one that receives."""

    __slots__ = ("_address", "_limits", "_receiving", "_sending", "signs")

    def __init__(self, address: str, limits: TimeLimits) -> None:
        self._address = address
        self._limits = limits
        self._receiving = Silence(limits.timeout_s)
        self._sending = Silence(limits.timeout_s)
        self.signs = 0
        """Signs of the engine's life so far."""

    @property
    def wait_s(self) -> float:
        """Seconds of one wait."""
        return self._sending.wait_s

    def check(self) -> None:
        """Raise EngineUnreachable if the caller's time is over."""
        if self._limits.until is not None:
            self._limits.check(self._address)

    def took_nothing(self, waited_s: float) -> None:
        """Note a wait in which the engine took no bytes.  EngineUnreachable: it is lost, or the caller's time over."""
        if self._sending.is_over(self.signs, waited_s):
            raise silent_error(self._address, self._limits.timeout_s)
        self.check()

    def sent_nothing(self, sock: socket.socket, ask: Callable[[], Asked]) -> None:
        """Note a wait in which the engine sent no bytes; like `took_nothing`.

        If the caller's time is over sooner than the next wait, wait here just so long.
        """
        if self._receiving.is_over(self.signs, self.wait_s, ask):
            raise silent_error(self._address, self._limits.timeout_s)
        self.check()
        left_s = self._limits.left_s()
        if left_s < self.wait_s:
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            if not poll.poll(left_s * 1000):
                self.check()
