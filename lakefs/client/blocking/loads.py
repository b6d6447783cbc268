"""`lake.load_many` of the blocking client: copies chunks that are in memory itself; the engine loads the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lakefs.client.blocking.chunks import read_directly, renew
from lakefs.direct.chunk_reads import NOT_READ, DirectReads
from lakefs.direct.keyed_reads import NAMELESS
from lakefs.direct.pool_loads import segments_of, slabs_of, slots_fit
from lakefs.errors import LakeError
from lakefs.get.fetch import need_segments, need_slabs
from lakefs.get.pools import Pool
from lakefs.shared_index.table_format import Found
from lakefs.wire.media import IN_SLABS

if TYPE_CHECKING:
    from lakefs.client.blocking.driver import BlockingDriver


class PoolLoads:
    """Loads of one lake, through its shared index.  As safe for threads as the lake."""

    def __init__(self, driver: BlockingDriver) -> None:
        self._driver = driver
        self._index = driver.shares.index

    def load_many(
        self, wanted: Sequence[bytes | str], pool: Pool, offsets: Sequence[int], rooms: Sequence[int]
    ) -> list[int]:
        """See `Lake.load_many`."""
        pool.check_own()
        shared = self._index.at_hand()
        chunks = [item for item in wanted if isinstance(item, bytes)]
        is_even = len(chunks) == len(wanted) == len(offsets) and len(rooms) in (0, len(wanted))
        found = [] if shared is None or not is_even else [place for place in shared.places_of(chunks) if place]
        if shared is None or len(found) < len(wanted) or not slots_fit(found, offsets, rooms, pool.size_bytes):
            lengths = self._driver.run(self._driver.steps.load_many(wanted, pool, offsets, rooms))
            renew(self._driver)
            return lengths
        buffer = pool.buffer
        targets = [buffer[offset : offset + place[3]] for offset, place in zip(offsets, found, strict=True)]
        lengths = read_directly(self._driver, shared, chunks, targets, found, asks=True)
        self._note(chunks, found)
        left = [index for index, length in enumerate(lengths) if length == NOT_READ]
        if left:
            asked = [wanted[index] for index in left], pool, [offsets[index] for index in left]
            kept_rooms = [rooms[index] for index in left] if rooms else ()
            loaded = self._driver.run(self._driver.steps.load_many(*asked, kept_rooms))
            for index, length in zip(left, loaded, strict=True):
                lengths[index] = length
            self.prepare([found[index] for index in left])
        return lengths

    def read(self, shared: DirectReads, targets: list[memoryview], packed: bytearray) -> list[int]:
        """Copy values into parts of a pool, if they are in the page cache and pass their check; return the lengths.

        `packed`: their places, in segments.  NOT_READ for the rest.
        """
        return read_directly(self._driver, shared, [NAMELESS] * len(targets), targets, packed, asks=True)

    def _note(self, chunks: list[bytes], found: list[Found]) -> None:
        """Note reads from the DRAM tier: what is not read leaves it.  A load from segments leaves their heat alone."""
        if any(place[0] in IN_SLABS for place in found) and self._index.notes.note_many(chunks):
            self._index.tell_notes()

    def prepare(self, found: Sequence[Found]) -> None:
        """Get what the next load of these chunks needs: a current index, their segments' descriptors, their slabs."""
        renew(self._driver)
        shares = self._driver.shares
        segments, slabs = shares.not_asked(segments_of(found)), shares.slabs_not_asked(slabs_of(found))
        with suppress(LakeError):  # without them the engine loads these chunks
            if segments:
                self._driver.run(need_segments(shares.descriptors, segments))
            if slabs:
                self._driver.run(need_slabs(shares.descriptors.slabs, slabs))
