"""The shared index of a process without segments: it names the chunks of the DRAM tier, and no others.

Clients read it as they read an engine's (`engine.tiers.shared_index`); what it does not name they ask for.

Rules kept here:
- A chunk has an entry from the step that publishes it in the tier to the step that forgets or demotes it, before the
  cell is freed.  A reader that uses the entry after that sees another generation.
- After `close` the tier's changes no longer reach the table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
import trio

from engine.format.layouts import StoreIdentity
from engine.memory.backing import Backing, open_backing
from engine.tiers.dram_entries import slab_place
from engine.tiers.dram_tier import DramTier
from engine.tiers.owned_table import OwnedTable, TableCounts, capacity_allowed
from lakefs.errors import LakeError
from lakefs.grants.dram_slabs import UNIT_BYTES
from lakefs.limits import GC_BATCH, HOT_INDEX_ENTRIES_MIN
from lakefs.ports import Offload
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import capacity_for, table_bytes

OFF: Final = "off"
IN_MEMORY: Final = ("auto", "memory")
_log: Final = structlog.get_logger(__name__)


class TierIndex(OwnedTable):
    """The table of one tier.  `run` keeps it large enough."""

    def __init__(
        self,
        tier: DramTier,
        offload: Offload,
        identity: StoreIdentity,
        backing: Backing,
        table: SharedTable,
        *,
        is_growing: bool = True,
    ) -> None:
        """`identity`: that of the process, as its reply to Hello has it.  `is_growing`: the table may grow."""
        self._tier: Final = tier
        self.offload = offload
        self.identity = identity
        self.backing = backing
        self.table = table
        self.is_growing = is_growing
        self.state = "filling"
        self.counts = TableCounts()
        self.full = trio.Event()
        self.write_header()
        tier.on_admitted.append(self._put)
        tier.on_demoted.append(self._remove)

    def _put(self, chunk: bytes) -> None:
        place = slab_place(self._tier, chunk)
        if place is not None:
            self.put_entry(chunk, place)

    def _remove(self, chunk: bytes) -> None:
        self.table.remove(chunk)

    async def fill(self) -> None:
        """Put the chunks that are in the tier now; returns early when the table is full."""
        for count, chunk in enumerate(self._tier.chunks(), 1):
            self._put(chunk)  # nothing, if it has left since
            if self.full.is_set():
                return
            if not count % GC_BATCH:
                await trio.lowlevel.checkpoint()
        self.state = "ready"

    def emptied(self) -> None:
        """See `OwnedTable.emptied`."""

    def statistics(self) -> dict[str, Any]:
        """For people and scripts; JSON-able."""
        return self.figures(was_kept=False, in_slabs=self.table.count)

    def close(self) -> None:
        """Release the table.  No look-up may follow."""
        self._tier.on_admitted.remove(self._put)
        self._tier.on_demoted.remove(self._remove)
        self.end_table()


@asynccontextmanager
async def open_tier_index(
    tier: DramTier, offload: Offload, identity: StoreIdentity, setting: str = "auto", entries: int = 0
) -> AsyncIterator[TierIndex | None]:
    """Open the index of a tier; None when it is off, or memory is short, which is logged.  It is to be run.

    `entries` 0: it sizes itself.  A path as setting is for indexes that are kept; this one lies in memory.
    """
    if setting == OFF:
        yield None
        return
    if setting not in IN_MEMORY:
        _log.warning("hot_index: the index of a DRAM tier is not kept over a restart; it lies in memory", path=setting)
    most = tier.arena.slabs_max * tier.arena.slab_bytes // UNIT_BYTES
    capacity = min(capacity_for(entries or min(HOT_INDEX_ENTRIES_MIN, most)), capacity_allowed())
    try:
        backing = await offload.run(open_backing, "memory", table_bytes(capacity))
    except LakeError as error:
        _log.warning("there is no shared index", reason=error.message)
        yield None
        return
    table = SharedTable(backing.memory, capacity)
    index = TierIndex(tier, offload, identity, backing, table, is_growing=not entries)
    try:
        yield index
    finally:
        index.close()
