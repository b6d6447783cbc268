"""Stores chunks as stripes: the store of the port `Stripes`.

Rules kept here ("An answer means"):
- Shards go where `engine.stripes.stripe_layout` says.  A member that fails, is full, or refuses a shard gets no more of
  it in this call, and the shard goes to the next place.  So each round stores shards or rules a place out, and there
  are few of them.  A shard that a member holds with other bytes stays there: fsck and the walker judge it.  Nor does a
  member get a shard of which it would say a wrong length (`KnownChunks.is_wrong`).
- Chunks of puts at the same time are stored in portions (`gathered_stores`).
- All shards of a portion for one member are one request, split where it is over the limits of a frame.
- Stored is answered when `is_stored` says so of each chunk, and when partitions of chunks with a shard missing, or at
  another place than its home, have been noted as dirty: that note is durable before the answer.
- A member's answer counts while the member is not found away: one that goes away before all is stored and noted has
  stored nothing, and its shards go elsewhere.
- When too few shards found a place, a member of the row that went away only just now is waited for
  (`ReturningMembers.wait_return`), so that the smallest lakes take writes while the process of one is started again.
- With a newer table all shards of the portion are stored anew by it: a shard that is present is only touched.
- A shard is named by its chunk, and its bytes are a function of it, so a repeated store is harmless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from engine.coordinator.lake_state import LakeState
from engine.host.tasks import run_all
from engine.members.ports import MEMBER_RETURN_S, NewChunk, ReturningMembers
from engine.stripes.gathered_stores import GatheredStores
from engine.stripes.known_chunks import KnownChunks
from engine.stripes.newest_table import by_newest_table
from engine.stripes.request_parts import request_parts
from engine.stripes.stripe_errors import damaged, not_stored
from engine.stripes.stripe_layout import is_at_home, is_stored, placed
from engine.stripes.stripe_shards import ParityMemory, Stripe, portions
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.table import Table
from lakefs.errors import (
    AlreadyExists,
    CoordinatorLost,
    EngineUnreachable,
    InvalidArgument,
    LakeError,
    RequestTooLarge,
    StaleEpoch,
)
from lakefs.ids import EMPTY_CHUNK, ChunkId, GcGeneration, MemberId, ShardNumber, shard_text
from lakefs.ports import Offload
from lakefs.wire import messages as m

_CONFLICTS_MAX: Final = 4
"""Shards with other bytes that one member may hold before it gets none of this call."""
Sent = tuple[Stripe, int]


class StripeWriter:
    """Stores chunks over the members."""

    def __init__(
        self,
        members: ReturningMembers,
        code: ErasureCode,
        state: LakeState,
        offload: Offload,
        memory: ParityMemory,
        known: KnownChunks,
    ) -> None:
        self._members = members
        self._gathered = GatheredStores(code, self._store)
        self._code = code
        self._state = state
        self._offload = offload
        self._memory = memory
        self._known = known

    async def store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> list[bool]:
        """Store chunks; see `Stripes.store`."""
        once = {new.chunk: new for new in chunks if new.chunk != EMPTY_CHUNK}
        fresh = dict(await self._gathered.store(generation, once)) if once else {}
        for new in once.values():
            self._known.note(new.chunk, len(new.payload), new.crcs)
        return [fresh.pop(new.chunk, False) for new in chunks]

    async def _store(self, generation: GcGeneration, chunks: Sequence[NewChunk]) -> Mapping[ChunkId, bool]:
        fresh: dict[ChunkId, bool] = {}
        for portion in portions(self._code, chunks):
            fresh |= await self._store_portion(generation, portion)
        return fresh

    async def _store_portion(self, generation: GcGeneration, portion: Sequence[NewChunk]) -> dict[ChunkId, bool]:
        code = self._code
        stripes = [Stripe(code, new) for new in portion]
        long = [(stripe, new.payload) for stripe, new in zip(stripes, portion, strict=True) if stripe.data_shards > 1]
        async with self._memory.taken([code.parity * code.shard_bytes(stripe.length) for stripe, _ in long]) as areas:
            if long:
                await self._offload.run(
                    _encode_all, code, [(*each, area) for each, area in zip(long, areas, strict=True)]
                )
            storing = _Storing(self._members, code, generation, stripes, self._known)
            while True:
                table = await storing.run()
                if await self._is_noted(table, stripes) or not storing.gone():
                    break
        return {stripe.chunk: stripe.fresh for stripe in stripes}

    async def _is_noted(self, table: Table, stripes: Sequence[Stripe]) -> bool:
        """Note partitions of chunks that are not wholly at home; return True at once if all are."""
        dirty = {
            table.partition_of(stripe.chunk)
            for stripe in stripes
            if not is_at_home(table, stripe.chunk, stripe.stored, len(stripe.shards))
        }
        if dirty:
            await self._state.note_dirty(dirty, table.ring_epoch)
        return not dirty


def _encode_all(code: ErasureCode, chunks: Sequence[tuple[Stripe, memoryview, memoryview]]) -> None:
    for stripe, payload, memory in chunks:
        stripe.encode(code, payload, memory)


class _Storing:
    """One portion being stored: what each member has refused."""

    def __init__(
        self,
        members: ReturningMembers,
        code: ErasureCode,
        generation: GcGeneration,
        stripes: Sequence[Stripe],
        known: KnownChunks,
    ) -> None:
        self._members = members
        self._code = code
        self._generation = generation
        self._stripes = stripes
        self._known = known
        self._table = members.tables[0]
        self._failed: dict[MemberId, LakeError] = {}
        self._refused: set[tuple[MemberId, ChunkId, int]] = set()
        self._conflicts: dict[MemberId, int] = {}
        self._until = math.inf

    async def run(self) -> Table:
        """Store all; returns the table by which they are stored.  ClusterDegraded, StoreFull."""
        await by_newest_table(self._members, self._run_by)
        self._until = min(self._until, trio.current_time() + MEMBER_RETURN_S)
        while (missed := self._missed()) and trio.current_time() < self._until and await self._wait_for_one(missed):
            await by_newest_table(self._members, self._run_by)
        self._check()
        return self._table

    async def _run_by(self, table: Table) -> None:
        """Store what can be stored by a table.  StaleEpoch when a member knows a newer one."""
        if table.ring_epoch != self._table.ring_epoch:
            self._table = table
            for stripe in self._stripes:
                stripe.stored.clear()
        while sends := self._next_sends():
            await run_all(self._send, sends)

    def gone(self) -> set[MemberId]:
        """Return the members that have stored something, and were found away since."""
        stored = {member for stripe in self._stripes for member in stripe.stored.values()}
        return {member for member in stored if not self._members.is_up(member)}

    def _forget_gone(self) -> None:
        """Let members that went away have stored nothing; they get nothing more, unless they are waited for."""
        gone = self.gone()
        if not gone:
            return
        for member in gone:
            self._failed[member] = EngineUnreachable("it went away while the chunk was stored", subject=member.hex())
        for stripe in self._stripes:
            stripe.stored = {shard: member for shard, member in stripe.stored.items() if member not in gone}

    def _next_sends(self) -> list[tuple[MemberId, list[Sent]]]:
        """Return what to send next to each member; nothing when all that can be stored is."""
        self._forget_gone()
        sends: dict[MemberId, list[Sent]] = {}
        for stripe in self._stripes:
            missing = [shard for shard in stripe.shards if shard not in stripe.stored]
            if not missing:
                continue

            def can_take(member: MemberId, shard: int, chunk: ChunkId = stripe.chunk) -> bool:
                return (
                    member not in self._failed
                    and self._members.is_up(member)
                    and (member, chunk, shard) not in self._refused
                    and not self._known.is_wrong(chunk, member, shard)
                )

            for shard, member in placed(self._table, stripe.chunk, stripe.stored, missing, can_take).items():
                sends.setdefault(member, []).append((stripe, shard))
        return [(member, part) for member, sent in sends.items() for part in request_parts(sent, _size_of)]

    async def _send(self, send: tuple[MemberId, list[Sent]]) -> None:
        """Store shards at one member; notes what it refuses.  StaleEpoch; errors that are this process's own."""
        member, sent = send
        request = m.StoreShards(
            self._table.ring_epoch,
            self._generation,
            [stripe.chunk for stripe, _ in sent],
            [shard for _, shard in sent],
            [len(stripe.shards[shard]) for stripe, shard in sent],
            [stripe.crcs[shard] for stripe, shard in sent],
            chunk_lengths=[stripe.length for stripe, _ in sent],
        )
        try:
            reply = await self._members.call(member, request, [stripe.shards[shard] for stripe, shard in sent])
        except AlreadyExists as error:
            self._note_conflict(member, sent, error)
        except (StaleEpoch, InvalidArgument, RequestTooLarge):
            raise
        except LakeError as error:
            self._failed[member] = error
        else:
            reply.body.release()
            assert isinstance(reply.message, m.ShardsStored)
            for (stripe, shard), fresh in zip(sent, reply.message.fresh, strict=True):
                stripe.stored[shard] = member
                stripe.fresh |= fresh and shard == 0

    def _note_conflict(self, member: MemberId, sent: Sequence[Sent], error: AlreadyExists) -> None:
        """Note the shard that a member holds with other bytes; nothing of the request was stored."""
        count = self._conflicts[member] = self._conflicts.get(member, 0) + 1
        for stripe, shard in sent:
            if shard_text(stripe.chunk, ShardNumber(shard)) == error.subject and count <= _CONFLICTS_MAX:
                self._refused.add((member, stripe.chunk, shard))
                return
        self._failed[member] = error

    def _missed(self) -> set[MemberId]:
        """Return the members that are away in the rows of chunks that do not count as stored."""
        missed: set[MemberId] = set()
        for stripe in self._stripes:
            if not is_stored(stripe.stored, stripe.data_shards, len(stripe.shards)):
                row = {*self._table.homes(stripe.chunk), *self._table.substitutes(stripe.chunk)}
                missed |= {member for member in row if self._is_away(member)}
        return missed

    def _is_away(self, member: MemberId) -> bool:
        error = self._failed.get(member)
        if isinstance(error, CoordinatorLost):  # it was reached, and takes nothing: that is not over in a moment
            return False
        return isinstance(error, EngineUnreachable) if error is not None else not self._members.is_up(member)

    async def _wait_for_one(self, missed: set[MemberId]) -> bool:
        """Wait until one of these is up again, and use it again; return False if none is in time."""
        returned: set[MemberId] = set()

        async def wait_for(member: MemberId) -> None:
            if await self._members.wait_return(member):
                returned.add(member)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for member in sorted(missed):
                nursery.start_soon(wait_for, member)
        for member in returned:
            self._failed.pop(member, None)
        return bool(returned)

    def _check(self) -> None:
        """Raise ClusterDegraded or StoreFull unless all stripes count as stored.

        ChunkDamaged for a chunk of which homes hold more shards with other bytes than readers can do without.
        """
        for stripe in self._stripes:
            wrong = sum(chunk == stripe.chunk for _, chunk, _ in self._refused) if self._refused else 0
            if wrong > self._code.parity:
                raise damaged(stripe.chunk, f"members hold {wrong} of its shards with other bytes")
            if not is_stored(stripe.stored, stripe.data_shards, len(stripe.shards)):
                raise not_stored(self._table, stripe, self._failed, self._members.is_up)


def _size_of(sent: Sent) -> int:
    stripe, shard = sent
    return len(stripe.shards[shard])
