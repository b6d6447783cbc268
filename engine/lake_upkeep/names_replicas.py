"""The replicas of the names, for the status and for operators: who leads, who follows how far behind, who is silent.

Rules kept here:
- Silence is counted by the one that leads, in its own signs of life: a replica whose record stays as it is while the
  leader's changes in SILENT_LOOKS looks is silent.  So an etcd that was away, or a clock that is wrong, makes nobody
  silent.
- How far the leader is, is what it knows of itself in the first shard; in others, what its record says.
- What a replica has said of the time is its own clock's, and only shown.
- The replica that leads is not removed, and its record is compared in that very transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import structlog
import trio

from engine.coordinator.coordinator import Compare, Coordinator, Entry, HasRevision, IsAbsent, Put
from engine.coordinator.lake_state import LakeState, pages
from engine.coordinator.records import LeaderRecord, LogRecord, ReplicaRecord, decode, encode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.log_bounds import KEPT_BY, REPLICA_SIGN_S
from lakefs.errors import InvalidArgument, LakeError, PreconditionFailed
from lakefs.ids import NamesShard, ReplicaId, Revision, Sequence

LOOK_EVERY_S: Final = 1.5 * REPLICA_SIGN_S
"""A replica that is there has said something between two looks."""
SILENT_LOOKS: Final = 2
_log: Final = structlog.get_logger(__name__)


@dataclass
class _Seen:
    """A record as it was seen last, and the looks since in which the leader's was another each time."""

    revision: Revision
    looks: int = 0


class Committed(Protocol):
    """The part of `Metadata` that is used here."""

    @property
    def durable_sequence(self) -> Sequence:
        """The last durable group."""
        ...


class NamesReplicas:
    """The replicas of the names of one lake, as the process that leads shard 0 sees them.  Used on the loop."""

    def __init__(self, coordinator: Coordinator, metadata: Committed) -> None:
        """`metadata`: of the replica that leads shard 0."""
        self._coordinator = coordinator
        self._state = LakeState(coordinator)
        self._shards = [_ShardReplicas(coordinator, FIRST_SHARD, metadata)]

    async def run(self) -> None:
        """Look at the records now and then, until cancelled."""
        while True:
            try:
                for shard in [*self._shards]:
                    await shard.look()
                await self._present()
            except LakeError as error:
                _log.warning("the replicas of the names were not looked at", reason=error.message)
            await trio.sleep(LOOK_EVERY_S)

    async def read(self) -> dict[str, Any]:
        """Return `replicas`, `tail` and `outlives_machines` of shard 0, JSON-able.  Errors of `Coordinator`.

        Of further shards, if there are any, the same in `shards`, each with its number as `shard`.
        """
        first, *others = await self._present()
        shards = [{"shard": shard.number, **await shard.read()} for shard in others]
        return {**await first.read(), **({"shards": shards} if shards else {})}

    async def remove(self, replica: bytes) -> None:
        """Remove a replica for ever, in whichever shard it is; safe to repeat.

        InvalidArgument for one that the lake does not have, PreconditionFailed for one that leads its shard.
        """
        for shard in await self._present():
            if await shard.remove(replica):
                return
        raise InvalidArgument("the names have no such replica", subject=replica.hex())

    async def _present(self) -> list[_ShardReplicas]:
        """Return the replicas of each shard that the lake has now."""
        count = await self._state.names_shards()
        for number in range(len(self._shards), count):
            self._shards.append(_ShardReplicas(self._coordinator, NamesShard(number)))
        return [*self._shards]


