"""A replica whose disk is full leaves the lead of the names to one that has room.

    leave_first         before a free lead is taken: FULL_LEAVE_S, so that a replica with room takes it
    call_when_full      while it leads: calls once the disk is full, and another replica with room is present

Rules kept here:
- It is politeness and no proof: safe is whoever leads, by the leader's key alone.
- The lead is left to a replica that is present alone: one that has said something since the disk was found full.
- One that is nearly full says that it is full: else two such replicas would leave the lead to each other in turn.
- Where no other one has room, it is led here: names are read and removed, and new ones are refused with StoreFull.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

import trio

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.lake_state import pages
from engine.coordinator.records import ReplicaRecord, decode
from engine.format.group_parts import LogKeys
from engine.group_log.handing_over import LOOK_S
from lakefs.errors import LakeError
from lakefs.ids import ReplicaId, Revision

FULL_LEAVE_S: Final = 3.0
"""A replica that follows has taken the lead by then."""
HasRoom = Callable[[], bool]


async def leave_first(has_room: HasRoom) -> None:
    """Leave a free lead to others for a while, if the disk here is full."""
    if not has_room():
        await trio.sleep(FULL_LEAVE_S)


async def call_when_full(
    coordinator: Coordinator, keys: LogKeys, replica: ReplicaId, has_room: HasRoom, call: Callable[[], None]
) -> None:
    """Call once the disk here is full and another replica with room is present, and return."""
    said: dict[bytes, Revision] = {}
    while True:
        await trio.sleep(LOOK_S)
        if has_room():
            said.clear()
            continue
        with suppress(LakeError):
            found = await _with_room(coordinator, keys, replica)
            if any(said.setdefault(key, revision) != revision for key, revision in found.items()):
                call()
                return


async def _with_room(coordinator: Coordinator, keys: LogKeys, replica: ReplicaId) -> dict[bytes, Revision]:
    """Return the records of other replicas whose disks have room, each with its revision.  EngineUnreachable."""
    found: dict[bytes, Revision] = {}
    async for page in pages(coordinator, *keys.replicas):
        for entry in page.entries:
            record = decode(ReplicaRecord, entry.value)
            if entry.key != keys.replica(replica) and not (record.is_removed or record.is_full):
                found[entry.key] = entry.revision
    return found
