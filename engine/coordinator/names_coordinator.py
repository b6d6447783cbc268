"""The coordinator as a table of the names: `engine.coordinator.coordinator.Coordinator` over a names store's metadata.

    transact    a decision on the table `coordinator`: compare, change, raise the revision  --  durable  --  answered
    leases      records of the table, and deadlines in memory; a task removes those that are over
    watches     fed with each revision once it is durable (`engine.coordinator.watch_history`)

Rules kept here:
- Every answer with a revision is read from the state's record too.  So it depends on the last transaction, and waits
  until that is durable.  An answer about a lease depends on the lease's record, or on its removal.
- The last revision is in the table, raised in the group that changes the keys.  A decision that fails takes none.
- Memory (leases, their keys, bytes in use) changes in the step in which a decision's mutations become visible, and not
  in the decision, which may still be refused.
- When a lease ends, its record and keys are removed by one decision, which looks at its deadline again.
- Only a store whose superblock has the bit `cluster` has records in the table.

It is not mirrored by itself: it is as durable as the journal that the metadata write.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

import structlog
import trio

from engine.coordinator.coordinator import (
    NO_LEASE,
    Change,
    Changes,
    Compare,
    Delete,
    Entry,
    Found,
    Operation,
    Outcome,
    Page,
    Put,
    Transacted,
)
from engine.coordinator.coordinator_bounds import check_key, check_page, check_range, check_transaction, check_ttl
from engine.coordinator.coordinator_table import bounded, cost_bytes, entry_of, holds, last_state, page_of, unpacked
from engine.coordinator.leases import Leases
from engine.coordinator.watch_history import History, HistoryWatch
from engine.format.coordinator import (
    ENTRIES_BEGIN,
    ENTRIES_END,
    LEASES_BEGIN,
    LEASES_END,
    STATE_KEY,
    TABLE,
    entry_key,
    lease_key,
    lease_of_key,
    pack_entry,
    pack_lease,
    unpack_lease,
)
from engine.format.features import Feature
from engine.host.tasks import plain_errors
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction, View
from lakefs import ids
from lakefs.errors import (
    EngineBusy,
    EngineUnreachable,
    LakeError,
    RequestTooLarge,
    StoreDamaged,
    StoreFull,
    StoreReadOnly,
    StoreUnusable,
)
from lakefs.ids import LeaseId, Revision
from lakefs.limits import COORDINATOR_BYTES_MAX, COORDINATOR_LEASE_KEYS_MAX, COORDINATOR_LEASES_MAX
from lakefs.ports import Clock

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)
_NONE: Final = Revision(0)
_LOOK_EVERY_S: Final = 0.5
"""Leases that are over are looked for so often."""
_PAUSE_S: Final = 1.0
"""The task that looks for them was not late by so much, unless the process stood still."""


class _Move(NamedTuple):
    """A change of one key: its entry before and after, None where it is absent."""

    key: bytes
    old: Entry | None
    new: Entry | None


@dataclass(frozen=True)
class _Decided:
    """A decision's effect on memory: changed keys, a lease that was granted, and one that ended."""

    revision: Revision = _NONE
    moves: tuple[_Move, ...] = ()
    granted: tuple[LeaseId, int] | None = None
    ended: LeaseId = NO_LEASE


@asynccontextmanager
async def open_names_coordinator(
    metadata: Metadata, clock: Clock, incompat_features: int, history: Callable[[Revision], History] = History
) -> AsyncIterator[NamesCoordinator]:
    """Open the coordinator of a names store whose metadata run; they are not closed at the end.

    `incompat_features` are those of its superblock; `history` makes the history behind a revision.  All leases run for
    their whole time again.  Calls and watches that outlive the block end with EngineUnreachable.
    Errors: StoreUnusable, IndexDamaged, StoreDamaged.
    """
    if not incompat_features & Feature.CLUSTER_NAMES:
        raise StoreUnusable("the store does not hold the names of a cluster, so it has no coordinator")
    coordinator = NamesCoordinator(metadata, clock, history)
    try:
        with plain_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(coordinator.end_leases)
                yield coordinator
                nursery.cancel_scope.cancel()
    finally:
        coordinator.close()


