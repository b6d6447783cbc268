"""Records of the table `coordinator`: the keys of a cluster's coordinator, its leases, and its last revision.

state    0                    coordinator state: the last revision, and the lowest unused number of a lease
entry    1, key (1 to 256)    coordinator entry head, then the value
lease    2, number (8)        coordinator lease
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.format.layouts import Table
from lakefs.errors import StoreUnusable
from lakefs.ids import LeaseId, Revision
from lakefs.layout import Layout

TABLE: Final = Table.COORDINATOR
STATE_KEY: Final = b"\x00"
ENTRIES_BEGIN: Final = b"\x01"
ENTRIES_END: Final = b"\x02"
LEASES_BEGIN: Final = b"\x02"
LEASES_END: Final = b"\x03"
_VERSION: Final = 1

COORDINATOR_STATE: Final = Layout("coordinator state", 17, [("version", "B"), ("revision", "Q"), ("next_lease", "Q")])
COORDINATOR_ENTRY_HEAD: Final = Layout(
    "coordinator entry head", 17, [("version", "B"), ("revision", "Q"), ("lease", "Q")]
)
COORDINATOR_LEASE: Final = Layout("coordinator lease", 5, [("version", "B"), ("ttl_s", "I")])


class StateRecord(NamedTuple):
    """The last revision, and the lowest number of a lease that was never handed out."""

    revision: Revision = Revision(0)
    next_lease: LeaseId = LeaseId(1)

    def pack(self) -> bytes:
        """Pack the record."""
        return COORDINATOR_STATE.pack(_VERSION, self.revision, self.next_lease)


def unpack_state(record: bytes | None) -> StateRecord:
    """Unpack the state from its (already verified) record; None in a new store.  StoreUnusable for a later version."""
    if record is None:
        return StateRecord()
    _, revision, next_lease = _unpacked(COORDINATOR_STATE, record, COORDINATOR_STATE.size)
    return StateRecord(Revision(revision), LeaseId(next_lease))


def pack_entry(revision: Revision, lease: LeaseId, value: bytes) -> bytes:
    """Pack a key's record."""
    return COORDINATOR_ENTRY_HEAD.pack(_VERSION, revision, lease) + value


def unpack_entry(record: bytes) -> tuple[Revision, LeaseId, bytes]:
    """Unpack revision, lease and value from a key's (already verified) record.  StoreUnusable for a later version."""
    _, revision, lease = _unpacked(COORDINATOR_ENTRY_HEAD, record, len(record))
    return Revision(revision), LeaseId(lease), record[COORDINATOR_ENTRY_HEAD.size :]


def pack_lease(ttl_s: int) -> bytes:
    """Pack a lease's record."""
    return COORDINATOR_LEASE.pack(_VERSION, ttl_s)


def unpack_lease(record: bytes) -> int:
    """Unpack the TTL in seconds from a lease's (already verified) record.  StoreUnusable for a later version."""
    ttl_s: int = _unpacked(COORDINATOR_LEASE, record, COORDINATOR_LEASE.size)[1]
    return ttl_s


def entry_key(key: bytes) -> bytes:
    """Key of the record of a coordinator's key."""
    return ENTRIES_BEGIN + key


def lease_key(lease: LeaseId) -> bytes:
    """Key of a lease's record."""
    return LEASES_BEGIN + lease.to_bytes(8, "big")


def lease_of_key(key: bytes) -> LeaseId:
    """Number of the lease, from the key of its record."""
    return LeaseId(int.from_bytes(key[1:], "big"))


def _unpacked(layout: Layout, record: bytes, size: int) -> tuple[int, ...]:
    """Unpack a fixed head; StoreUnusable unless the record has this size and a known version."""
    if len(record) != size or size < layout.size:
        raise StoreUnusable(f"{layout.name} of {len(record)} bytes, {layout.size} expected")
    fields: tuple[int, ...] = layout.unpack_from(record)
    if fields[0] != _VERSION:
        raise StoreUnusable(f"{layout.name} version {fields[0]} is not known")
    return fields
