"""Files of a store that are lost, or another store's: noticed, never taken for what they are not."""

from __future__ import annotations

import shutil

import pytest

from engine.format.layouts import Table
from engine.journal.reader import list_journal
from engine.metadata.recovery import rebuild_store
from engine.superblock.superblock import read_superblock
from lakefs.errors import DiskFailed, JournalDamaged, LakeError
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.unit.engine.metadata.test_recovery import filled_store, index_file
from tests.unit.support.metadata_rig import contents, opened, put, run


async def killed_with_two_files(disk: SimDisk) -> None:
    """Stop cleanly, then leave acknowledged groups that only the last journal file has."""
    await filled_store(disk)
    async with opened(disk, clean=False) as metadata:
        await put(metadata, (Table.NAMES, b"acknowledged", b"1"))


def test_a_last_journal_file_that_is_missing_after_a_crash_is_damage_and_no_silent_loss() -> None:
    async def scenario() -> None:
        disk = SimDisk(21)
        await killed_with_two_files(disk)
        disk = disk.kill()
        files = list_journal(disk, read_superblock(disk).store_id)
        assert len(files) == 2
        disk.unlink(files[-1].path)
        with pytest.raises(JournalDamaged, match="last start began is missing"):
            async with opened(disk):
                pass
        identity = read_superblock(disk).identity
        with pytest.raises(JournalDamaged, match="last start began is missing"):
            rebuild_store(disk, SimClock(), identity, None, accept_loss=False)
        report = rebuild_store(disk, SimClock(), identity, None, accept_loss=True)
        assert report.lost_from == files[-1].first_sequence
        async with opened(disk) as metadata:
            assert (Table.NAMES, b"acknowledged") not in contents(metadata)

    run(scenario)


def test_starts_that_crash_before_their_superblock_lose_no_journal_file() -> None:
    async def scenario() -> None:
        disk = SimDisk(22)
        await killed_with_two_files(disk)
        for _ in range(3):
            disk = disk.kill()
            disk.fail_next("rename", DiskFailed("no superblock for this boot"), path="superblock")
            with pytest.raises((LakeError, ExceptionGroup)):
                async with opened(disk):
                    pass
        async with opened(disk.kill()) as metadata:
            assert (Table.NAMES, b"acknowledged") in contents(metadata)

    run(scenario)


def test_the_index_of_a_new_store_was_not_rebuilt() -> None:
    async def scenario() -> None:
        async with opened(SimDisk(25)) as metadata:
            assert metadata.rebuilt_because == ""

    run(scenario)


def test_the_index_of_another_store_is_not_taken_for_this_ones() -> None:
    async def scenario() -> None:
        mine, other = SimDisk(23), SimDisk(24)
        before = await filled_store(mine)
        await filled_store(other)
        shutil.copyfile(index_file(other), index_file(mine))
        async with opened(mine) as metadata:
            assert "another store" in metadata.rebuilt_because
            assert contents(metadata) == before

    run(scenario)
