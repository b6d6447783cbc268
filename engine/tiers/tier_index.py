"""The shared index of a process without segments: it names the chunks of the DRAM tier, and no others.

Clients read it as they read an engine's (`engine.tiers.shared_index`); what it does not name they ask for.

Rules kept here:
- A chunk has an entry from the step that publishes it in the tier to the step that forgets or demotes it, before the
  cell is freed.  A reader that uses the entry after that sees another generation.
- After `close` the tier's changes no longer reach the table.
"""

from __future__ import annotations

from typing import Final

import trio

from engine.format.layouts import StoreIdentity
from engine.memory.backing import Backing
from engine.tiers.dram_entries import slab_place
from engine.tiers.dram_tier import DramTier
from engine.tiers.owned_table import OwnedTable, TableCounts
from lakefs.limits import GC_BATCH
from lakefs.ports import Offload
from lakefs.shared_index.table import SharedTable


class TierIndex(OwnedTable):
    """The table of one tier.  `run` keeps it large enough."""

    def __init__(
        self, tier: DramTier, offload: Offload, identity: StoreIdentity, backing: Backing, table: SharedTable
    ) -> None:
        """`identity`: that of the process, as its reply to Hello has it; readers compare it."""
        self._tier: Final = tier
        self.offload = offload
        self.identity = identity
        self.backing = backing
        self.table = table
        self.is_growing = True
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

    def close(self) -> None:
        """Release the table.  No look-up may follow."""
        self._tier.on_admitted.remove(self._put)
        self._tier.on_demoted.remove(self._remove)
        self.end_table()
