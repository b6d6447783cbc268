from collections.abc import Collection, Iterable, Sequence
from mmap import mmap
from typing import Protocol

class ManyMutations(Protocol):
    """Mutations of many records of one table, each once; `keys` is a list."""

    @property
    def table(self) -> int: ...
    @property
    def keys(self) -> list[bytes]: ...

class StampMemory:
    """Stamps in memory that the caller maps: the engine's in writable memory, a reader's in read-only memory.

    The memory is a header of 4,096 bytes and a power of two of counters of 8 bytes; the engine's is zeros at first.
    ValueError if it is not; TypeError or BufferError if it is no memory.  `tables` are the tables, below 64, whose
    records have stamps.  Many mutations or records are passed as a list.
    """

    def __init__(self, memory: mmap | memoryview | bytearray, tables: Iterable[int] = ()) -> None: ...
    def begin(self, has_end: bool = False) -> None:
        """Lock the mutex in this thread, which should call `end`, and write the header: from now on stamps stand.

        `has_end`: only while there is a right to use them (`right_end_ns`); there is none yet.
        OSError if the machine has no robust mutex; ValueError over read-only memory, and if called again.
        """
    def end(self) -> None:
        """End the stamps: no set stands from now on.  Idempotent; does nothing in a forked child.

        The mutex is unlocked only by the thread that called `begin`; after another one's `end` the memory is leaked.
        """
    def turn(self, mutations: Sequence[tuple[int, int, bytes, bytes] | ManyMutations]) -> None:
        """Add 1 to the stamp of each changed record whose table has stamps; a mutation is (op, table, key, value)."""
    def turn_all(self) -> None:
        """Add 1 to every stamp."""
    def of(self, records: Sequence[tuple[int, bytes]], base: int = 0, noted: bytearray | None = None) -> bytes:
        """Return the set of stamps of records, (table, key); b"" for none, and for more than an answer may have.

        `base` is added to each value.  `noted`: bits, one for each slot; those of the set's slots are set.
        """
    def turn_noted(
        self, mutations: Sequence[tuple[int, int, bytes, bytes] | ManyMutations], noted: Sequence[bytearray]
    ) -> dict[int, list[int]]:
        """Do as `turn`, and clear the bits of the turned slots in each of `noted` (a list).

        Returns the slots whose bits were set, by the index in `noted`.
        """
    def pack(self, slots: Collection[int], base: int = 0) -> bytes:
        """Return the set of these slots as they are now, `base` added to each value.  ValueError for no such slot."""
    def raise_to(self, stamps: bytes) -> None:
        """Raise the counter of each slot to its value in the set, unless it is higher.  ValueError if it is no set."""
    def raise_all(self, value: int) -> None:
        """Raise all counters to a value, those that are lower."""
    def parts(self) -> bytearray:
        """Return a copy of the counters: the part of them that is all of them, until there are others."""
    def raise_part(self, part: bytearray, stamps: bytes) -> bytes:
        """Raise a part of the counters, of which each is the sum of its parts, to a set's values, those that are lower.

        Returns the set of the counters that had these values of the part, and have today's of the others.
        ValueError if it is no set, or `part` has not 8 bytes for each slot.
        """
    def raise_whole_part(self, part: bytearray, value: int) -> None:
        """Raise a part of all counters to a value, where it is lower."""
    def withdraw(self) -> None:
        """Let there be no right to use the stamps."""
    @property
    def right_end_ns(self) -> int:
        """End of the right to use the stamps, by CLOCK_BOOTTIME; 0: it has no end.  It is set above 0."""
    @right_end_ns.setter
    def right_end_ns(self, right_end_ns: int) -> None: ...
    @property
    def is_live(self) -> bool:
        """True while the engine that began the stamps lives and has not ended them."""
    def read(self, slots: Sequence[int]) -> list[int]:
        """Return the counters of slots.  ValueError for a slot that does not exist."""
    def stand(self, stamps: bytes) -> bool:
        """Return True if the engine lives and the whole set stands; False for b"" and for bytes that are no set."""
    @property
    def native(self) -> object:
        """A PyCapsule "lake_stamps": a `lake_stamps` of `stamps.h`, for native modules.  It keeps this object alive."""
