"""Bounds of the coordinator's arguments, checked alike by every implementation before anything is done.

Errors: RequestTooLarge for a transaction that is too long, InvalidArgument for everything else.  No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.coordinator.coordinator import Compare, HasRevision, HasValue, Operation, Put
from lakefs.errors import InvalidArgument, RequestTooLarge
from lakefs.limits import (
    COORDINATOR_KEY_BYTES_MAX,
    COORDINATOR_LEASE_S_MAX,
    COORDINATOR_LEASE_S_MIN,
    COORDINATOR_OPERATIONS_MAX,
    COORDINATOR_PAGE_MAX,
    COORDINATOR_TRANSACTION_BYTES_MAX,
    COORDINATOR_VALUE_BYTES_MAX,
)


def check_key(key: bytes) -> None:
    """Refuse a key that is empty or too long."""
    if not 0 < len(key) <= COORDINATOR_KEY_BYTES_MAX:
        raise InvalidArgument(
            f"a key of the coordinator has 1 to {COORDINATOR_KEY_BYTES_MAX} bytes, this one has {len(key)}",
            subject=repr(key[:COORDINATOR_KEY_BYTES_MAX]),
        )


def check_range(begin: bytes, end: bytes) -> None:
    """Refuse a range that no key can be in, or whose ends are too long."""
    for key in (begin, end):
        check_key(key)
    if begin >= end:
        raise InvalidArgument(f"the range from {begin!r} to {end!r} is empty", subject=repr(begin))


def check_page(begin: bytes, end: bytes, limit: int, after: bytes) -> None:
    """Refuse a page that is too large, or of a range that is none."""
    check_range(begin, end)
    if after:
        check_key(after)
    if not 1 <= limit <= COORDINATOR_PAGE_MAX:
        raise InvalidArgument(f"a page has 1 to {COORDINATOR_PAGE_MAX} keys, not {limit}")


def check_ttl(ttl_s: int) -> None:
    """Refuse a lease that is too short or too long."""
    if not COORDINATOR_LEASE_S_MIN <= ttl_s <= COORDINATOR_LEASE_S_MAX:
        raise InvalidArgument(
            f"a lease runs for {COORDINATOR_LEASE_S_MIN} to {COORDINATOR_LEASE_S_MAX} seconds, not {ttl_s}"
        )


def check_transaction(
    compares: Sequence[Compare], then_ops: Sequence[Operation], else_ops: Sequence[Operation]
) -> None:
    """Refuse a transaction with too many or too long parts, or a branch that names a key twice."""
    for part in (compares, then_ops, else_ops):
        if len(part) > COORDINATOR_OPERATIONS_MAX:
            raise RequestTooLarge(
                f"a transaction has at most {COORDINATOR_OPERATIONS_MAX} comparisons, and as many operations in each "
                f"branch, not {len(part)}: split it"
            )
    total_bytes = 0
    for compare in compares:
        value_bytes = len(compare.value) if isinstance(compare, HasValue) else 0
        total_bytes += _checked_bytes(compare.key, value_bytes)
        if isinstance(compare, HasRevision) and compare.revision < 1:
            raise InvalidArgument("the first revision is 1; a key that is absent is compared by `IsAbsent`")
    for branch in (then_ops, else_ops):
        keys = {operation.key for operation in branch}
        if len(keys) < len(branch):
            raise InvalidArgument("a branch of a transaction names each key once")
        for operation in branch:
            total_bytes += _checked_bytes(operation.key, len(operation.value) if isinstance(operation, Put) else 0)
    if total_bytes > COORDINATOR_TRANSACTION_BYTES_MAX:
        raise RequestTooLarge(
            f"keys and values of a transaction have at most {COORDINATOR_TRANSACTION_BYTES_MAX} bytes, "
            f"not {total_bytes}: split it"
        )


def _checked_bytes(key: bytes, value_bytes: int) -> int:
    check_key(key)
    if value_bytes > COORDINATOR_VALUE_BYTES_MAX:
        raise InvalidArgument(
            f"a value of the coordinator has at most {COORDINATOR_VALUE_BYTES_MAX} bytes, this one has {value_bytes}",
            subject=repr(key),
        )
    return len(key) + value_bytes
