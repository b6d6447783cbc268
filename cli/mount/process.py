"""The process behind a mount: one loop, signals, the service manager.

SIGTERM, SIGINT and SIGHUP end it: it takes no more requests, stores all written data, and unmounts.  A second signal
ends it at once; staged files stay, and the next mount names them.

It gives the lock of its mount point up when its mount has left the place and goes on without it.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog
import trio

from cli.terminal.systemd_notify import keep_watchdog, notifier_from
from fuse.kernel.attach import MountOptions
from fuse.kernel.mount_lock import MountLock
from fuse.service import serve_mount

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_HURRIED: Final = 75
DESCRIPTORS_MAX: Final = 262_144
"""100,000 open handles with two descriptors each, and those of the process itself."""
_log: Final = structlog.get_logger()


def run_mount(address: str, token: str, options: MountOptions, lock: MountLock, ready: Callable[[str], None]) -> None:
    """Serve the mount until it is unmounted or a signal arrives.  Calls `ready` with a line when it serves.

    `lock` is that of the mount point, taken; it is given up when the mount goes on without its place.
    """
    raise_descriptor_limit()
    trio.run(partial(_run, address, token, options, lock, ready))


async def _run(address: str, token: str, options: MountOptions, lock: MountLock, ready: Callable[[str], None]) -> None:
    notifier = notifier_from()

    def serves(line: str) -> None:
        _log.info("serving", mount_point=str(options.mount_point), engine=address, pid=os.getpid())
        ready(line)
        notifier.ready(line)
        serving.set()

    async def end_on_signal() -> None:
        """End the mount on the first signal; exit at once on a second one."""
        number = await anext(signals)
        _log.info("told to end", signal=signal.Signals(number).name)
        notifier.stopping("storing what was written")
        if serving.is_set():
            options.stop.set()
        else:
            start.cancel()
        for each in END_SIGNALS:
            signal.signal(each, _hurry)

    async def give_place_up() -> None:
        await options.left.wait()
        lock.give_up()
        notifier.status("unmounted at its place, still in use elsewhere")

    serving = trio.Event()
    with trio.open_signal_receiver(*END_SIGNALS) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_watchdog, notifier)
            nursery.start_soon(end_on_signal)
            nursery.start_soon(give_place_up)
            with trio.CancelScope() as start:
                await serve_mount(address, token, options, serves)
            nursery.cancel_scope.cancel()
    _log.info("ended", mount_point=str(options.mount_point))


def _hurry(number: int, frame: object) -> None:
    os._exit(EXIT_HURRIED)


def raise_descriptor_limit() -> None:
    """Raise the limit of open files as far as allowed, up to a bound: each open handle of the mount takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
