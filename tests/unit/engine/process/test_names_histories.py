"""Histories of names on simulated devices: crashes, failing devices, devices that go and come back, in any order."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from engine.process.mirrored_names import LocalNames
from lakefs.errors import DiskFailed, StoreUnusable
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.unit.engine.process.names_machine import Machine, bind, good_copies, keys_of, until
from tests.unit.support.metadata_rig import run


class History:
    """Lives of names on four devices, of which at most one fails or is away at a time."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine("abcd", seed)
        self.rng = self.machine.rng
        self.acknowledged: list[str] = []
        self.sent: set[str] = set()
        self.away: dict[str, SimDisk] = {}
        self.opened = 0

    async def live(self) -> None:
        """Open, look, bind keys, with a device that fails, or a crash."""
        opening = self.machine.open(is_new=not self.acknowledged)
        try:
            names = await opening.__aenter__()
        except StoreUnusable:
            assert self.away, "nothing is missing"
            self.bring_back()
            opening = self.machine.open()
            names = await opening.__aenter__()
        self.opened += 1
        try:
            await self._use(names)
        except BaseException as error:
            await opening.__aexit__(type(error), error, None)
            raise
        await opening.__aexit__(None, None, None)

    async def _use(self, names: LocalNames) -> None:
        found = set(await keys_of(names.store)) if self.acknowledged else set()
        assert self.sent >= found >= set(self.acknowledged)
        self._plan()
        for _ in range(self.rng.randrange(12)):
            key = f"{len(self.sent)}"
            self.sent.add(key)
            await bind(names.store, key)
            self.acknowledged.append(key)
            await trio.sleep(self.rng.choice((0, 0, 7)))
        if self.rng.randrange(3) == 0:
            await until(lambda: len(good_copies(names)) == 3)

    def _plan(self) -> None:
        disk = self.machine.disks[self.rng.choice(sorted(self.machine.disks))]
        match self.rng.randrange(4):
            case 0:
                disk.crash_at = disk.operation_count + self.rng.randrange(1, 200)
            case 1:
                for operation in ("pwrite", "sync_data", "rename"):
                    disk.fail_next(operation, DiskFailed("planted"), skip=self.rng.randrange(20))
            case _:
                pass

    def end(self) -> None:
        """Lose the power, or only the process; then perhaps a device, until after the next life."""
        (self.machine.crash if self.rng.randrange(2) else self.machine.kill)()
        for disk in self.machine.disks.values():
            disk.forget_failures()
            disk.crash_at = None
        self.bring_back()
        if self.rng.randrange(2):
            name = self.rng.choice(sorted(self.machine.disks))
            self.away[name] = self.machine.lose(name)

    def bring_back(self) -> None:
        self.machine.disks |= {name: disk.crash() for name, disk in self.away.items()}
        self.away.clear()


@pytest.mark.parametrize("seed", range(16))
def test_no_history_of_crashes_and_lost_devices_loses_an_acknowledged_name(seed: int) -> None:
    history = History(seed)
    for _ in range(8):
        with suppress(SimCrashed):
            try:
                run(history.live, seed)
            except* SimCrashed:
                raise SimCrashed from None
        history.end()
    assert history.opened >= 4
    assert history.acknowledged
