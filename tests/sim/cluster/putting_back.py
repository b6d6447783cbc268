"""Devices that are put back: an image is taken of a member's device, and written back some time later.

The member opens as it was then: what it stored since is lost like a lost device's content, and what was dropped or
removed since is there again.  Nobody need have seen it away.  The lake has to find that out by itself, when it had
recorded more than the image has (`engine.walker.member_openings`); what the image lacks of the last moments alone is
left to the weekly pass, in whose place the operator checks every shard.
"""

from __future__ import annotations

import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import OpeningRecord
from lakefs.errors import LakeError
from lakefs.ids import MemberId
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.operating import Operator
from tests.sim.cluster.places import MemberPlace
from tests.sim.world.disk import SimDisk


class PuttingBack:
    """Images of devices.  A member is hurt from its image on until the lake has seen it come back."""

    def __init__(self, lake: SimLake, operator: Operator) -> None:
        self._lake = lake
        self._operator = operator

    async def put_back(self) -> None:
        """Take an image of a member's device, and put it back later; ends when the lake has seen that."""
        lake = self._lake
        found = [place for place in lake.members if place.is_up and not place.disk.is_dead and place not in lake.lying]
        found = lake.losable(found)
        if not found:
            return
        place = lake.rng.choice(found)
        self.begin(place)
        image = await self.image_of(place)
        if image is not None:
            await trio.sleep(lake.rng.choice((5.0, 20.0, 50.0)))
            power, away_s = lake.rng.choice(((False, 0.1), (True, 0.1), (True, 10.0)))
            await self.write_back(place, image, power=power, away_s=away_s)
        self.end(place)

    def begin(self, place: MemberPlace) -> None:
        """Count a member as hurt, and let nothing else happen to it."""
        self._lake.health.begin(place.name)
        self._lake.health.lost.add(place.name)
        self._lake.lying.add(place)

    def end(self, place: MemberPlace) -> None:
        """Note that the lake has seen it come back."""
        self._lake.lying.discard(place)
        self._lake.health.end(place.name)

    async def image_of(self, place: MemberPlace) -> SimDisk | None:
        """Stop a member, take an image of its device, and start it again; None if it did not stop well."""
        process = place.process
        assert process is not None
        lives = place.lives
        await place.stop()
        await until(lambda: place.store is None)
        image = None if process.error is not None or place.disk.open_files else place.disk.image()
        self._lake.log(f"an image is taken of {place.name}" if image else f"{place.name} has not stopped well")
        place.is_wanted = True
        await until(lambda: place.is_up and place.lives > lives)
        return image

    async def write_back(self, place: MemberPlace, image: SimDisk, *, power: bool = False, away_s: float = 0.1) -> None:
        """Let a member die, or its power fail, and write an image to its device; it is away for so long and a bit."""
        lake = self._lake
        await until(lambda: place.is_up and not place.disk.is_dead)
        member, lives = place.id, place.lives
        assert member is not None
        before = await self._recorded(member)
        lake.log(f"the device of {place.name} is put back")
        lake.met["put back"] += 1
        lake.health.forgotten += 1
        lake.forgetful.add(member)
        place.is_wanted = False
        place.replace_device(image, power=power)
        await trio.sleep(away_s)
        place.is_wanted = True
        await until(lambda: place.is_up and place.lives > lives)
        if await self._is_seen(place, member, before):
            lake.met["put back, and found out"] += 1
        else:
            await self._operator._check(place)

    async def _is_seen(self, place: MemberPlace, member: MemberId, before: OpeningRecord | None) -> bool:
        """Wait until the lake has recorded the member's opening; return False if it need not know that it is older."""
        while place.id == member:
            found, opening = await self._recorded(member), place.opening
            if found is not None and opening is not None and found.opening == opening.boot:
                return before is not None and opening.recovered < before.durable
            await trio.sleep(0.2)
        return False

    async def _recorded(self, member: MemberId) -> OpeningRecord | None:
        """Return the record of a member's opening; None while the names are away."""
        upkeep = self._lake.names.upkeep
        if upkeep is None:
            return None
        try:
            return (await LakeState(upkeep._coordinator).openings()).get(member)
        except LakeError:
            return None
