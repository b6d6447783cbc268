"""A process for the time of a bench: it ends however the bench ends, also by a signal while the process starts."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from cli.bench.process import lake_process, signals_held_back

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _as_in_a_bench() -> Iterator[None]:
    before = {number: signal.signal(number, interrupt) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_while_the_process_is_begun_ends_it_too(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[str]] = []

    class Begun(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr("cli.bench.process.subprocess.Popen", Begun)
    with pytest.raises(KeyboardInterrupt), lake_process(["serve"]):
        raise AssertionError("the block was begun")
    assert begun[0].returncode == -signal.SIGTERM
    assert signal.getsignal(number) is interrupt


def test_a_process_that_cannot_be_begun_leaves_the_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.bench.process.sys.executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError), lake_process(["serve"]):
        raise AssertionError("the block was begun")
    assert [signal.getsignal(number) for number in ENDING] == [interrupt] * 3


def test_a_signal_in_the_block_is_answered_behind_it_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals_held_back():
        signal.raise_signal(signal.SIGTERM)
        done.append("went on")
    assert done == ["went on"]
