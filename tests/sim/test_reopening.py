"""An opening that fails because of the disk leaves nothing open, and can be tried again in the same process."""

from __future__ import annotations

import pytest
import trio

from engine.format.sizes import MetadataSizes, StoreSizes
from engine.store.opening import open_store
from lakefs.errors import DiskFailed, LakeError
from lakefs.host.offload import InlineOffload
from lakefs.limits import KIB, MIB
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk

pytestmark = pytest.mark.thorough

SIZES = StoreSizes(metadata=MetadataSizes(journal_fill=16 * KIB))


async def open_and_stop(disk: SimDisk) -> None:
    async with open_store(disk, SimClock(), InlineOffload(), sizes=SIZES, verify_index=False):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("operation", ["open", "pwrite", "sync_data", "rename", "sync_folder"])
def test_an_opening_that_failed_anywhere_can_be_tried_again(operation: str) -> None:
    disk = SimDisk(1, capacity_bytes=64 * MIB)
    trio.run(open_and_stop, disk)
    failed = 0
    for skip in range(40):
        disk.forget_failures()
        disk.fail_next(operation, DiskFailed(f"planted: {operation}"), skip=skip)
        try:
            trio.run(open_and_stop, disk)
        except LakeError:
            failed += 1
        if disk.faults_to_come:
            break
        trio.run(open_and_stop, disk)
    assert disk.faults_to_come, "more operations than were tried"
    assert failed > 0
