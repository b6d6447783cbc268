"""The replica of a names shard that leads, as a process finds it that asks the names.

    async with open_names_leader(coordinator) as leader:
        found = await leader.wait()                         found.record.addresses
        await leader.wait_deposed(found)

The record is one key, on a lease of its holder (`engine.group_log.replica`); the revision that wrote it is the leader's
*term*.

Rules kept here:
- A process has one watch of the key, whatever number of connections depend on it.
- While the coordinator cannot be asked, the leader that was read last is the leader: its connections say if it is not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog
import trio

from engine.coordinator.coordinator import Changes, Coordinator, Entry, ReadAnew
from engine.coordinator.records import LeaderRecord, decode
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.host.tasks import plain_errors
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import NamesShard, Revision
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_PAUSE_S_MAX

_log: Final = structlog.get_logger(__name__)


class Leader(NamedTuple):
    """A replica that leads, and its term."""

    record: LeaderRecord
    term: Revision


@asynccontextmanager
async def open_names_leader(coordinator: Coordinator, shard: NamesShard = FIRST_SHARD) -> AsyncIterator[NamesLeader]:
    """Follow the record of a names shard's leader until the block ends; nothing is waited for at the beginning."""
    leader = NamesLeader(coordinator, shard)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leader.follow)
            yield leader
            nursery.cancel_scope.cancel()


class NamesLeader:
    """The leader of a names shard, as this process last read it.  Used on the loop.

    Made by `open_names_leader`; or `follow` runs beside whoever has it.
    """

    def __init__(self, coordinator: Coordinator, shard: NamesShard = FIRST_SHARD) -> None:
        self._coordinator = coordinator
        self._key: Final = LogKeys(shard).leader
        self._leader: Leader | None = None
        self._changed = trio.Event()
        self.was_deposed: Callable[[Leader], None] = lambda _: None
        """Called with a leader that does not lead any more, in the step in which that is known."""

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
                found = await self._coordinator.get(self._key)
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
        async with self._coordinator.watch(self._key, self._key + b"\0", from_revision) as watch:
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
            _log.error("coordinator_record_unusable", key=self._key.decode(), reason=error.message)
            leader = None
        if leader != self._leader:
            before, self._leader = self._leader, leader
            self._changed.set()
            self._changed = trio.Event()
            if before is not None:
                self.was_deposed(before)


@asynccontextmanager
async def open_names_leaders(coordinator: Coordinator) -> AsyncIterator[NamesLeaders]:
    """Follow the leaders of names shards, each once it is asked for, until the block ends."""
    with plain_errors():
        async with trio.open_nursery() as nursery:
            yield NamesLeaders(coordinator, nursery)
            nursery.cancel_scope.cancel()


class NamesLeaders:
    """The leaders of all names shards.  Made by `open_names_leaders`; used on the loop."""

    def __init__(self, coordinator: Coordinator, nursery: trio.Nursery) -> None:
        self._coordinator = coordinator
        self._nursery = nursery
        self._of: dict[NamesShard, NamesLeader] = {}
        self.was_deposed: Callable[[Leader], None] = lambda _: None
        """Called with a leader of any shard that does not lead any more."""

    def of(self, shard: NamesShard) -> NamesLeader:
        """Return the leader of a shard, which is followed from now on."""
        if shard not in self._of:
            leader = self._of[shard] = NamesLeader(self._coordinator, shard)
            leader.was_deposed = lambda deposed: self.was_deposed(deposed)
            self._nursery.start_soon(leader.follow)
        return self._of[shard]
