"""The heartbeat for the service manager: sent while the loop runs and the engine is well.

The manager kills and restarts a process that sends none: one whose loop hangs, or whose engine is not well.  A clean
stop cancels the heartbeat only after STOPPING has been sent.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from cli.terminal.systemd_notify import Notifier


async def keep_watchdog(notifier: Notifier, is_well: Callable[[], bool]) -> None:
    """Send two heartbeats in each of the manager's intervals, until cancelled; returns at once if it wants none."""
    if notifier.watchdog_s is None:
        return
    while True:
        if is_well():
            notifier.watchdog()
        await trio.sleep(notifier.watchdog_s / 2)
