"""The port `Coordinator`: a few small keys on which all processes of a cluster agree.

It has only operations that etcd has (Range, Txn with comparisons, Watch, Lease, Compact), so that etcd can stand behind
it (`engine.etcd.etcd_coordinator`).  A lake's own is a table of the names (`engine.coordinator.names_coordinator`).
The suite of every implementation is `tests/contract/test_coordinator.py`.

Duties of an implementation:
- *Order.*  Transactions are serial.  Each that changes a key has a revision, larger than the last.  One that changes
  nothing may have one, too, and so may others who share the server: revisions may have gaps.  Reads and transactions
  are linearizable: they see every transaction that was answered before they began.
- *Durable.*  A transaction, and all that an answer was read from, is durable before the answer.
- *Refused is an answer.*  A comparison that fails, and a lease that has ended, are results.  The errors are
  InvalidArgument and RequestTooLarge for arguments outside the bounds (`lakefs.limits`), StoreFull and EngineBusy for
  bounds of the whole, and EngineUnreachable when the coordinator has ended or cannot be asked.  After EngineUnreachable
  a transaction has been done whole, or not at all; one that is still under way to a server that cannot be asked may
  also be done a while later.
- *Cancelled.*  Each call is a checkpoint before it does anything.  A call that is cancelled later has been done whole,
  or not at all, as after EngineUnreachable; a watch that is cancelled has taken no event.
- *Bounded.*  Past changes are held for a while.  A watch that needs one that is not held any more ends with `ReadAnew`;
  one that nobody waits for may also end so when others were forgotten in the meantime.  What is under way to a watch
  is still held.

It does not know what the keys mean: `engine.coordinator.records` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from lakefs.ids import LeaseId, Revision

NO_LEASE: Final = LeaseId(0)
END: Final = b"\xff" * 8
"""Behind every key that begins with ASCII: the end of a range of all such keys."""


class Entry(msgspec.Struct, frozen=True):
    """A key and its value, the revision that wrote it, and the lease with which it ends (`NO_LEASE`: none)."""

    key: bytes
    value: bytes
    revision: Revision
    lease: LeaseId = NO_LEASE


class Found(msgspec.Struct, frozen=True):
    """The answer of `get`: the entry, None if the key is absent, and the revision at which it was so."""

    entry: Entry | None
    revision: Revision


class Page(msgspec.Struct, frozen=True):
    """The answer of `range`: entries in the order of their keys, at one revision.  `more`: others are behind them."""

    entries: tuple[Entry, ...]
    revision: Revision
    more: bool


class IsAbsent(msgspec.Struct, frozen=True):
    """Holds if the key is absent."""

    key: bytes


class HasRevision(msgspec.Struct, frozen=True):
    """Holds if the key is present, and that revision wrote it."""

    key: bytes
    revision: Revision


class HasValue(msgspec.Struct, frozen=True):
    """Holds if the key is present with that value."""

    key: bytes
    value: bytes


Compare = IsAbsent | HasRevision | HasValue


class Put(msgspec.Struct, frozen=True):
    """Sets a key's value; with a lease, the key is removed when the lease ends.  An earlier lease of it is replaced."""

    key: bytes
    value: bytes
    lease: LeaseId = NO_LEASE


class Delete(msgspec.Struct, frozen=True):
    """Removes a key; does nothing if it is absent."""

    key: bytes


Operation = Put | Delete


class Outcome(Enum):
    """The end of a transaction."""

    DONE = auto()
    """All comparisons held, and `then_ops` were done."""
    CONFLICT = auto()
    """A comparison failed, and `else_ops` were done."""
    LEASE_GONE = auto()
    """The branch puts a key with a lease that has ended; nothing was done."""


class Transacted(msgspec.Struct, frozen=True):
    """The answer of `transact`.

    `revision` is the transaction's; if it changed nothing, one as of which `seen` holds: between the last change of a
    key of the coordinator before it and the next.  `seen` has the entry of each
    comparison, in order, as the transaction found it, None if absent: it shows which one failed and why.  Values behind
    the first COORDINATOR_SEEN_BYTES_MAX bytes of keys and values are left out, as b"".
    """

    outcome: Outcome
    revision: Revision
    seen: tuple[Entry | None, ...] = ()

    @property
    def succeeded(self) -> bool:
        """True if all comparisons held, and the operations were done."""
        return self.outcome is Outcome.DONE


