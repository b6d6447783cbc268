"""A repair that loses power, or is killed, at any operation of the disk: the store is no worse, and repair finishes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.format.layouts import Table
from engine.fsck.repair import repair_files
from engine.journal.reader import list_journal
from engine.metadata.checkpoint import newest_checkpoint
from engine.superblock.superblock import read_superblock
from lakefs.findings import Finding
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.engine.metadata.test_recovery import State, fill, filled_store, group_offset, lose_index
from tests.unit.support.metadata_rig import contents, opened, put, run, wait_applied

pytestmark = pytest.mark.thorough

_OPERATIONS_MAX = 200


async def _stopped(disk: SimDisk) -> State:
    """Write a checkpoint in the middle of the history, then stop cleanly, which writes another."""
    return await filled_store(disk)


async def _killed(disk: SimDisk) -> State:
    """Leave a checkpoint, groups that the index has, and groups that only the journal has."""
    async with opened(disk, clean=False) as metadata:
        await fill(metadata, 10)
        await wait_applied(metadata)
        await metadata.checkpoint()
        await fill(metadata, 10, first=10)
        await wait_applied(metadata)
        await put(metadata, (Table.NAMES, b"only in the journal", b"1"))
        return contents(metadata)


def _lose_superblock(disk: SimDisk) -> None:
    disk.unlink("superblock")
    disk.sync_folder("")


def _spoil_superblock(disk: SimDisk) -> None:
    disk.flip_bit("superblock", 40, 3)


def _spoil_copy(disk: SimDisk) -> None:
    disk.flip_bit("superblock.copy", 40, 3)


def _spoil_checkpoint(disk: SimDisk) -> None:
    checkpoint = newest_checkpoint(disk)
    assert checkpoint is not None
    disk.flip_bit(checkpoint.path, checkpoint.file_bytes // 2, 4)


def _lose_checkpoint(disk: SimDisk) -> None:
    checkpoint = newest_checkpoint(disk)
    assert checkpoint is not None
    disk.unlink(checkpoint.path)
    disk.sync_folder("checkpoints")


def _lose_journal(disk: SimDisk) -> None:
    for file in list_journal(disk, read_superblock(disk).store_id):
        disk.unlink(file.path)
    disk.sync_folder("journal")


def _spoil_journal_header(disk: SimDisk) -> None:
    disk.flip_bit(list_journal(disk, read_superblock(disk).store_id)[-1].path, 20, 1)


def _spoil_group_header(disk: SimDisk) -> None:
    _spoil_group(disk, 8)


def _spoil_group_body(disk: SimDisk) -> None:
    _spoil_group(disk, 60)


def _spoil_group(disk: SimDisk, at: int) -> None:
    """Spoil group 15 of 21, which the index has and the checkpoint has not."""
    (file,) = list_journal(disk, read_superblock(disk).store_id)
    disk.flip_bit(file.path, group_offset(disk, file.path, 15) + at, 2)


def _leave_temporaries(disk: SimDisk) -> None:
    for path in ("journal/0000000000000099.journal.new", "checkpoints/x.checkpoint.new", "superblock.new"):
        disk.open(path, create=True).close()


HARMS = [
    # a harm without a finding needs no repair: the journal has everything
    (_stopped, _lose_superblock, Finding.SUPERBLOCK_MISSING),
    (_stopped, _spoil_superblock, Finding.SUPERBLOCK_DAMAGED),
    (_stopped, _spoil_copy, Finding.SUPERBLOCK_DAMAGED),
    (_stopped, _spoil_checkpoint, Finding.CHECKPOINT_DAMAGED),
    (_stopped, _lose_checkpoint, None),
    (_stopped, _lose_journal, Finding.JOURNAL_MISSING),
    (_stopped, _spoil_journal_header, Finding.JOURNAL_HEADER_DAMAGED),
    (_stopped, lose_index, Finding.INDEX_MISSING),
    (_killed, _spoil_superblock, Finding.SUPERBLOCK_DAMAGED),
    (_killed, _spoil_checkpoint, Finding.CHECKPOINT_DAMAGED),
    (_killed, _lose_checkpoint, None),
    (_killed, lose_index, Finding.INDEX_MISSING),
    (_killed, _spoil_group_header, Finding.JOURNAL_DAMAGED),
    (_killed, _spoil_group_body, Finding.JOURNAL_DAMAGED),
    (_killed, _leave_temporaries, Finding.FILE_HALF_WRITTEN),
]


@pytest.mark.parametrize("loses_power", [False, True])
@pytest.mark.parametrize(("make", "harm", "finding"), HARMS)
def test_a_repair_cut_short_anywhere_is_finished_by_the_next(
    make: Callable[[SimDisk], object], harm: Callable[[SimDisk], None], finding: Finding | None, loses_power: bool
) -> None:
    for operation in range(1, _OPERATIONS_MAX):
        if _is_whole_after_crash_at(operation, make, harm, finding, loses_power=loses_power):
            return
    raise AssertionError("a repair has no end")


def _is_whole_after_crash_at(
    operation: int,
    make: Callable[..., object],
    harm: Callable[[SimDisk], None],
    finding: Finding | None,
    *,
    loses_power: bool,
) -> bool:
    """Repair up to that operation, then again; return whether the first repair finished."""
    finished = True

    async def scenario() -> None:
        nonlocal finished
        disk = SimDisk(operation)
        before = await make(disk)  # type: ignore[misc]
        disk = disk.kill()
        harm(disk)
        disk.crash_at = disk.operation_count + operation
        try:
            report = repair_files(disk, SimClock(), index_committed=disk.note_index_sync)
        except SimCrashed:
            finished = False
            disk = _after_power_loss(disk) if loses_power else disk.kill()
            report = repair_files(disk, SimClock(), index_committed=disk.note_index_sync)
        disk.crash_at = None
        assert report.found == []
        if finished:
            assert {repair.code for repair in report.repairs} == ({finding.code} if finding else set())
        assert repair_files(disk, SimClock()).repairs == []
        async with opened(disk) as metadata:
            assert contents(metadata) == before
            await metadata.verify_index()
            await metadata.verify_journal()
        assert repair_files(disk, SimClock()).repairs == []

    run(scenario, operation)
    return finished


def _after_power_loss(disk: SimDisk) -> SimDisk:
    """Return the disk after a power loss, but keep LMDB's file: to lose that as well would be a second damage."""
    path = Path(disk.local_path("index"))
    kept = (path / "data.mdb").read_bytes() if (path / "data.mdb").exists() else None
    heir = disk.crash()
    path = Path(heir.local_path("index"))
    shutil.rmtree(path, ignore_errors=True)
    if kept is not None:
        path.mkdir()
        (path / "data.mdb").write_bytes(kept)
    return heir
