"""A temporary engine for a bench: a process of its own, on a new store in a new folder, both removed at the end.

It gets none of the user's settings.  The given folder needs 4 GiB of free room.  Only SIGKILL of the bench leaves
anything behind: folders `lake-bench-*` there and in /tmp (its socket's), and an engine that serves the store.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli.bench.process import lake_process
from lakefs.errors import EngineUnreachable, LocalFileError

FREE_BYTES_MIN: Final = 4 << 30
"""Free room needed: one of four trials stores little, the others 1 GiB each; then journal, index and reserve."""


@dataclass(frozen=True)
class TemporaryEngine:
    """An engine that serves."""

    address: str
    pid: int


@contextmanager
def temporary_engine(folder: Path) -> Iterator[TemporaryEngine]:
    """Run an engine on a store in a new folder below `folder`.  Raises LocalFileError, EngineUnreachable."""
    try:
        if shutil.disk_usage(folder).free < FREE_BYTES_MIN:
            raise LocalFileError(f"{folder}: a bench needs 4 GiB free there; name another with --dir")
        data = Path(tempfile.mkdtemp(prefix="lake-bench-", dir=folder))
    except OSError as error:
        raise LocalFileError(f"{folder}: {error.strerror}", subject=str(folder)) from error
    try:
        # A socket's path must be short.
        with tempfile.TemporaryDirectory(prefix="lake-bench-", dir="/tmp") as short:
            yield from _serving(data, Path(short))
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _serving(data: Path, short: Path) -> Iterator[TemporaryEngine]:
    config = short / "lake.toml"
    config.write_text("")
    socket = short / "s"
    places = ("--data", str(data), "--socket", str(socket), "--config", str(config))
    arguments = ["serve", *places, "--s3", "off", "--admin", "off", "--log-level", "error"]
    with lake_process(arguments) as process:
        assert process.stdout is not None
        if "ready\n" not in process.stdout:
            raise EngineUnreachable(f"the engine of the bench did not start: it ended with {process.wait()}")
        yield TemporaryEngine(f"unix:{socket}", process.pid)
