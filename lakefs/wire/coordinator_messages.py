"""Messages about the coordinator of a lake: a few keys on which all its processes agree.

Only the names of a lake answer them.  What the operations mean, and their bounds, say `Coordinator`
(`engine.coordinator.coordinator`) and the COORDINATOR limits; the server checks all bounds before it does anything.
Keys, values, revisions and leases are those of the port.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Done, Message, Request

REVISION_MAX: Final = (1 << 63) - 2
LEASE_MAX: Final = (1 << 63) - 1
OUTCOME_DONE: Final = 0
OUTCOME_CONFLICT: Final = 1
OUTCOME_LEASE_GONE: Final = 2


class KeyEntry(Message, frozen=True):
    """A key and its value, the revision that wrote it, and the lease with which it ends; 0: none."""

    key: bytes
    value: bytes
    revision: int
    lease: int = 0


class KeyComparison(Message, frozen=True):
    """Holds if the key has that value, or if that revision wrote it; with neither given, if the key is absent.

    InvalidArgument if both are given.
    """

    key: bytes
    revision: int | None = None
    value: bytes | None = None


class KeyChange(Message, frozen=True):
    """A change of a key: its new value and its lease, 0: none; no value: the key is removed, and has no lease."""

    key: bytes
    value: bytes | None = None
    lease: int = 0


class CoordinatorPage(Message, frozen=True):
    """Entries in the order of their keys, at one revision.  `more`: others are behind them."""

    entries: list[KeyEntry]
    revision: int
    more: bool = False


class CoordinatorRange(Request, frozen=True):
    """Read the first entries with begin <= key < end and key > after; with `end` b"" the entry of the key `begin`.

    At most `limit`, 1 to COORDINATOR_PAGE_MAX, and fewer when they are long: ask again, behind the last, while `more`.
    InvalidArgument.
    """

    OP = 120
    REPLY = CoordinatorPage
    begin: bytes
    end: bytes = b""
    limit: int = 1
    after: bytes = b""


class CoordinatorTransacted(Message, frozen=True):
    """The end of a transaction, and the entry of each comparison as it found it, nil if the key was absent.

    `outcome` 0: all comparisons held, and `then_changes` were done; 1: one did not, and `else_changes` were done; 2: a
    lease had ended, and nothing was done.  `revision` is the transaction's, or the last one before it if it changed
    nothing.  Values of entries behind the first COORDINATOR_SEEN_BYTES_MAX are left out, as b"".
    """

    outcome: int
    revision: int
    seen: list[KeyEntry | None]


class CoordinatorTransact(Request, frozen=True):
    """Do `then_changes` if all comparisons hold, else `else_changes`; durable when answered, at one revision.

    Not sent again by a client that lost the answer: it has been done whole, or not at all, which a later read shows.
    InvalidArgument, RequestTooLarge; StoreFull.
    """

    OP = 121
    REPLY = CoordinatorTransacted
    comparisons: list[KeyComparison]
    then_changes: list[KeyChange]
    else_changes: list[KeyChange] = []


class CoordinatorChanges(Message, frozen=True):
    """The first revision that a watch had to return, and its changes in the range; none: there was none in time.

    `next_revision`: the watch goes on from there, with its next request.  `read_anew`: a change that it had to return
    is not held any more; read the range, and watch from behind the revision of the first page.
    """

    next_revision: int
    revision: int = 0
    changes: list[KeyChange] = []
    read_anew: bool = False


class CoordinatorWatch(Request, frozen=True):
    """Wait for the first revision, from `from_revision` on, that changes a key with begin <= key < end.

    Answered when that is durable, or after `wait_s` seconds, at most COORDINATOR_WATCH_S_MAX.  A watch is a row of such
    requests, each from where the last one ended: the server keeps nothing of it in between, so it goes on over another
    connection, and after a restart of the names, without a change missed or repeated.  InvalidArgument; EngineBusy when
    too many wait already.
    """

    OP = 122
    REPLY = CoordinatorChanges
    begin: bytes
    end: bytes
    from_revision: int
    wait_s: float


class CoordinatorLeased(Message, frozen=True):
    """The lease that was granted."""

    lease: int


class CoordinatorLease(Request, frozen=True):
    """Grant a lease, which ends unless it is kept alive every `ttl_s` seconds; its keys are removed with it.

    COORDINATOR_LEASE_S_MIN to COORDINATOR_LEASE_S_MAX.  A holder counts from the moment at which it sent the request.
    InvalidArgument; EngineBusy when there are too many.
    """

    OP = 123
    REPLY = CoordinatorLeased
    ttl_s: int


class CoordinatorKept(Message, frozen=True):
    """False if the lease has ended, or never was."""

    lasts: bool


class CoordinatorKeepAlive(Request, frozen=True):
    """Let a lease run for its whole time again."""

    OP = 124
    REPLY = CoordinatorKept
    lease: int


class CoordinatorRevoke(Request, frozen=True):
    """End a lease now, and remove its keys at one revision; durable when answered.  Nothing if it has ended."""

    OP = 125
    REPLY = Done
    lease: int
