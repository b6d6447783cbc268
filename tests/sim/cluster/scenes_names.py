"""Scenes of the names: their copies miss writes, and come back."""

from __future__ import annotations

import trio

from tests.sim.cluster.lake import until
from tests.sim.cluster.names_place import NamesPlace
from tests.sim.cluster.stage import Stage


async def a_copy_misses_writes(stage: Stage) -> None:
    """A device of the names breaks, objects are put, the names crash, and the device works again."""
    names = stage.lake.names
    assert isinstance(names, NamesPlace)
    for number in range(2):
        await stage.put(f"o{number}", stage.payload())
    device = stage.rng.choice(sorted(names.disks))
    stage.break_names_device(device, is_broken=True)
    for number in range(1, 4):
        await stage.put(f"o{number}", stage.payload())
    await stage.remove("o0")
    if stage.rng.random() < 0.5:
        stage.break_names_device(device, is_broken=False)
    stage.lake.health.begin_elsewhere()
    lives = names.lives
    names.crash(power=stage.rng.random() < 0.5)
    await until(lambda: not names.is_up)
    stage.break_names_device(device, is_broken=False)
    await stage.wait(lambda: names.is_up and names.lives > lives, "the names serve again")
    stage.lake.health.end_elsewhere()
    await stage.read_all()
    await trio.sleep(5.0)
    await stage.read_all()
