"""Shared by `lake put` and `lake get`: outcomes reported as they arrive, and the summary of many files.

Progress is a bar on a terminal, nothing elsewhere.  rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from cli.terminal.output import JsonList, escaped, human_bytes, notice
from lakefs.trees.walk import Fate, FileOutcome, Observer, Totals

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress, TaskID

EXIT_INCOMPLETE: Final = 1
DONE: Final = (Fate.STORED, Fate.FETCHED, Fate.UNCHANGED)


class Account:
    """One transfer as the user sees it: bar, notices, JSON document, summary.

    With `as_json` stdout holds one document, which is closed also if the transfer ends early.
    """

    def __init__(self, title: str, total_bytes: int | None, *, as_json: bool, quiet: bool) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._draw = not as_json and not quiet and sys.stderr.isatty()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._begin_s = time.monotonic()
        self._done_bytes = 0
        self._present_bytes = 0
        self.totals = Totals()
        self._document = JsonList("files") if as_json else None
        self._quiet = quiet
        self._made_bucket = ""
        self.observer = Observer(self.note, self.progress)

    def __enter__(self) -> Account:
        if self._draw:
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._document is not None:
            made = {"made_bucket": self._made_bucket} if self._made_bucket else {}
            self._document.end({"totals": self._totals_document(), "complete": error is None, **made})
        elif error is None and not self._quiet and not self._only_failed():
            notice(self.summary())

    def note(self, outcome: FileOutcome) -> None:
        """Count and report the outcome of one file."""
        self.totals.count(outcome)
        if self._document is not None:
            self._document.add(_document(outcome))
        if outcome.is_there:
            return  # the summary counts them: it was asked for, and they may be many
        if outcome.fate is Fate.SKIPPED:
            self._notice(f"lake: skipped {escaped(outcome.path or outcome.name)}: {outcome.notice}")
        elif outcome.error is not None and self._document is None and self.totals.files[Fate.FAILED] > 1:
            # The first failure is the command's own error, shown at its end.
            self._notice(f"lake: {escaped(outcome.error.message)}")

    def progress(self, done_bytes: int, present_bytes: int) -> None:
        """Add to the counts."""
        self._done_bytes += done_bytes
        self._present_bytes += present_bytes
        if self._bar is not None and self._task is not None:
            there = f"{human_bytes(self._present_bytes)} there" if self._present_bytes else ""
            self._bar.update(self._task, advance=done_bytes, there=there)

    def _only_failed(self) -> bool:
        """Return True if no file came to anything but an error, which says all."""
        failed = self.totals.files[Fate.FAILED]
        return failed > 0 and failed == sum(self.totals.files.values())

    def note_made_bucket(self, bucket: str) -> None:
        """Report that the transfer made a bucket: the name may have been a mistake."""
        self._made_bucket = bucket
        self._notice(f"lake: bucket {bucket} did not exist, and was made")

    def finish(self) -> int:
        """Raise the first failure, after all files were tried; return the exit code: EXIT_INCOMPLETE if some wanted
        file was skipped."""
        if self.totals.first_error is not None:
            raise self.totals.first_error
        return EXIT_INCOMPLETE if self.totals.missing else 0

    def summary(self) -> str:
        """Return the summary: `3 files, 1.5 GiB: 2 stored, 1 unchanged; 1.0 GiB new; 2.1 s, 730.0 MiB/s`."""
        counts = {fate.value: count for fate, count in self.totals.files.items()}
        counts[Fate.SKIPPED] -= self.totals.there
        counts["there already"] = self.totals.there
        fates = [f"{count} {fate}" for fate, count in counts.items() if count]
        count = sum(self.totals.files.values())
        files = "1 file" if count == 1 else f"{count} files"
        new = human_bytes(self.totals.new_bytes)
        parts = [f"{files}, {human_bytes(self.totals.size_bytes)}: {', '.join(fates) or 'nothing to do'}"]
        return "; ".join([*parts, f"{new} new", self._rate()])

    def _totals_document(self) -> dict[str, object]:
        counts: dict[str, object] = {fate.value: count for fate, count in self.totals.files.items()}
        return {**counts, "size_bytes": self.totals.size_bytes, "new_bytes": self.totals.new_bytes}

    def _notice(self, text: str) -> None:
        """Write a line above the bar, or on stderr."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            notice(text)

    def _rate(self) -> str:
        """Return the bytes done and the rate, for people."""
        elapsed_s = max(time.monotonic() - self._begin_s, 1e-6)
        return f"{elapsed_s:.1f} s, {human_bytes(self._done_bytes / elapsed_s)}/s"

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


def _document(outcome: FileOutcome) -> dict[str, object]:
    found: dict[str, object] = {
        "path": escaped(outcome.path),
        "name": escaped(outcome.name),
        "status": outcome.fate.value,
        "size_bytes": outcome.size_bytes,
    }
    if outcome.fate in DONE:
        found["new_bytes"] = outcome.new_bytes
    if outcome.notice:
        found["notice"] = outcome.notice
    if outcome.error is not None:
        found["error"] = type(outcome.error).__name__
        found["message"] = outcome.error.message
    return found
