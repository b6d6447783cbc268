"""The reports of a replica of the names at the coordinator: how far its journal has come, and that it is present.

Rules kept here:
- Its record is put only as this replica left it.  One that was removed says nothing any more, and ends
  (`ReplicaRemoved`): its machine was given up, and another may be in its place.
- A machine has one replica: a new one removes the record of that before it, whose folder was lost.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from engine.coordinator.coordinator import Compare, Coordinator, Delete, Entry, HasRevision, IsAbsent, Operation, Put
from engine.coordinator.lake_state import pages
from engine.coordinator.records import ReplicaRecord, decode, encode
from engine.format.group_parts import LogKeys
from engine.group_log.log_bounds import REPLICA_SIGN_S, REPORT_EVERY_S
from lakefs.errors import LakeError, StoreUnusable
from lakefs.ids import ReplicaId, Revision
from lakefs.limits import COORDINATOR_OPERATIONS_MAX

REMOVED = (
    "this replica of the names was removed from the lake, and does not come back; to give this machine a new one, "
    "stop lake serve, move the folder names away from each of its data folders, and start it"
)


class ReplicaRemoved(StoreUnusable):
    """An operator has removed this replica: its machine was thought to be gone for ever."""


class Reports:
    """The reports of one replica.  `run` it; used on the loop."""

    def __init__(self, coordinator: Coordinator, keys: LogKeys, replica: ReplicaId) -> None:
        self._coordinator = coordinator
        self._keys = keys
        self._key = keys.replica(replica)
        self._revision: Revision | None = None
        """The revision of this replica's record, as it left it."""

    async def check(self) -> None:
        """Raise ReplicaRemoved if this replica was removed.  Errors of `Coordinator`."""
        await self._entry()

    async def _entry(self) -> Entry | None:
        """Return the record's entry.  ReplicaRemoved; errors of `Coordinator`."""
        entry = (await self._coordinator.get(self._key)).entry
        if entry is not None and decode(ReplicaRecord, entry.value).is_removed:
            raise ReplicaRemoved(REMOVED, subject="names")
        return entry

    async def run(self, record: Callable[[], ReplicaRecord]) -> None:
        """Say what `record` returns whenever it changes, and now and then, until cancelled.  ReplicaRemoved."""
        said, due = (-1, -1, False), 0.0
        while True:
            found = record()
            has = found.kept, found.tail_bytes, found.is_full
            if has != said or trio.current_time() >= due:
                try:
                    await self.say(found)
                    said, due = has, trio.current_time() + REPLICA_SIGN_S
                except ReplicaRemoved:
                    raise
                except LakeError:  # it is said the next time
                    pass
            await trio.sleep(REPORT_EVERY_S)

    async def say(self, record: ReplicaRecord) -> None:
        """Put the record.  ReplicaRemoved; errors of `Coordinator`."""
        while True:
            removed: list[Operation] = []
            if self._revision is None:
                entry = await self._entry()
                compare: Compare = IsAbsent(self._key) if entry is None else HasRevision(self._key, entry.revision)
                removed = await self._before_this(record.machine)
            else:
                compare = HasRevision(self._key, self._revision)
            done = await self._coordinator.transact([compare], [Put(self._key, encode(record)), *removed])
            if done.succeeded:
                self._revision = done.revision
                return
            self._revision = None

    async def _before_this(self, machine: str) -> list[Operation]:
        """Return the removals of records of this machine's earlier replicas."""
        found: list[Operation] = []
        async for page in pages(self._coordinator, *self._keys.replicas):
            for entry in page.entries:
                known = decode(ReplicaRecord, entry.value)
                if entry.key != self._key and known.machine == machine and not known.is_removed:
                    found.append(Delete(entry.key))
        return found[: COORDINATOR_OPERATIONS_MAX - 2]
