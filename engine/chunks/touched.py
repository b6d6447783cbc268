"""The gc generation in which each shard of a member was last stored or offered, by the shard's birth.

Gc and the mover of a shard ask: was it touched later than in generation n?  So what is kept is exact for the last
generations, and a bound above the truth for earlier ones.

Rules kept here:
- `of` never answers less than the generation of the last touch.
- Behind a restart everything counts as touched in the coordinator's generation, read since the start.  Until that is
  known (`opened`), everything counts as touched by any session, so nothing is freed or dropped.
- Sets of births are kept for the last `KEPT` generations that were seen.  Memory: about a bit for each shard and set.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from engine.tables.number_set import NumberSet
from lakefs.ids import Birth
from lakefs.wire.shard_messages import TOUCHED_UNKNOWN

KEPT: Final = 3
"""The cycle of generation g looks at g - 1 and g; sessions of g + 1 may begin before it has ended."""


class Touched:
    """The touches of one store since its start.  Used on the loop."""

    def __init__(self) -> None:
        self._sets: dict[int, NumberSet] = {}
        self._newest = 0
        self._floor = 0
        """Every shard counts as touched in this generation, at least."""
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """True once the generation at the start is known."""
        return self._is_known

    def opened(self, generation: int) -> None:
        """Note the coordinator's generation, read since this store was opened; 0: there were no shards."""
        if not self._is_known:
            self._is_known = True
            self._floor = max(self._floor, generation)

    def note(self, birth: Birth, generation: int) -> None:
        """Note that a session of this generation stored or found the shard."""
        if generation > self._newest:
            self.seen(generation)
        if generation > self._newest - KEPT:
            births = self._sets.get(generation)
            if births is None:
                births = self._sets[generation] = NumberSet()
            births.add(birth)
        # Else it counts as touched in the floor, which is later.

    def seen(self, generation: int) -> None:
        """Note that a generation has begun: touches in too early ones become part of the floor."""
        if generation <= self._newest:
            return
        self._newest = generation
        self._floor = max(self._floor, generation - KEPT)
        for old in [number for number in self._sets if number <= generation - KEPT]:
            del self._sets[old]
        assert len(self._sets) < KEPT + 1, "the sets in memory are bounded"

    def of(self, birth: Birth) -> int:
        """Return the generation in which the shard was touched last, or a later one."""
        if not self._is_known:
            return TOUCHED_UNKNOWN
        for generation in sorted(self._sets, reverse=True):
            if generation <= self._floor:
                break
            if birth in self._sets[generation]:
                return generation
        return self._floor

    def of_each(self, births: Seq[Birth]) -> list[int]:
        """Return the generation of each shard; see `of`."""
        if not self._is_known or all(generation <= self._floor for generation in self._sets):
            return [TOUCHED_UNKNOWN if not self._is_known else self._floor] * len(births)
        return list(map(self.of, births))
