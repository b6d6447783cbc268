"""The lock of gc over a lake: one cycle at a time, in whichever process.

It saves work and decides nothing: cycles have different generations, and a member that begins a later one frees nothing
for an earlier one any more.  So the lock may be lost, or be held twice for a moment, and no content is at risk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from engine.coordinator.coordinator import Coordinator, IsAbsent, Put
from engine.coordinator.held_lease import HeldLease, hold_lease
from engine.coordinator.records import GC_KEY
from engine.lake_gc.lake_gc_bounds import LAKE_GC_LOCK_S
from lakefs.errors import EngineBusy
from lakefs.ids import new_id16
from lakefs.ports import Clock

_LOOK_EVERY_S: Final = 1.0


@asynccontextmanager
async def hold_gc_lock(coordinator: Coordinator, clock: Clock) -> AsyncIterator[HeldLease]:
    """Hold the lock during the block; its lease may end before that.

    EngineBusy if another process holds it for longer than a process that died would; errors of `Coordinator.lease`.
    """
    async with hold_lease(coordinator, clock, LAKE_GC_LOCK_S) as lease:
        take = Put(GC_KEY, new_id16(), lease.id)
        with trio.move_on_after(2 * LAKE_GC_LOCK_S) as waiting:
            while True:
                if (await coordinator.transact([IsAbsent(GC_KEY)], [take])).succeeded:
                    break
                await trio.sleep(_LOOK_EVERY_S)
        if waiting.cancelled_caught:
            raise EngineBusy("another process collects the garbage of this lake; one cycle runs at a time")
        yield lease
