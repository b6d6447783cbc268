"""Memory that this process may have: of the machine, and of its control groups (v2, v1).

`memory_bytes` is how much there is at all; callers size caches as shares of it.  `available_bytes` is how much may be
taken now without others being driven out: caches that the kernel would drop count as available.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from lakefs.limits import KIB

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Available(NamedTuple):
    """Memory in bytes: how much may be taken now, of how much."""

    free_bytes: int
    of_bytes: int


def memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of the machine's memory, or the least limit of its control groups if that is less."""
    return min(limit for limit in (_machine(proc), *(limit for limit, _ in _groups(proc, cgroups))) if limit)


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[Available]:
    """Return what is available on the machine, and in each of the control groups that has a limit."""
    total = _machine(proc)
    found = [Available(_meminfo(proc, "MemAvailable") or total, total)]
    for limit, folder in _groups(proc, cgroups):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        found.append(Available(max(0, limit - used + _file_pages(folder)), limit))
    return found


def _machine(proc: Path) -> int:
    # Our unit hides the file (ProcSubset=pid): the C library asks the kernel by a system call.
    return _meminfo(proc, "MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(proc: Path, wanted: str) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.split()[0]) * KIB
    return 0


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Yield limit and folder of this process's groups and of all their parents, where they have a limit."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            limit = _number(place / name)
            if limit:
                yield limit, place
            if place == root:
                break


def _file_pages(folder: Path) -> int:
    """Return the bytes of a group's pages of files on disks: the kernel drops those when the group needs room."""
    counts: dict[str, int] = {}
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        counts[name] = int(value)
    # In v1 the plain fields leave out the groups below.
    return sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in ("active_file", "inactive_file"))


def _number(path: Path) -> int:
    return next((int(text) for text in _lines(path)[:1] if text.isdigit()), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
