"""One mount, from the check of its place until the kernel has forgotten it.

`mounted` mounts, serves while the block runs, and unmounts, whatever ends the block:
- the block was left or cancelled (SIGTERM): the mount is removed while requests are still answered, since unmounting
  can need answers; lazily when it is in use, and the log says so.  Then no request is taken, and those under way end;
- it was unmounted from outside, its connection was aborted, or `MountOptions.stop` was set: the block is cancelled,
  and the code behind it runs with all that the caller has around it still alive;
- the loop failed: as in the first case, and the failure is raised (in an exception group).

A mount that leaves its place and is not over serves on: it was unmounted lazily with files open, or another mount
namespace or a bind mount has it, too.  `MountOptions.left` is set then, half a second after it has left, and the log
names its holders.

Rules kept here:
- One mount per process: libfuse's session is a global of pyfuse3.
- No code here touches a path below the mount point on the loop's thread: it would wait for itself.
- When `mounted` has returned no handler runs and no call of pyfuse3 may be made: its session is gone.
- The native layer (`fuse.native.layer`) ends before the session does: its threads first, then the device.

Not here: operations, staged writes.  A RELEASE that was under way when the mount was removed may never arrive: the
owner of the operations treats every handle that is still open as released.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyfuse3
import structlog
import trio

from fuse.kernel.holders import find_holders, told
from fuse.kernel.mount_point import MountEntry, check_mount_point, mount_at, unmount
from fuse.kernel.place_watch import PlaceWatch
from fuse.native import layer
from lakefs.errors import EngineBusy, InvalidArgument, LakeError, LocalFileError, PermissionDenied
from lakefs.limits import ENGINE_SILENCE_S, ENGINE_WAIT_S, GIB

STOP_WAIT_S: Final = 75.0
"""Longest time from the signal to the end of the process; the unit's TimeoutStopSec is longer."""
UNMOUNT_WAIT_S: Final = 25.0
"""Unmounting writes mapped pages back through the mount.  After this, or a third of the stop time, it is lazy."""
DRAIN_WAIT_S: Final = 20.0
"""Time for requests under way when the mount ends; after this, or a third of the stop time, they are cancelled
and fail with ENOTCONN."""
FIRST_ANSWER_WAIT_S: Final = 30.0
LEFT_AFTER_S: Final = 0.5
"""Longest time from the unmount to the end of the kernel's session, if nothing holds that."""
READ_AHEAD_FOLDER: Final = Path("/sys/class/bdi")
MAX_TASKS: Final = 256
"""Requests answered at once; more wait in the kernel."""
_log: Final = structlog.get_logger()


@dataclass(frozen=True)
class MountOptions:
    """Options of a mount.  `mount_point` is a real path, see `fuse.kernel.mount_point.real_path`."""

    mount_point: Path
    staging: Path
    """Folder for written bytes that are not stored yet; another mount's only where that was at this place before."""
    bucket: str = ""
    """Show this bucket as the root; empty: all buckets, as folders."""
    read_only: bool = False
    allow_other: bool = False
    sync: bool = False
    """close() is durable when it returns."""
    may_hold_files: bool = False
    """Mount over a folder that is not empty."""
    read_ahead_kib: int = 4096
    attribute_timeout_s: float = 60.0
    entry_timeout_s: float = 60.0
    staging_bytes: int = 64 * GIB
    hot_bytes: int | None = None
    """Most memory for hot files; None: a tenth of the memory, 0: none."""
    hot_forced: bool = False
    """For tests: every file is hot at its first open."""
    append_forced: bool = False
    """For tests: native threads append to short files too."""
    engine_wait_s: float = ENGINE_WAIT_S
    """Longest time that operations wait for a lost engine before they fail with EIO."""
    engine_silence_s: float = ENGINE_SILENCE_S
    """Longest time that an engine may send nothing, not even a keep-alive, before it counts as lost."""
    stop_wait_s: float = STOP_WAIT_S
    """Longest time that the mount may take to end; files not stored by then stay in the staging folder."""
    source: str = "lake"
    """Source shown in the table of mounts."""
    kernel_options: frozenset[str] = frozenset()
    """Passed on unchanged: noexec, noatime, nodiratime, dirsync."""
    debug: bool = False
    """libfuse prints every request."""
    native: bool = True
    """Put the native layer below libfuse, where it can be."""
    stop: trio.Event = field(default_factory=trio.Event, compare=False)
    """Set to end the mount in order; cancelling also ends the task that stores the last writes."""
    left: trio.Event = field(default_factory=trio.Event, compare=False)
    """Set when the mount has left its place and serves on elsewhere: another mount may have the place."""


