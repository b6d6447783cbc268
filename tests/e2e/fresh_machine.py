"""A machine on which lake was never started, with a /run, a /var/lib and a network of its own.  As root only.

Commands run in its namespaces, as root or as a user without rights, with a home folder each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.mount_rig import NOBODY
from tests.e2e.served import LAKE, WAIT_S, Finished, environment

_ARRANGE = """
mount -t tmpfs -o mode=755 none /run
mount -t tmpfs -o mode=755 none /var/lib
if [ -e /dev/fuse ]; then mknod -m 666 /run/fuse c 10 229; mount --bind /run/fuse /dev/fuse; fi
ip link set lo up
echo ready
exec sleep infinity
"""


class FreshMachine:
    """The namespaces of one process that sleeps."""

    def __init__(self, holder: subprocess.Popen[str], folder: Path) -> None:
        self._inside = ("nsenter", f"--target={holder.pid}", "--mount", "--net", f"--wd={folder}")
        self._holder = holder
        self.folder = folder

    def path(self, place: str) -> Path:
        """Return the path of one of the machine's files, as this process sees it."""
        return Path(f"/proc/{self._holder.pid}/root{place}")

    def home(self, uid: int) -> Path:
        """Return the home folder of a user."""
        return self.folder / f"home-{uid}"

    def command(self, *command: str | Path, uid: int = 0, gid: int | None = None) -> list[str]:
        """Return the command line that runs a command there as a user; `gid`: else the group of the same number."""
        group = uid if gid is None else gid
        user = ("setpriv", f"--reuid={uid}", f"--regid={group}", "--clear-groups") if uid else ()
        return [*self._inside, *user, *map(str, command)]

    def environment(self, uid: int = 0) -> dict[str, str]:
        """Return a user's environment, without settings."""
        kept = environment()
        kept.pop("XDG_RUNTIME_DIR", None)
        return kept | {"HOME": str(self.home(uid))}

    def run(
        self, *command: str | Path, uid: int = 0, gid: int | None = None, settings: dict[str, str] | None = None
    ) -> Finished:
        """Run a command to its end."""
        done = subprocess.run(
            self.command(*command, uid=uid, gid=gid),
            env=self.environment(uid) | (settings or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAIT_S,
        )
        return Finished(done.returncode, done.stdout, done.stderr.decode(errors="backslashreplace"))

    def lake(
        self, *args: str | Path, uid: int = 0, gid: int | None = None, settings: dict[str, str] | None = None
    ) -> Finished:
        """Run a command of lake to its end."""
        return self.run(*LAKE, *args, uid=uid, gid=gid, settings=settings)

    @contextmanager
    def begun(self, *args: str | Path, uid: int = 0) -> Iterator[list[str]]:
        """Run a command of lake for the block; yield what it printed up to `ready`.  SIGTERM must end it with 0."""
        command = self.command(*LAKE, *args, uid=uid)
        with subprocess.Popen(command, env=self.environment(uid), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            printed: list[str] = []
            try:
                for line in process.stdout:
                    printed.append(line.rstrip("\n"))
                    if line == "ready\n":
                        break
                assert printed[-1:] == ["ready"], printed
                yield printed
                process.terminate()
                process.stdout.read()
                assert process.wait(WAIT_S) == 0
            finally:
                process.kill()


@contextmanager
def fresh_machine() -> Iterator[FreshMachine]:
    """Make a machine for the block."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip"))):
        pytest.skip("a machine of its own needs root, util-linux and iproute2")
    # Not pytest's folder: a socket's path must be short, and the other user must be able to reach it.
    with TemporaryDirectory(prefix="lake-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        for uid in (0, NOBODY):
            home = place / f"home-{uid}"
            home.mkdir()
            os.chown(home, uid, uid)
        holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-ec", _ARRANGE], stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield FreshMachine(holder, place)
        finally:
            holder.kill()
            holder.communicate()


def python(code: str) -> tuple[str, str, str]:
    """Return the command line of a Python program."""
    return (sys.executable, "-c", code)
