from collections.abc import Mapping, Sequence
from typing import overload

from lakefs.shared_index.table import SharedTable
from lakefs.stamps.stamps import StampReader

class KnownTable:
    """What is known about names, at most `memory_bytes` of it, and what the engine shares to read content by.

    A name is text as users write it, with or without `lake://`.  Answers are given only while their stamps stand, and
    content only if it is at hand and its bytes match the CRC32C of their place: else the result is None.
    """

    def __init__(self, memory_bytes: int) -> None: ...
    def use_stamps(self, reader: StampReader) -> None:
        """Check answers by these stamps; before any is learned, or after `forget`."""

    def use_places(self, table: SharedTable) -> None:
        """Look chunks up in this table."""

    def use_segment(self, segment: int, descriptor: int, flags: int) -> int | None:
        """Read a segment by this descriptor, which stays the caller's; return the segment that made room, if any.

        `flags` are preadv2's: with RWF_NOWAIT a read never waits for a disk.  The descriptor stays open until another
        takes its place, `drop_segments` or `forget`.
        """

    def drop_segments(self) -> None:
        """Use none of the descriptors any more."""

    def use_slabs(self, generations: memoryview, slab_bytes: int, slabs: Mapping[int, memoryview]) -> None:
        """Copy from these slabs of the DRAM tier, instead of any others; all is memory sealed against shrinking."""

    def forget(self) -> None:
        """Drop everything: all answers, and all that the engine shared."""

    def learn(self, answers: list[tuple[str, bytes, bytes, bytes | None, int]]) -> tuple[set[tuple[int, int]], bool]:
        """Learn of each name (BUCKET/KEY) its stamps, its stat as bytes, its chunk if it has content, and its length.

        Content is known only if it is of one chunk of at most 256 KiB.  Returns tier and number of the segments and
        slabs in which chunks lie, and which are not in use here; and True if the index has all chunks.
        """

    def stat(self, name: str) -> bytes | None:
        """Return the stat of a name."""

    def read(self, name: str, with_stat: bool = False) -> tuple[bytes, ...] | None:
        """Return content and chunk of a name; `with_stat`: if it has at most 64 KiB, and with the stat behind them."""

    @overload
    def read_many(
        self, names: list[str], found: list[tuple[bytes, bytes, int] | None], room_bytes: int, targets: None = None
    ) -> None: ...
    @overload
    def read_many(
        self, names: list[str], found: list[tuple[int, bytes, int] | None], room_bytes: int, targets: list[memoryview]
    ) -> None:
        """Read names from number `len(found)` on, as long as their content has room.

        Adds content, chunk and serial of each to `found`, or None.  With `targets` content is read to the beginning of
        the memory of each, and its length is added; after None that memory may hold anything.
        """

    def stand(self, names: list[str], found: Sequence[tuple[object, bytes, int] | None]) -> bool:
        """Return True if all answers that were found by `read_many` are still known, and stand."""

    def count(self, answered: int) -> None:
        """Add to the count of names that were answered."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Counts of the names that are known, of their bytes, and of the names that were answered."""
