"""Mounts of a file system that are elsewhere: what keeps it alive after it was unmounted at its place.

A mount namespace (a container, a service with one of its own) that was made while the file system was mounted has a
mount of its own, which an unmount outside does not remove; a bind mount is another.  Overlays, open files of a mount
that was unmounted lazily, and namespaces without a process hold it, too, and cannot be seen here.

Rules kept here:
- Only /proc is read, never a file system: one that does not answer must not hang its observer.
- One table is read for each namespace, not for each process; the search ends after `SEARCH_S`, and what it has found by
  then is the result.
- A user without rights may not read which namespace a process is in.  It is then known by the id of its first mount.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fuse.kernel.mount_point import LAKE_TYPE, mounts_seen_by

SEARCH_S: Final = 2.0
NAMESPACES_MAX: Final = 4_096
"""Most namespaces whose tables are read."""
NAMESPACES_NAMED: Final = 4
PROCESSES_NAMED: Final = 4
_PROC: Final = Path("/proc")


@dataclass
class Holder:
    """A mount namespace that has the file system mounted."""

    namespace: str
    """Its number as `lsns` shows it; empty if this user may not read it, or if it is this process's own."""
    mount_point: Path
    """The first mount point there, as the namespace's first process sees it."""
    processes: list[tuple[int, str]] = field(default_factory=list)
    """Id and command of the first processes in it, by id; none for this process's own namespace."""
    process_count: int = 0

    def __str__(self) -> str:
        if not self.process_count:
            return f"it is also mounted at {self.mount_point}"
        named = ", ".join(f"{pid} ({command})" for pid, command in self.processes)
        more = self.process_count - len(self.processes)
        which = f"{self.namespace}," if self.namespace else "of"
        what = "process" if self.process_count == 1 else "processes"
        return f"mount namespace {which} {what} {named}{f' and {more} more' if more else ''}"


def find_holders(device: str) -> list[Holder]:
    """Return the namespaces that have the device (`MAJOR:MINOR`) mounted, this process's own first.

    Blocks, `SEARCH_S` at most; then processes with the higher ids are left out.
    """
    here = [Holder("", entry.mount_point) for entry in mounts_seen_by("self", device)]
    others: dict[str, Holder | None] = {_namespace("self"): None, _first_mount("self"): None}
    for pid in _processes():
        name = _namespace(pid) or _first_mount(pid)
        if name not in others:
            if len(others) >= NAMESPACES_MAX:
                break
            others[name] = _holder(pid, device)
        holder = others[name]
        if holder is not None:
            _note(holder, pid)
    return here[:1] + [holder for holder in others.values() if holder is not None]


def told(holders: list[Holder]) -> str:
    """Return one line that names the first holders, and how many more there are."""
    more = len(holders) - NAMESPACES_NAMED
    named = "; ".join(map(str, holders[:NAMESPACES_NAMED]))
    return f"{named}; and {more} more mount namespaces" if more > 0 else named


def mounted_elsewhere(pid: int, mount_point: Path) -> Holder | None:
    """Return the holder if the process is in another mount namespace and sees a lake mount at `mount_point`."""
    namespace = _namespace(str(pid))
    if namespace in ("", _namespace("self")):
        return None
    found = [entry for entry in mounts_seen_by(str(pid)) if entry.mount_point == mount_point]
    if not found or found[-1].type != LAKE_TYPE:
        return None
    holder = Holder(_number(namespace), mount_point)
    _note(holder, str(pid))
    return holder


def _processes() -> Iterator[str]:
    """Yield the ids of all processes, ascending, until the time is over."""
    end = time.monotonic() + SEARCH_S
    for pid in sorted(int(name) for name in os.listdir(_PROC) if name.isdecimal()):
        if time.monotonic() > end:
            return
        yield str(pid)


def _holder(pid: str, device: str) -> Holder | None:
    found = mounts_seen_by(pid, device)
    return Holder(_number(_namespace(pid)), found[0].mount_point) if found else None


def _note(holder: Holder, pid: str) -> None:
    holder.process_count += 1
    if len(holder.processes) < PROCESSES_NAMED:
        holder.processes.append((int(pid), _command(pid)))


def _command(pid: str) -> str:
    try:
        text = (_PROC / pid / "comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return "ended"
    return "".join(each if each.isprintable() else "?" for each in text)


def _namespace(pid: str) -> str:
    """Return the mount namespace of a process as `mnt:[NUMBER]`; empty if it has ended, or may not be asked."""
    try:
        return os.readlink(_PROC / pid / "ns" / "mnt")
    except OSError:
        return ""


def _number(namespace: str) -> str:
    return namespace.removeprefix("mnt:[").removesuffix("]")


def _first_mount(pid: str) -> str:
    """Return the id of the first mount that a process sees, which no other namespace has; empty if it has ended."""
    try:
        with (_PROC / pid / "mountinfo").open("rb", buffering=0) as table:
            return table.read(64).partition(b" ")[0].decode()
    except OSError:
        return ""
