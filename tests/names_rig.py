"""Names without content in this process: a store on a simulated disk that holds metadata and no segment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from engine.chunks.quarantine import Quarantine
from engine.namespace.buckets import initialise
from engine.namespace.watch import Watchers
from engine.sessions.references import References
from engine.store.features import Features
from engine.store.keyed_store import KeyedStore
from engine.superblock.reserve import Reserve
from engine.superblock.superblock import read_superblock
from lakefs.host.offload import InlineOffload
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimDisk
from tests.store_rig import SMALL_SIZES
from tests.unit.support.metadata_rig import opened


@asynccontextmanager
async def names_store(disk: SimDisk | None = None) -> AsyncIterator[KeyedStore]:
    """Names and spaces, created when the disk has none; closed cleanly at the end."""
    disk, clock = disk or SimDisk(), SimClock()
    async with opened(disk, sizes=SMALL_SIZES.metadata) as metadata:
        _, sequence = await metadata.commit(initialise)
        await metadata.wait_durable(sequence)
        with closing(Reserve(disk)) as reserve:
            reserve.open()
            yield KeyedStore(
                features=Features(read_superblock(disk), disk, InlineOffload(), reserve, metadata),
                clock=clock,
                metadata=metadata,
                references=References(clock),
                watchers=Watchers(metadata.on_durable),
                quarantine=Quarantine(metadata, clock),
            )
