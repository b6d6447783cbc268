"""A temporary mount for a trial: a process of its own, at a new folder, both removed at the end.

It is read-only, so it cannot write to the store, and has none of the user's settings but the token.  A mount that does
not end by itself is unmounted and killed.  Only SIGKILL of the bench leaves it behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cli.bench.process import lake_process
from cli.terminal.target import Target
from lakefs.errors import LocalFileError

FUSE_DEVICE: Final = "/dev/fuse"


def what_mounting_lacks() -> str:
    """Return what this machine lacks for a mount, in words; empty if nothing is missing."""
    if not os.path.exists(FUSE_DEVICE):
        return f"there is no {FUSE_DEVICE} (modprobe fuse; a container must be given the device)"
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        return f"this user may not open {FUSE_DEVICE}"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "fusermount3 is missing (install the package fuse3)"
    return ""


@contextmanager
def temporary_mount(target: Target, bucket: str) -> Iterator[Path]:
    """Mount a bucket of a running engine as a folder.  Raises LocalFileError, with the reason, if it cannot be mounted.

    Close every file opened below the folder inside the block.
    """
    with tempfile.TemporaryDirectory(prefix="lake-bench-") as name:
        folder = Path(name)
        place = folder / "mount"
        place.mkdir()
        try:
            with _mounting(target, bucket, folder) as process:
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise LocalFileError(f"nothing was mounted: {_last_words(folder / 'log', process.wait())}")
                yield place
        finally:
            _unmount(place)


@contextmanager
def _mounting(target: Target, bucket: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    place, config = folder / "mount", folder / "lake.toml"
    config.write_text("")
    arguments = ["--server", target.address()]
    if target.token_file is not None:
        arguments += ["--token-file", str(target.token_file)]
    arguments += ["mount", "--foreground", "--read-only", "--bucket", bucket, str(place)]
    settings = {"LAKE_CONFIG": str(config), "STATE_DIRECTORY": str(folder / "lake-mount")}
    if (token := os.environ.get("LAKE_TOKEN")) is not None:
        settings["LAKE_TOKEN"] = token
    with (folder / "log").open("w") as log, lake_process(arguments, settings, log) as process:
        yield process


def _last_words(log: Path, code: int) -> str:
    """Return the error that the process ended with, as it was printed."""
    lines = log.read_text(errors="replace").splitlines()
    told = (line.removeprefix("lake: ") for line in reversed(lines) if line.startswith("lake: "))
    return next(told, f"the mount ended with {code}")


def _unmount(place: Path) -> None:
    """Remove the mount that a killed process leaves."""
    from fuse.kernel.mount_point import mount_at, real_path, unmount

    real = real_path(place)
    if mount_at(real) is not None:
        unmount(real, lazy=True)
