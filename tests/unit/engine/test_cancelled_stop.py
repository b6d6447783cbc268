"""A clean stop that is cancelled at any step ends as a crash does."""

from __future__ import annotations

import pytest
import trio

from engine.format.layouts import Table
from engine.tables import lmdb_index as index_module
from tests.sim.world.disk import SimDisk
from tests.unit.support.metadata_rig import contents, opened, put, run


def test_a_clean_stop_may_be_cancelled_at_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_COMPACT_BYTES_MIN", 0)
    delay = 0
    ended = False

    async def stop(disk: SimDisk) -> None:
        nonlocal ended
        with trio.CancelScope() as scope:

            async def cancel(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                task_status.started()
                for _ in range(delay):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            async with trio.open_nursery() as nursery, opened(disk) as metadata:
                for number in range(4):
                    await put(metadata, (Table.NAMES, b"key %d" % number, b"value"))
                await nursery.start(cancel)
            ended = not scope.cancelled_caught

    async def scenario() -> None:
        disk = SimDisk(1)
        await stop(disk)
        async with opened(disk) as metadata:
            assert len(contents(metadata)) == 4

    while not ended:
        for seed in range(3):  # each seed orders the tasks in another way
            run(scenario, seed)
        delay += 1
        assert delay < 500
    assert delay > 10
