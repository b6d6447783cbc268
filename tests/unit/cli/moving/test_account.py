"""The account of a sync on a terminal and in a summary."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import pytest

from cli.moving.sync_account import Pace, SyncAccount
from lakefs.sync.report import Done, SyncOutcome, SyncTotals

MIB = 1 << 20


def test_a_terminal_shows_files_and_bytes_in_one_kind_of_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        totals = SyncTotals(unchanged=7)
        with SyncAccount(as_json=False, quiet=False, dry_run=False, pace=Pace(0)) as account:
            account.observer.planned(3, 4 * MIB)
            outcome = SyncOutcome("a", Done.COPIED, size_bytes=MIB, new_bytes=MIB)
            account.observer.progress(MIB, 0)
            account.note(outcome)
            account.note(SyncOutcome("b", Done.SKIPPED, "a symbolic link"))
            totals.count(outcome)
            account.totals = totals
    shown = b""
    with contextlib.suppress(OSError):  # the signal of a terminal that was closed
        while piece := os.read(leader, 1 << 16):
            shown += piece
    os.close(leader)
    text = shown.decode()
    assert "1 of 3 files, 1.0 MiB of 4.0 MiB" in text
    assert "lake: skipped b: a symbolic link" in text
    assert "1 copied, 1.0 MiB (1.0 MiB new), 7 unchanged; " in text
    assert not re.search(r"\d [kMG]?B/s|\d [kMG]B\b", text.replace(" B/s", "")), "units of 1,024 and of 1,000 together"


def test_a_summary_says_why_nothing_was_removed() -> None:
    account = SyncAccount(as_json=False, quiet=True, dry_run=True, pace=Pace(0))
    totals = SyncTotals(newer=2, withheld="./in has no file")
    text = account.summary(totals)
    assert text == "dry run: 0 copied, 0 B, 2 newer at the target; nothing was removed: ./in has no file"
    assert not totals.is_in_step
