"""Group commit: decisions join groups, and groups are appended to the log one after the other.

The steps (`--` marks where other tasks may run in between):

    commit          decide on a transaction; pack its mutations into the open group; publish them in the overlay
    run             --  close the open group  --  log: write the small payloads that are placed, and sync them; append
                        and sync the group  --  mark it durable, wake its waiters, call observers
    take            a group that was decided elsewhere; it is appended and becomes visible as others do
    wait_durable    --  return when the sequence is durable

Rules kept here:
- A decision and its publication are one step without `await`: decisions are serial, each sees all before it.
- A decision runs exactly once.  It joins one group as a whole; when it raises, it joins none.
- A group is appended as soon as a task waits for it; else `VISIBLE_LINGER_S` after its first decision.
- The stamps of changed records turn in that same step: who learns of a change finds them turned.
- Where heads of a lake repeat the stamps, a group is durable only when these have turned them, too (`Turns`).
- Sequences have no gaps, and group n+1 is appended only when group n is durable.
- Payload placed in small segments is written and synced before the next group is appended, by the same call: a record
  is on the medium only when its payload is.
- An answer from a view or a commit, refusals included, leaves only when its sequence is durable.  Exception: a request
  with `durable=False` is answered as soon as its change is in an open group (visible, not yet durable).
- The overlay is frozen only between groups: when a group closes, or while the open one is empty.
- A failed append or sync is final.  The mutations of groups after the last durable one stay visible in the overlay,
  because later decisions were built on them.  So no answer may depend on them: `wait_durable` and `commit` raise
  StoreReadOnly until the engine is restarted.  Only the restart finds out, from the log, if the failed group is in it.
  On a full disk the journal first takes room from the reserve.
- When the log is lost to another leader, what waits for it has an unknown end: CoordinatorLost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog
import trio

from engine.format.columns import Insertions
from engine.format.layouts import RECORD_HEADER, Mutation, Table
from engine.format.sizes import DEFAULT_SIZES, MetadataSizes
from engine.journal.reader import decode_records
from engine.metadata.group_log import ClosedGroup, GroupLog, PayloadSource
from engine.metadata.turns import NO_TURNS, Turns
from engine.tables.merged_tables import Tables, TableTransaction
from engine.tables.overlay import Layer
from engine.tables.views import Transaction
from lakefs.errors import CoordinatorLost, LakeError, RequestTooLarge, StoreFull, StoreReadOnly, UserError
from lakefs.ids import Sequence
from lakefs.limits import OVERLAY_BYTES_MAX

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)
Observer = Callable[[Sequence, list[object]], None]
"""Called on the loop with a sequence and notes, in the order of commits; must not block, await or raise."""
RecordObserver = Callable[[list[Mutation]], None]
"""Called on the loop with a group's records of the watched tables; must not block, await or raise."""

VISIBLE_LINGER_S: Final = 0.05
"""Seconds a group stays open when no task waits for it.  A visible change is durable within a second."""
_GROUPS_WAITING_MAX: Final = 1
"""Closed groups behind the one being appended; with the open one at most 3 x 8 MiB of bodies in memory."""


@dataclass
class _Group:
    """Mutations of many decisions under one sequence, packed."""

    sequence: Sequence
    parts: list[bytes] = field(default_factory=list)
    body_bytes: int = 0
    record_count: int = 0
    notes: list[object] = field(default_factory=list)
    watched: list[Mutation] = field(default_factory=list)
    since: float = 0.0
    """Time of its first mutation, on trio's clock."""
    turn: int = 0
    """The last turn of stamps that heads are sent for its mutations (`engine.metadata.head_turns`)."""
    waiters: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)

    def closed(self) -> ClosedGroup:
        """Return the group as a log takes it."""
        return ClosedGroup(self.sequence, self.parts, self.body_bytes, self.record_count)


