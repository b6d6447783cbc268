"""The machine, its state, and the code's commit.

Figures may be compared between machines of one `kind`: same processor, count, memory and kind of disk.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.process import ROOT
from lakefs.version import VERSION


def machine(folder: Path) -> dict[str, Any]:
    """Return JSON-able facts; `folder` is on the measured disk."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "disk": _disk(folder),
        "load": round(os.getloadavg()[0], 2),
    }
    return facts | {"kind": kind_of(facts)}


def kind_of(facts: dict[str, Any]) -> str:
    """Return the kind of machine, like `AMD EPYC, 2 cpus, 24 GiB, ext4 on vda`."""
    memory_gib = round(facts["memory_bytes"] / (1 << 30))
    return f"{facts['processor']}, {facts['cpus']} cpus, {memory_gib} GiB, {facts['disk']}"


def commit() -> str:
    """Return the checkout's commit, with a + if files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _disk(folder: Path) -> str:
    """Return file system and device of the mount that a folder is on."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            kind, source = rest.split()[:2]
            return f"{kind} on {source.removeprefix('/dev/')}"
    return "unknown"
