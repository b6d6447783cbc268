"""The log of a mount in the background stays within its bounds, and never ends the mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli.mount.daemon import LOG_BYTES_MAX

_WRITER = """
import os, sys
from pathlib import Path
import cli.mount.daemon as log
import structlog
from cli.terminal.logs import log_to_stderr

path = Path(sys.argv[1])
log.LOG_BYTES_MAX = int(sys.argv[2])
descriptor = log.open_log(path)
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
log_to_stderr("info", log.BoundedLog(path))
for number in range(int(sys.argv[3])):
    structlog.get_logger().info("a line", number=number)
os.write(2, b"from a library\\n")
if len(sys.argv) > 4:
    os.close(2)
    structlog.get_logger().info("nobody hears this")
    os._exit(7)
"""


def _run(path: Path, limit: int, lines: int, *more: str) -> int:
    command = [sys.executable, "-c", _WRITER, str(path), str(limit), str(lines), *more]
    return subprocess.run(command, timeout=60).returncode


def test_a_log_is_put_aside_when_it_is_full_and_no_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert _run(path, 10_000, 1000) == 0
    names = sorted(os.listdir(tmp_path))
    assert names == ["log", "log.1"]
    kept = (tmp_path / "log.1").read_text() + path.read_text()
    assert len(kept) < 2 * 10_200
    lines = kept.splitlines()
    assert lines.pop() == "from a library"
    numbers = [int(line.partition("number=")[2]) for line in lines]
    assert numbers == list(range(numbers[0], 1000))


def test_a_log_is_appended_to_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        assert _run(path, LOG_BYTES_MAX, 3) == 0
    assert path.read_text().count("a line") == 6
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_does_not_end_the_process(tmp_path: Path) -> None:
    assert _run(tmp_path / "log", LOG_BYTES_MAX, 1, "close") == 7


_INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from cli.mount.daemon import detach

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    detach(Path(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
time.sleep(1000)  # the child
"""


def test_an_interrupt_in_the_moment_of_the_fork_ends_both_processes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(tmp_path / "log")], timeout=60)
    assert done.returncode == 130
