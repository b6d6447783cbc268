"""The heartbeat for the service manager: as long as the loop runs and the engine is well, it beats.

A loop that hangs sends nothing and is killed and started anew by the manager; so is an engine that says it is not
well.  A clean stop cancels the heartbeat only after STOPPING has been sent.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from cli.terminal.systemd_notify import Notifier


async def keep_watchdog(notifier: Notifier, is_well: Callable[[], bool]) -> None:
    """Beat twice in each interval that the manager asked for, until cancelled; returns at once if it asked for none."""
    if notifier.watchdog_s is None:
        return
    while True:
        if is_well():
            notifier.watchdog()
        await trio.sleep(notifier.watchdog_s / 2)