class NamesCoordinator:
    """`Coordinator` over one store's metadata.  Made by `open_names_coordinator`; used on the loop."""

    def __init__(self, metadata: Metadata, clock: Clock, history: Callable[[Revision], History] = History) -> None:
        self._metadata = metadata
        self._clock = clock
        self._leases = Leases()
        self._used_bytes = 0
        with metadata.view() as view:
            self._history = history(last_state(view).revision)
            self._restore(view)
        self._ends = [metadata.on_joined(self._joined, {_Decided}), metadata.on_durable(self._durable)]

    def close(self) -> None:
        """End all watches and further calls with EngineUnreachable; what was decided becomes durable."""
        self._history.end(EngineUnreachable("the coordinator was closed"))
        while self._ends:
            self._ends.pop()()

    # --- keys --------------------------------------------------------------------------------------------

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        check_key(key)
        return await self._read(lambda view: Found(entry_of(view, key), last_state(view).revision))

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        check_page(begin, end, limit, after)
        return await self._read(lambda view: page_of(view, max(begin, after + b"\0"), end, limit))

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Compare and change keys at one revision, once; see the port."""
        check_transaction(compares, then_ops, else_ops)
        grows = any(isinstance(operation, Put) for operation in (*then_ops, *else_ops))
        return await self._decide(lambda txn: self._transact(txn, compares, then_ops, else_ops), grows=grows)

    async def compact(self, revision: Revision) -> None:
        """Do nothing; see the port.  The history is bounded, and what it holds costs others no `ReadAnew`."""
        await trio.lowlevel.checkpoint()
        with self._reaching():
            pass

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> HistoryWatch:
        """Watch a range; see the port."""
        check_range(begin, end)
        return HistoryWatch(self._history, begin, end, from_revision)

    # --- leases ------------------------------------------------------------------------------------------

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease; see the port."""
        check_ttl(ttl_s)
        return await self._decide(lambda txn: self._grant(txn, ttl_s), grows=True)

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; see the port."""
        while await self._read(lambda view: view.get(TABLE, lease_key(lease)) is not None):
            if self._leases.renew(lease, self._clock.monotonic()):
                return True
        return False

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease; see the port."""
        await self._decide(lambda txn: self._end_lease(txn, lease))

    async def end_leases(self) -> None:
        """End the leases whose time is over, until cancelled or the store has failed."""
        while (failed := self._metadata.failed) is None:
            expected = self._clock.monotonic() + _LOOK_EVERY_S
            await trio.sleep(_LOOK_EVERY_S)
            late_s = self._clock.monotonic() - expected
            if late_s > _PAUSE_S:
                self._leases.postpone(late_s)
            for lease in self._leases.due(self._clock.monotonic()):
                try:
                    await self._decide(partial(self._end_lease_if_due, lease=lease))
                except StoreFull as error:
                    _log.warning("a lease that is over could not be ended; it is tried again", error=error.message)
                except EngineUnreachable:
                    break
        self._history.end(failed)

    # --- decisions ---------------------------------------------------------------------------------------

    def _transact(
        self,
        txn: Transaction,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation],
    ) -> Transacted:
        seen = tuple(entry_of(txn, compare.key) for compare in compares)
        is_held = all(map(holds, compares, seen))
        operations = then_ops if is_held else else_ops
        leases = {operation.lease for operation in operations if isinstance(operation, Put)} - {NO_LEASE}
        if any(txn.get(TABLE, lease_key(lease)) is None for lease in leases):
            return Transacted(Outcome.LEASE_GONE, last_state(txn).revision, bounded(seen))
        self._refuse_many_keys(operations)
        return Transacted(Outcome.DONE if is_held else Outcome.CONFLICT, self._change(txn, operations), bounded(seen))

    def _change(self, txn: Transaction, operations: Sequence[Operation], ended: LeaseId = NO_LEASE) -> Revision:
        """Do the operations at the next revision, and return it; the last one if they change nothing."""
        state = last_state(txn)
        revision = Revision(state.revision + 1)
        moves: list[_Move] = []
        for operation in operations:
            key, old = entry_key(operation.key), entry_of(txn, operation.key)
            if isinstance(operation, Put):
                new = Entry(operation.key, operation.value, revision, operation.lease)
                change = txn.insert if old is None else txn.put
                change(TABLE, key, pack_entry(revision, operation.lease, operation.value))
                moves.append(_Move(operation.key, old, new))
            elif old is not None:
                txn.delete(TABLE, key)
                moves.append(_Move(operation.key, old, None))
        if moves:
            self._refuse_without_room(moves)
            txn.put(TABLE, STATE_KEY, state._replace(revision=revision).pack())
        if moves or ended:
            txn.note(_Decided(revision, tuple(moves), ended=ended))
        return revision if moves else state.revision

    def _grant(self, txn: Transaction, ttl_s: int) -> LeaseId:
        if len(self._leases) >= COORDINATOR_LEASES_MAX:
            raise EngineBusy(f"the coordinator has {COORDINATOR_LEASES_MAX} leases, the most that it may have")
        state = last_state(txn)
        lease = state.next_lease
        txn.insert(TABLE, lease_key(lease), pack_lease(ttl_s))
        txn.put(TABLE, STATE_KEY, state._replace(next_lease=LeaseId(lease + 1)).pack())
        txn.note(_Decided(granted=(lease, ttl_s)))
        return lease

    def _end_lease_if_due(self, txn: Transaction, lease: LeaseId) -> None:
        if self._leases.is_due(lease, self._clock.monotonic()):
            self._end_lease(txn, lease)

    def _end_lease(self, txn: Transaction, lease: LeaseId) -> None:
        if txn.get(TABLE, lease_key(lease)) is not None:
            txn.delete(TABLE, lease_key(lease))
            self._change(txn, [Delete(key) for key in self._leases.keys(lease)], ended=lease)

    def _refuse_many_keys(self, operations: Sequence[Operation]) -> None:
        """Raise RequestTooLarge if a lease would have more keys than are removed at once."""
        added: dict[LeaseId, int] = {}
        for operation in operations:
            if isinstance(operation, Put) and operation.lease:
                is_new = not self._leases.has_key(operation.lease, operation.key)
                added[operation.lease] = added.get(operation.lease, 0) + is_new
        for lease, count in added.items():
            if self._leases.key_count(lease) + count > COORDINATOR_LEASE_KEYS_MAX:
                raise RequestTooLarge(f"a lease has at most {COORDINATOR_LEASE_KEYS_MAX} keys: take another for more")

    def _refuse_without_room(self, moves: Sequence[_Move]) -> None:
        """Raise StoreFull if the keys would take more than the coordinator holds; removals never do."""
        more_bytes = _added_bytes(moves)
        if more_bytes > 0 and self._used_bytes + more_bytes > COORDINATOR_BYTES_MAX:
            raise StoreFull(
                f"the coordinator holds {self._used_bytes} bytes, and {more_bytes} more would be over "
                f"{COORDINATOR_BYTES_MAX}"
            )

    # --- memory ------------------------------------------------------------------------------------------

    def _restore(self, view: View) -> None:
        """Let all leases run from now on, and count what the keys take."""
        now = self._clock.monotonic()
        for key, record in view.scan(TABLE, LEASES_BEGIN, LEASES_END):
            self._leases.grant(lease_of_key(key), unpack_lease(record), now)
        for key, record in view.scan(TABLE, ENTRIES_BEGIN, ENTRIES_END):
            entry = unpacked(key[1:], record)
            self._used_bytes += cost_bytes(entry)
            if entry.lease and entry.lease not in self._leases:
                raise StoreDamaged(f"the coordinator's key {entry.key!r} ends with a lease that does not exist")
            if entry.lease:
                self._leases.attach(entry.lease, entry.key)

    def _joined(self, _: ids.Sequence, notes: list[object]) -> None:
        """Follow a decision in memory, in the step in which it becomes visible."""
        for note in notes:
            if not isinstance(note, _Decided):
                continue
            for key, old, new in note.moves:
                if old is not None and old.lease:
                    self._leases.detach(old.lease, key)
                if new is not None and new.lease:
                    self._leases.attach(new.lease, key)
            self._used_bytes += _added_bytes(note.moves)
            if note.granted is not None:
                self._leases.grant(*note.granted, self._clock.monotonic())
            if note.ended:
                self._leases.remove(note.ended)

    def _durable(self, _: ids.Sequence, notes: list[object]) -> None:
        """Hand the revisions of a durable group to the watches."""
        for note in notes:
            if isinstance(note, _Decided) and note.moves and note.revision > self._history.last:
                changes = (Change(move.key, move.new) for move in note.moves)
                self._history.add(Changes(note.revision, tuple(changes)))

    # --- asking the metadata -----------------------------------------------------------------------------

    async def _read(self, look: Callable[[View], T]) -> T:
        """Return what `look` sees, when it is durable; always a checkpoint before that."""
        await trio.lowlevel.checkpoint()
        with self._reaching():
            with self._metadata.view() as view:
                seen, sequence = look(view), view.sequence
            await self._metadata.wait_durable(sequence)
        return seen

    async def _decide(self, decide: Callable[[Transaction], T], *, grows: bool = False) -> T:
        """Run a decision, and return its result when it is durable; always a checkpoint before that."""
        await trio.lowlevel.checkpoint()
        with self._reaching():
            result, sequence = await self._metadata.commit(decide, grows=grows)
            await self._metadata.wait_durable(sequence)
        return result

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        failed: LakeError | None = self._history.failed or self._metadata.failed
        if failed is not None:
            raise EngineUnreachable(f"the coordinator has ended: {failed}") from failed
        try:
            yield
        except StoreReadOnly as error:
            raise EngineUnreachable(f"the coordinator's store has failed: {error}") from error


def _added_bytes(moves: Sequence[_Move]) -> int:
    return sum(cost_bytes(move.new) - cost_bytes(move.old) for move in moves)
