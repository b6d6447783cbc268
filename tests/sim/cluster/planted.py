"""Rules of a lake weakened on purpose, to see that histories would notice: `python -m tests.sim.cluster.planted`.

Each is said by the head of the module that it changes.  `seeds`: within so many histories it has to be noticed.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final
from unittest import mock

import structlog
import trio

from engine.chunks.shards import Shards
from engine.chunks.touched import Touched
from engine.coordinator.coordinator import Delete
from engine.coordinator.lake_state import Dirty, LakeState
from engine.coordinator.records import MemberState, dirty_key
from engine.head import head_keyed
from engine.host import tasks
from engine.keyed import lake_spaces
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_gc.lake_gc_homes import CycleHomes
from engine.lake_gc.lake_gc_marks import Marks, MemberMarks
from engine.members.member_link import MemberClient, MemberLink
from engine.metadata.metadata_store import Metadata
from engine.mirror.copy import Copy
from engine.mirror.good_copies import GoodCopies
from engine.requests.bind import BindGate
from engine.sessions.references import References
from engine.stripes import chunk_assembly, decode, stripe_layout, stripe_writer, stripes
from engine.stripes.stripe_offers import Found, StripeOffers
from engine.stripes.stripe_writer import StripeWriter
from engine.upkeep.roots import Roots
from engine.upkeep.shard_gc import ShardCollector
from engine.walker import member_openings, membership
from engine.walker.membership import Membership
from engine.walker.walker import Walked
from engine.walker.walker_calls import Name, ShardCalls
from engine.walker.walker_repair import Repair, Stored
from lakefs.cluster.placing import next_table
from lakefs.cluster.table import Table
from lakefs.errors import InvalidArgument, LakeError
from lakefs.ids import ChunkId, GcGeneration, MemberId, Partition
from lakefs.wire import messages as m
from lakefs.wire.shard_messages import GENERATION_MAX
from tests.sim.cluster.weakening import Weakening, instead, seeds_to_notice

# --- gc ----------------------------------------------------------------------------------------------


def _sweep_ignores_touched() -> AbstractContextManager[Any]:
    original = ShardCollector._is_garbage

    def is_garbage(self: ShardCollector, cycle: Any, key: bytes, record: Any, homes: bytes) -> bool:
        with instead(self._shards.touched, "of", lambda birth: 0):
            return original(self, cycle, key, record, homes)

    return instead(ShardCollector, "_is_garbage", is_garbage)


def _sweep_by_the_tables_of_now() -> AbstractContextManager[Any]:
    original = LakeGc._sweep

    async def sweep(self: LakeGc, marks: Marks, homes: CycleHomes) -> Any:
        return await original(self, marks, CycleHomes(list(self._members.tables)))

    return instead(LakeGc, "_sweep", sweep)


def _missed_marks_are_no_matter() -> AbstractContextManager[Any]:
    stack = ExitStack()

    async def send_batch(self: Marks, marks: MemberMarks, number: int, batch: list[ChunkId]) -> None:
        try:
            if not await self._is_sent(marks, m.GcMark(self.walk, number, [*batch])):
                await trio.sleep(1.0)
        except LakeError as error:
            marks.leave_out(error.message)
        finally:
            marks.slots.release()

    stack.enter_context(instead(ShardCollector, "_why_not", lambda self, cycle, batches: ""))
    stack.enter_context(instead(Marks, "_send_batch", send_batch))
    return stack


def _leases_are_not_marked() -> AbstractContextManager[Any]:
    return instead(References, "leased_blobs", lambda self: iter(()))


def _rebound_nodes_are_not_looked_at() -> AbstractContextManager[Any]:
    return instead(Roots, "_note_rebound", lambda self, sequence, notes: None)


def _touched_is_0_behind_a_restart() -> AbstractContextManager[Any]:
    original = Touched.opened
    return instead(Touched, "opened", lambda self, generation: original(self, 0))


def _old_answers_are_bound() -> AbstractContextManager[Any]:
    return instead(BindGate, "check", lambda self, answered: None)


# --- stripes -----------------------------------------------------------------------------------------


def _stored_is_what_can_be_read() -> AbstractContextManager[Any]:
    def is_stored(stored: Mapping[int, MemberId], data_shards: int, shard_count: int) -> bool:
        return len(stored) >= data_shards

    return instead(stripe_writer, "is_stored", is_stored)


def _many_on_one_member() -> AbstractContextManager[Any]:
    original = stripe_layout.placed

    def placed(table: Table, chunk: ChunkId, kept: Any, shards: Any, can_take: Any) -> dict[int, MemberId]:
        wanted = [*shards]
        found = original(table, chunk, kept, wanted, can_take)
        for shard in wanted:
            home = table.homes(chunk)[shard]
            if found.get(shard) != home:
                taker = next((member for member in table.homes(chunk) if can_take(member, shard)), None)
                if taker is not None:
                    found[shard] = taker
        return found

    return instead(stripe_writer, "placed", placed)


def _offer_says_what_can_be_read_is_stored() -> AbstractContextManager[Any]:
    def is_whole(self: StripeOffers, table: Table, found: Found) -> bool:
        return len(found.places) >= self._code.data_shards(found.length)

    return instead(StripeOffers, "_is_whole", is_whole)


def _dirty_is_noted_before_the_store() -> AbstractContextManager[Any]:
    original = StripeWriter._store_portion

    async def store_portion(self: StripeWriter, generation: GcGeneration, portion: Sequence[Any]) -> Any:
        table = self._members.tables[0]
        away = [new for new in portion if not all(map(self._members.is_up, table.homes(new.chunk)))]
        if away:
            await self._state.note_dirty({table.partition_of(new.chunk) for new in away}, table.ring_epoch)

        async def nothing(*_: object, **__: object) -> None:
            return None

        with instead(self, "_state", mock.Mock(note_dirty=nothing)):
            return await original(self, generation, portion)

    return instead(StripeWriter, "_store_portion", store_portion)


def _decoded_is_not_compared() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(instead(chunk_assembly, "matches_id", lambda chunk, memory: True))
    original = decode._solve_one

    def solve_one(code: Any, chunk: ChunkId, length: int, chosen: Any) -> Any:
        with instead(decode, "_hasher", lambda chunk: mock.Mock(digest=lambda: chunk[-32:])):
            return original(code, chunk, length, chosen)

    stack.enter_context(instead(decode, "_solve_one", solve_one))
    return stack


def _lengths_are_not_disputed() -> AbstractContextManager[Any]:
    return instead(stripes, "_is_final", lambda outcome: outcome is not None)


# --- walker, members ---------------------------------------------------------------------------------


def _strays_are_dropped_whatever_touched_them() -> AbstractContextManager[Any]:
    original = ShardCalls.drop

    async def drop(self: ShardCalls, member: MemberId, touched: int, names: Sequence[Name]) -> Any:
        return await original(self, member, GENERATION_MAX, names)

    return instead(ShardCalls, "drop", drop)


def _strays_are_dropped_before_home_has_them() -> AbstractContextManager[Any]:
    async def offered(self: Repair, strays: Sequence[Any], generation: GcGeneration) -> set[tuple[int, int]]:
        return {(id(stripe), copy.shard) for stripe, copy in strays}

    stack = ExitStack()
    stack.enter_context(instead(Repair, "_offered", offered))
    stack.enter_context(instead(Repair, "_may_drop", lambda self, stripe, copy: True))
    return stack


def _made_shards_are_old() -> AbstractContextManager[Any]:
    original = Repair._store

    async def store(self: Repair, stores: Sequence[Stored], generation: GcGeneration, moved: set[int]) -> None:
        await original(self, stores, GcGeneration(1), moved)

    return instead(Repair, "_store", store)


def _notes_are_cleared_although_noted_again() -> AbstractContextManager[Any]:
    async def clear_dirty(self: LakeState, notes: Sequence[Dirty]) -> set[Partition]:
        for dirty in notes:
            await self._coordinator.transact([], [Delete(dirty_key(dirty.partition))])
        return {dirty.partition for dirty in notes}

    return instead(LakeState, "clear_dirty", clear_dirty)


def _partitions_are_cleared_unsettled() -> AbstractContextManager[Any]:
    return instead(Walked, "is_settled", lambda self, partition: True)


def epochs_are_retired_unsaid() -> AbstractContextManager[Any]:
    async def all_know(self: Membership, members: Any, table: Table) -> bool:
        return True

    stack = ExitStack()
    stack.enter_context(instead(Membership, "_all_know", all_know))
    stack.enter_context(instead(Shards, "check_epoch", lambda self, epoch: None))
    return stack


def epochs_are_retired_unwalked() -> AbstractContextManager[Any]:
    async def retire(self: Membership) -> list[Any]:
        tables = list(self._members.tables)
        await self._retiring(tables[0].ring_epoch, 1)
        return [table.ring_epoch for table in tables[1:] if await self._state.retire_epoch(table.ring_epoch)]

    return instead(Membership, "retire", retire)


def _more_than_m_are_put_out() -> AbstractContextManager[Any]:
    async def put_out(self: Membership, records: Any, now: float) -> None:
        for record in records:
            silent = now - self._silent_since.get(record.member, now)
            if record.state is MemberState.UP and silent >= self._settings.out_after_s:
                await self._state.set_state(record.member, MemberState.UP, MemberState.OUT)

    return instead(Membership, "_put_out", put_out)


def _returned_members_are_not_noted() -> AbstractContextManager[Any]:
    async def returned(self: Membership, record: Any) -> None:
        await self._state.set_state(record.member, MemberState.OUT, MemberState.UP)

    return instead(Membership, "_returned", returned)


def _returned_members_keep_strays() -> AbstractContextManager[Any]:
    async def partitions_held(self: Membership, member: MemberId, table: Table) -> set[Partition]:
        return set()

    return instead(Membership, "_partitions_held", partitions_held)


def _tables_with_lost_homes_stay() -> AbstractContextManager[Any]:
    return instead(membership, "_has_lost_homes", lambda table, wanted: False)


def _drains_do_not_wait() -> AbstractContextManager[Any]:
    return instead(membership, "next_table", partial(next_table, at_once=True))


def _drains_are_refused() -> AbstractContextManager[Any]:
    def table_behind(newest: Table, wanted: Any) -> Table | None:
        try:
            return next_table(newest, wanted)
        except InvalidArgument:
            return None

    return instead(membership, "_table_behind", table_behind)


def _old_openings_are_not_noted() -> AbstractContextManager[Any]:
    return instead(member_openings, "is_older", lambda said, before: False)


def _no_generation_on_a_connection() -> AbstractContextManager[Any]:
    async def greet(self: MemberLink, client: MemberClient) -> None:
        self._sent = self._view.tables[0].ring_epoch, True

    return instead(MemberLink, "_greet", greet)


# --- names -------------------------------------------------------------------------------------------


def _lists_are_not_written() -> AbstractContextManager[Any]:
    """A copy that has failed is not read any more, and the list that says so is on no device."""
    original = GoodCopies.install

    def install(self: GoodCopies, wanted: Sequence[Copy], gone: dict[Copy, str], **more: Any) -> None:
        with instead(self, "calls", mock.Mock(each=lambda *_, **__: [])) if gone else ExitStack():
            original(self, wanted, gone, **more)

    return instead(GoodCopies, "install", install)


def _failed_copies_stay() -> AbstractContextManager[Any]:
    """A copy that missed a write stays good, and is read from."""
    return instead(GoodCopies, "_throw_out_failed", lambda self, failed: None)


def _answers_are_not_durable() -> AbstractContextManager[Any]:
    async def wait_durable(self: Metadata, sequence: Any) -> None:
        return None

    return instead(Metadata, "wait_durable", wait_durable)


def _damaged_strays_stay() -> AbstractContextManager[Any]:
    return instead(Repair, "_worthless", lambda self, stripe: [])


# --- keyed -------------------------------------------------------------------------------------------


def _removed_spaces_stay_at_their_homes() -> AbstractContextManager[Any]:
    return instead(lake_spaces, "remove_space", lambda txn, name: 0)


def _removals_of_keys_are_answered_unsent() -> AbstractContextManager[Any]:
    original = tasks.run_all

    async def run_some(call: Callable[[Any], Awaitable[None]], items: Sequence[Any]) -> None:
        await original(call, items[:1] if call.__name__ == "remove_at" else items)

    return instead(head_keyed, "run_all", run_some)


WHOLE: Final = [
    Weakening("the sweep ignores what was touched", _sweep_ignores_touched),
    Weakening("open objects are not marked", _leases_are_not_marked),
    Weakening("no epoch and generation on a new connection", _no_generation_on_a_connection),
    Weakening("answers leave before they are durable", _answers_are_not_durable),
    Weakening("removed spaces stay at their homes", _removed_spaces_stay_at_their_homes),
    Weakening("keys are removed at one home only", _removals_of_keys_are_answered_unsent, first=6),
]
"""Each is noticed within 5 whole histories."""
IN_SCENES: Final = [
    Weakening("a note is cleared although the partition is not whole", _partitions_are_cleared_unsettled).in_scene(
        "a home is full"
    ),
    Weakening("a partition is noted as dirty before the store", _dirty_is_noted_before_the_store).in_scene(
        "a put is slow behind its note"
    ),
    Weakening("marks that a member missed are no matter", _missed_marks_are_no_matter).in_scene("a mark is lost"),
    Weakening(
        "the walk does not look again at nodes that got other content", _rebound_nodes_are_not_looked_at
    ).in_scene("a name moves behind the walk"),
    Weakening("behind a restart a member's shards count as never touched", _touched_is_0_behind_a_restart).in_scene(
        "members restart during a put"
    ),
    Weakening("names bind answers of old generations", _old_answers_are_bound).in_scene("a put outlives cycles"),
    Weakening("stored is what can be read just now", _stored_is_what_can_be_read).in_scene(
        "a put with too few members, then a loss"
    ),
    Weakening("more than m shards of a chunk on one member", _many_on_one_member).in_scene(
        "a put while members are away, then a loss", first=1
    ),
    Weakening("an offer says that what can be read is stored", _offer_says_what_can_be_read_is_stored).in_scene(
        "some members sweep"
    ),
    Weakening("bytes are not compared with the chunk's id", _decoded_is_not_compared).in_scene(
        "a member lies for long"
    ),
    Weakening("strays are dropped whatever touched them", _strays_are_dropped_whatever_touched_them).in_scene(
        "a stray is touched", first=2
    ),
    Weakening("strays are dropped before home has them", _strays_are_dropped_before_home_has_them).in_scene(
        "a home is full, then a loss"
    ),
    Weakening("damaged shards elsewhere stay", _damaged_strays_stay).in_scene("a stray is damaged"),
    Weakening("shards that are made anew count as old", _made_shards_are_old).in_scene(
        "a shard is made anew during a put"
    ),
    Weakening("a note is cleared although it was noted again", _notes_are_cleared_although_noted_again).in_scene(
        "a partition is noted again"
    ),
    Weakening("epochs are retired before all members know", epochs_are_retired_unsaid).in_scene(
        "a head learns late of a table"
    ),
    Weakening("epochs are retired before the walks", epochs_are_retired_unwalked).in_scene(
        "two members are drained at once", first=2
    ),
    Weakening("partitions of a member that returns are not noted", _returned_members_are_not_noted).in_scene(
        "a member forgets", first=2
    ),
    Weakening("the list of good copies of the names is not written", _lists_are_not_written).in_scene(
        "a copy of the names misses writes", first=1
    ),
    Weakening("a copy of the names that missed a write stays good", _failed_copies_stay).in_scene(
        "a copy of the names misses writes", first=1
    ),
    Weakening("shards of a member that was out are not looked for", _returned_members_keep_strays).in_scene(
        "a member is out, and returns", first=2746317213
    ),
    Weakening("a table of which a home is lost stays when there are many", _tables_with_lost_homes_stay).in_scene(
        "many tables, then a loss"
    ),
    Weakening("the sweep looks at the tables of now", _sweep_by_the_tables_of_now).in_scene(
        "tables change during a cycle"
    ),
    Weakening("what one member says of a chunk's length is believed", _lengths_are_not_disputed).in_scene(
        "a member lies of a length"
    ),
    Weakening("members that are drained leave all at once", _drains_do_not_wait).in_scene("drains wait for each other"),
    Weakening("no table is made while drains wait", _drains_are_refused).in_scene("drains wait for each other"),
    Weakening("a store that opens older than it was is not found out", _old_openings_are_not_noted).in_scene(
        "a device is put back"
    ),
    Weakening("more than m members are put out", _more_than_m_are_put_out).in_scene("more than m members are unheard"),
]
"""Each is noticed by the first seed of its scene, or by the one that is said."""
WEAKENED: Final = [*WHOLE, *IN_SCENES]


def main(weakened: Sequence[Weakening] = WEAKENED, module: str = "planted") -> int:
    """Weaken rules until each is noticed; return 1 when one was not."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.sim.cluster.{module}")
    numbers = list(range(len(weakened)))
    parser.add_argument("--only", type=int, nargs="+", default=numbers, help="by number")
    parser.add_argument("--seeds", type=int, default=1000, help="at most so many of each")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    unnoticed = 0
    for number in asked.only:
        began = time.process_time()
        found = seeds_to_notice(weakened[number], most=asked.seeds)
        unnoticed += found is None
        told = "NOT NOTICED" if found is None else f"{found[0]} seeds, {found[1]}"
        print(f"{number} {weakened[number].what}: {time.process_time() - began:.0f} s, {told}"[:260], flush=True)  # noqa: T201
    return 1 if unnoticed else 0


if __name__ == "__main__":
    raise SystemExit(main())
