"""A simulated lake as those see it to whom things happen: its places, its health, and what has happened so far."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberState
from lakefs.errors import LakeError
from lakefs.ids import MemberId
from tests.sim.cluster.health import Health
from tests.sim.cluster.places import HeadPlace, MemberPlace, Names, Place, Surroundings


@dataclass
class SimLake:
    """The parts of one history.  `keep` runs the processes of a new place."""

    world: Surroundings
    rng: random.Random
    members: list[MemberPlace]
    names: Names
    heads: Sequence[HeadPlace]
    health: Health
    is_rough: bool
    """More than m members may be hurt at once: requests may fail then, and nothing may be lost."""
    keep: Callable[[Place], None]
    met: Counter[str] = field(default_factory=Counter)
    lost: set[MemberId] = field(default_factory=set)
    """Members whose devices are lost for ever, and that the lake still has."""
    forgetful: set[MemberId] = field(default_factory=set)
    """Members that forgot: values of keys lie once, so some of theirs may be damaged."""
    lying: set[MemberPlace] = field(default_factory=set)
    """Members whose disks lie about syncs, or of which there is an image: nothing else happens to them until they are
    as they were."""

    def log(self, text: str) -> None:
        """Note a step."""
        self.world.log(text)

    def victim(self) -> MemberPlace | None:
        """Return a member that may be hurt now."""
        found = [place for place in self.members if self.is_rough or self.health.may_hurt(place.name)]
        found = [place for place in found if place.id is not None and place.is_wanted and place not in self.lying]
        return self.rng.choice(found) if found else None

    def losable(self, places: Iterable[MemberPlace]) -> list[MemberPlace]:
        """Return those of these members that are not hurt, and may be hurt and lost now."""
        found = [place for place in places if not self.health.hurt.get(place.name)]
        found = [place for place in found if self.is_rough or self.health.may_hurt(place.name)]
        return [place for place in found if self.health.may_lose(place.name)]

    @property
    def is_all_up(self) -> bool:
        """True if every process serves."""
        return self.names.is_up and all(place.is_up for place in (*self.members, *self.heads))

    async def is_healed(self) -> bool:
        """Return True if the lake says that every stripe is whole, and its table has all members that there are."""
        upkeep = self.names.upkeep
        if upkeep is None or not self.names.is_up:
            return False
        state = LakeState(upkeep._coordinator)
        try:
            if await state.dirty() or not upkeep.walks.is_healed:
                return False
            records = {record.member: record.state for record in await state.members()}
        except LakeError:
            return False
        tables = upkeep._members.tables
        placed = {member.id for member in tables[0].members}
        wanted = {member for member, found in records.items() if found is not MemberState.REMOVED}
        present = {place.id for place in self.members if place.is_up}
        return len(tables) == 1 and wanted == placed == present


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110 - on a clock that jumps
        await trio.sleep(0.1)
