"""`lake mount` and `lake unmount`: buckets as folders of this machine.

`lake mount` returns when the mount serves.  The process behind it stays in the background until it is unmounted or
receives a signal to end.  With --foreground this process itself serves.  `cli.mount.options` parses the text behind -o.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from cli.terminal.output import notice, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import EngineBusy, InvalidArgument, LakeError, LocalFileError

if TYPE_CHECKING:
    from cli.mount.daemon import Reporter
    from cli.mount.places import MountPlaces
    from fuse.kernel.attach import MountOptions
    from fuse.kernel.mount_point import MountEntry

FLAG_NAMES = ("bucket", "read_only", "allow_other", "sync", "staging", "staging_size", "read_ahead", "hot_memory")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--bucket", metavar="NAME", help="Mount this bucket; else all of them, as folders.")
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--foreground", is_flag=True, help="Stay, and log to stderr; else return when the mount serves.")
@click.option("--allow-other", is_flag=True, help="Let other users in, as far as modes allow.")
@click.option("--sync", is_flag=True, help="A file is durable when its close returns, not within a second.")
@click.option("--staging", metavar="DIR", help="Folder for what is written and not stored yet; one mount's alone.")
@click.option("--staging-size", metavar="SIZE", help="Most bytes in it; writes beyond fail with ENOSPC.")
@click.option("--read-ahead", metavar="KIB", help="How far the kernel reads ahead; else 4096.")
@click.option("--hot-memory", metavar="SIZE", help="Most memory for files that the kernel reads by itself; 0: none.")
@click.option("-o", "texts", metavar="OPTIONS", multiple=True, help="Options as mount(8) takes them: ro,sync,...")
@click.option("--quiet", is_flag=True, hidden=True)
@engine_options
@pass_target
def mount(where: Target, /, folder: Path, texts: tuple[str, ...], foreground: bool, quiet: bool, **flags: Any) -> None:
    """Mount the lake, or one bucket of it, at the folder DIR.

    DIR must exist and be empty.  lake unmount, umount and fusermount3 -u take the mount away again.
    """
    from cli.terminal.logs import log_to_stderr
    from lakefs.config.settings import load

    _require_pyfuse3()
    log_level = load().log_level  # before the process leaves the folder that a path may be relative to
    given = _given(texts, flags)
    wait_s: float = given.pop("retry_s", 0.0)
    give_up_at = time.monotonic() + wait_s
    address, token = _engine(where, given, give_up_at)
    options, places = _options(folder, given)
    if wait_s:
        from cli.mount.engine_wait import reach, until_reached

        until_reached(lambda: reach(address, token), give_up_at)
    reporter: Reporter = _Terminal()
    log: TextIO | None = None
    if not foreground:
        if options.debug:
            raise InvalidArgument("-o debug prints every request on stderr: give --foreground with it")
        from cli.mount.daemon import BoundedLog, detach

        outcome = detach(places.log)
        if isinstance(outcome, str):
            if not quiet:
                write_line(outcome)
                _tell_leftovers(options.staging)
            return
        reporter, log = outcome, cast("TextIO", BoundedLog(places.log))
    log_to_stderr(log_level, log)
    _serve(address, token, options, places, reporter)


def _require_pyfuse3() -> None:
    """Raise LocalFileError where no mount can be made, because pyfuse3 was not built."""
    from importlib.util import find_spec

    if find_spec("pyfuse3") is None:
        raise LocalFileError(
            "this installation has no mount: pyfuse3 is not there; as root: apt-get install fuse3 gcc libfuse3-dev "
            "pkg-config python3-dev; then, as yourself, in the checkout: make setup",
            subject="pyfuse3",
        )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--lazy",
    is_flag=True,
    help="Also when it is in use: files that are open in it keep working; the folder shows it no more.",
)
@click.option("--dead", is_flag=True, help="Only a mount whose process was killed; else do nothing.")
def unmount(folder: Path, lazy: bool, dead: bool) -> None:
    """Take away the lake mount at DIR, and wait until what was written through it is stored.

    Where another mount namespace (a container) has it, too, it stays there: the command says who has it.
    """
    from cli.mount.places import places_of
    from fuse.kernel.mount_lock import MountLock
    from fuse.kernel.mount_point import LAKE_TYPE, answers, mount_at, real_path

    place = real_path(folder)
    entry = mount_at(place)
    if dead and (entry is None or entry.type != LAKE_TYPE or answers(place) is not False):
        return
    if entry is None:
        raise LocalFileError(f"nothing is mounted at {place}", subject=str(place))
    if entry.type != LAKE_TYPE:
        raise InvalidArgument(
            f"{place} is a mount of {entry.type}, not of a lake; remove it with: umount {place}", subject=str(place)
        )
    file = places_of(place).lock
    with MountLock(file) if os.access(file, os.R_OK | os.W_OK) else nullcontext() as lock:
        _take_away(place, lazy)
        if not lazy and not (lock and lock.wait_free(place)):
            _tell_holders(entry, lock.found_pid if lock else None)


def _take_away(place: Path, lazy: bool) -> None:
    """Unmount; a dead mount also when it is in use.  EngineBusy, PermissionDenied, LocalFileError."""
    from fuse.kernel.mount_point import answers, unmount as take_away

    try:
        take_away(place, lazy=lazy)
    except EngineBusy:
        if answers(place) is not False:
            raise
        take_away(place, lazy=True)
        notice(f"the process behind {place} had been killed; files that are still open in it fail")


def _tell_holders(entry: MountEntry, pid: int | None) -> None:
    """Say on stderr who has the mount elsewhere, if it goes on; `pid` is the process behind it, if known."""
    from fuse.kernel.holders import find_holders, told
    from fuse.kernel.mount_point import mount_at

    holders = find_holders(entry.device)
    goes_on = pid is not None and Path(f"/proc/{pid}").exists() and mount_at(entry.mount_point) is None
    if not holders and not goes_on:
        return
    notice(
        f"{entry.mount_point} is unmounted here and free for another mount; it is still in use elsewhere"
        f" ({told(holders) or 'by whom cannot be seen from here'}), and its process{f' {pid}' if pid else ''} goes on"
        " until the last of its users has ended"
    )


def _given(texts: tuple[str, ...], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of -o and the flags, by the names of MountOptions' fields; a flag overrides -o."""
    from cli.mount.options import parse_byte_count, parse_mount_options, parse_read_ahead

    given = parse_mount_options(texts)
    for name in FLAG_NAMES:
        value = flags[name]
        if value is None or value is False:
            continue
        elif name == "staging_size":
            given["staging_bytes"] = parse_byte_count("--staging-size", value)
        elif name == "hot_memory":
            given["hot_bytes"] = parse_byte_count("--hot-memory", value)
        elif name == "read_ahead":
            given["read_ahead_kib"] = parse_read_ahead("--read-ahead", value)
        else:
            given[name] = value
    return given


