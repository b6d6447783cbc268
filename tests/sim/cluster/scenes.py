"""Scenes: short histories with a plot, each of one family of rules; the seed draws all that the plot leaves open.

`SceneWorld(name, seed).run()` is one history, 0.4 s of CPU; `python -m tests.sim.cluster --scene NAME 7` shows it.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from engine.lake_upkeep.lake_upkeep import UpkeepSettings
from engine.walker.membership import MembershipSettings
from engine.walker.walker_pass import PassSettings
from lakefs.cluster.protection import Protection
from tests.sim.cluster import scenes_etcd, scenes_gc, scenes_names, scenes_shards, scenes_stripes, scenes_walks
from tests.sim.cluster.customers import Pool
from tests.sim.cluster.lake import SimLake
from tests.sim.cluster.promises import Promises
from tests.sim.cluster.stage import Stage
from tests.sim.cluster.world import LakeWorld

ONE_ONE: Final = Protection(1, 1)
TWO_ONE: Final = Protection(2, 1)
FOUR_TWO: Final = Protection(4, 2)
NEVER_S: Final = 1e5


@dataclass(frozen=True)
class Scene:
    """A plot, and the lakes on which it is played: protections with numbers of members."""

    play: Callable[[Stage], Awaitable[None]]
    lakes: tuple[tuple[Protection, int], ...] = ((TWO_ONE, 4), (TWO_ONE, 5), (ONE_ONE, 3))
    out_after_s: float = NEVER_S
    has_etcd: bool = False
    """It is of lakes over an etcd alone."""
    shards: int = 1
    """Names shards that there may be; `begun` of them are there from the beginning."""
    begun: int = 1
    settings: UpkeepSettings = field(
        default=UpkeepSettings(
            name="simulated",
            gc_interval_s=NEVER_S,
            look_interval_s=2.0,
            gc_batch=2,
            walk_share=1.0,
            walks=PassSettings(full_pass_s=NEVER_S, retry_s=5.0, idle_s=2.0),
        )
    )


def _two_shards(play: Callable[[Stage], Awaitable[None]], begun: int = 2) -> Scene:
    return Scene(play, SMALL, has_etcd=True, shards=2, begun=begun)


SMALL: Final = (TWO_ONE, 4), (ONE_ONE, 3)
RARE_LOOKS: Final = replace(Scene(scenes_walks.a_device_is_put_back).settings, look_interval_s=20.0)
SCENES: Final[dict[str, Scene]] = {
    "a mark is lost": Scene(scenes_gc.a_mark_is_lost),
    "a name moves behind the walk": Scene(scenes_gc.a_name_moves_behind_the_walk),
    "members restart during a put": Scene(scenes_gc.members_restart_during_a_put),
    "a put outlives cycles": Scene(scenes_gc.a_put_outlives_cycles),
    "tables change during a cycle": Scene(
        scenes_gc.tables_change_during_a_cycle, ((ONE_ONE, 5), (ONE_ONE, 6), (TWO_ONE, 6)), out_after_s=15.0
    ),
    "some members sweep": Scene(scenes_gc.some_members_sweep),
    "a shard is made anew during a put": Scene(scenes_gc.a_shard_is_made_anew_during_a_put),
    "a stray is touched": Scene(scenes_gc.a_stray_is_touched, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a put while members are away, then a loss": Scene(
        scenes_stripes.a_put_while_members_are_away, ((TWO_ONE, 4), (FOUR_TWO, 6), (TWO_ONE, 5))
    ),
    "a put with too few members, then a loss": Scene(
        scenes_stripes.a_put_with_too_few_members, ((ONE_ONE, 3), (TWO_ONE, 4))
    ),
    "a member lies for long": Scene(scenes_stripes.a_member_lies_for_long),
    "a member lies of a length": Scene(
        scenes_stripes.a_member_lies_of_a_length, ((TWO_ONE, 4), (ONE_ONE, 3), (FOUR_TWO, 6))
    ),
    "a put is slow behind its note": Scene(scenes_stripes.a_put_is_slow, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a partition is noted again": Scene(scenes_walks.a_partition_is_noted_again, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a home is full, then a loss": Scene(scenes_walks.a_home_is_full, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a home is full": Scene(scenes_walks.a_home_is_full_for_long, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a stray is damaged": Scene(scenes_walks.a_stray_is_damaged, ((TWO_ONE, 4), (TWO_ONE, 5))),
    "a head learns late of a table": Scene(scenes_walks.a_head_learns_late, ((ONE_ONE, 4), (TWO_ONE, 5))),
    "two members are drained at once": Scene(scenes_walks.two_are_drained, ((ONE_ONE, 4), (ONE_ONE, 5))),
    "drains wait for each other": Scene(
        scenes_walks.drains_wait_for_each_other, ((TWO_ONE, 6), (TWO_ONE, 7), (FOUR_TWO, 9))
    ),
    "a member is out, and returns": Scene(
        scenes_walks.a_member_is_out, ((ONE_ONE, 5), (ONE_ONE, 6), (TWO_ONE, 7)), out_after_s=6.0
    ),
    "many tables, then a loss": Scene(scenes_walks.many_tables_and_a_loss, ((TWO_ONE, 4), (FOUR_TWO, 7))),
    "more than m members are unheard": Scene(
        scenes_walks.more_than_m_are_unheard, ((ONE_ONE, 5), (ONE_ONE, 6), (TWO_ONE, 7)), out_after_s=6.0
    ),
    "a member forgets": Scene(scenes_walks.a_member_forgets),
    "a device is put back": Scene(
        scenes_walks.a_device_is_put_back, ((TWO_ONE, 4), (TWO_ONE, 5), (FOUR_TWO, 6)), settings=RARE_LOOKS
    ),
    "a copy of the names misses writes": Scene(
        scenes_names.a_copy_misses_writes, ((ONE_ONE, 3), (TWO_ONE, 4), (FOUR_TWO, 6))
    ),
    "a former leader goes on": Scene(scenes_etcd.a_former_leader_goes_on, ((TWO_ONE, 4), (TWO_ONE, 5)), has_etcd=True),
    "two replicas of the names lead": Scene(scenes_etcd.two_replicas_lead, has_etcd=True),
    "two replicas of another names shard lead": _two_shards(scenes_shards.two_replicas_of_another_shard_lead),
    "cycles over two names shards": _two_shards(scenes_shards.cycles_over_two_shards),
    "a put to another names shard outlives cycles": _two_shards(scenes_shards.a_put_to_another_shard_outlives_cycles),
    "a names shard is added during a cycle": _two_shards(scenes_shards.a_shard_is_added_during_a_cycle, begun=1),
    "epochs over two names shards": _two_shards(scenes_shards.epochs_over_two_shards),
    "buckets come and go": _two_shards(scenes_shards.buckets_come_and_go),
    "a removal of a bucket is lost": _two_shards(scenes_shards.a_removal_is_lost),
    "a copy between the walks of two names shards": _two_shards(scenes_shards.a_copy_between_walks),
    "a former leader of a names shard goes on": _two_shards(scenes_shards.a_former_leader_of_a_shard_goes_on),
    "a copy to another names shard is slow": _two_shards(scenes_shards.a_copy_is_slow),
}


class SceneWorld(LakeWorld):
    """The run of one scene with one seed."""

    def __init__(self, name: str, seed: int, *, has_etcd: bool = False) -> None:
        scene = SCENES[name]
        super().__init__(seed, has_etcd=has_etcd or scene.has_etcd, shards=scene.shards)
        self._name, self._scene, self._begun, self._asked_shards = name, scene, scene.begun, None
        self._protection, self._member_count = self._rng.choice(self._scene.lakes)
        self._is_rough = False
        self._look_every_s = 1000.0

    @property
    def name(self) -> str:
        """See `LakeWorld.name`."""
        return f'--scene "{self._name}" {self.seed}{self._kind}'

    def _settings(self) -> UpkeepSettings:
        membership = MembershipSettings(out_after_s=self._scene.out_after_s, answer_s=3.0)
        return replace(self._scene.settings, membership=membership)

    async def _busy(self, lake: SimLake, promises: Promises, pool: Pool) -> None:
        stage = Stage(lake, promises, pool, self._new_random(), self._buckets)
        await stage.healed()
        await self._scene.play(stage)
        self.history.met.update(lake.met)


def scene_of(number: int) -> SceneWorld:
    """Return the scene of a number: all of them take turns."""
    names = list(SCENES)
    return SceneWorld(names[number % len(names)], random.Random(number).getrandbits(32))