class _ShardReplicas:
    """The replicas of one names shard."""

    def __init__(self, coordinator: Coordinator, shard: NamesShard, metadata: Committed | None = None) -> None:
        """`metadata`: of the replica that leads; None in another process."""
        self.number: Final = shard
        self._coordinator = coordinator
        self._keys = LogKeys(shard)
        self._metadata = metadata
        self._seen: dict[bytes, _Seen] = {}

    async def read(self) -> dict[str, Any]:
        """Return `replicas`, `tail` and `outlives_machines`, JSON-able.  Errors of `Coordinator`."""
        entries, leader = await self._entries(), await self._leader()
        log = (await self._coordinator.get(self._keys.log)).entry
        trimmed = Sequence(0) if log is None else decode(LogRecord, log.value).trimmed
        durable = self._durable(entries, leader)
        replicas = [self._replica(entry, leader, durable) for entry in entries]
        whole = [each for each in replicas if each["state"] in ("leads", "follows") and each["kept"] >= trimmed]
        tail_bytes = next((each["tail_bytes"] for each in replicas if each["state"] == "leads"), 0)
        return {
            "replicas": [{name: value for name, value in each.items() if name != "tail_bytes"} for each in replicas],
            "tail": {"groups": durable - trimmed, "bytes": tail_bytes},
            "outlives_machines": max(0, min(len(whole), KEPT_BY) - 1),
        }

    async def remove(self, replica: bytes) -> bool:
        """Remove a replica for ever; False if the shard has none of this id."""
        key = self._keys.replica(replica)
        while True:
            entry = (await self._coordinator.get(key)).entry
            if entry is None:
                return False
            record = decode(ReplicaRecord, entry.value)
            if record.is_removed:
                return True
            key_of_leader = self._keys.leader
            leader = (await self._coordinator.get(key_of_leader)).entry
            if leader is not None and decode(LeaderRecord, leader.value).replica == replica:
                raise PreconditionFailed(
                    "this replica leads the names; stop lake serve on its machine first, and another one leads",
                    subject=replica.hex(),
                )
            same = IsAbsent(key_of_leader) if leader is None else HasRevision(key_of_leader, leader.revision)
            compares: list[Compare] = [HasRevision(key, entry.revision), same]
            gone = msgspec.structs.replace(record, is_removed=True)
            if (await self._coordinator.transact(compares, [Put(key, encode(gone))])).succeeded:
                return True

    # --- records -----------------------------------------------------------------------------------

    async def look(self) -> None:
        """Count a look for each record that is as it was while the leader's is another."""
        entries, leader = await self._entries(), await self._leader()
        own = next((entry for entry in entries if leader is not None and entry.key == self._keys.replica(leader)), None)
        seen = None if own is None else self._seen.get(own.key)
        has_moved = own is not None and seen is not None and seen.revision != own.revision
        before, self._seen = self._seen, {}
        for entry in entries:
            known = before.get(entry.key)
            is_same = known is not None and known.revision == entry.revision
            looks = known.looks + has_moved if known is not None and is_same else 0
            self._seen[entry.key] = _Seen(entry.revision, looks)

    def _durable(self, entries: Iterable[Entry], leader: ReplicaId | None) -> Sequence:
        """Return the last durable group, as far as it is known here."""
        if self._metadata is not None:
            return self._metadata.durable_sequence
        records = {self._keys.replica_of(entry.key): decode(ReplicaRecord, entry.value) for entry in entries}
        kept = [record.kept for replica, record in records.items() if leader is None or replica == leader]
        return max(kept, default=Sequence(0))

    def _replica(self, entry: Entry, leader: ReplicaId | None, durable: Sequence) -> dict[str, Any]:
        record, replica = decode(ReplicaRecord, entry.value), self._keys.replica_of(entry.key)
        seen = self._seen.get(entry.key)
        state = "follows"
        if record.is_removed:
            state = "removed"
        elif replica == leader:
            state = "leads"
        elif seen is not None and seen.revision == entry.revision and seen.looks >= SILENT_LOOKS:
            state = "silent"
        return {
            "id": replica.hex(),
            "machine": record.machine,
            "state": state,
            "kept": record.kept,
            "groups_behind": max(0, durable - record.kept),
            "is_full": record.is_full,
            "said_ns": record.said_ns,
            "tail_bytes": record.tail_bytes,
        }

    async def _entries(self) -> list[Entry]:
        return [entry async for page in pages(self._coordinator, *self._keys.replicas) for entry in page.entries]

    async def _leader(self) -> ReplicaId | None:
        entry = (await self._coordinator.get(self._keys.leader)).entry
        return None if entry is None else ReplicaId(decode(LeaderRecord, entry.value).replica)
