"""A shell of one process: commands, what they print, and whether they see a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.main import run
from cli.terminal import target
from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """stdout, line by line."""
        return self.out.splitlines()


class _Answers(io.StringIO):
    """A terminal's input."""

    def isatty(self) -> bool:
        return True


class Shell:
    """Runs commands on one store."""

    def __init__(
        self, lake: Lake, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.lake = lake
        self._folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: str | Path) -> Done:
        """Run `lake ARGS`."""
        command, *rest = map(str, args)
        code = run([command, "--data", str(self._folder), *rest])
        return Done(code, *self._capsys.readouterr())

    def good(self, *args: str | Path) -> Done:
        """Run `lake ARGS`, which must succeed."""
        done = self(*args)
        assert done.code == 0, done
        return done

    def on_terminal(self, answer: str, *args: str | Path) -> Done:
        """Run `lake ARGS` on a terminal where a question gets this answer."""
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", _Answers(answer))
            patch.setattr(type(sys.stderr), "isatty", lambda stream: True, raising=False)
            return self(*args)

    def fill(self, *names: str) -> None:
        """Store objects whose content is their name; buckets are made."""
        self.lake.put_many([(name, name.encode()) for name in names], create_bucket=True)

    def names(self, bucket: str) -> list[str]:
        """Return all keys of a bucket."""
        return [entry.key for entry in self.lake.ls(bucket)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lake, Path]]:
    """A store that is open for all tests of a module; each test uses buckets of its own."""
    folder = tmp_path_factory.mktemp("store")
    with open_lake(folder) as lake:
        yield lake, folder


@pytest.fixture
def shell(store: tuple[Lake, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Commands on the open store."""

    def opened(data: Path, create: bool) -> AbstractContextManager[Lake]:
        return nullcontext(store[0])

    monkeypatch.setattr(target, "_open_folder", opened)
    return Shell(*store, capsys, monkeypatch)
