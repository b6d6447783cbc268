"""An OSError that reaches the command line's edge: stdout's own, or a bug."""

from __future__ import annotations

import errno
import os

import pytest

from cli import main


@pytest.mark.parametrize(
    ("code", "filename", "exit_code"),
    [(errno.ENOENT, None, 70), (errno.EACCES, "f", 70), (errno.ENOSPC, "f", 70), (errno.EPERM, None, 70)],
)
def test_an_error_that_no_command_has_translated_is_not_blamed_on_stdout(
    code: int, filename: str | None, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: object) -> int:
        raise OSError(code, os.strerror(code), filename)

    monkeypatch.setattr(main, "_invoke", failing)
    assert main.run(["ls"]) == exit_code
    told = capsys.readouterr().err
    assert "stdout" not in told
    assert "this is a bug" in told
