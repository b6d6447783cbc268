"""Limits an engine's silence while a request waits, for both clients.  Sans-IO.

Silence is limited, not duration: gc, fsck and a large commit may take minutes, and an engine at work on them answers a
Ping.  Engines of every release do.

    waiting ... half of the limit without a sign of life: ask(), which sends a Ping ... the other half: it is lost

Rules kept here:
- A sign of life is any byte of the engine, and any byte that it takes of a request that did not fit the socket.
- Silence is the sum of short waits that this process was awake for: a client that was stopped itself, or whose machine
  was suspended, counts one short wait at most, and reads what has arrived during the next one.
- If no Ping can be sent because every stream is taken, the engine has four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from lakefs.errors import EngineUnreachable

WAITS: Final = 8
"""Short waits in one limit."""
_WAIT_S_MIN: Final = 0.005
_UNASKED_TIMES: Final = 4


class Asked(Enum):
    """The outcome of an attempt to send a Ping."""

    SENT = "the engine is asked"
    FULL = "the socket takes no more bytes: the engine takes none"
    NOT_NOW = "every stream is taken, or a frame is being sent"


class Silence:
    """The silence that one waiting thread or task has seen."""

    __slots__ = ("_asked_s", "_is_sent", "_signs", "limit_s", "quiet_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s: Final = limit_s
        self.quiet_s = 0.0
        """Seconds since the last sign of life, as far as they were waited for."""
        self._signs = -1
        self._asked_s: float | None = None
        self._is_sent = False

    @property
    def wait_s(self) -> float:
        """Seconds of one short wait."""
        return max(_WAIT_S_MIN, self.limit_s / WAITS)

    def begin_anew(self) -> None:
        """Count from here on: nothing is waited for, or this process was stopped."""
        self._signs = -1

    def is_over(self, signs: int, waited_s: float, ask: Callable[[], Asked] | None = None) -> bool:
        """Note a wait of so many seconds; return True if the engine is lost.

        `signs`: count of signs of life so far.  `ask`: sends a Ping without waiting; None: the waiter sends bytes that
        the engine does not take, and needs no Ping.
        """
        if signs != self._signs:
            self._signs, self.quiet_s, self._asked_s, self._is_sent = signs, 0.0, None, False
        self.quiet_s += waited_s
        if ask is None:
            return self.quiet_s >= self.limit_s
        half = self.limit_s / 2
        if self.quiet_s >= half and not self._is_sent:
            self._note(ask())
        if self._asked_s is not None:
            return self.quiet_s >= self._asked_s + half
        return self.quiet_s >= _UNASKED_TIMES * self.limit_s

    def _note(self, asked: Asked) -> None:
        self._is_sent = asked is Asked.SENT
        if asked is Asked.NOT_NOW:
            self._asked_s = None
        elif self._is_sent or self._asked_s is None:
            self._asked_s = self.quiet_s


def silent_error(address: str, limit_s: float) -> EngineUnreachable:
    """Return the error of a connection whose engine is silent."""
    return given_up(f"the engine at {address} does not answer, for {limit_s:g} s now", address)


def given_up(message: str, address: str) -> EngineUnreachable:
    """Return the error of a connection that this client ends, while the engine may go on with what it asked for."""
    error = EngineUnreachable(message, subject=address)
    error.goes_on = True
    return error