@asynccontextmanager
async def mounted(operations: pyfuse3.Operations, options: MountOptions) -> AsyncIterator[MountEntry]:
    """Mount, serve `operations` while the block runs, unmount.  The kernel has its first answer when the block starts.

    The block is cancelled when the mount is removed from outside: no request arrives any more.  Unmounting is shielded
    from cancellation and bounded in time.  Raises the errors of `check_mount_point`, PermissionDenied,
    InvalidArgument, LocalFileError.
    """
    place = options.mount_point
    await trio.to_thread.run_sync(
        lambda: check_mount_point(place, may_hold_files=options.may_hold_files), abandon_on_cancel=True
    )
    _start_session(operations, options)
    try:
        entry = mount_at(place)
        if entry is None:
            raise LocalFileError(f"{place}: the mount was taken away while it was made", subject=str(place))
        loop = _Loop()
        with PlaceWatch(entry) as watch:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.run)
                try:
                    await _wait_first_answer(place)
                    _raise_read_ahead(entry.device, options.read_ahead_kib)
                    nursery.start_soon(loop.end_block_at, options.stop)
                    nursery.start_soon(loop.give_place_up, watch, entry, options.left)
                    with loop.block:
                        yield entry
                finally:
                    loop.watching.cancel()
                    with trio.CancelScope(shield=True):
                        await _leave(loop, entry, options)
                nursery.cancel_scope.cancel()
    finally:
        if not layer.why_not():
            _log.info("native layer", **layer.counters())
        layer.end()
        pyfuse3.close(unmount=False)


@dataclass
class _Loop:
    """pyfuse3's loop, shielded from cancellation from outside: it answers until the mount is gone."""

    ended: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=lambda: trio.CancelScope(shield=True))
    block: trio.CancelScope = field(default_factory=trio.CancelScope)
    watching: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Ends the watch on the place: a mount that is ending keeps its place until the end."""

    async def run(self) -> None:
        """Run until the session is over; an exception that escaped a handler is raised."""
        try:
            with self.scope:
                await answer_kernel()
        finally:
            self.ended.set()
            self.block.cancel()

    async def end_block_at(self, stop: trio.Event) -> None:
        """Cancel the block when `stop` is set."""
        await stop.wait()
        self.block.cancel()

    async def give_place_up(self, watch: PlaceWatch, entry: MountEntry, left: trio.Event) -> None:
        """Set `left` when the mount has left its place and the session goes on; log its holders."""
        with self.watching:
            await watch.wait_left()
            if await self.has_ended(LEFT_AFTER_S):
                return
            left.set()
            holders = await trio.to_thread.run_sync(find_holders, entry.device, abandon_on_cancel=True)
            _log.warning(
                "unmounted at its place, which is free for another mount; still in use elsewhere: this process goes on"
                " until its last user has ended",
                mount_point=str(entry.mount_point),
                holders=told(holders) or "open files",
            )

    async def has_ended(self, within_s: float) -> bool:
        """Wait at most `within_s` for the end; return True if it has ended."""
        with trio.move_on_after(within_s):
            await self.ended.wait()
        return self.ended.is_set()


async def answer_kernel() -> None:
    """Answer the kernel's requests until the session is over; an exception that escaped a handler is raised.

    A session that is aborted just when a request was taken from it ends with ECONNABORTED instead of ENODEV (Linux'
    `fuse_dev_do_read`), for which libfuse makes an error of the end.
    """
    try:
        await pyfuse3.main(max_tasks=MAX_TASKS)
    except* OSError as errors:
        _, others = errors.split(lambda error: isinstance(error, OSError) and error.errno == errno.ECONNABORTED)
        if others is not None:
            raise others from None


async def _leave(loop: _Loop, entry: MountEntry, options: MountOptions) -> None:
    """Remove the mount and end the loop, each within a third of the time that the mount has to end at most."""
    wait_s = options.stop_wait_s / 3
    drain_s = min(DRAIN_WAIT_S, wait_s)
    if not loop.ended.is_set():
        _log.info("unmounting", mount_point=str(entry.mount_point))
    try:
        lazy = options.left.is_set() or await _take_away(entry, min(UNMOUNT_WAIT_S, wait_s))
    except LakeError as error:  # the loop must end all the same
        _log.error("a dead mount stays behind", mount_point=str(entry.mount_point), error=error.message)
        lazy = True
    if loop.ended.is_set():
        return
    # Unless the unmount was lazy the kernel has ended the session itself, and the loop sees that.
    if lazy or not await loop.has_ended(drain_s / 4):
        pyfuse3.terminate()
    if not await loop.has_ended(drain_s * 3 / 4):
        _log.warning("requests that did not end are given up", after_s=drain_s)
        loop.scope.cancel()
        await loop.ended.wait()


async def _take_away(entry: MountEntry, wait_s: float) -> bool:
    """Unmount this mount if it is still mounted.  Returns True if the kernel may not have ended the session:
    it was unmounted lazily, or another mount lies over it."""
    place = entry.mount_point
    now = mount_at(place)
    if now is None or now.device != entry.device:
        if now is not None:
            _log.warning("another mount lies over this one", mount_point=str(place), type=now.type)
        return now is not None
    try:
        with trio.fail_after(wait_s):
            await trio.to_thread.run_sync(lambda: unmount(place, lazy=False), abandon_on_cancel=True)
    except (EngineBusy, trio.TooSlowError):
        _log.warning(
            "the mount point is in use: unmounted lazily; files that are still open fail with ENOTCONN",
            mount_point=str(place),
        )
    except LakeError as error:
        _log.error("cannot unmount", mount_point=str(place), error=error.message)
    else:
        return False
    await trio.to_thread.run_sync(_unmount_lazily, place)
    return True


def _unmount_lazily(place: Path) -> None:
    try:
        unmount(place, lazy=True)
    except LakeError as error:
        _log.error("a dead mount stays behind", mount_point=str(place), error=error.message)


async def _wait_first_answer(place: Path) -> None:
    """Wait until the root's attributes were answered: the kernel's first handshake is then over, too."""
    try:
        with trio.fail_after(FIRST_ANSWER_WAIT_S):
            await trio.to_thread.run_sync(os.stat, place, abandon_on_cancel=True)
    except (OSError, trio.TooSlowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not answer"
        raise LocalFileError(f"{place}: the mount does not work: {reason}", subject=str(place)) from error


def _raise_read_ahead(device: str, read_ahead_kib: int) -> None:
    """Write the read-ahead size.  Only after the handshake, which sets the kernel's own first value."""
    setting = READ_AHEAD_FOLDER / device / "read_ahead_kb"
    try:
        setting.write_text(f"{read_ahead_kib}\n")
    except OSError as error:
        _log.warning(
            "read-ahead stays at the kernel's default: large sequential reads are about 5 times slower;"
            " mount as root, or have root write the size",
            file=str(setting),
            wanted_kib=read_ahead_kib,
            error=error.strerror,
        )