def _engine(where: Target, given: dict[str, Any], give_up_at: float) -> tuple[str, str]:
    """Return address and token; a socket's path is made absolute, since the process leaves its folder."""
    from cli.mount.engine_wait import until_reached
    from lakefs.client.address import resolve

    server, token_file = given.pop("server", None), given.pop("token_file", None)
    if where.data is not None:
        raise InvalidArgument("a mount needs an engine that serves; give --server ADDRESS instead of --data DIR")
    chosen = Target(where.server or server, None, where.token_file or (Path(token_file) if token_file else None))
    address, token = until_reached(lambda: resolve(chosen.server, chosen.token()), give_up_at)
    if address.startswith("unix:"):
        address = f"unix:{os.path.abspath(address.removeprefix('unix:'))}"
    return address, token


def _options(folder: Path, given: dict[str, Any]) -> tuple[MountOptions, MountPlaces]:
    """Return all options.  A folder that cannot be a mount point is refused before anything is made for it."""
    from cli.mount.places import places_of
    from lakefs.client.address import silence_limit

    try:
        from fuse.kernel.attach import MountOptions
    except ImportError as error:
        raise LocalFileError(f"libfuse cannot be loaded ({error}): install the package fuse3") from error
    from fuse.kernel.mount_point import check_mount_point, mount_at, real_path

    place = real_path(folder)
    if mount_at(place) is None:
        check_mount_point(place, may_hold_files=given.get("may_hold_files", False))
    places = places_of(place)
    staging = Path(os.path.abspath(given.pop("staging"))) if "staging" in given else places.staging
    for path in (staging, places.folder):
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise InvalidArgument(f"{path} is below the mount point {place}; choose another folder", subject=str(path))
    places.make()
    given.setdefault("engine_silence_s", silence_limit(None))
    return MountOptions(place, staging, **given), places


def _serve(address: str, token: str, options: MountOptions, places: MountPlaces, reporter: Reporter) -> None:
    """Be the mount process.  An error that keeps it from serving is sent to the reporter, and raised."""
    from cli.mount.process import run_mount
    from fuse.kernel.mount_lock import MountLock
    from fuse.kernel.mount_point import check_mount_point

    try:
        with MountLock(places.lock) as lock:
            lock.take(options.mount_point)
            check_mount_point(options.mount_point, may_hold_files=options.may_hold_files)
            run_mount(address, token, options, lock, reporter.ready)
    except BaseExceptionGroup as group:
        from cli.terminal.process import single_error

        error = single_error(group)
        if isinstance(error, LakeError):
            reporter.failed(error)
        raise error from group
    except LakeError as error:
        reporter.failed(error)
        raise


def _tell_leftovers(staging: Path) -> None:
    """Say on stderr that an earlier mount left files, and which command shows them."""
    import shlex

    from fuse.staging.leftovers import find_leftovers, is_in_use, staging_folders

    try:
        count = sum(
            not is_in_use(leftover) for folder in staging_folders(staging) for leftover in find_leftovers(folder)
        )
    except LocalFileError:
        return  # the mount serves, and its log has the error
    if count:
        files = "1 file" if count == 1 else f"{count} files"
        notice(
            f"{files} of an earlier mount could not be stored and can be restored;"
            f" see: lake staged ls --staging {shlex.quote(str(staging))}"
        )


class _Terminal:
    """Reports of a mount in the foreground: writes the line to stdout; the command itself shows an error."""

    def ready(self, line: str) -> None:
        """Write one line, at once."""
        import sys

        write_line(line)
        sys.stdout.flush()

    def failed(self, error: LakeError) -> None:
        """Does nothing: the command ends with the error."""
