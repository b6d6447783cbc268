"""The lead of the names is handed over: a replica asks for it, and the one that leads ends its term.

    names/SHARD/wanted      the replica that shall lead, on its own lease

Rules kept here:
- While the key is there, no other replica takes the lead, and the one that has it gives it up within LOOK_S.
- Who asks and dies on the way is asked for no longer than its lease lasts.
- It is a wish and no proof: safe is whoever leads, by the leader's key alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.held_lease import hold_key
from engine.format.group_parts import LogKeys
from lakefs.errors import LakeError
from lakefs.ids import ReplicaId
from lakefs.ports import Clock

LOOK_S: Final = 1.0
_LEASE_S: Final = 10


@asynccontextmanager
async def asking_to_lead(
    coordinator: Coordinator, clock: Clock, keys: LogKeys, replica: ReplicaId
) -> AsyncIterator[None]:
    """Ask for the lead during the block, in the place of whoever has asked before.  EngineUnreachable, EngineBusy."""
    async with hold_key(coordinator, clock, _LEASE_S, keys.wanted, replica):
        yield


async def is_wanted_elsewhere(coordinator: Coordinator, keys: LogKeys, replica: ReplicaId) -> bool:
    """Return True if another replica than this one shall lead.  EngineUnreachable."""
    entry = (await coordinator.get(keys.wanted)).entry
    return entry is not None and entry.value != replica


async def call_when_wanted_elsewhere(
    coordinator: Coordinator, keys: LogKeys, replica: ReplicaId, call: Callable[[], None]
) -> None:
    """Call once another replica shall lead, and return."""
    while True:
        await trio.sleep(LOOK_S)
        with suppress(LakeError):
            if await is_wanted_elsewhere(coordinator, keys, replica):
                call()
                return
