"""The reserve holds room, not a length."""

from __future__ import annotations

from engine.superblock.reserve import RESERVE_PATH, Reserve
from lakefs.limits import MIB
from tests.sim.world.disk import SimDisk


def test_a_reserve_whose_room_was_lost_is_not_taken_for_whole() -> None:
    disk = SimDisk(1, capacity_bytes=64 * MIB)
    reserve = Reserve(disk)
    reserve.open()
    assert reserve.held_bytes == reserve.target_bytes > 0
    reserve.close()
    disk.unlink(RESERVE_PATH)
    file = disk.open(RESERVE_PATH, create=True)
    file.truncate(reserve.target_bytes)
    file.close()

    others = disk.open("others", create=True)
    others.allocate(0, disk.free_bytes())
    reserve.open()
    assert reserve.held_bytes == 0
    assert not reserve.release()
    others.truncate(0)
    assert reserve.restore()
    taken = disk.stat(RESERVE_PATH).allocated_bytes
    assert reserve.held_bytes == reserve.target_bytes == taken
