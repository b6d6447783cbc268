"""Members that forget: a disk lies about syncs for a while, then the power fails, and the member comes back as it was.

What such a disk has acknowledged may be lost like a lost device's content, and what was dropped or removed may be there
again.  Nothing of it is promised by that member alone, and the lake outlives it as it outlives one loss.
"""

from __future__ import annotations

import trio

from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.operating import Operator
from tests.sim.cluster.places import MemberPlace

SEEN_S = 12.0
"""A host is down for so long when its power has failed: every look at the members has seen that."""
OPENS_S = 20.0


class Forgetting:
    """Disks that lie.  A member of one is hurt from the first lie until it is back, or replaced."""

    def __init__(self, lake: SimLake, operator: Operator) -> None:
        self._lake = lake
        self._operator = operator

    async def forget(self) -> None:
        """Let a member forget; the event ends when the lake has checked what is left there."""
        lake = self._lake
        found = [place for place in lake.members if place.id is not None and place.is_up and not place.disk.is_dead]
        found = lake.losable(found)
        if not found:
            return
        place = lake.rng.choice(found)
        self.lie_about_syncs(place)
        await trio.sleep(lake.rng.choice((3.0, 10.0, 30.0)))
        await self.lose_power(place)
        await self._operator._check(place)
        lake.health.end(place.name)

    def lie_about_syncs(self, place: MemberPlace) -> None:
        """Let a member's disk lie about syncs from now on."""
        self._lake.health.begin(place.name)
        self._lake.health.lost.add(place.name)
        self._lake.met["lying disk"] += 1
        self._lake.log(f"the disk of {place.name} lies about syncs")
        place.disk.lying_sync = 1.0
        self._lake.lying.add(place)

    async def lose_power(self, place: MemberPlace) -> None:
        """Let the power of a member with a lying disk fail; it returns, or is replaced when it cannot be opened."""
        lake = self._lake
        await until(lambda: place.is_up and not place.disk.is_dead)
        lives = place.lives
        lake.log(f"the power of {place.name} fails")
        place.is_wanted = False
        place.crash(power=True)
        lake.lying.discard(place)
        lake.health.forgotten += 1
        assert place.id is not None
        lake.forgetful.add(place.id)
        await trio.sleep(SEEN_S)
        place.is_wanted = True
        with trio.move_on_after(OPENS_S):
            await until(lambda: place.is_up and place.lives > lives)
        if not place.is_up:
            lake.met["forgot everything"] += 1
            await self._operator._lose(place)
