"""fio as a side: the disk's own speed, as fio counts it.

Each run is one job on one file.  Times are fio's, without its start; CPU is that of its process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from bench.harness.contest import CouldNotRun
from bench.harness.sampled import Run

TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Job:
    """An fio job: `pattern`, block size, blocks in flight, and bytes in all.

    `sync_each`: blocks between two fdatasync, 0 for none.  `direct`: past the page cache.  `threads`: so many share the
    work, each with a descriptor of its own.
    """

    pattern: Literal["read", "write", "randread"]
    block_bytes: int
    size_bytes: int
    depth: int = 1
    sync_each: int = 0
    direct: bool = True
    threads: int = 1

    def arguments(self, path: Path) -> list[str]:
        """Return the command line."""
        engine = "psync" if self.depth == 1 else "io_uring"
        return [
            "fio", "--name=job", f"--filename={path}", f"--rw={self.pattern}", f"--bs={self.block_bytes}",
            f"--filesize={path.stat().st_size if path.exists() else self.size_bytes}",
            f"--io_size={self.size_bytes // self.threads}", f"--direct={int(self.direct)}", f"--ioengine={engine}",
            f"--iodepth={self.depth}", f"--fdatasync={self.sync_each}", "--invalidate=1", "--thread",
            "--overwrite=0", "--fallocate=none", "--randrepeat=0", "--norandommap", "--refill_buffers",
            f"--numjobs={self.threads}", "--group_reporting", "--output-format=json",
        ]  # fmt: skip


def fio(path: Path, job: Job) -> Callable[[], Run]:
    """Return a round: the job once.  CouldNotRun if fio is not installed, or fails."""

    def run() -> Run:
        if shutil.which("fio") is None:
            raise CouldNotRun("there is no program fio: apt-get install fio")
        try:
            done = subprocess.run(job.arguments(path), capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise CouldNotRun(f"fio: {error}") from error
        return _run_of(json.loads(done.stdout)["jobs"][0]["write" if job.pattern == "write" else "read"], job)

    return run


def _run_of(found: dict[str, Any], job: Job) -> Run:
    count, moved = int(found["total_ios"]), int(found["io_bytes"])
    percentiles = found["clat_ns"].get("percentile", {})
    more = {
        name: percentiles[share] / 1e3
        for name, share in (("p50_us", "50.000000"), ("p99_us", "99.000000"), ("p999_us", "99.900000"))
        if share in percentiles
    }
    stored = moved if job.pattern == "write" else 0
    return Run(count, moved, elapsed_s=moved / found["bw_bytes"], stored_bytes=stored, more=more)
