"""A store that begins anew from another one's checkpoint has the old records or the new ones, whatever happens."""

from __future__ import annotations

import pytest

from engine.format.layouts import Table
from engine.metadata.begin_anew import CheckpointCopy, finish, take_over
from engine.metadata.checkpoint import newest_checkpoint
from engine.superblock.superblock import open_store
from lakefs.errors import StoreDamaged
from lakefs.ids import Sequence
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.support.metadata_rig import NAMES_OF, SMALL, contents, opened, put, run

NAMES = Table.NAMES
PIECE = 1000


async def source() -> bytes:
    """Return the checkpoint of a store with some records; its sequence is 30."""
    disk = SimDisk(1)
    async with opened(disk, has_names=True, sizes=SMALL) as metadata:
        for number in range(30):
            await put(metadata, (NAMES, b"new %d" % number, b"v"))
        await metadata.close()
    newest = newest_checkpoint(disk)
    assert newest is not None
    assert newest.sequence == 30
    file = disk.open(newest.path, read_only=True)
    found = bytearray(newest.file_bytes)
    file.pread_into(memoryview(found), 0)
    return bytes(found)


async def target() -> SimDisk:
    """Return a disk with a store that has records of its own, and was not stopped cleanly."""
    disk = SimDisk(2)
    async with opened(disk, has_names=True, sizes=SMALL, clean=False) as metadata:
        for number in range(7):
            await put(metadata, (NAMES, b"old %d" % number, b"v"))
    return disk.kill()


def begin_anew(disk: SimDisk, checkpoint: bytes) -> None:
    """Copy a checkpoint to the store on a disk, and take it over."""
    store = open_store(disk, SimClock(), create=False, cluster_id=NAMES_OF, has_names=True)
    try:
        superblock = finish(disk, SimClock(), store.superblock)
        copy = CheckpointCopy(disk, superblock.identity, Sequence(30))
        for at in range(0, len(checkpoint), PIECE):
            copy.write(checkpoint[at : at + PIECE], at)
        copy.close(whole=True)
        take_over(disk, SimClock(), superblock, Sequence(30))
    finally:
        store.lock.close()


def goes_on(disk: SimDisk) -> None:
    """Let the next process go on with what was interrupted, and no more, before the power fails."""
    store = open_store(disk, SimClock(), create=False, cluster_id=NAMES_OF, has_names=True)
    finish(disk, SimClock(), store.superblock)
    store.lock.close()


async def reopened(disk: SimDisk) -> set[bytes]:
    """Return the first words of the keys of a store that is opened as names are."""
    store = open_store(disk, SimClock(), create=False, cluster_id=NAMES_OF, has_names=True)
    finish(disk, SimClock(), store.superblock)
    store.lock.close()
    async with opened(disk, has_names=True, sizes=SMALL) as metadata:
        await put(metadata, (NAMES, b"later", b"v"))
        keys = {key for _, key in contents(metadata)}
    assert len(keys) in (8, 31)
    return {key.split()[0] for key in keys} - {b"later"}


def test_a_store_that_began_anew_has_the_other_one_s_records_and_goes_on_behind_them() -> None:
    async def scenario() -> None:
        disk = await target()
        begin_anew(disk, await source())
        assert await reopened(disk) == {b"new"}
        async with opened(disk, has_names=True, sizes=SMALL) as metadata:
            assert metadata.durable_sequence == 31

    run(scenario)


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_at_any_step_leaves_the_old_records_or_the_new_ones(*, power: bool) -> None:
    found: list[set[bytes]] = []

    async def scenario() -> None:
        checkpoint = await source()
        for step in range(1, 1000):
            disk = await target()
            disk.crash_at = disk.operation_count + step
            try:
                begin_anew(disk, checkpoint)
            except SimCrashed:
                disk = disk.crash() if power else disk.kill()
                goes_on(disk)
                found.append(await reopened(disk.crash()))
            else:
                return

    run(scenario)
    assert len(found) > 20
    turn = found.index({b"new"})
    assert found == [{b"old"}] * turn + [{b"new"}] * (len(found) - turn)


def test_a_copy_that_is_damaged_changes_nothing() -> None:
    async def scenario() -> None:
        checkpoint = bytearray(await source())
        checkpoint[len(checkpoint) // 2] ^= 1
        disk = await target()
        with pytest.raises(StoreDamaged):
            begin_anew(disk, bytes(checkpoint))
        assert await reopened(disk) == {b"old"}

    run(scenario)


def test_a_copy_that_was_given_up_leaves_nothing() -> None:
    async def scenario() -> None:
        disk = await target()
        store = open_store(disk, SimClock(), create=False, cluster_id=NAMES_OF, has_names=True)
        copy = CheckpointCopy(disk, store.superblock.identity, Sequence(30))
        copy.write(bytes(100), 0)
        copy.close(whole=False)
        store.lock.close()
        assert not [name for name in disk.list_folder("checkpoints") if name.endswith(".copied")]
        assert await reopened(disk) == {b"old"}

    run(scenario)
