"""The coordinator's values as messages, and back: `lakefs.wire.coordinator_messages` has the shapes.

What arrives is checked for its shape here; bounds are checked by the coordinator, as of every caller.  No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engine.coordinator.coordinator import (
    Change,
    Changes,
    Compare,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Operation,
    Outcome,
    Page,
    Put,
    Transacted,
)
from lakefs.errors import InvalidArgument, ProtocolError
from lakefs.ids import LeaseId, Revision
from lakefs.wire import messages as m

_OUTCOMES: Final = {
    Outcome.DONE: m.OUTCOME_DONE,
    Outcome.CONFLICT: m.OUTCOME_CONFLICT,
    Outcome.LEASE_GONE: m.OUTCOME_LEASE_GONE,
}
_OF_CODES: Final = {code: outcome for outcome, code in _OUTCOMES.items()}


# --- entries and pages -----------------------------------------------------------------------------------


def sent_entry(entry: Entry) -> m.KeyEntry:
    """Return an entry as it is sent."""
    return m.KeyEntry(entry.key, entry.value, entry.revision, entry.lease)


def received_entry(entry: m.KeyEntry) -> Entry:
    """Return an entry that was received."""
    return Entry(entry.key, entry.value, Revision(entry.revision), LeaseId(entry.lease))


def sent_page(page: Page) -> m.CoordinatorPage:
    """Return a page as it is sent."""
    return m.CoordinatorPage([sent_entry(entry) for entry in page.entries], page.revision, page.more)


def received_page(page: m.CoordinatorPage) -> Page:
    """Return a page that was received."""
    return Page(tuple(map(received_entry, page.entries)), Revision(page.revision), page.more)


# --- transactions ----------------------------------------------------------------------------------------


def sent_transaction(
    compares: Sequence[Compare], then_ops: Sequence[Operation], else_ops: Sequence[Operation]
) -> m.CoordinatorTransact:
    """Return a transaction as it is sent."""
    return m.CoordinatorTransact(
        [_sent_comparison(compare) for compare in compares],
        [_sent_operation(operation) for operation in then_ops],
        [_sent_operation(operation) for operation in else_ops],
    )


def received_comparisons(comparisons: Iterable[m.KeyComparison]) -> list[Compare]:
    """Return comparisons that were received.  InvalidArgument for one of two things."""
    return [_received_comparison(comparison) for comparison in comparisons]


def received_operations(changes: Iterable[m.KeyChange]) -> list[Operation]:
    """Return operations that were received.  InvalidArgument for a removal with a lease, and for no lease's number."""
    return [_received_operation(change) for change in changes]


def sent_outcome(done: Transacted) -> m.CoordinatorTransacted:
    """Return the end of a transaction as it is sent."""
    seen = [None if entry is None else sent_entry(entry) for entry in done.seen]
    return m.CoordinatorTransacted(_OUTCOMES[done.outcome], done.revision, seen)


def received_outcome(done: m.CoordinatorTransacted) -> Transacted:
    """Return the end of a transaction that was received.  ProtocolError for one that this release does not know."""
    outcome = _OF_CODES.get(done.outcome)
    if outcome is None:
        raise ProtocolError(f"a transaction ended with {done.outcome}, which is not known here; update this process")
    seen = (None if entry is None else received_entry(entry) for entry in done.seen)
    return Transacted(outcome, Revision(done.revision), tuple(seen))


def _sent_comparison(compare: Compare) -> m.KeyComparison:
    if isinstance(compare, HasRevision):
        return m.KeyComparison(compare.key, revision=compare.revision)
    if isinstance(compare, HasValue):
        return m.KeyComparison(compare.key, value=compare.value)
    return m.KeyComparison(compare.key)


def _received_comparison(comparison: m.KeyComparison) -> Compare:
    if comparison.revision is not None and comparison.value is not None:
        raise InvalidArgument("a comparison is of a revision or of a value", subject=repr(comparison.key))
    if comparison.revision is not None:
        return HasRevision(comparison.key, received_revision(comparison.revision))
    if comparison.value is not None:
        return HasValue(comparison.key, comparison.value)
    return IsAbsent(comparison.key)


def _sent_operation(operation: Operation) -> m.KeyChange:
    if isinstance(operation, Put):
        return m.KeyChange(operation.key, operation.value, operation.lease)
    return m.KeyChange(operation.key)


def _received_operation(change: m.KeyChange) -> Operation:
    if change.value is not None:
        return Put(change.key, change.value, received_lease(change.lease))
    if change.lease:
        raise InvalidArgument("a key that is removed has no lease", subject=repr(change.key))
    return Delete(change.key)


# --- watches ---------------------------------------------------------------------------------------------


def sent_changes(changes: Changes, next_revision: Revision) -> m.CoordinatorChanges:
    """Return an event of a watch as it is sent."""
    return m.CoordinatorChanges(next_revision, changes.revision, [_sent_change(change) for change in changes.changes])


def received_changes(answer: m.CoordinatorChanges) -> Changes:
    """Return an event of a watch that was received."""
    revision = Revision(answer.revision)
    return Changes(revision, tuple(_received_change(change, revision) for change in answer.changes))


def _sent_change(change: Change) -> m.KeyChange:
    if change.entry is None:
        return m.KeyChange(change.key)
    return m.KeyChange(change.key, change.entry.value, change.entry.lease)


def _received_change(change: m.KeyChange, revision: Revision) -> Change:
    if change.value is None:
        return Change(change.key, None)
    return Change(change.key, Entry(change.key, change.value, revision, LeaseId(change.lease)))


# --- numbers ---------------------------------------------------------------------------------------------


def received_revision(number: int) -> Revision:
    """Return a revision from outside.  InvalidArgument."""
    if not 0 <= number <= m.REVISION_MAX:
        raise InvalidArgument(f"a revision is from 0 to {m.REVISION_MAX}")
    return Revision(number)


def received_lease(number: int) -> LeaseId:
    """Return a lease's number from outside.  InvalidArgument."""
    if not 0 <= number <= m.LEASE_MAX:
        raise InvalidArgument(f"a lease has a number from 0 to {m.LEASE_MAX}")
    return LeaseId(number)
