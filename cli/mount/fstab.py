"""Calls by mount(8): for `mount -t lake`, `mount -t fuse.lake`, and lines of /etc/fstab.

mount(8) runs `/sbin/mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`; the script `mount.lake` is
installed under that name (or `mount.fuse.lake`).  Without it, mount(8) gives type `fuse.lake` to mount.fuse3, which
runs `lake SOURCE DIR -o OPTIONS`; `lake` passes such a call to this module.  All become a `lake mount`.

Such a mount is made by nobody who watches, often at boot: it waits for its engine.

SOURCE is `lake` or `none` for the configured engine, or an engine's address; the bucket is an option.
"""

from __future__ import annotations

from typing import Final

from lakefs.errors import InvalidArgument

CONFIGURED: Final = ("lake", "none", "")
ADDRESSES: Final = ("unix:", "tcp:")
RETRY_MINUTES: Final = 2
"""The option `retry`, where the call has none: nfs(5)'s default for mounts in the foreground."""
USAGE: Final = "usage: mount.lake SOURCE DIR [-fnsv] [-o OPTIONS]"


def from_mount(given: list[str]) -> list[str]:
    """Return the `lake mount` that mount(8) means; empty if it only pretends (-f).  Raises InvalidArgument."""
    import getopt

    try:
        options, places = getopt.gnu_getopt(given, "sfnvN:o:t:")
    except getopt.GetoptError as error:
        raise InvalidArgument(f"{error}; {USAGE}") from error
    if len(places) != 2:
        raise InvalidArgument(USAGE)
    if any(name == "-f" for name, _ in options):
        return []
    return as_mount(places[0], places[1], [value for name, value in options if name == "-o"])


def from_mount_fuse(given: list[str]) -> list[str] | None:
    """Return the `lake mount` that mount.fuse3 means; None if mount.fuse3 did not make the call."""
    if len(given) != 4 or given[2] != "-o" or not _is_of_mount_fuse(given[3]):
        return None
    return as_mount(given[0], given[1], [given[3]])


def _is_of_mount_fuse(options: str) -> bool:
    """Return True if the options name both dev and suid settings: mount.fuse3 always does, people do not."""
    names = set(options.split(","))
    return bool(names & {"dev", "nodev"}) and bool(names & {"suid", "nosuid"})


def as_mount(source: str, place: str, options: list[str]) -> list[str]:
    """Return the command line.  Raises InvalidArgument for an unknown source."""
    if source not in CONFIGURED and not source.startswith(ADDRESSES):
        raise InvalidArgument(
            f"{source!r} is no source of a lake mount; give lake, or an engine's address (unix:PATH, tcp://HOST:PORT),"
            " and a bucket as -o bucket=NAME",
            subject=source,
        )
    chosen = [f"retry={RETRY_MINUTES}", *options]  # in this order: the later one wins
    arguments = ["mount", "--quiet", *(part for text in chosen for part in ("-o", text))]
    if source:
        # The table of mounts then shows fstab's source: mount -a sees that it is mounted.
        arguments += ["-o", f"fsname={source}"]
    if source.startswith(ADDRESSES):
        arguments += ["--server", source]
    return [*arguments, "--", place]
