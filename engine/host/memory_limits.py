"""Limits of this process's memory, and the return of its free heap.

- Memory: that of the machine, or the least limit of its control groups.  Callers size the DRAM tier and the shared
  index as shares of it.
- Address space, which is not memory: ConfigError if the process may map less than a store needs.
- Heap: the C library's, which holds buffers and objects of more than 512 bytes.  Its free memory is returned to the
  machine on request.
"""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Final

from lakefs.errors import ConfigError
from lakefs.limits import ADDRESS_SPACE_BYTES, KIB

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of the machine's memory, or the least limit of its control groups (v2, v1) if that is less."""
    return min(limit for limit in (_machine(proc), *_group_limits(proc, cgroups)) if limit)


def refuse_little_address_space() -> None:
    """Raise ConfigError if the process may map less than a store needs (`ulimit -v`, LimitAS=)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= ADDRESS_SPACE_BYTES:
        return
    raise ConfigError(
        f"a store needs {ADDRESS_SPACE_BYTES // KIB} KiB of address space (which is not memory), and this process may "
        f"have {limit // KIB} KiB: lift the limit with `ulimit -v unlimited`, or take LimitAS= out of the unit",
        subject="RLIMIT_AS",
    )


def give_back_free_heap() -> None:
    """Return free memory of the heap to the machine.

    Blocks, some 2 ms for a heap of 30 MiB; other threads that allocate wait for it.  On its own glibc returns only free
    memory at the heap's end: under mixed load of millions of operations it kept 8 MiB of 28.  Does nothing with a C
    library without malloc_trim.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _machine(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * KIB
    # Our unit hides this file (ProcSubset=pid): the C library asks the kernel by a system call.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the limits of this process's groups and of all their parents."""
    limits: list[int] = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            limits.extend(int(text) for text in _lines(place / name)[:1] if text.isdigit())
            if place == root:
                break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
