"""The request that adds a names shard to a lake, at the names of the first shard, which lead.

The record of the number of shards, and an empty log for the new one, are written in one transaction of the leader's
term.  Machines that see the record make replicas of it (`engine.lake.shard_replicas`); one of them leads.

Rules kept here:
- Nothing is added while the shard that was added last has no leader: an operator sees one fault before the next.
- The number of shards never falls, and is at most NAMES_SHARDS_MAX.
- The same transaction makes the coordinator's charge one that releases with one shard refuse (`ShardsChargeRecord`).
"""

from __future__ import annotations

import json
from typing import Final

import trio

from engine.coordinator.coordinator import Compare, Coordinator, HasRevision, IsAbsent, Put
from engine.coordinator.records import (
    CHARGE_KEY,
    SHARDS_KEY,
    ChargeRecord,
    LeaderRecord,
    LogRecord,
    ShardsRecord,
    decode,
    encode,
    of_shards,
)
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.requests.dispatch import Group
from engine.requests.handlers import handles
from lakefs.errors import EngineBusy, InvalidArgument, PreconditionFailed
from lakefs.ids import NamesShard
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

NAMES_SHARDS_MAX: Final = 16
"""Each takes threads, an index and a journal on three machines, and 2 GiB at the etcd at most; 1.6 billion names."""
SERVED_WITHIN_S: Final = 20.0
"""The answer waits so long for a leader: replicas are made within seconds."""
_LOOK_S: Final = 0.2
_ATTEMPTS_MAX: Final = 3


def shards_group(coordinator: Coordinator | None, lake: bytes) -> Group:
    """Return the handlers of requests about names shards.  `coordinator`: that of the term; None: there is no etcd."""
    return Group([ShardRequests(coordinator, lake)])


class ShardRequests:
    """Handlers of requests about names shards."""

    def __init__(self, coordinator: Coordinator | None, lake: bytes) -> None:
        self._coordinator = coordinator
        self._lake = lake

    @handles(m.AddNamesShard)
    async def add(self) -> Reply:
        if self._coordinator is None:
            raise InvalidArgument(
                "names shards are added to lakes with etcd, and this one has its names on one machine"
            )
        shard = await self._added(self._coordinator)
        leader: LeaderRecord | None = None
        with trio.move_on_after(SERVED_WITHIN_S):
            while leader is None:
                await trio.sleep(_LOOK_S)
                leader = await self._leader(self._coordinator, shard)
        return Reply(m.ReportReply(json.dumps({"shard": shard, "machine": "" if leader is None else leader.machine})))

    async def _added(self, coordinator: Coordinator) -> NamesShard:
        """Add a shard; returns its number.  PreconditionFailed; EngineBusy when others add, too."""
        for _ in range(_ATTEMPTS_MAX):
            entry = (await coordinator.get(SHARDS_KEY)).entry
            count = 1 if entry is None else decode(ShardsRecord, entry.value).count
            await self._refuse(coordinator, count)
            shard = NamesShard(count)
            same = IsAbsent(SHARDS_KEY) if entry is None else HasRevision(SHARDS_KEY, entry.revision)
            log = LogKeys(shard).log
            puts = [Put(SHARDS_KEY, encode(ShardsRecord(count + 1))), Put(log, encode(LogRecord(self._lake)))]
            compares: list[Compare] = [same, IsAbsent(log)]
            charge = (await coordinator.get(CHARGE_KEY)).entry
            if charge is not None:
                compares.append(HasRevision(CHARGE_KEY, charge.revision))
                puts.append(Put(CHARGE_KEY, encode(of_shards(decode(ChargeRecord, charge.value)))))
            done = await coordinator.transact(compares, puts)
            if done.succeeded:
                return shard
            if done.seen[1] is not None and done.seen[0] == entry:
                raise PreconditionFailed(f"the coordinator has a log of names shard {shard} already, of another time")
        raise EngineBusy("another names shard is being added; see it with: lake cluster names")

    async def _refuse(self, coordinator: Coordinator, count: int) -> None:
        """Raise PreconditionFailed if a lake with so many shards gets no other one now."""
        if count >= NAMES_SHARDS_MAX:
            raise PreconditionFailed(f"the lake has {count} names shards, the most that there may be")
        newest = NamesShard(count - 1)
        if newest != FIRST_SHARD and await self._leader(coordinator, newest) is None:
            raise PreconditionFailed(
                f"no machine serves names shard {newest}, which was added last; see why in the log of lake serve, and "
                "add another one when it is served: lake cluster names shows it"
            )

    async def _leader(self, coordinator: Coordinator, shard: NamesShard) -> LeaderRecord | None:
        entry = (await coordinator.get(LogKeys(shard).leader)).entry
        return None if entry is None else decode(LeaderRecord, entry.value)
