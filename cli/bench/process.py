"""A process of ours for the time of a bench, which ends it however the bench ends.

A signal that comes while the process is begun is answered when it is known: else nobody would end it.
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
    """A command of ours that says a line on stdout when it serves; none of the user's settings, but these.

    Ended behind the block.  In the main thread.
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
                start_new_session=True,  # an interrupt of the terminal is the bench's to handle
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
    """Signals that end a bench are answered behind the block, not in its midst."""
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
