"""Items that travel together: grouped by their memory, and cut into requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from lakefs.ids import Buffer
from lakefs.put.shared_memory import SharedMemory, Slot


class Item(Protocol):
    """An object or a value to store."""

    @property
    def data(self) -> Buffer | Slot:
        """The bytes, or where they lie in shared memory."""

    @property
    def length(self) -> int:
        """Number of bytes."""


ItemT = TypeVar("ItemT", bound=Item)


def by_memory(items: Sequence[ItemT]) -> Iterator[tuple[SharedMemory | None, list[ItemT]]]:
    """Group items by their shared memory; None for those without."""
    groups: dict[SharedMemory | None, list[ItemT]] = {}
    for item in items:
        memory = item.data.memory if isinstance(item.data, Slot) else None
        groups.setdefault(memory, []).append(item)
    yield from groups.items()


def batches(items: Sequence[ItemT], bytes_max: int, count_max: int) -> Iterator[list[ItemT]]:
    """Cut items into runs of at most so many bytes and so many items; one that is longer is a run of its own."""
    batch: list[ItemT] = []
    size = 0
    for item in items:
        if batch and (size + item.length > bytes_max or len(batch) == count_max):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.length
    if batch:
        yield batch


def view_of(data: Buffer | Slot) -> memoryview:
    """Return the bytes of an item."""
    return data.buffer if isinstance(data, Slot) else memoryview(data).cast("B")
