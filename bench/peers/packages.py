"""Peers installed by package name: once into .peers/ of the checkout, and never into the environment.

`PeerUnavailable` says why a peer is missing; its text is the reason that a row shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.process import ROOT

KEPT: Final = ROOT / ".peers"
FETCH_S: Final = 300.0


class PeerUnavailable(Exception):
    """The peer is not installed here, or did not start; the text says why."""


@dataclass(frozen=True)
class Package:
    """A package in one version.  `install`: returns the command that installs it below a folder.

    `variable`: the environment variable that may name another folder with the same content.
    """

    name: str
    version: str
    variable: str
    install: Callable[[Path], list[str]]

    def folder(self, *, fetch: bool) -> Path:
        """Return its folder; installs it if it is missing and `fetch` is True.  PeerUnavailable."""
        named = os.environ.get(self.variable)
        if named is not None:
            return Path(named)
        target = KEPT / f"{self.name}-{self.version}"
        if not target.exists():
            if not fetch:
                raise PeerUnavailable(
                    f"{self.name} is not here; name it in {self.variable}, or run the bench once without --quick"
                )
            install(self.name, self.version, self.install, target)
        return target


def install(name: str, version: str, command: Callable[[Path], list[str]], target: Path) -> None:
    """Install a package; its folder then exists as a whole, or not at all.  PeerUnavailable."""
    print(f"bench: installing {name} {version} below {KEPT}, once", file=sys.stderr, flush=True)
    partial = target.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        done = subprocess.run(command(partial), capture_output=True, text=True, timeout=FETCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{name} could not be installed: {error}") from error
    if done.returncode:
        raise PeerUnavailable(f"{name} could not be installed: {last_line(done.stderr)}")
    partial.rename(target)


def pip_install(requirement: str) -> Callable[[Path], list[str]]:
    """Return the command that installs one Python package, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    return lambda folder: [*pip, "--no-deps", "--no-compile", "--target", str(folder), requirement]


def pip_install_all(requirement: str) -> Callable[[Path], list[str]]:
    """Return the command that installs one Python package with what it depends on."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    return lambda folder: [*pip, "--no-compile", "--target", str(folder), requirement]


def last_line(text: str) -> str:
    """Return the last line that a program printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


OPENLAKED_VERSION: Final = "0.8.1"
MOONCAKE_VERSION: Final = "0.3.13.post1"
OPENLAKED: Final = Package(
    "openlaked", OPENLAKED_VERSION, "BENCH_OPENLAKE", pip_install(f"openlake-vllm=={OPENLAKED_VERSION}")
)
MOONCAKE: Final = Package(
    "mooncake",
    MOONCAKE_VERSION,
    "BENCH_MOONCAKE",
    pip_install(f"mooncake-transfer-engine-non-cuda=={MOONCAKE_VERSION}"),
)
S3FS_VERSION: Final = "2026.9.0"
S3FS: Final = Package("s3fs", S3FS_VERSION, "BENCH_S3FS", pip_install_all(f"s3fs=={S3FS_VERSION}"))
