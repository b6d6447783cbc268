"""Ports to the names of a lake, as gc over the lake asks them: one `ShardNames` for each names shard.

One process drives gc and retires epochs: the leader of names shard 0.  It has the names of that shard
(`names_in_process`), and asks the leaders of the others (`names_by_requests`), or has theirs, too, in a lake that has
no etcd any more.  Each shard binds names by itself, on what its own log has joined.

Why nothing that is referred to is freed, with several shards:

- *Content that a session binds.*  Members free in the cycle of generation g what was last touched below g - 1.  Each
  shard joins g in its log before members begin, so none binds answers below g - 1 behind its own walk, whoever leads it
  by then; and what it bound before it joined, its walk meets.  So shards join and are walked one by one, in any order.
- *Content that names hand on.*  Copies and renames within a shard are met by its own walk (`engine.upkeep.roots`).  A
  name in another shard is never bound to what a name has: a copy across shards offers the chunks in a session, which
  touches them, and binds the answers.  So no root moves from a shard that was not walked to one that was.
- *Leases* are roots at the leader that gave them.  With another leader they end, with the connections of their clients.
- *Another leader.*  A walk is of one leader's term, and of one connection; it never goes on at another one.  What the
  next leader begins with is in the log, so it was in the names of the one before all the time, but for removals: the
  walk is whole when all that it saw is durable.  So a walk that was whole counts, whoever leads behind it; each read of
  it makes sure that its leader may lead.
- *A shard that is added.*  Their number is read when g was made.  A shard whose record came later has had no term by
  then; each term of it reads generation and epochs before it serves, and records them in its log
  (`engine.lake_upkeep.shard_upkeep`): it binds no answers below g - 1, and has nothing that was bound before.
- *All or nothing.*  Nothing is swept unless each shard has joined, and was walked whole in this very cycle.

Epochs: one is retired when each shard refuses answers under it, durably in its log.  So a leader of any of them begins
with what its log says.  The transaction that retires it compares the number of shards with that of those that were
asked, so none was added meanwhile that has read it as present.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.metadata.pacing import Pacing
from engine.upkeep.roots import Owner, Visit
from lakefs.errors import PreconditionFailed
from lakefs.ids import GcGeneration, NamesShard, RingEpoch


class ShardNames(Protocol):
    """The names of one shard.  Errors of all methods: EngineUnreachable, CoordinatorLost, StoreReadOnly, StoreFull."""

    async def join(self, generation: GcGeneration) -> int:
        """Remove uploads that are too old, then join a generation; returns how many, when all is durable.

        Joining again, or an earlier generation, changes nothing.
        """
        ...

    async def refuse_below(self, epoch: RingEpoch) -> None:
        """Refuse answers under ring epochs before this one, durably; safe to repeat."""
        ...

    async def walk(self, visit: Visit, pacing: Pacing) -> None:
        """Visit all roots; returns when each was visited, and all that the walk saw is durable.

        `pacing`: of this process; the walk rests by it between its steps.  SessionLost when the
        walk cannot go on.  Behind an error nothing is known of the roots.
        """
        ...

    async def name_of(self, owner: Owner) -> str:
        """Return `BUCKET/KEY` of an owner that was visited, as far as it has a name."""
        ...


OtherNames = Callable[[NamesShard], ShardNames]
"""Returns the names of a shard other than the first one."""


def no_other_names(shard: NamesShard) -> ShardNames:
    """Return the names of no other shard: PreconditionFailed, in a process that is not made for several."""
    raise PreconditionFailed(f"the lake has several names shards, and this process cannot ask shard {shard}")
