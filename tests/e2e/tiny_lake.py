"""The command line with `tiny_fs` behind `lake mount` instead of a store: `python -m tests.e2e.tiny_lake ARGS`.

The address chooses what the mount process does: `unix:.../refuse` cannot reach an engine, `unix:.../crash` raises an
unexpected error, `unix:.../killed` is killed before it serves; anything else serves.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

import trio

import cli.mount.engine_wait
from cli.main import main
from fuse.kernel.attach import MountOptions, mounted
from lakefs.errors import EngineUnreachable
from tests.e2e.tiny_fs import TinyFs


async def serve_mount(address: str, token: str, options: MountOptions, ready: Callable[[str], None]) -> None:
    """Stand in for the function of `fuse.service`."""
    match address.rpartition("/")[2]:
        case "refuse":
            raise EngineUnreachable(f"nobody serves at {address}", subject=address)
        case "crash":
            raise ValueError("a bug")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    async with mounted(TinyFs(), options):
        ready(f"mounted {options.mount_point}")
        await trio.sleep(math.inf)


def reach(address: str, token: str) -> None:
    """Stand in for the function of `cli.mount.engine_wait`."""
    if address.endswith("/refuse"):
        raise EngineUnreachable(f"nobody serves at {address}", subject=address)


cli.mount.engine_wait.reach = reach
service = ModuleType("fuse.service")
service.serve_mount = serve_mount  # type: ignore[attr-defined]
sys.modules["fuse.service"] = service

if __name__ == "__main__":
    main()
