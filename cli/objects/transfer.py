"""Shared by `lake put` and `lake get`: outcomes reported as they arrive, and the summary of many files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.terminal.output import JsonList, escaped, human_bytes, write_line
from cli.terminal.progress import Meter
from lakefs.trees.walk import Fate, FileOutcome, Observer, Totals

if TYPE_CHECKING:
    from types import TracebackType

PAST = {Fate.STORED: "stored", Fate.FETCHED: "fetched", Fate.UNCHANGED: "unchanged"}


class Account:
    """One transfer as the user sees it: bar, notices, JSON document, summary.

    With `as_json` stdout holds one document, which is closed also if the transfer ends early.
    """

    def __init__(self, title: str, total_bytes: int | None, *, as_json: bool, quiet: bool) -> None:
        self.meter = Meter(title, total_bytes, draw=not as_json and not quiet)
        self.totals = Totals()
        self._document = JsonList("files") if as_json else None
        self._quiet = quiet
        self._made_bucket = ""
        self.observer = Observer(self._outcome, self.meter.progress)

    def __enter__(self) -> Account:
        self.meter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.meter.__exit__(kind, error, trace)
        if self._document is not None:
            made = {"made_bucket": self._made_bucket} if self._made_bucket else {}
            self._document.end({"totals": self._totals_document(), "complete": error is None, **made})
        elif error is None and not self._quiet:
            write_line(self.summary())

    def note(self, outcome: FileOutcome) -> None:
        """Count an outcome that no tree operation reported."""
        self._outcome(outcome)

    def note_made_bucket(self, bucket: str) -> None:
        """Report that the transfer made a bucket: the name may have been a mistake."""
        self._made_bucket = bucket
        self.meter.notice(f"lake: bucket {bucket} did not exist, and was made")

    def finish(self) -> None:
        """Raise the first failure, after all files were tried."""
        if self.totals.first_error is not None:
            raise self.totals.first_error

    def summary(self) -> str:
        """Return the summary: `3 files, 1.5 GiB: 2 stored, 1 unchanged; 1.0 GiB new; 2.1 s, 730.0 MiB/s`."""
        fates = [f"{count} {fate.value}" for fate, count in self.totals.files.items() if count]
        count = sum(self.totals.files.values())
        files = "1 file" if count == 1 else f"{count} files"
        new = human_bytes(self.totals.new_bytes)
        parts = [f"{files}, {human_bytes(self.totals.size_bytes)}: {', '.join(fates) or 'nothing to do'}"]
        return "; ".join([*parts, f"{new} new", self.meter.rate()])

    def _outcome(self, outcome: FileOutcome) -> None:
        self.totals.count(outcome)
        if self._document is not None:
            self._document.add(_document(outcome))
        if outcome.fate is Fate.SKIPPED:
            self.meter.notice(f"lake: skipped {escaped(outcome.path)}: {outcome.notice}")
        elif outcome.error is not None and self._document is None and self.totals.files[Fate.FAILED] > 1:
            # The first failure is the command's own error, shown at its end.
            self.meter.notice(f"lake: {escaped(outcome.error.message)}")

    def _totals_document(self) -> dict[str, object]:
        counts: dict[str, object] = {fate.value: count for fate, count in self.totals.files.items()}
        return {**counts, "size_bytes": self.totals.size_bytes, "new_bytes": self.totals.new_bytes}


def _document(outcome: FileOutcome) -> dict[str, object]:
    found: dict[str, object] = {
        "path": escaped(outcome.path),
        "name": escaped(outcome.name),
        "status": outcome.fate.value,
        "size_bytes": outcome.size_bytes,
    }
    if outcome.fate in PAST:
        found["new_bytes"] = outcome.new_bytes
    if outcome.notice:
        found["notice"] = outcome.notice
    if outcome.error is not None:
        found["error"] = type(outcome.error).__name__
        found["message"] = outcome.error.message
    return found
