"""Names without content in this process, on a simulated disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.store.given_rights import NOTHING_KEPT, GivenRights
from engine.store.keyed_store import KeyedStore
from engine.store.metadata_life import Leading, always_leading
from engine.store.names_opening import open_names_store
from lakefs.host.offload import InlineOffload
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES
from tests.unit.support.metadata_rig import NAMES_OF


@asynccontextmanager
async def names_store(
    disk: SimDisk | None = None, given_rights: GivenRights = NOTHING_KEPT, leading: Leading = always_leading
) -> AsyncIterator[KeyedStore]:
    """Names and spaces of the lake NAMES_OF, created when the disk has none; closed cleanly at the end."""
    disk = disk or SimDisk()
    async with open_names_store(
        disk,
        SimClock(),
        InlineOffload(),
        cluster_id=NAMES_OF,
        create=True,
        verify_index=False,
        sizes=SMALL_SIZES,
        index_committed=disk.note_index_sync,
        leading=leading,
        given_rights=given_rights,
    ) as store:
        yield store
