"""lab/run with a script in QEMU's place: exit codes, output, time limits, signals, and what is missing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.machine import CHECKOUT, NO_CODE

QEMU = r"""#!/bin/bash
for word; do
    case $word in
        local,id=lab,path=*) shared=${word#local,id=lab,path=}; shared=${shared%,security_model=none} ;;
        file:*) console=${word#file:} ;;
    esac
done
shared=${shared//,,/,} console=${console//,,/,}
echo "the kernel's last words" >"$console"
echo 1.5 >"$shared/booted"
echo $$ >"$STARTED"
setpriv --pdeathsig KILL bash "$shared/command" </dev/null 2>&1
code=$?
echo $code >"$shared/code"
"""
MAIN = "import lab.machine, pathlib, sys; lab.machine.MADE = pathlib.Path({made!r}); sys.exit(lab.machine.main())"


class Lab:
    """Calls of lab/run, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp,1"
        self.temporary.mkdir()
        self.started = folder / "started"
        made = folder / "made"
        made.mkdir()
        (made / "vmlinuz").touch()
        self.programs = folder / "bin"
        self.programs.mkdir()
        qemu = self.programs / "qemu-system-x86_64"
        qemu.write_text(QEMU)
        qemu.chmod(0o755)
        self._main = MAIN.format(made=str(made))

    def begin(
        self, *words: str, prepare: Callable[[], object] | None = None, path: str = ""
    ) -> subprocess.Popen[bytes]:
        """Begin a call."""
        found = {
            "PATH": path or f"{self.programs}:{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "STARTED": str(self.started),
            "PYTHONPATH": str(CHECKOUT),
        }
        return subprocess.Popen(
            [sys.executable, "-c", self._main, *words],
            env=found,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
        )

    def run(self, *words: str, prepare: Callable[[], object] | None = None, path: str = "") -> tuple[int, bytes, bytes]:
        """Return exit code, output and errors of a call."""
        with self.begin(*words, prepare=prepare, path=path) as process:
            output, errors = process.communicate(timeout=30)
        return process.returncode, output, errors

    def qemu(self) -> int:
        """Wait until the script runs; return its process id."""
        until = time.monotonic() + 20
        while not (self.started.exists() and self.started.read_text().strip()):
            assert time.monotonic() < until, "the guest was not started"
            time.sleep(0.01)
        return int(self.started.read_text())


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def is_gone(pid: int) -> bool:
    """Return True once a process has ended, or will not run again."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("true",), 0),
        (("--", "sh", "-c", "exit 3"), 3),
        (("no-such-command",), 127),
        (("--rdma", "--cxl", "--", "test", "a b", "=", "a b"), 0),
    ],
)
def test_the_exit_code_is_the_command_s(lab: Lab, words: tuple[str, ...], code: int) -> None:
    found, _, errors = lab.run(*words)
    assert found == code
    assert not errors
    assert not list(lab.temporary.iterdir())


def test_output_is_given_back_byte_for_byte(lab: Lab) -> None:
    code, output, _ = lab.run(r"printf 'a\377\000\303\r\n'; printf 'err\200' >&2")
    assert (code, output) == (0, b"a\xff\0\xc3\r\nerr\x80")


@pytest.mark.parametrize("command", ["kill -9 $PPID", "rm -r $(dirname $0)"])
def test_without_an_exit_code_the_end_of_the_console_is_shown(lab: Lab, command: str) -> None:
    """The guest ends early, or cannot leave the code."""
    code, _, errors = lab.run(command)
    assert code == NO_CODE
    assert b"the kernel's last words" in errors


def test_the_guest_is_ended_at_its_time_limit(lab: Lab) -> None:
    code, output, errors = lab.run("--seconds", "0.5", "echo begun; exec sleep 60")
    assert code == NO_CODE
    assert output == b"begun\n\nlab: ended after 0 s\n"
    assert b"the kernel's last words" in errors
    assert is_gone(lab.qemu())


@pytest.mark.parametrize("seconds", ["nan", "0"])
def test_a_time_limit_that_is_none_is_refused(lab: Lab, seconds: str) -> None:
    code, _, errors = lab.run("--seconds", seconds, "true")
    assert code == 2
    assert b"--seconds" in errors
    assert not lab.started.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_guest_ends_with_a_call_that_is_ended(lab: Lab, number: signal.Signals) -> None:
    with lab.begin("exec sleep 60") as process:
        guest = lab.qemu()
        process.send_signal(number)
        code = process.wait(20)
        assert is_gone(guest)
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        assert code == 128 + number
        assert not list(lab.temporary.iterdir())


def test_two_calls_at_once_have_each_their_own_guest(lab: Lab) -> None:
    with lab.begin("sleep 0.3; echo one; exit 1") as one, lab.begin("sleep 0.3; echo two; exit 2") as two:
        found = [process.communicate(timeout=30)[0] for process in (one, two)]
    assert (one.returncode, two.returncode, found) == (1, 2, [b"one\n", b"two\n"])


def test_without_qemu_a_sentence_says_so(lab: Lab) -> None:
    code, _, errors = lab.run("true", path=str(lab.temporary))
    assert (code, errors) == (NO_CODE, b"lab: there is no qemu-system-x86_64; run lab/setup\n")


def test_without_room_for_its_files_a_sentence_says_so(lab: Lab) -> None:
    code, _, errors = lab.run("true", prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)))
    assert code == NO_CODE
    assert errors.startswith(b"lab: [Errno ")
    assert errors.count(b"\n") == 1
    assert not list(lab.temporary.iterdir())


@pytest.mark.parametrize(("ci", "outcome"), [("1", "failed"), ("", "skipped")])
def test_without_qemu_the_lab_s_tests_are_skipped_and_fail_in_ci(ci: str, outcome: str, tmp_path: Path) -> None:
    """The file imports nothing of the product."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytestmark = pytest.mark.lab('rdma')\ndef test_in_the_guest() -> None:\n    assert False\n"
    )
    options = [
        "-q",
        "-rs",
        "-p",
        "tests.lab.conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(CHECKOUT / "pyproject.toml"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env={"PATH": str(tmp_path), "CI": ci, "PYTHONPATH": str(CHECKOUT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert f"1 {outcome}" in done.stdout, done
    assert "there is no qemu-system-x86_64: run lab/setup" in done.stdout
