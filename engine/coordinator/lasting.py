"""The keys of a lake that outlast its processes, as a coordinator has them, and transactions that put them elsewhere.

They are all keys without a lease, but for those that belong to one coordinator: its charge, the place of the lake's
etcd, the log and the replicas of the names, and the note of when they were repeated (`engine.coordinator.repeating`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from engine.coordinator.coordinator import END, NO_LEASE, Coordinator, Entry, Operation, Put
from engine.coordinator.lake_state import pages
from engine.coordinator.records import CHARGE_KEY, ETCD_KEY, NAMES, REPEATED_KEY
from lakefs.limits import COORDINATOR_OPERATIONS_MAX, COORDINATOR_VALUE_BYTES_MAX

BEGIN: Final = b"\0"
"""Before every key."""
_LEFT: Final = 1
"""Operations that are left for the caller's own: a note that it puts with each transaction."""


def lasts(entry: Entry) -> bool:
    """Return True if an entry is one of the lake's, and has no lease."""
    is_of_names = NAMES[0] <= entry.key < NAMES[1]
    return entry.lease == NO_LEASE and not is_of_names and entry.key not in (CHARGE_KEY, ETCD_KEY, REPEATED_KEY)


async def lasting(coordinator: Coordinator) -> dict[bytes, bytes]:
    """Return the values of the keys that last."""
    return {entry.key: entry.value async for entry in entries_of(coordinator) if lasts(entry)}


async def entries_of(coordinator: Coordinator, begin: bytes = BEGIN, end: bytes = END) -> AsyncIterator[Entry]:
    """Yield the entries of a range: not all of one revision."""
    async for page in pages(coordinator, begin, end):
        for entry in page.entries:
            yield entry


def batches(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Yield the operations of each transaction: bounded in their number and bytes, with room for one more."""
    batch: list[Operation] = []
    batch_bytes = 0
    for operation in operations:
        taken = len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)
        is_many = len(batch) == COORDINATOR_OPERATIONS_MAX - _LEFT
        if batch and (is_many or batch_bytes + taken > COORDINATOR_VALUE_BYTES_MAX):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(operation)
        batch_bytes += taken
    if batch:
        yield batch
