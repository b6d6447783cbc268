"""A mount that can have no hot files logs one line, and the reason in it is the one that applies."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
from structlog.testing import capture_logs

from fuse import service
from fuse.hot import hot_set
from fuse.hot.hot_set import HotSet
from fuse.hot.memory_files import MemoryFiles
from fuse.kernel.attach import MountOptions
from fuse.native import layer
from fuse.state.mount import Mount
from lakefs.limits import MIB


class Machine:
    """A machine whose answers the test sets: why there is no native layer, passthrough, file systems, backing files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.why_no_layer = ""
        self.has_passthrough = True
        self.file_system_error = 0
        self.backing_error = 0
        monkeypatch.setattr(layer, "why_not", lambda: self.why_no_layer)
        monkeypatch.setattr(layer, "has_passthrough", lambda: self.has_passthrough)
        monkeypatch.setattr(layer, "open_backing", self._open_backing)
        monkeypatch.setattr(layer, "close_backing", lambda backing: None)
        monkeypatch.setattr(hot_set, "MemoryFiles", self._files)

    def _open_backing(self, descriptor: int) -> int:
        if self.backing_error:
            _fail(self.backing_error)
        return 1

    def _files(self, size_bytes: int) -> MemoryFiles:
        if self.file_system_error:
            _fail(self.file_system_error)
        try:
            return MemoryFiles(size_bytes)
        except OSError as error:
            pytest.skip(f"this user may not make a file system: {error.strerror}")

    def found(self, *, native: bool = True, hot_bytes: int | None = 8 * MIB) -> tuple[HotSet | None, list[str]]:
        """Return the hot set of a mount with these options, and the reasons in the log."""
        options = MountOptions(Path("/nowhere"), Path("/nowhere"), native=native, hot_bytes=hot_bytes)
        with capture_logs() as logs:
            found = service._hot_set(cast(Mount, SimpleNamespace(options=options)))
        assert all("no hot files" in line["event"] for line in logs)
        return found, [line["reason"] for line in logs]


def _fail(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_machine_that_has_everything_has_a_hot_set_and_no_line(machine: Machine) -> None:
    found, reasons = machine.found()
    assert reasons == []
    assert found is not None
    found.close()


def test_options_are_the_reason_before_anything_else(machine: Machine) -> None:
    machine.why_no_layer, machine.has_passthrough = "libfuse 3.13 or later is needed", False
    assert machine.found(hot_bytes=0) == (None, ["--hot-memory is 0"])
    assert machine.found(native=False) == (None, ["-o native=off"])


def test_an_older_libfuse_is_the_reason(machine: Machine) -> None:
    machine.why_no_layer, machine.has_passthrough = "libfuse 3.13 or later is needed", False
    assert machine.found() == (None, ["there is no native layer (libfuse 3.13 or later is needed)"])


def test_a_kernel_without_passthrough_is_the_reason(machine: Machine) -> None:
    machine.has_passthrough = False
    _, [reason] = machine.found()
    assert "Linux 6.9" in reason
    assert "CONFIG_FUSE_PASSTHROUGH" in reason


def test_a_user_who_may_make_no_file_system_is_the_reason(machine: Machine) -> None:
    machine.file_system_error = errno.EPERM
    _, [reason] = machine.found()
    assert "no file system in memory" in reason
    assert "CAP_SYS_ADMIN" in reason


@pytest.mark.parametrize(
    ("error", "said"), [(errno.EPERM, "CAP_SYS_ADMIN in the first user"), (errno.ENOTTY, os.strerror(errno.ENOTTY))]
)
def test_a_kernel_that_takes_no_backing_file_is_the_reason(machine: Machine, error: int, said: str) -> None:
    machine.backing_error = error
    found, [reason] = machine.found()
    assert found is None
    assert "backing file" in reason
    assert said in reason
