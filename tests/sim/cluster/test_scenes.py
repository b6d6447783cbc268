"""Scenes of a lake: whatever the plot, it keeps its promises."""

from __future__ import annotations

import pytest

from tests.sim.cluster.scenes import SCENES, SceneWorld
from tests.sim.cluster.world import History

pytestmark = pytest.mark.slow

SEEDS = range(5)
FIRST = 1
"""So many seeds of each scene are run first; the others are run with what is thorough."""
SEEDS_OF_SHARDS = range(3)
"""The seeds of scenes of several names shards."""
IN_SHORT = [name for name in SCENES if SCENES[name].shards == 1 or name == "cycles over two names shards"]
IDS = [name.replace(" ", "-") for name in SCENES]


def _play(name: str, seed: int) -> History:
    world = SceneWorld(name, seed)
    try:
        return world.run()
    except Exception as error:
        error.add_note("\n".join([*world.history.log[-60:], f"again: python -m tests.sim.cluster {world.name}"]))
        raise


@pytest.mark.parametrize("name", IN_SHORT, ids=[name.replace(" ", "-") for name in IN_SHORT])
def test_a_lake_keeps_its_promises_in_a_scene(name: str) -> None:
    for seed in SEEDS[:FIRST]:
        _play(name, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCENES, ids=IDS)
def test_a_lake_keeps_its_promises_in_more_of_a_scene(name: str) -> None:
    first = FIRST if name in IN_SHORT else 0
    for seed in (SEEDS if SCENES[name].shards == 1 else SEEDS_OF_SHARDS)[first:]:
        _play(name, seed)


def test_a_scene_is_the_same_history_each_time() -> None:
    logs = {tuple(_play("a stray is damaged", 3).log) for _ in range(2)}
    assert len(logs) == 1
