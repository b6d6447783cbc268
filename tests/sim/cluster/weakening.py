"""A rule of a lake that is weakened, and the histories that have to notice it (`tests.sim.cluster.planted`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from tests.sim.cluster.scenes import SceneWorld
from tests.sim.cluster.world import LakeWorld

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Weakening:
    """A rule that is weakened, and the number of seeds within which that must be noticed."""

    what: str
    plant: Plant
    scene: str = ""
    """The scene whose seeds are run; without it, whole histories."""
    first: int = 0
    """The seed that is tried first."""
    seeds: int = 30
    has_etcd: bool = False

    def in_scene(self, scene: str, first: int = 0) -> Weakening:
        """Return it as it is looked for in a scene."""
        return replace(self, scene=scene, first=first, seeds=10)

    def over_etcd(self) -> Weakening:
        """Return it as it is looked for in lakes over an etcd."""
        return replace(self, has_etcd=True)

    def world(self, seed: int) -> LakeWorld:
        """Return the world of a seed."""
        if self.scene:
            return SceneWorld(self.scene, seed, has_etcd=self.has_etcd)
        return LakeWorld(seed, has_etcd=self.has_etcd)


def instead(owner: object, name: str, instead: object) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, instead)


def seeds_to_notice(weakened: Weakening, most: int = 1000) -> tuple[int, str] | None:
    """Return the number of seeds until one failed, `first` before the others, and the failure; None if none did."""
    order = [weakened.first, *(seed for seed in range(weakened.seeds) if seed != weakened.first)]
    with weakened.plant():
        for count, seed in enumerate(order[:most], 1):
            try:
                weakened.world(seed).run()
            except Exception as error:  # noqa: BLE001 - a weaker rule may break anything
                return count, f"seed {seed}: {type(error).__name__}: {error}"
    return None
