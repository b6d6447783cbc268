"""One mount, put together: the connection to the engine, the inodes, the staging folder, the watches, the kernel.

The mount is a client like any other.  When the engine is lost it waits for it, then continues with the files that
are open.  It lives until it is cancelled or unmounted.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from fuse.hot.hot_set import HotRules, HotSet, made_hot_set
from fuse.hot.kernel_backings import KernelBackings, why_not
from fuse.kernel.attach import MountOptions, mounted
from fuse.names.watches import Watcher
from fuse.operations import LakeOperations
from fuse.staging.folder import StagingFolder, open_staging
from fuse.staging.leftovers import find_leftovers, is_in_use, staging_folders
from fuse.state.attributes import Owner
from fuse.state.inodes import InodeTable
from fuse.state.mount import Mount, now_ns
from lakefs.client.trio.driver import TrioDriver
from lakefs.client.trio.reconnecting import connect_reconnecting
from lakefs.errors import LakeError
from lakefs.host.offload import ThreadOffload
from lakefs.names import Name

_log: Final = structlog.get_logger(__name__)
_THREADS: Final = 4
_ROOT_MODE: Final = 0o755
_LEFTOVERS_NAMED: Final = 20


async def serve_mount(address: str, token: str, options: MountOptions, ready: Callable[[str], None]) -> None:
    """Mount, call `ready`, and serve until cancelled or unmounted.

    Raises the errors of connecting, of the mount point and of the staging folder; at the end, the error that kept
    files from being stored.
    """
    staging = open_staging(options.staging, options.staging_bytes, options.mount_point)
    if options.append_forced:
        staging.append_from(1)
    try:
        _log_leftovers(staging, options.staging)
        async with (
            ThreadOffload(_THREADS, "lake-mount") as offload,
            connect_reconnecting(
                address, token=token, patience_s=options.engine_wait_s, silence_s=options.engine_silence_s
            ) as engine,
        ):
            driver = TrioDriver(engine, offload, network=address.startswith("tcp"))
            owner = Owner(os.getuid(), os.getgid())
            table = InodeTable(owner.bare_folder(_ROOT_MODE, now_ns()), options.bucket)
            async with trio.open_nursery() as nursery:
                mount = Mount(driver, engine, offload, staging, table, owner, options, nursery)
                staging.empty_beside = lambda emptying: nursery.start_soon(mount.empty_beside, emptying)
                if not mount.checks_places:
                    _log.warning("the engine is of an earlier release: names are looked at before each change")
                await _check_root(mount)
                nursery.start_soon(Watcher(mount, engine).run)
                nursery.start_soon(mount.give_leases_back)
                nursery.start_soon(mount.settle)
                operations = LakeOperations(mount)
                try:
                    async with mounted(operations, options) as entry:
                        mount.device = entry.device
                        operations.hot = hot = _hot_set(mount)
                        if hot is not None:
                            nursery.start_soon(hot.run)
                        ready(f"mounted {options.mount_point}")
                        try:
                            await trio.sleep(math.inf)  # the block is cancelled when the mount is taken away
                        finally:
                            mount.begin_to_end()
                finally:
                    with trio.CancelScope(shield=True):
                        await operations.release_all(max(0.0, mount.end_by - trio.current_time()))
                    staging.empty_beside = None
                nursery.cancel_scope.cancel()
            if operations.hot is not None:
                operations.hot.close()
            await driver.aclose()
            _raise_unstored(mount)
    finally:
        staging.close()


def _hot_set(mount: Mount) -> HotSet | None:
    """Return the hot set of the mount; None, with a line in the log which says why, if there can be none."""
    options = mount.options
    missing = "--hot-memory is 0" if options.hot_bytes == 0 else why_not() if options.native else "-o native=off"
    rules = HotRules(forced=options.hot_forced)
    found = missing or made_hot_set(mount, KernelBackings(), options.hot_bytes, rules)
    if isinstance(found, HotSet):
        return found
    _log.info("no hot files: every read is asked of the mount", reason=found)
    return None


def _log_leftovers(staging: StagingFolder, path: Path) -> None:
    """Log the first files that earlier mounts could not store, their number, and the command that lists all.

    `path` is the staging folder of the place; other folders in it may be in use by processes that go on.
    """
    beside = [
        leftover for folder in staging_folders(path) if folder != staging.path for leftover in find_leftovers(folder)
    ]
    found = staging.leftovers() + [leftover for leftover in beside if not is_in_use(leftover)]
    leftovers = sorted(found, key=lambda leftover: leftover.time_ns)
    for leftover in leftovers[:_LEFTOVERS_NAMED]:
        _log.warning(
            "an earlier mount ended before this was stored",
            name=leftover.name,
            path=str(leftover.path),
            size_bytes=leftover.size_bytes,
        )
    if leftovers:
        _log.warning(f"it can be restored, see: {_command(path)}", files=len(leftovers))


def _raise_unstored(mount: Mount) -> None:
    """Raise the error that kept files from being stored when the mount ended; its class sets the exit code."""
    if mount.unstored_error is None:
        return
    files = "1 file" if mount.unstored_count == 1 else f"{mount.unstored_count} files"
    raise type(mount.unstored_error)(
        f"{files} could not be stored when the mount ended ({mount.unstored_error.message});"
        f" to restore what was written: {_command(mount.staging.path)}"
    )


def _command(path: Path) -> str:
    return f"lake staged ls --staging {shlex.quote(str(path))}"


async def _check_root(mount: Mount) -> None:
    """Check that the bucket exists when one bucket is the root, and take its attributes.  Raises BucketNotFound."""
    bucket = mount.options.bucket
    if not bucket:
        return
    (found,) = await mount.stat([Name(bucket, "")])
    if isinstance(found, LakeError):
        raise found
    mount.table.root.attributes = mount.owner.shown(found)
