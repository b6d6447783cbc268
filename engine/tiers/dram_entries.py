"""What the shared index tells of the DRAM tier: entries of chunks that are in it, for as long as they are.

Rules kept here:
- An entry tells a cell from the step in which its chunk is published there, when the chunk is durable, to the one in
  which it is forgotten or demoted, before the cell is given up.  A reader that is late sees another generation.
- When the index ends it hears of the tier no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.tiers.dram_tier import DramTier
from engine.tiers.shared_index import SharedIndex
from lakefs.ids import ChunkId
from lakefs.shared_index.table_format import Found, pack_place
from lakefs.wire.grants import MEDIUM_DRAM


@contextmanager
def joined(index: SharedIndex, tier: DramTier | None) -> Iterator[None]:
    """The index tells what the tier has, until the end of this."""
    if tier is None:
        yield
        return

    def admitted(chunk: ChunkId, *_: int) -> None:
        index.tell_slab(chunk)

    def slab_place_of(chunk: bytes) -> Found | None:
        grant = tier.grant(ChunkId(chunk))
        place = None if grant is None else pack_place(grant.segment, grant.epoch)
        if grant is None or place is None:
            return None
        return MEDIUM_DRAM, place, grant.offset, grant.stored_bytes, grant.crc

    index.slab_place_of = slab_place_of
    tier.on_admitted.append(admitted)
    tier.on_demoted.append(index.tell_segment)
    try:
        yield
    finally:
        tier.on_admitted.remove(admitted)
        tier.on_demoted.remove(index.tell_segment)
