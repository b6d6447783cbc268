"""The replica of the names that leads: how it says so, and how a process finds it.

    async with open_leading(coordinator, clock, LeaderRecord(...)) as leading:      in the process with the names
    async with open_names_leader(coordinator) as leader:                            in each process that asks them
        found = await leader.wait()                                                 found.record.addresses
        await leader.wait_deposed(found)

The record is one key, on a lease of its holder; the revision that wrote it is the leader's *term*.

Rules kept here:
- The key is put where it is absent, or where it is the same replica's: an earlier process of it, which has ended since
  this one has its store.
- A process has one watch of the key, whatever number of connections depend on it.
- While the coordinator cannot be asked, the leader that was read last is the leader: its connections say if it is not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.coordinator import Changes, Compare, Coordinator, Entry, HasRevision, IsAbsent, Put, ReadAnew
from engine.coordinator.held_lease import HeldLease, hold_lease
from engine.coordinator.records import LEADER_KEY, LeaderRecord, decode, encode
from engine.host.tasks import plain_errors
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import Revision
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_PAUSE_S_MAX
from lakefs.ports import Clock

NAMES_LEASE_S: Final = 6
"""Lease of the names that lead: another replica may lead 10 s after their machine has gone, and etcd, which has
another leader after 1 to 3 s, does not end it."""
_log: Final = structlog.get_logger(__name__)
_END: Final = LEADER_KEY + b"\0"
_NO_TERM: Final = Revision(0)


class Leader(NamedTuple):
    """A replica that leads, and its term."""

    record: LeaderRecord
    term: Revision


# --- the replica that leads --------------------------------------------------------------------------


@asynccontextmanager
async def open_leading(
    coordinator: Coordinator, clock: Clock, record: LeaderRecord, lease_s: int = NAMES_LEASE_S
) -> AsyncIterator[Leading]:
    """Let a replica's record be the leader's during the block: as soon as it may, and again when its lease was lost."""
    leading = Leading(coordinator, clock, record, lease_s)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leading.run)
            yield leading
            nursery.cancel_scope.cancel()


class Leading:
    """A replica's term as the leader.  Made by `open_leading`."""

    def __init__(self, coordinator: Coordinator, clock: Clock, record: LeaderRecord, lease_s: int) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._record = record
        self._lease_s = lease_s
        self.term = _NO_TERM
        """The present term; 0 while another replica leads, or the lease was lost."""

    async def run(self) -> None:
        """Lead, and begin anew when the lease was lost, until cancelled."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            try:
                async with hold_lease(self._coordinator, self._clock, self._lease_s) as lease:
                    if await self._put(lease):
                        pause_s = AWAY_PAUSE_S_MIN
                        await lease.ended.wait()
                        _log.warning("names_lease_lost")
            except LakeError as error:
                _log.warning("names_do_not_lead", reason=error.message)
            finally:
                self.term = _NO_TERM
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)

    async def _put(self, lease: HeldLease) -> bool:
        """Put the record; False while another replica leads."""
        entry = (await self._coordinator.get(LEADER_KEY)).entry
        if entry is not None and decode(LeaderRecord, entry.value).replica != self._record.replica:
            return False
        compare: Compare = IsAbsent(LEADER_KEY) if entry is None else HasRevision(LEADER_KEY, entry.revision)
        done = await self._coordinator.transact([compare], [Put(LEADER_KEY, encode(self._record), lease.id)])
        if done.succeeded:
            self.term = done.revision
        return done.succeeded


# --- processes that ask it ---------------------------------------------------------------------------


@asynccontextmanager
async def open_names_leader(coordinator: Coordinator) -> AsyncIterator[NamesLeader]:
    """Follow the leader's record until the block ends; nothing is waited for at the beginning."""
    leader = NamesLeader(coordinator)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.follow)
            yield leader
            nursery.cancel_scope.cancel()


class NamesLeader:
    """The leader of the names, as this process last read it.  Made by `open_names_leader`; used on the loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._leader: Leader | None = None
        self._changed = trio.Event()

    def current(self) -> Leader | None:
        """Return the leader; None if there is none, or none was read yet."""
        return self._leader

    async def wait(self) -> Leader:
        """Return the leader, when there is one.  Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self._leader is None:
            await self._changed.wait()
        return self._leader

    async def wait_deposed(self, leader: Leader) -> None:
        """Wait until a leader that was returned here is not the leader any more."""
        while self._leader is not None and self._leader.term == leader.term:
            await self._changed.wait()

    async def follow(self) -> None:
        """Follow the record until cancelled; waits while the coordinator is away."""
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            try:
                found = await self._coordinator.get(LEADER_KEY)
                self._take(found.entry)
                pause_s = AWAY_PAUSE_S_MIN
                await self._watch(Revision(found.revision + 1))
            except (EngineUnreachable, EngineBusy) as error:
                if pause_s == AWAY_PAUSE_S_MIN:  # said once, not with each attempt
                    _log.warning("coordinator_away", reason=error.message)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)

    async def _watch(self, from_revision: Revision) -> None:
        """Take each change from a revision on; returns when the record is to be read anew."""
        async with self._coordinator.watch(LEADER_KEY, _END, from_revision) as watch:
            async for event in watch:
                if isinstance(event, ReadAnew):
                    return
                assert isinstance(event, Changes), "the other kind of event"
                self._take(event.changes[-1].entry)

    def _take(self, entry: Entry | None) -> None:
        """Note the leader, as its record says."""
        try:
            leader = None if entry is None else Leader(decode(LeaderRecord, entry.value), entry.revision)
        except LakeError as error:
            _log.error("coordinator_record_unusable", key=LEADER_KEY.decode(), reason=error.message)
            leader = None
        if leader != self._leader:
            self._leader = leader
            self._changed.set()
            self._changed = trio.Event()
