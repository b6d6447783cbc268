"""`lake` whose connections wait briefly: `python -m tests.door.brief_lake gateway ...`.

The same program, with time limits at which a test need not wait for a minute, and few connections.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from lakefs import limits
from tests.crash import small_lake

IDLE_S: Final = 2.0
HEAD_S: Final = 1.5
STALL_S: Final = 2.0
CONNECTIONS_MAX: Final = 40
SWEEP_S: Final = 0.002
"""The server looks for connections past their deadline once in so many seconds."""
_BRIEF: Final = {
    "HTTP_IDLE_TIMEOUT_S": IDLE_S,
    "HTTP_HEAD_TIMEOUT_S": HEAD_S,
    "HTTP_STALL_TIMEOUT_S": STALL_S,
    "HTTP_CONNECTIONS_MAX": CONNECTIONS_MAX,
}


def make_brief() -> None:
    """Change the bounds before anything has read them."""
    assert not any(name.startswith("gateway") for name in sys.modules), "the gateway has the long bounds already"
    for name, value in _BRIEF.items():
        assert hasattr(limits, name), f"there is no bound {name} any more"
        setattr(limits, name, value)
    server = importlib.import_module("gateway.http.server")
    assert hasattr(server, "_SWEEP_S"), "the server has another name for it now"
    setattr(server, "_SWEEP_S", SWEEP_S)  # noqa: B010 - mypy knows only the type of a module


if __name__ == "__main__":
    make_brief()
    small_lake.be_lake()
