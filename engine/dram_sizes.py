"""How large the DRAM tier may be, of the memory that machine and control groups leave to this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lakefs.errors import ConfigError
from lakefs.limits import (
    DRAM_BYTES_AUTO_MAX,
    DRAM_BYTES_AUTO_MIN,
    DRAM_SHARE,
    DRAM_SHARE_MOST,
    KIB,
    MIB,
)
from lakefs.slabs import SLAB_BYTES

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def memory_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The machine's memory, or what its control groups (v2, v1) allow when that is less."""
    return min(limit for limit in (_machine(proc), *_group_limits(proc, cgroups)) if limit)


def tier_bytes(asked: int | None, memory: int) -> tuple[int, str]:
    """Bytes of the tier, in whole slabs, and a warning or "".  `asked` None: a small share.

    ConfigError for less than a slab.  More than three quarters of the memory are clamped to that, with the warning.
    """
    if asked is None:
        share = min(memory // DRAM_SHARE, DRAM_BYTES_AUTO_MAX)
        return (_whole(share) if share >= DRAM_BYTES_AUTO_MIN else 0), ""
    if not asked:
        return 0, ""
    if asked < SLAB_BYTES:
        raise ConfigError(
            f"dram_tier_bytes: {asked} bytes are less than one slab; give {SLAB_BYTES >> 20}M or more, or 0 for none",
            subject="dram_tier_bytes",
        )
    most = _whole(int(memory * DRAM_SHARE_MOST))
    if memory and asked > most:
        return most, (
            f"dram_tier_bytes: {asked // MIB} MiB were asked for, and this machine or its control group has "
            f"{memory // MIB} MiB; the tier takes at most {most // MIB} MiB"
        )
    return _whole(asked), ""


def _whole(size: int) -> int:
    return size // SLAB_BYTES * SLAB_BYTES


def _machine(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * KIB
    # Our unit hides this file (ProcSubset=pid): the C library asks the kernel by a system call.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_limits(proc: Path, cgroups: Path) -> list[int]:
    """The limits of this process's groups and of all that they are in."""
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
