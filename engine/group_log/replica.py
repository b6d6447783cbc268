"""A replica of the names: it follows until it leads, and leads until its lease is over.

    async with leading(metadata, place):        follows; entered when this replica leads
        ...                                     names may be read and decided
                                                CoordinatorLost ends the block when another leads, or may

Rules kept here:
- The leader's key is put on a lease only if it is absent; its revision is the term.  The new leader then reads the log
  to its end, and only then reads and decides.
- A key that this very replica's last process left is removed at once: whoever has the store's lock is the only one.
- Rights of heads end before the leader's lease does: it is revoked only when they are over.  Whoever revokes the lease
  of its own last process answers nothing until then (`engine.store.names_opening`).
- A replica that was deposed holds decisions that never were: its store is closed as by a crash, and opened anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, IsAbsent, Put
from engine.coordinator.held_lease import HeldLease, hold_lease
from engine.coordinator.records import ReplicaRecord
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.follower import Follower
from engine.group_log.full_disk import call_when_full, leave_first
from engine.group_log.handing_over import LOOK_S, call_when_wanted_elsewhere, is_wanted_elsewhere
from engine.group_log.leader_log import LeaderLog
from engine.group_log.log_bounds import LEADER_LEASE_S
from engine.group_log.reports import Reports
from engine.group_log.room import keep_room
from engine.group_log.spread_leads import SpreadLeads
from engine.group_log.tail import Tail
from engine.group_log.trimming import Trimming
from engine.host.tasks import plain_errors
from engine.metadata.metadata_store import Metadata
from lakefs.errors import CoordinatorLost, LakeError
from lakefs.ids import NamesShard, ReplicaId, Revision
from lakefs.ports import Clock

LEADS: Final = "this replica leads the names now"
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaPlace:
    """A replica's surroundings.

    `clock` goes on while the machine is suspended.  `leader`: the value of the leader's key, by which heads find it;
    `holder` returns the replica in such a value.  `make_room`: gives back room of what the coordinator has forgotten.
    `leads`: those of all shards in this process.
    """

    coordinator: Coordinator
    clock: Clock
    lake: bytes
    replica: ReplicaId
    machine: str
    leader: bytes
    holder: Callable[[bytes], ReplicaId]
    shard: NamesShard = FIRST_SHARD
    make_room: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
    leads: SpreadLeads = field(default_factory=SpreadLeads)


@asynccontextmanager
async def leading(
    metadata: Metadata, place: ReplicaPlace, caught_up: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """Follow until this replica leads; then the block runs.  The metadata run, and nothing was committed.

    `caught_up` is called each time when all that was in the log has been taken.
    CoordinatorLost ends the block when the lease is over, ReplicaRemoved when an operator has removed this replica;
    errors of `Follower.catch_up` before it, and of the journal.
    """
    keys = LogKeys(place.shard)
    follower = Follower(place.coordinator, keys, place.lake, place.replica, metadata, caught_up)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            reports = Reports(place.coordinator, keys, place.replica)
            nursery.start_soon(reports.run, partial(_record, metadata, place, follower.tail))
            while True:
                has_led = await _end_own_last_term(place, keys)
                await follower.until_free()
                if await is_wanted_elsewhere(place.coordinator, keys, place.replica):
                    await trio.sleep(LOOK_S)
                    continue
                await reports.check()
                if not has_led:
                    await place.leads.leave(place.shard)
                await leave_first(metadata.has_room)
                async with _leader_lease(place) as lease:
                    term = await _taken(place, keys, lease)
                    if term is None:
                        continue
                    await follower.finish(term)
                    log = LeaderLog(place.coordinator, keys, term, lease, metadata.journal_log, follower.tail)
                    await metadata.lead(log, log.check, log.check_decision)
                    trimming = Trimming(place.coordinator, keys, place.lake, term, follower.tail, place.replica)
                    nursery.start_soon(log.run)
                    nursery.start_soon(trimming.run, lambda: metadata.kept_sequence)
                    nursery.start_soon(keep_room, log, trimming, lambda: metadata.kept_sequence, place.make_room)
                    nursery.start_soon(_end_with_lease, lease, log)
                    nursery.start_soon(_end_with_log, metadata, log)
                    nursery.start_soon(_leave_to_others, place, keys, metadata, log)
                    _log.info(LEADS, shard=place.shard, term=term, sequence=metadata.durable_sequence)
                    async with _giving_rights(metadata, log):
                        yield
                    nursery.cancel_scope.cancel()
                return


@asynccontextmanager
async def _giving_rights(metadata: Metadata, log: LeaderLog) -> AsyncIterator[None]:
    """Let heads have rights during the block; at its end none is left: the lease may be revoked then."""
    if metadata.turns is None:
        yield
        return
    metadata.turns.left_s = log.rights_s
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            await metadata.turns.end()


@asynccontextmanager
async def _leader_lease(place: ReplicaPlace) -> AsyncIterator[HeldLease]:
    """Hold a lease to lead with; other shards are left to other machines meanwhile."""
    with place.leads.taking(place.shard):
        async with hold_lease(place.coordinator, place.clock, LEADER_LEASE_S) as lease:
            yield lease


async def _taken(place: ReplicaPlace, keys: LogKeys, lease: HeldLease) -> Revision | None:
    """Put the leader's key on the lease; returns the term, None if another leads."""
    put = Put(keys.leader, place.leader, lease.id)
    done = await place.coordinator.transact([IsAbsent(keys.leader)], [put])
    return done.revision if done.succeeded else None


async def _end_own_last_term(place: ReplicaPlace, keys: LogKeys) -> bool:
    """Revoke the lease of this replica's last process, if that still leads; returns True if it did."""
    with suppress(LakeError):  # `until_free` waits for its end otherwise
        entry = (await place.coordinator.get(keys.leader)).entry
        if entry is not None and place.holder(entry.value) == place.replica:
            await place.coordinator.revoke(entry.lease)
            return True
    return False


def _record(metadata: Metadata, place: ReplicaPlace, tail: Tail) -> ReplicaRecord:
    """Return what this replica says of itself now."""
    is_full = not metadata.has_room(to_begin=True)
    return ReplicaRecord(place.machine, metadata.kept_sequence, place.clock.wall_ns(), tail.nbytes, is_full=is_full)


async def _end_with_lease(lease: HeldLease, log: LeaderLog) -> None:
    await lease.ended.wait()
    log.lose(CoordinatorLost("this replica does not lead the names any more: its lease is over"))


async def _leave_to_others(place: ReplicaPlace, keys: LogKeys, metadata: Metadata, log: LeaderLog) -> None:
    """End the term when another replica is asked to lead, or has room where the disk here is full."""

    def leave(reason: str) -> None:
        log.lose(CoordinatorLost(reason))

    wanted = partial(leave, "another replica of the names was asked to lead")
    is_full = partial(leave, "the disk of this replica of the names is full, and another one has room")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call_when_wanted_elsewhere, place.coordinator, keys, place.replica, wanted)
        nursery.start_soon(call_when_full, place.coordinator, keys, place.replica, metadata.has_room, is_full)


async def _end_with_log(metadata: Metadata, log: LeaderLog) -> None:
    """End the block when the log is lost."""
    await log.lost.wait()
    because = log.lost_because
    assert because is not None, "a log is lost for a reason"
    error = because if isinstance(because, CoordinatorLost) else CoordinatorLost(because.message)
    metadata.stop_leading(error)
    raise because
