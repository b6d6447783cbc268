"""Entries of the shared index that name cells of the DRAM tier.

Rules kept here:
- The entry of a durable chunk names its cell from the step that publishes the chunk in the tier to the step that
  forgets or demotes it, before the cell is freed.  A reader that uses the entry after that sees another generation.
- Once the block of `joined` has ended, the tier's changes no longer reach the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from engine.tiers.dram_tier import DramTier
from engine.tiers.shared_index import SharedIndex
from lakefs.ids import ChunkId
from lakefs.shared_index.table_format import Found, pack_place
from lakefs.wire.media import MEDIUM_DRAM


@contextmanager
def joined(index: SharedIndex, tier: DramTier | None) -> Iterator[None]:
    """Keep the index's entries up to date with the tier until the block ends."""
    if tier is None:
        yield
        return

    index.slab_place_of = partial(slab_place, tier)
    tier.on_admitted.append(index.tell_slab)
    tier.on_demoted.append(index.tell_segment)
    try:
        yield
    finally:
        tier.on_admitted.remove(index.tell_slab)
        tier.on_demoted.remove(index.tell_segment)


def slab_place(tier: DramTier, chunk: bytes) -> Found | None:
    """Return the chunk's place in the tier as an entry has it; None if it is not there, or no entry can hold it."""
    grant = tier.grant(ChunkId(chunk))
    place = None if grant is None else pack_place(grant.segment, grant.epoch)
    if grant is None or place is None:
        return None
    return MEDIUM_DRAM, place, grant.offset, grant.stored_bytes, grant.crc
