"""Leases of the coordinator in memory: their deadlines, and the keys that end with them.

Rules kept here:
- A lease exists until its removal was decided, also past its deadline: `due` only proposes.  So a lease that is kept
  alive late, and was not removed yet, goes on.
- Deadlines are in memory.  After a restart every lease runs for its whole time again (`restore`), and after a pause of
  the process all get the time of the pause (`postpone`): holders could not reach the coordinator, and are not gone.

Everything runs on the loop, in the step in which a decision becomes visible; nothing waits here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lakefs.ids import LeaseId


@dataclass
class _Lease:
    """A lease: its whole time, the end of it, and its keys, in the order in which they were attached."""

    ttl_s: int
    deadline: float
    keys: dict[bytes, None] = field(default_factory=dict)


class Leases:
    """All leases of one coordinator.  Times are of `Clock.monotonic`, in seconds."""

    def __init__(self) -> None:
        self._leases: dict[LeaseId, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._leases

    def grant(self, lease: LeaseId, ttl_s: int, now: float) -> None:
        """Add a lease that runs from now on."""
        assert lease not in self._leases, "a lease's number is never reused"
        self._leases[lease] = _Lease(ttl_s, now + ttl_s)

    def renew(self, lease: LeaseId, now: float) -> bool:
        """Let a lease run for its whole time from now on; False if it does not exist."""
        found = self._leases.get(lease)
        if found is None:
            return False
        found.deadline = max(found.deadline, now + found.ttl_s)
        return True

    def remove(self, lease: LeaseId) -> None:
        """Forget a lease; its keys were removed."""
        keys = self._leases.pop(lease).keys
        assert not keys, "the keys of a lease end with it"

    def attach(self, lease: LeaseId, key: bytes) -> None:
        """Let a key end with a lease."""
        self._leases[lease].keys[key] = None

    def detach(self, lease: LeaseId, key: bytes) -> None:
        """Let a key not end with a lease any more."""
        del self._leases[lease].keys[key]

    def keys(self, lease: LeaseId) -> Iterable[bytes]:
        """Return the keys that end with a lease."""
        return tuple(self._leases[lease].keys)

    def has_key(self, lease: LeaseId, key: bytes) -> bool:
        """Return True if the key ends with the lease."""
        return key in self._leases[lease].keys

    def key_count(self, lease: LeaseId) -> int:
        """Return how many keys end with a lease."""
        return len(self._leases[lease].keys)

    def is_due(self, lease: LeaseId, now: float) -> bool:
        """Return True if a lease exists and its time is over."""
        found = self._leases.get(lease)
        return found is not None and found.deadline <= now

    def due(self, now: float) -> list[LeaseId]:
        """Return the leases whose time is over, the oldest first."""
        return [lease for lease, found in self._leases.items() if found.deadline <= now]

    def postpone(self, seconds: float) -> None:
        """Move all deadlines."""
        for found in self._leases.values():
            found.deadline += seconds
