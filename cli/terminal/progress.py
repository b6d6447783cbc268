"""Progress of a transfer: a bar on a terminal, nothing elsewhere, one line at the end.

rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from cli.terminal.output import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress, TaskID


class Meter:
    """Counts bytes done, and bytes that were present already; draws them if stderr is a terminal."""

    def __init__(self, title: str, total_bytes: int | None, *, draw: bool) -> None:
        self.done_bytes = 0
        self.present_bytes = 0
        self._title = title
        self._total_bytes = total_bytes
        self._draw = draw and sys.stderr.isatty()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._begin_s = time.monotonic()

    def __enter__(self) -> Meter:
        if self._draw:
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def progress(self, done_bytes: int, present_bytes: int) -> None:
        """Add to the counts."""
        self.done_bytes += done_bytes
        self.present_bytes += present_bytes
        if self._bar is not None and self._task is not None:
            there = f"{human_bytes(self.present_bytes)} there" if self.present_bytes else ""
            self._bar.update(self._task, advance=done_bytes, there=there)

    def notice(self, text: str) -> None:
        """Write a line above the bar, or on stderr."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            sys.stdout.flush()
            sys.stderr.write(text + "\n")

    def rate(self) -> str:
        """Return the bytes done and the rate, for people."""
        elapsed_s = max(time.monotonic() - self._begin_s, 1e-6)
        return f"{elapsed_s:.1f} s, {human_bytes(self.done_bytes / elapsed_s)}/s"

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[there]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=self._total_bytes, there="")
        self._bar.start()