def _start_session(operations: pyfuse3.Operations, options: MountOptions) -> None:
    """Mount.  Text that libfuse and fusermount3 write to stderr becomes the error, or is logged."""
    said: list[str] = []
    if options.native:
        layer.arm(reads=not options.debug, passthrough=options.hot_bytes != 0)
    try:
        with _stderr_lines(said):
            pyfuse3.init(operations, str(options.mount_point), _session_options(options))
    except RuntimeError as error:
        raise _mount_error(said, options) from error
    for line in said:
        _log.warning("libfuse said", line=line)
    if reason := layer.why_not() if options.native else "-o native=off":
        _log.info("every request is answered in Python: there is no native layer below libfuse", reason=reason)


def _session_options(options: MountOptions) -> set[str]:
    chosen = {
        # A comma in the value would end it.
        f"fsname={options.source.replace(',', '_')}",
        "subtype=lake",
        "default_permissions",
    }
    chosen |= options.kernel_options
    chosen |= {"ro"} if options.read_only else set()
    chosen |= {"allow_other"} if options.allow_other else set()
    chosen |= {"debug"} if options.debug else set()
    return chosen


@contextmanager
def _stderr_lines(lines: list[str]) -> Iterator[None]:
    """Collect the lines written to descriptor 2 in the block, by C code and child processes too."""
    sys.stderr.flush()
    kept = os.dup(2)
    caught = os.memfd_create("said", os.MFD_CLOEXEC)
    try:
        os.dup2(caught, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        text = os.pread(caught, 64 << 10, 0).decode(errors="replace")
        os.close(caught)
        lines.extend(line for line in text.splitlines() if line.strip())


def _mount_error(said: list[str], options: MountOptions) -> LakeError:
    """Return the error that the last words of libfuse and fusermount3 mean."""
    place, text = options.mount_point, "\n".join(said)
    if "device not found" in text:
        return LocalFileError(
            "/dev/fuse is missing: load the module with: modprobe fuse; a container must be given the device",
            subject="/dev/fuse",
        )
    if "failed to open /dev/fuse" in text:
        return PermissionDenied(
            "/dev/fuse may not be opened by this user: as root, chmod 666 /dev/fuse;"
            " a container must be given the device",
            subject="/dev/fuse",
        )
    if "user_allow_other" in text:
        return PermissionDenied(
            "allow_other is refused for users who are not root: add a line user_allow_other to /etc/fuse.conf,"
            " or mount without it",
            subject="/etc/fuse.conf",
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return LocalFileError(
            "fusermount3 is missing, which users who are not root need to mount: install the package fuse3",
            subject="fusermount3",
        )
    reason = said[-1] if said else "no reason given"
    if "not owned by user" in text or "no write access" in text:
        return PermissionDenied(f"mount point {place} must belong to the user who mounts: {reason}", subject=str(place))
    if "not permitted" in text or "ermission denied" in text:
        return PermissionDenied(
            f"{place}: mounting is not permitted ({reason}); root and, in a container, the capability"
            " CAP_SYS_ADMIN may, and fusermount3 when it is setuid root",
            subject=str(place),
        )
    if "unknown option" in text or "invalid parameter" in text:
        return InvalidArgument(f"{place}: {reason}", subject=str(place))
    return LocalFileError(f"{place}: the mount failed: {reason}", subject=str(place))