class Committer:
    """Takes decisions for one store.  `durable_sequence` never decreases; `failed` is final."""

    def __init__(
        self, tables: Tables, log: GroupLog, durable_sequence: Sequence, sizes: MetadataSizes = DEFAULT_SIZES
    ) -> None:
        """`log` continues behind `durable_sequence`."""
        self.durable_sequence = durable_sequence
        self.failed: LakeError | None = None
        self.index_full: StoreFull | None = None
        """Set while the index cannot take more; commits then fail instead of waiting for room."""
        self._sizes = sizes
        self._tables = tables
        self.log = log
        """Changed only while nothing is appended, by `engine.metadata.metadata_store`."""
        self._open = _Group(Sequence(durable_sequence + 1))
        self._closed: deque[_Group] = deque()
        self._appending: _Group | None = None
        self._work = trio.Event()
        self._hurry = trio.Event()
        self._payload: PayloadSource | None = None
        self._payload_is_wanted = False
        self._room = trio.lowlevel.ParkingLot()
        self._freeze_wanted: trio.Event | None = None
        self._refused_at = Sequence(0)  # sequence of what the last refusal had read
        self.after_group: Callable[[], None] = lambda: None
        """Called on the loop when a group has become durable."""
        self.turn_stamps: Callable[[list[Mutation | Insertions]], None] = lambda mutations: None
        """Called with the mutations of a decision in the step in which they become visible, just before that."""
        self.turns: Turns = NO_TURNS
        """The heads that repeat the stamps."""
        self._noted_at = -math.inf
        self._joined_observers: list[tuple[Observer, frozenset[type] | None]] = []
        self._durable_observers: list[Observer] = []
        self._watched_tables: frozenset[Table] = frozenset()
        self._record_observers: list[tuple[frozenset[Table], RecordObserver]] = []

    # --- decisions ---------------------------------------------------------------------------------------

    def commit(self, decide: Callable[[Transaction], T]) -> tuple[T, Sequence]:
        """Run `decide` and add its mutations to the open group; returns its result and the sequence to wait for.

        Synchronous and atomic.  A decision without mutations gets the sequence of what it read.  An error of `decide`
        propagates and changes nothing (numbers it took are skipped).  RequestTooLarge when the
        mutations exceed a group; StoreReadOnly when an earlier group failed.  Callers use `commit_when_room`.
        """
        if self.failed is not None:
            raise self._refusal()
        with TableTransaction(self._tables) as transaction:
            try:
                outcome = decide(transaction)
            except UserError:
                self._refused_at = transaction.sequence
                raise
        if not transaction.mutations:
            return outcome, transaction.sequence
        return outcome, self._join(transaction)

    async def commit_when_room(self, decide: Callable[[Transaction], T], *, durable: bool = True) -> tuple[T, Sequence]:
        """Wait for room in group and overlay, then `commit`.  No checkpoint when there is room at once.

        StoreFull when index and overlay are full.  Can be cancelled before `decide` runs, not after; exception: a
        UserError of `decide` is raised when the state it was decided on is durable, with `durable=False` at once.
        """
        await self._wait_for_room()
        try:
            outcome, sequence = self.commit(decide)
        except UserError:
            if durable:
                await self.wait_durable(self._refused_at)
            else:
                await self.turns.wait_settled(self.turns.last)
            raise
        if durable:
            self._hurry.set()
        return outcome, sequence

    async def take(self, sequence: Sequence, body: bytes, record_count: int) -> None:
        """Let the next group join that was decided elsewhere, when there is room; it is appended as others are.

        Not to be mixed with decisions.  JournalDamaged, StoreUnusable for a body that is none; StoreReadOnly.
        """
        await self._wait_for_room()
        group = self._open
        assert (sequence, group.record_count) == (group.sequence, 0), "groups are taken in order, beside no decision"
        self._tables.overlay.current.publish(sequence, decode_records(body, record_count))
        group.parts, group.body_bytes, group.record_count = [body], len(body), record_count
        self._closed.append(self._close_open())
        self._work.set()

    async def wait_durable(self, sequence: Sequence) -> None:
        """Return when the group `sequence` is durable; no checkpoint when it is already.

        StoreReadOnly when it will not be.  Cancellation does not affect the group.
        """
        if sequence <= self.durable_sequence:
            return
        if self.failed is not None:
            raise self._refusal("what this answer rests on could not be made durable, and ")
        if sequence == self._open.sequence:
            self._hurry.set()
        await self._group(sequence).waiters.park()
        if sequence > self.durable_sequence:
            raise self._refusal("what this answer rests on could not be made durable, and ")

    @property
    def last_sequence(self) -> Sequence:
        """Sequence of the newest group that has a mutation, durable or not."""
        return self._open.sequence if self._open.record_count else Sequence(self._open.sequence - 1)

    def noted_at(self) -> float:
        """Return when a client last changed something, on trio's clock; -inf before.  Upkeep itself notes nothing."""
        return self._noted_at

    def on_joined(self, observer: Observer, kinds: Collection[type] | None = None) -> Callable[[], None]:
        """Call `observer` with a decision's notes in the step in which its mutations join a group.

        `kinds`: only if one of the notes is of one of these classes.  Returns a call that ends it, to be called once.
        """
        entry = observer, None if kinds is None else frozenset(kinds)
        self._joined_observers.append(entry)
        return lambda: self._joined_observers.remove(entry)

    def on_durable(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` with a group's notes once it is durable, before its waiters run.

        Returns a call that ends it, to be called once.
        """
        self._durable_observers.append(observer)
        return lambda: self._durable_observers.remove(observer)

    def on_durable_records(self, tables: frozenset[Table], observer: RecordObserver) -> None:
        """Call `observer` with a group's mutations of these tables once it is durable, before its waiters run.

        Observers are called in the order of these calls.  Mutations that joined a group before it may be left out.
        """
        self._record_observers.append((tables, observer))
        self._watched_tables |= tables

    def off_durable_records(self, observer: RecordObserver) -> None:
        """Call `observer` no more; does nothing if it is not called."""
        self._record_observers = [kept for kept in self._record_observers if kept[1] != observer]
        self._watched_tables = frozenset[Table]().union(*(tables for tables, _ in self._record_observers))

    # --- groups ------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Append groups until one fails or `run` is cancelled; then every waiter has been woken."""
        task_status.started()
        try:
            while self.failed is None:
                if self._closed:
                    await self._append(self._closed.popleft())
                elif self._payload_is_wanted and not self._open.record_count:
                    await self._append(None)
                elif self._open.record_count:
                    await self._linger()
                    await self._append(self._closed.popleft() if self._closed else self._close_open())
                else:
                    self._work = trio.Event()
                    await self._work.wait()
        finally:
            self._end(StoreReadOnly("the engine has stopped"))

    async def freeze(self) -> Layer:
        """Freeze the overlay at the next group border; returns the frozen layer.

        StoreReadOnly when the committer has failed; nothing is frozen then.
        """
        if self.failed is not None:
            raise self._refusal()
        if self._open.record_count:
            wanted = self._freeze_wanted = trio.Event()
            self._hurry.set()
            try:
                await wanted.wait()
            finally:
                self._freeze_wanted = None
            if self._tables.overlay.applying is None:
                raise self._refusal()
        else:
            self._tables.overlay.freeze()
        frozen = self._tables.overlay.applying
        assert frozen is not None
        return frozen

    def room_changed(self) -> None:
        """Wake tasks that wait for room; the applier calls it when the overlay shrank or the index is full."""
        self._room.unpark_all()

    def fail(self, cause: LakeError) -> None:
        """Refuse everything from now on and log why; also called for failures elsewhere that must stop writing."""
        if self.failed is None:
            if not isinstance(cause, CoordinatorLost):
                _log.error("the store takes no writes until the engine is restarted", reason=cause.message)
            self._end(cause)

    def _end(self, cause: LakeError) -> None:
        if self.failed is not None:
            return
        self.failed = cause
        groups = [self._appending, *self._closed, self._open]
        for group in groups:
            if group is not None:
                group.waiters.unpark_all()
        if self._freeze_wanted is not None:
            self._freeze_wanted.set()
        self._room.unpark_all()
        self._work.set()
        self._hurry.set()
        if self._payload is not None:
            self._payload.stop(cause)

    def write_first(self, payload: PayloadSource) -> None:
        """Have the payload placed in this source written before each group."""
        self._payload = payload
        payload.urge = self._payload_waits

    def _payload_waits(self) -> None:
        """Append the open group now; if it is empty, write the placed payload."""
        self._payload_is_wanted = True
        self._work.set()
        self._hurry.set()

    def _join(self, transaction: TableTransaction) -> Sequence:
        """Pack the mutations into the open group and publish them; from then on the decision is visible."""
        body_bytes = transaction.body_bytes
        if body_bytes > self._sizes.group_bytes:
            raise RequestTooLarge(
                f"the request makes {body_bytes} bytes of records; {self._sizes.group_bytes} fit in one group: split it"
            )
        if self._open.body_bytes + body_bytes > self._sizes.group_bytes:
            self._closed.append(self._close_open())
        group = self._open
        assert group.sequence > self.durable_sequence, "no mutation joins a durable group"
        if not group.record_count:
            group.since = trio.current_time()
        parts, pack, mutations = group.parts, RECORD_HEADER.pack, transaction.mutations
        watched = self._watched_tables
        self.turn_stamps(mutations)  # first: had it failed, nothing would be changed
        for mutation in mutations:
            if isinstance(mutation, Insertions):
                parts += mutation.parts()
                if mutation.table in watched:
                    group.watched += mutation.mutations()
            else:
                op, table, key, value = mutation
                parts += (pack(table, op, len(key), len(value)), key, value)
                if table in watched:
                    group.watched.append(mutation)
        group.body_bytes += body_bytes
        group.record_count += transaction.record_count
        group.turn = self.turns.last
        self._tables.overlay.current.publish(group.sequence, mutations)
        transaction.settle_counters(group.sequence)
        if transaction.notes:
            group.notes += transaction.notes
            self._noted_at = trio.current_time()
            noted = set(map(type, transaction.notes))
            for observer, kinds in self._joined_observers:
                if kinds is None or not kinds.isdisjoint(noted):
                    observer(group.sequence, transaction.notes)
        self._work.set()
        return group.sequence

    def _close_open(self) -> _Group:
        """Close the open group and begin the next: the border at which the overlay may be frozen."""
        group = self._open
        assert group.record_count, "an empty group is not closed"
        self._open = _Group(Sequence(group.sequence + 1))
        self._hurry.set()
        self._hurry = trio.Event()
        if self._freeze_wanted is not None:
            self._tables.overlay.freeze()
            self._freeze_wanted.set()
            self._freeze_wanted = None
        return group

    async def _linger(self) -> None:
        """Wait until a task needs the open group durable, or `VISIBLE_LINGER_S` have passed."""
        if not self._hurry.is_set():
            with trio.move_on_at(self._open.since + VISIBLE_LINGER_S):
                await self._hurry.wait()

    async def _append(self, group: _Group | None) -> None:
        """Write the placed payload, and append the group, if there is one."""
        assert group is None or group.sequence == self.durable_sequence + 1, "groups become durable in order"
        self._appending = group
        self._payload_is_wanted = False
        self._room.unpark_all()  # a group has left the queue, or a new one is open
        batch = None if self._payload is None else self._payload.take()
        closed = None if group is None else group.closed()
        try:
            await self.log.append(closed, batch)
            if group is not None and group.turn:
                await self.turns.wait_settled(group.turn)
        except StoreFull as error:
            self.fail(StoreFull(f"its disk is full and the reserve is used up; make room on the disk first ({error})"))
            return
        except LakeError as error:
            self.fail(error)
            return
        finally:
            if batch is not None:
                batch.ended()
        if group is None or self.failed is not None:  # it may have failed while heads were waited for
            return
        self._appending = None
        self.durable_sequence = group.sequence
        if group.watched:
            for tables, observe in self._record_observers:
                if watched := [mutation for mutation in group.watched if mutation[1] in tables]:
                    observe(watched)
        if group.notes:
            for observer in self._durable_observers:
                observer(group.sequence, group.notes)
        group.waiters.unpark_all()
        self.after_group()

    def _group(self, sequence: Sequence) -> _Group:
        """Return the group of a sequence that is not durable yet."""
        if sequence == self._open.sequence:
            return self._open
        if self._appending is not None and sequence == self._appending.sequence:
            return self._appending
        for group in self._closed:
            if group.sequence == sequence:
                return group
        raise AssertionError(f"sequence {sequence} was never given")

    async def _wait_for_room(self) -> None:
        while not self._has_room():
            if self.failed is not None:
                raise self._refusal()
            if self.index_full is not None and self._overlay_is_full():
                raise StoreFull(f"the index takes no more records: {self.index_full}")
            self._hurry.set()
            await self._room.park()

    def _has_room(self) -> bool:
        return (
            len(self._closed) < _GROUPS_WAITING_MAX
            and self._open.body_bytes < self._sizes.group_bytes
            and not self._overlay_is_full()
        )

    def _overlay_is_full(self) -> bool:
        return self._tables.overlay.has_reached(self._sizes.overlay_entries_max, OVERLAY_BYTES_MAX)

    def _refusal(self, because: str = "") -> LakeError:
        cause = self.failed
        if isinstance(cause, CoordinatorLost):
            return CoordinatorLost(cause.message)
        refusal = StoreReadOnly(f"{because}the store takes no writes until the engine is restarted: {cause}")
        refusal.__cause__ = cause
        return refusal
