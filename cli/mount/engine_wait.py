"""Waits for an engine that starts later than its mounts, as at boot: the option `retry` of a mount.

It waits before anything is made, locked or mounted, in the command's own process: whoever ends the command ends the
wait, and another mount of the same place is not kept out by it.  Only an engine that nobody reaches is waited for; a
token or a right that is refused is an error at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from cli.terminal.output import notice
from lakefs.errors import EngineUnreachable

T = TypeVar("T")
FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 1.0
"""Pauses double from the first to the last: an engine that starts is found soon, a missing one is rarely looked for."""


def until_reached(attempt: Callable[[], T], give_up_at: float) -> T:
    """Return what `attempt` returns; call it again when it raises EngineUnreachable, until that time (monotonic).

    Says once on stderr that it waits.  Raises the last EngineUnreachable, and any other error at once.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except EngineUnreachable as error:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise
            if pause_s == FIRST_PAUSE_S:
                notice(f"waiting for the engine, {math.ceil(left_s)} s at most: {error.message}")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def reach(address: str, token: str) -> None:
    """Connect to an engine and close the connection.  EngineUnreachable, PermissionDenied, InvalidArgument, ..."""
    from lakefs.client.blocking.engine import connect_blocking

    connect_blocking(address, token=token).close()
