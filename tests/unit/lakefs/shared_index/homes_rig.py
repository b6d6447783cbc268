"""The keyed index and the stamps of a member, made by hand."""

from __future__ import annotations

from engine.memory.sealed_memory import SealedMemory
from engine.metadata.stamps import Stamps
from lakefs.shared_index.key_format import KEYED_MAGIC, SPACE_WHOLE, id_of_record, id_of_space
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import SUPERSEDED, Found, TableHeader, table_bytes

SPACE = 7
CAPACITY = 1024


def record_id(key: bytes) -> bytes:
    return id_of_record(b"\x02" + SPACE.to_bytes(4, "big") + key)


class Home:
    """The keyed index and the stamps of a member, as its process shares them."""

    def __init__(self) -> None:
        self._memory = SealedMemory("home", table_bytes(CAPACITY))
        self.table = SharedTable(self._memory.view, CAPACITY)
        header = TableHeader(CAPACITY, bytes(16), bytes(16), 0, 0).pack(KEYED_MAGIC)
        self._memory.view[: len(header)] = header
        self.stamps = Stamps()
        self.stamps.begin()
        self.is_ended = False
        self.is_without = False
        """It shares no index yet."""
        self.other_index: Home | None = None
        """The process whose index is sent instead."""
        self.say(SPACE_WHOLE)

    @property
    def descriptors(self) -> list[int]:
        index = self.other_index or self
        return [index._memory.descriptor, self.stamps.descriptor]

    def id_of(self, key: bytes) -> bytes:
        return record_id(key)

    def say(self, tier: int, expiring: int = 0) -> None:
        """Put the entry of the space."""
        self.table.put(id_of_space(SPACE), tier, 0, 0, expiring, 0)

    def put(self, key: bytes, place: Found) -> None:
        self.table.put(record_id(key), *place)

    def remove(self, key: bytes) -> None:
        self.table.remove(record_id(key))

    def replace(self) -> None:
        """Say that there is another table."""
        self._memory.view[: len(SUPERSEDED)] = SUPERSEDED

    def end(self) -> None:
        """End the process: its table stays as it was."""
        if not self.is_ended:
            self.stamps.end()
        self.is_ended = True

    def close(self) -> None:
        self.end()
        del self.table
        self._memory.close()
