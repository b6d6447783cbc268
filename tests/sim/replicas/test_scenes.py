"""Scenes of names with replicas: whatever the plot, each name is a register, and the log stays readable."""

from __future__ import annotations

import pytest

from tests.sim.replicas.scenes import SCENES, ReplicaScene

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SCENES, ids=lambda name: name.replace(" ", "-"))
def test_names_with_replicas_are_registers_in_a_scene(name: str) -> None:
    world = ReplicaScene(name, 0)
    try:
        world.run()
    except Exception as error:
        error.add_note("\n".join([*world.history.log[-60:], f"again: python -m tests.sim.replicas {world.name}"]))
        raise
