"""A sync as the user sees it: a bar, notices, what a dry run would do, one summary.

Rules kept here:
- stdout has the lines of a dry run, or the one document of --json; everything else is for people and on stderr.
- Bytes are in units of 1,024 everywhere: in the bar, in lines, in the summary and in --bwlimit.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from cli.terminal.output import JsonList, escaped, human_bytes, notice, shown, write_line
from lakefs.sync.report import Done, SyncObserver, SyncOutcome, SyncTotals

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress, TaskID

EXIT_NOT_IN_STEP: Final = 1


class Pace:
    """Keeps the bytes that move to a rate: whoever reports some sleeps for the time that they may take."""

    def __init__(self, rate_bytes_per_s: int) -> None:
        """A rate of 0 is unbounded."""
        self._rate = rate_bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def moved(self, count_bytes: int) -> None:
        """Sleep until the bytes may have moved.  Blocks; called by any thread."""
        if not self._rate or count_bytes <= 0:
            return
        with self._lock:
            now_s = time.monotonic()
            free_at_s = self._free_at_s = max(self._free_at_s, now_s) + count_bytes / self._rate
        time.sleep(free_at_s - now_s)


class SyncAccount:
    """One pass of a sync, or an import.

    With `as_json` stdout holds one document, which is closed also if the pass ends early.
    """

    def __init__(
        self,
        *,
        as_json: bool,
        quiet: bool,
        dry_run: bool,
        pace: Pace,
        is_silent_if_idle: bool = False,
        title: str = "sync",
    ) -> None:
        self._document = JsonList("names") if as_json else None
        self._quiet = quiet
        self._dry_run = dry_run
        self._pace = pace
        self._is_silent_if_idle = is_silent_if_idle
        self._title = title
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._begin_s = time.monotonic()
        self._done_bytes = 0
        self._planned_bytes = 0
        self._planned_names = 0
        self._ended_names = 0
        self.totals: SyncTotals | None = None
        """Set by the caller, once the pass has ended."""
        self.observer = SyncObserver(self.note, self._plan, self._progress)

    def __enter__(self) -> SyncAccount:
        if self._document is None and not self._quiet and not self._dry_run and sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        totals = self.totals
        if self._document is not None:
            self._document.end(self._end_document(totals))
        elif (
            totals is not None and not self._quiet and not (self._is_silent_if_idle and not any(totals.names.values()))
        ):
            notice(self.summary(totals))

    def note(self, outcome: SyncOutcome) -> None:
        """Report the outcome of one name."""
        self._ended_names += outcome.done is Done.COPIED
        if self._document is not None:
            self._document.add(_document(outcome))
            return
        if outcome.done is Done.SKIPPED:
            self._notice(f"lake: skipped {escaped(outcome.path)}: {outcome.reason}")
        elif outcome.done is Done.FAILED:
            self._notice(f"lake: {escaped(outcome.reason)}")
        elif self._dry_run:
            verb = "copy" if outcome.done is Done.COPIED else "remove"
            write_line(f"would {verb}  {shown(outcome.path)}  ({human_bytes(outcome.size_bytes)}; {outcome.reason})")
        self._draw()

    def count_bytes(self, done_bytes: int) -> None:
        """Add bytes that are done, without a pause."""
        self._done_bytes += done_bytes
        self._draw()

    def summary(self, totals: SyncTotals) -> str:
        """Return `3 copied, 1.5 GiB (1.0 GiB new), 1 removed, 7 unchanged; 2.1 s, 730.0 MiB/s`."""
        would = "dry run: " if self._dry_run else ""
        copied = f"{totals.names[Done.COPIED]} copied, {human_bytes(totals.size_bytes)}"
        copied += "" if self._dry_run else f" ({human_bytes(totals.new_bytes)} new)"
        counts = {
            "removed": totals.names[Done.REMOVED],
            "unchanged": totals.unchanged,
            "newer at the target": totals.newer,
            "skipped": totals.names[Done.SKIPPED],
            "failed": totals.names[Done.FAILED],
        }
        others = "".join(f", {count} {what}" for what, count in counts.items() if count)
        withheld = f"; nothing was removed: {escaped(totals.withheld)}" if totals.withheld else ""
        elapsed_s = max(time.monotonic() - self._begin_s, 1e-6)
        rate = "" if self._dry_run else f"; {elapsed_s:.1f} s, {human_bytes(self._done_bytes / elapsed_s)}/s"
        return f"{would}{copied}{others}{withheld}{rate}"

    def _end_document(self, totals: SyncTotals | None) -> dict[str, object]:
        found: dict[str, object] = {"dry_run": self._dry_run, "complete": totals is not None}
        if totals is None:
            return found
        counts: dict[str, object] = {done.value: count for done, count in totals.names.items()}
        counts |= {"unchanged": totals.unchanged, "newer": totals.newer}
        counts |= {"size_bytes": totals.size_bytes, "new_bytes": totals.new_bytes}
        return {"totals": counts, "withheld": totals.withheld, "in_step": totals.is_in_step, **found}

    def _plan(self, names: int, size_bytes: int) -> None:
        self._planned_names += names
        self._planned_bytes += size_bytes
        self._draw()

    def _progress(self, done_bytes: int, present_bytes: int) -> None:
        self.count_bytes(done_bytes)
        self._pace.moved(done_bytes - present_bytes)

    def _notice(self, text: str) -> None:
        """Write a line above the bar, or on stderr."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            notice(text)

    def _draw(self) -> None:
        if self._bar is None or self._task is None:
            return
        rate = self._done_bytes / max(time.monotonic() - self._begin_s, 1e-6)
        text = (
            f"{self._ended_names} of {self._planned_names} files, "
            f"{human_bytes(self._done_bytes)} of {human_bytes(self._planned_bytes)}, {human_bytes(rate)}/s"
        )
        self._bar.update(self._task, completed=self._done_bytes, total=max(1, self._planned_bytes), text=text)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn(self._title), BarColumn(), TextColumn("{task.fields[text]}")
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=None, text="")
        self._bar.start()


def _document(outcome: SyncOutcome) -> dict[str, object]:
    found: dict[str, object] = {
        "name": escaped(outcome.path),
        "status": outcome.done.value,
        "size_bytes": outcome.size_bytes,
    }
    if outcome.done is Done.COPIED:
        found["new_bytes"] = outcome.new_bytes
    if outcome.reason:
        found["reason"] = outcome.reason
    if outcome.error is not None:
        found["error"] = type(outcome.error).__name__
    return found
