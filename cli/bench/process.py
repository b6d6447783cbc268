"""A child process of a bench, which is ended however the bench ends.

A signal that arrives while the process is started is handled once the process is known: otherwise nothing would end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Final

END_S: Final = 30.0
"""A process that takes longer to end is killed."""
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def lake_process(
    arguments: Sequence[str], settings: Mapping[str, str] | None = None, stderr: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a `lake` command that prints a line on stdout when it serves.  Its LAKE_ variables are only `settings`.

    The process is ended behind the block.  Call it in the main thread.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("LAKE_")}
    process: subprocess.Popen[str] | None = None
    try:
        with signals_held_back():
            process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=kept | dict(settings or {}),
                start_new_session=True,  # the bench handles an interrupt from the terminal
            )
        yield process
    finally:
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Delay the signals that end a bench until the end of the block."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