class Change(msgspec.Struct, frozen=True):
    """A change of a key: its new entry, None if it was removed."""

    key: bytes
    entry: Entry | None


class Changes(msgspec.Struct, frozen=True):
    """All changes that one revision made in the range of a watch, at least one."""

    revision: Revision
    changes: tuple[Change, ...]


class ReadAnew(msgspec.Struct, frozen=True):
    """The last event of a watch: a change that it had to see next is not held any more.

    Read the range, and watch from behind the revision of the first page.
    """


class Watch(Protocol):
    """The events of one range, for one task.  Iteration ends behind `ReadAnew`."""

    @property
    def resumes_at(self) -> Revision:
        """A revision from which another watch of the range would return what this one returns from here on."""
        ...

    def __aiter__(self) -> Watch: ...

    async def __anext__(self) -> Changes | ReadAnew:
        """Return the next event, when its revision is durable.  Always a checkpoint; a cancelled call takes none.

        EngineUnreachable when the coordinator has ended or cannot be reached any more.
        """
        ...


class Coordinator(Protocol):
    """Keys, transactions, watches and leases; see the head of the module for errors and cancellation.

    Keys have 1 to COORDINATOR_KEY_BYTES_MAX bytes, values up to COORDINATOR_VALUE_BYTES_MAX.
    """

    async def get(self, key: bytes) -> Found:
        """Return a key's entry.  Cancellation changes nothing."""
        ...

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return the first entries with begin <= key < end and key > after.  Cancellation changes nothing.

        At most `limit` (1 to COORDINATOR_PAGE_MAX), and fewer when they are long: ask again, behind the last key, while
        `more`.  Pages are of different revisions.  To have a range as it is and stays, read its pages, then watch it
        from behind the revision of the first.
        """
        ...

    async def transact(
        self,
        compares: Sequence[Compare],
        then_ops: Sequence[Operation],
        else_ops: Sequence[Operation] = (),
        *,
        is_repeatable: bool = False,
    ) -> Transacted:
        """Do `then_ops` if all comparisons hold, else `else_ops`: at one revision, whole or not at all.

        At most COORDINATOR_OPERATIONS_MAX of each, COORDINATOR_TRANSACTION_BYTES_MAX in all; a branch names a key once.
        Durable on return.  Cancelled while it waits, it has been done whole or not at all, which a later read shows.

        `is_repeatable` is the caller's word that the keys themselves tell whether a try was done.  The transaction may
        then be done more than once, also a while after the answer, and the result is that of the last try: CONFLICT if
        an earlier one has changed what is compared.  It costs less at an etcd, and fails less often.
        """
        ...

    async def compact(self, revision: Revision) -> None:
        """Forget the changes before a revision; does nothing if they are forgotten.  No key changes.

        `revision` is one that an answer had, or the next; InvalidArgument for one that is yet to come.  A watch that
        needs a forgotten change ends with `ReadAnew`.  An implementation with a bounded history may do nothing, and
        then any revision will do.  A transaction whose answer was lost may raise EngineUnreachable though it was done,
        if its changes are forgotten before it is asked again: leave the changes of some seconds.
        Cancelled while it waits, it may have been done.
        """
        ...

    def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AbstractAsyncContextManager[Watch]:
        """Watch begin <= key < end: every revision from `from_revision` on that changes it, once and in order.

        The watch has begun when the block is entered, and ends with the block.  EngineBusy if there are too many.
        """
        ...

    async def lease(self, ttl_s: int) -> LeaseId:
        """Grant a lease, which ends unless it is kept alive every `ttl_s` seconds; its keys are removed with it.

        COORDINATOR_LEASE_S_MIN to COORDINATOR_LEASE_S_MAX seconds.  It takes COORDINATOR_LEASE_KEYS_MAX keys; an
        implementation may refuse more (`transact` raises RequestTooLarge).  A lease may last longer: after a restart of
        the coordinator all run for their whole time again.  A holder therefore counts by itself, from the moment at
        which it sent `lease` or `keep_alive`.
        EngineBusy if there are too many.  Cancelled while it waits, a lease may exist, and ends after `ttl_s`.
        """
        ...

    async def keep_alive(self, lease: LeaseId) -> bool:
        """Let a lease run for its whole time again; False if it has ended.  Cancellation: it may have been renewed."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease now, and remove its keys at one revision; does nothing if it has ended.

        Durable on return.  Cancelled while it waits, it has been done whole or not at all.
        """
        ...
