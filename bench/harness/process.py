"""A `lake serve` process to measure, on a folder of a real disk, and its resource use."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import lakefs

ROOT: Final = Path(__file__).resolve().parents[2]
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def lake_command() -> list[str]:
    """Return the command of the installed `lake`, or of the module."""
    script = Path(sys.executable).with_name("lake")
    return [str(script)] if script.exists() else [sys.executable, "-m", "cli.main"]


def clean_environment() -> dict[str, str]:
    """Return this environment without the user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKE_")}
    return kept | {"PYTHONPATH": str(ROOT)}


def run_lake(*arguments: str) -> str:
    """Run one `lake` command; return its output.  RuntimeError with its message if it fails."""
    done = subprocess.run(
        [*lake_command(), *arguments], capture_output=True, text=True, cwd=ROOT, env=clean_environment(), check=False
    )
    if done.returncode:
        raise RuntimeError(f"lake {' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class EngineProcess:
    """One engine.  A context manager: started at the beginning, stopped cleanly at the end."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """Prepare an engine; `flags` are further flags of `lake serve`."""
        self.data = folder / "store"
        self.printed: list[str] = []
        """Lines printed before it served."""
        self._flags = flags
        # A socket's path must be short, so it is not below the store.
        self.socket = Path(f"/tmp/lake-bench-{os.getpid()}-{id(self):x}.sock")
        self.address = f"unix:{self.socket}"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.stop()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def serve_command(self) -> list[str]:
        """Return the command of the engine's process, without `flags`."""
        return [*lake_command(), "serve", "--data", str(self.data), "--socket", str(self.socket)]

    def start(self) -> None:
        """Start, and return once it serves."""
        self._process = subprocess.Popen(
            [*self.serve_command(), "--admin", "off", "--s3", "off", "--log-level", "error", *self._flags],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "ready\n":
                return
            self.printed.append(line.rstrip("\n"))
        raise RuntimeError(f"the engine ended with {self._process.wait()}")

    def stop(self) -> None:
        """Send SIGTERM, and wait."""
        self._end("terminate")

    def kill(self) -> None:
        """Send SIGKILL, and wait."""
        self._end("kill")

    def _end(self, how: str) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        getattr(process, how)()
        process.stdout.read()
        process.stdout.close()
        process.wait()
        self._process = None

    def connect(self, check: lakefs.Check = lakefs.Check.BLAKE3) -> lakefs.Lake:
        """Return a client of this engine, and create the bucket `bench` if it is missing."""
        lake = lakefs.connect(self.address, check=check)
        with suppress(lakefs.errors.AlreadyExists):
            lake.create_bucket("bench")
        return lake

    def s3(self) -> tuple[str, str, str]:
        """Return the URL at which it serves S3, and the access key and secret of the store's first start."""
        [url] = [line.split()[1] for line in self.printed if line.startswith("s3 ")]
        found = configparser.ConfigParser()
        found.read(self.data / "s3-first-key")
        key = found["default"]
        return url, key["aws_access_key_id"], key["aws_secret_access_key"]

    def cpu_s(self) -> float:
        """Return user and system time so far, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def memory_bytes(self) -> tuple[int, int]:
        """Return RssAnon, the engine's private memory; and RssAnon + RssShmem, with its shared buffers.  Not the page
        cache."""
        found: dict[str, int] = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = int(value.split()[0]) * 1024
        return found["RssAnon"], found["RssAnon"] + found["RssShmem"]


class MemoryWatch:
    """Samples an engine's memory 20 times a second during the block; keeps the highest of each kind."""

    def __init__(self, engine: EngineProcess) -> None:
        self.private_bytes = 0
        self.buffered_bytes = 0
        self._engine = engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.05):
            private, buffered = self._engine.memory_bytes()
            self.private_bytes = max(self.private_bytes, private)
            self.buffered_bytes = max(self.buffered_bytes, buffered)

    def figures(self) -> dict[str, float]:
        """Return both peaks."""
        return {"RssAnon": float(self.private_bytes), "with RssShmem": float(self.buffered_bytes)}


def allocated_bytes(folder: Path, *, leave_out: str = "") -> int:
    """Return the disk space of a folder's files, as `du` counts it."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            if name != leave_out:
                total += os.stat(os.path.join(path, name), follow_symlinks=False).st_blocks * 512
    return total
