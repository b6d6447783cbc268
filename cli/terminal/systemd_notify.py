"""Notices to the service manager about the state of an engine, a gateway or a mount: the datagrams of `sd_notify(3)`,
without its library.

A `Notifier` without an address (not started by a manager) does nothing, so callers need not check.

Rules kept here:
- A notice never blocks and never raises: the process keeps serving if nothing listens.  Each returns True if the
  manager's socket took it.
- The variables are removed from the environment, so that no child process sends notices in this process's name.
- The manager kills and restarts a process that sends no heartbeat: one whose loop hangs.  A clean stop cancels the
  heartbeat only after STOPPING has been sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

import trio

STATUS_BYTES_MAX: Final = 512
"""The manager shows one line; it would refuse a much larger datagram whole."""


class Notifier:
    """Sends states to one manager.  `watchdog_s` is its longest interval between heartbeats, or None."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self._address = _socket_address(address)
        self.watchdog_s = watchdog_s if self._address is not None else None

    def ready(self, status: str) -> bool:
        """The start is done: requests are answered from now on."""
        return self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> bool:
        """It goes on, in this state."""
        return self._send(f"STATUS={_one_line(status)}")

    def stopping(self, status: str) -> bool:
        """The stop has begun."""
        return self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def watchdog(self) -> bool:
        """Still alive; send it at least every `watchdog_s`, better twice as often."""
        return self._send("WATCHDOG=1")

    def _send(self, state: str) -> bool:
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto(state.encode(), self._address)
        except OSError:
            return False
        return True


def notifier_from(environ: MutableMapping[str, str] | None = None) -> Notifier:
    """Return the notifier that `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` describe; removes the three."""
    environ = os.environ if environ is None else environ
    address = environ.pop("NOTIFY_SOCKET", None)
    interval_us = environ.pop("WATCHDOG_USEC", "")
    watched_pid = environ.pop("WATCHDOG_PID", "")
    is_watched = interval_us.isdecimal() and int(interval_us) > 0 and watched_pid in ("", str(os.getpid()))
    return Notifier(address, int(interval_us) / 1e6 if is_watched else None)


async def keep_watchdog(notifier: Notifier) -> None:
    """Send two heartbeats in each of the manager's intervals, until cancelled; returns at once if it wants none."""
    if notifier.watchdog_s is None:
        return
    while True:
        notifier.watchdog()
        await trio.sleep(notifier.watchdog_s / 2)


def _socket_address(address: str | None) -> bytes | None:
    """Return a path, or `@name` in the abstract namespace; None for anything else (sd_notify ignores it, too)."""
    if not address or address[0] not in "/@" or len(address) < 2:
        return None
    encoded = os.fsencode(address)
    return b"\0" + encoded[1:] if address[0] == "@" else encoded


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined.encode()[:STATUS_BYTES_MAX].decode(errors="ignore")
