"""Tools as people run them: a command with a time limit; a test is skipped when its tool is missing."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.served import segments_of
from tests.mount.model import POLL_S, SETTLE_S
from tests.mount.snapshot import Tree, difference, tree

LIMIT_S: Final = 120.0


def need(*tools: str) -> None:
    """Skip the test unless all of these programs are installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def run(*command: str | Path, cwd: Path | None = None, code: int = 0, stdin: bytes = b"") -> str:
    """Run to the end; return stdout.  Any other exit code fails the test with what the tool printed."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, input=stdin, capture_output=True, timeout=LIMIT_S, env=_environment()
    )
    said = done.stderr.decode(errors="backslashreplace")
    assert done.returncode == code, f"{command} gave {done.returncode}: {said}"
    return done.stdout.decode(errors="surrogateescape")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAKE_", "GIT_"))}
    who = {f"GIT_{role}_{what}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return kept | who | {"LC_ALL": "C.UTF-8", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}


def content(size: int, seed: int = 1) -> bytes:
    """Return random bytes, always the same."""
    return random.Random(seed).randbytes(size)


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder; for a symlink its target."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


def make_tree(folder: Path) -> None:
    """Make a few dozen files: empty, small, over a page, over a chunk; folders, symlinks, modes, old times."""
    folder.mkdir()
    for index in range(24):
        place = folder / f"d{index % 3}" / ("deep" if index % 2 else ".")
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"file {index} ü"
        path.write_bytes(content((0, 1, 100, 4096, 4097, 70_000)[index % 6], index))
        path.chmod((0o644, 0o600, 0o755)[index % 3])
        os.utime(path, ns=(10**18, 10**18 + 123_456_789 * index))
    (folder / "large").write_bytes(content((4 << 20) + 12_345))
    (folder / "empty folder").mkdir()
    (folder / "link").symlink_to("d0")
    (folder / "dangling").symlink_to("nowhere")


def attributes(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return mode, size and time of modification of every file, which tools that copy them must keep."""
    found: dict[str, tuple[str, int, int]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = (oct(status.st_mode), status.st_size, status.st_mtime_ns)
    return found


def catch_up(here: Path, there: Path) -> None:
    """Wait until the other mount shows what was closed on this one; the promise is a second."""
    until = time.monotonic() + SETTLE_S
    expected = tree(str(here))
    while what := _behind(expected, there):
        assert time.monotonic() < until, what
        time.sleep(POLL_S)


def _behind(expected: Tree, there: Path) -> str:
    """Return how a mount's tree differs; a name may be removed between its listing and a look at it."""
    try:
        return difference(expected, tree(str(there)))
    except FileNotFoundError as error:
        return f"{error.filename} is listed and gone"


def spoil(data: Path, part: bytes) -> None:
    """Change a byte of a payload where the store has it: in the page cache, and on the disk."""
    spoil_at(*place_of(data, part), part)


def place_of(data: Path, part: bytes) -> tuple[Path, int]:
    """Return segment and offset of a payload."""
    for path in segments_of(data):
        at = path.read_bytes().find(part)
        if at >= 0:
            return path, at
    raise AssertionError("the payload is in no segment")


def spoil_at(path: Path, at: int, part: bytes) -> None:
    """Change the first byte of a payload that lies there."""
    with path.open("r+b") as segment:
        segment.seek(at)
        segment.write(bytes([part[0] ^ 1]))
        os.fsync(segment.fileno())
