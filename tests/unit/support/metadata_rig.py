"""Opens the metadata of a simulated or real store the way the engine does, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import trio
from trio.testing import MockClock

from engine.format.layouts import Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.host.clock import SystemClock
from engine.metadata.metadata_store import Metadata
from engine.metadata.opening import open_metadata
from engine.superblock.superblock import NO_CLUSTER, open_store, write_superblock
from engine.tables.views import Transaction, View
from lakefs.host.offload import InlineOffload
from lakefs.ids import Sequence
from lakefs.ports import Disk, Offload
from tests.sim.world.clock import SimClock
from tests.sim.world.determinism import run_seeded
from tests.sim.world.disk import SimDisk

TABLES = (Table.CHUNKS, Table.NODES, Table.NAMES)
END = b"\xff" * 64
NAMES_OF = b"a lake of names."
"""The lake whose names a store holds that is opened with `has_names`."""
SMALL = MetadataSizes(
    group_bytes=24 << 10,
    journal_file=64 << 10,
    journal_fill=16 << 10,
    overlay_entries_apply=4,
    overlay_entries_max=24,
    checkpoint_journal=96 << 10,
)
"""Bounds that a few commits reach: groups are full, files rotate, the index is written while groups are open."""
Change = tuple[Table, bytes, bytes | None]
"""Table, key, and the new value; None removes."""


@asynccontextmanager
async def opened(
    disk: Disk,
    *,
    clean: bool = True,
    offload: Offload | None = None,
    sizes: MetadataSizes = DEFAULT_SIZES,
    headroom_bytes: int = 0,
    index_on: SimDisk | None = None,
    has_names: bool = False,
) -> AsyncIterator[Metadata]:
    """Open the metadata of the store on `disk`, created when there is none; closed cleanly by default.

    `index_on` is the simulated disk that has the index, where `disk` is not one itself.
    `has_names`: the store holds the names of a lake.
    """
    index_on = disk if isinstance(disk, SimDisk) else index_on
    clock = SystemClock() if index_on is None else SimClock()
    cluster_id = NAMES_OF if has_names else NO_CLUSTER
    store = open_store(disk, clock, create=True, cluster_id=cluster_id, has_names=has_names)
    try:
        metadata = await open_metadata(
            disk,
            offload or InlineOffload(),
            clock,
            identity=store.superblock.identity,
            clean_sequence=store.superblock.clean_sequence,
            index_committed=None if index_on is None else index_on.note_index_sync,
            sizes=sizes,
            headroom_bytes=headroom_bytes,
        )
        write_superblock(disk, replace(store.superblock, clean_sequence=None))
        async with trio.open_nursery() as nursery:
            await nursery.start(metadata.run)
            yield metadata
            if clean:
                sequence = await metadata.close()
                if sequence is not None:
                    write_superblock(disk, replace(store.superblock, clean_sequence=sequence))
            nursery.cancel_scope.cancel()
    finally:
        store.lock.close()


async def put(metadata: Metadata, *changes: Change) -> Sequence:
    """Commit changes in one decision and wait until they are durable."""
    _, sequence = await metadata.commit(lambda txn: apply_changes(txn, changes))
    await metadata.wait_durable(sequence)
    return sequence


def apply_changes(txn: Transaction, changes: tuple[Change, ...]) -> int:
    """Insert, replace or remove each, as the tables require; return the number of mutations."""
    count = 0
    for table, key, value in changes:
        there = txn.get(table, key) is not None
        if value is not None:
            (txn.put if there else txn.insert)(table, key, value)
        elif there:
            txn.delete(table, key)
        count += there or value is not None
    return count


def everything(view: View) -> dict[tuple[Table, bytes], bytes]:
    """Return all records of the tables that tests write, by scanning."""
    return {(table, key): value for table in TABLES for key, value in view.scan(table, b"", END)}


def contents(metadata: Metadata) -> dict[tuple[Table, bytes], bytes]:
    """Return all records."""
    with metadata.view() as view:
        return everything(view)


async def wait_applied(metadata: Metadata) -> None:
    """Wait until the index has everything durable; the simulated clock jumps to the applier's next round."""
    while True:
        if metadata.applied_sequence >= metadata.durable_sequence:
            return
        await trio.sleep(0.25)


def run(scenario: Callable[[], Awaitable[None]], seed: int = 0) -> None:
    """Run a scenario on a clock that jumps, so that nothing waits for real; `seed` orders the tasks."""
    run_seeded(scenario, seed, clock=MockClock(autojump_threshold=0))
