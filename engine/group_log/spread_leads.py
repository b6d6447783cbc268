"""The leads of several names shards are spread over machines: one that leads some leaves a free lead to others first.

    leave       before a free lead is taken: LEAVE_S for each other shard that is led here, or is just being taken
    taking      while this process tries to lead a shard, and while it does

Rules kept here:
- It is politeness and no proof: safe is whoever leads, by the leader's key alone.
- Nobody else takes it: then it is taken here all the same, within LEAVE_S for each shard that is led.
- A process that leads nothing else waits for nothing: so a lake of one shard knows no pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from lakefs.ids import NamesShard

LEAVE_S: Final = 0.3
"""A replica that follows has seen by then that nobody leads, and has taken the lead: two transactions."""
_LOOK_S: Final = 0.05


class SpreadLeads:
    """The leads of the replicas in one process.  Used on the loop."""

    def __init__(self) -> None:
        self._taken: set[NamesShard] = set()

    async def leave(self, shard: NamesShard) -> None:
        """Leave the lead of a shard to other machines for the time that is due."""
        began = trio.current_time()
        while trio.current_time() - began < LEAVE_S * len(self._taken - {shard}):  # noqa: ASYNC110 - time decides
            await trio.sleep(_LOOK_S)

    @contextmanager
    def taking(self, shard: NamesShard) -> Iterator[None]:
        """Count a shard as led here during the block."""
        self._taken.add(shard)
        try:
            yield
        finally:
            self._taken.discard(shard)
