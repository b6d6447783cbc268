"""Bugs planted in repair, each of which the tests beside this one notice; one run each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.fsck import repair
from engine.journal import salvage
from engine.journal.writer import Journal, start_journal
from engine.metadata.checkpoint import Checkpoint, checkpoint_path
from lakefs.errors import LakeError
from tests.repair import test_crashes as crashes, test_table as table
from tests.repair.test_crashes import HARMS
from tests.sim.world.disk import SimDisk

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.thorough]
samples = table.samples


def crashes_notice() -> None:
    """Repair stores that were killed, and lose power at each of the first operations."""
    for make, harm, finding in HARMS[8:]:
        for operation in range(1, 26):
            crashes._is_whole_after_crash_at(operation, make, harm, finding, loses_power=True)


def forget_the_tail(patch: pytest.MonkeyPatch) -> None:
    """Do not look for what only the journal has."""
    patch.setattr(repair, "_behind", lambda _disk, _sources, told, _problem: (told, ()))


def save_nothing(patch: pytest.MonkeyPatch) -> None:
    """Begin the journal anew without a checkpoint of what was before."""

    def unwritten(disk: SimDisk, identity: object, source: Any) -> Checkpoint:
        return Checkpoint(checkpoint_path(source.applied), source.applied, 0)

    patch.setattr(repair, "write_checkpoint", unwritten)


def begin_too_late(patch: pytest.MonkeyPatch) -> None:
    """Set bad journal files aside before there is a new one."""
    original = repair._Repairing._set_aside_superseded
    waiting: dict[int, Callable[[], Journal]] = {}

    class Unbegun:
        def close(self) -> None:
            pass

    def begin_later(*args: Any, **options: Any) -> Unbegun:
        waiting[id(args[0])] = lambda: start_journal(*args, **options)
        return Unbegun()

    def set_aside_first(work: repair._Repairing, files: Any) -> None:
        original(work, files)
        if id(work._disk) in waiting:
            waiting.pop(id(work._disk))().close()

    patch.setattr(repair, "start_journal", begin_later)
    patch.setattr(repair._Repairing, "_set_aside_superseded", set_aside_first)


@pytest.mark.parametrize("plant", [forget_the_tail, save_nothing, begin_too_late])
def test_a_repair_that_loses_groups_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, LakeError, ExceptionGroup)):
        crashes_notice()


def test_a_repair_that_removes_what_is_bad_is_noticed(
    samples: table.Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def removed(work: repair._Repairing, path: str) -> str:
        if work._disk.exists(path):
            work._disk.unlink(path)
        return ""

    monkeypatch.setattr(repair._Repairing, "_move_away", removed)
    with pytest.raises(AssertionError, match="what was there is gone"):
        table.test_what_fsck_says_and_does(samples, "killed", "checkpoint", "zeros", table.REPAIRED, tmp_path, capsys)


def test_a_lost_journal_file_that_nobody_misses_is_noticed(
    samples: table.Samples, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (salvage, repair):
        monkeypatch.setattr(module, "refuse_lost_boot", lambda *_: None)
    with pytest.raises(AssertionError):
        table.test_what_fsck_says_and_does(samples, "killed", "journal", "missing", table.LEFT, tmp_path, capsys)
