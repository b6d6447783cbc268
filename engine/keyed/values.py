"""Values of keys: looked up, put once, removed, on one view or transaction.

Pure decisions; a function that raises has changed nothing.  Rules kept here:
- A key that has a value keeps it: a put of other bytes changes nothing.  A value that has expired, or one of whose
  chunks is in quarantine, counts as absent, and a put replaces it.  For a put that resizes so does a value of another
  length, in the transaction that decides it: of two such puts of one length the second finds the first's value.
- A value is put only when each of its chunks has a record, in the same transaction or held by the caller.
- A value that expires has an expiry record, which comes and goes in the same transactions.
- A value expires by the wall clock, at the time that was fixed when it was put.  A clock that is set back makes it
  expire later, never earlier than its TTL by that clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.format.keyed import KeyedValue, SpaceRecord, expiry_key, unpack_value, value_key
from engine.format.layouts import Table
from engine.keyed.spaces import EVICT_ABOVE, Usage, charge
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument, LakeError, RequestTooLarge
from lakefs.ids import ChunkId
from lakefs.limits import CHUNK_BYTES, KEYED_DEPTH_MAX, KEYED_KEY_BYTES_MAX, KEYED_PARTS_MAX, KEYED_VALUE_BYTES_MAX


class Values:
    """The rules by which values are found: those of a wall clock's time and a quarantine."""

    def __init__(self, is_damaged: Callable[[ChunkId], bool], now_ns: int) -> None:
        self._is_damaged = is_damaged
        self.now_ns = now_ns

    def is_absent(self, value: KeyedValue) -> bool:
        """Return True if the value counts as absent: it has expired, or a chunk of it is damaged."""
        return has_expired(value, self.now_ns) or any(map(self._is_damaged, value.chunks))

    def find(self, view: View, number: int, key: bytes) -> KeyedValue | None:
        """Return the value of a key in a space; None if it has none, or one that counts as absent."""
        record = view.get(Table.KEYED, value_key(number, key))
        if record is None:
            return None
        value = unpack_value(record)
        return None if self.is_absent(value) else value

    def put(
        self, txn: Transaction, usage: Usage, number: int, key: bytes, value: KeyedValue, *, resize: bool = False
    ) -> KeyedValue | None:
        """Give the key its value; returns the value that it has already, which then stays, or None.

        `resize`: a value of another length does not stay.
        """
        place = value_key(number, key)
        record = txn.get(Table.KEYED, place)
        present = None if record is None else unpack_value(record)
        if present is not None:
            if not self.is_absent(present) and not (resize and present.size_bytes != value.size_bytes):
                return present
            _forget(txn, usage, number, key, present)
        usage.add(value)
        if value.expires_ns:
            txn.put(Table.KEYED, expiry_key(value.expires_ns, number, key), b"")
        (txn.insert if present is None else txn.put)(Table.KEYED, place, value.pack())
        return None

    def new_value(
        self, space: SpaceRecord, depth: int, chunks: Sequence[ChunkId], lengths: Sequence[int]
    ) -> KeyedValue:
        """Return a value of these parts that is made now."""
        expires_ns = self.now_ns + space.ttl_ns if space.ttl_ns else 0
        return KeyedValue(self.now_ns, expires_ns, depth, tuple(chunks), tuple(lengths))


def has_expired(value: KeyedValue, now_ns: int) -> bool:
    """Return True if the value's time is over."""
    return 0 < value.expires_ns <= now_ns


def remove_value(txn: Transaction, usage: Usage, number: int, key: bytes) -> KeyedValue | None:
    """Remove the value of a key, expired or damaged ones too; returns it, None if there is none."""
    place = value_key(number, key)
    record = txn.get(Table.KEYED, place)
    if record is None:
        return None
    value = unpack_value(record)
    txn.delete(Table.KEYED, place)
    _forget(txn, usage, number, key, value)
    return value


def _forget(txn: Transaction, usage: Usage, number: int, key: bytes, value: KeyedValue) -> None:
    """Take a value that is removed or replaced out of the usage, and remove its expiry."""
    usage.take(value)
    if value.expires_ns:
        txn.delete(Table.KEYED, expiry_key(value.expires_ns, number, key))


# --- what clients send -----------------------------------------------------------------------------------


def key_problem(key: bytes) -> LakeError | None:
    """Return the error of a key that no value has, or None."""
    if 0 < len(key) <= KEYED_KEY_BYTES_MAX:
        return None
    return InvalidArgument(f"a key has 1 to {KEYED_KEY_BYTES_MAX} bytes, this one {len(key)}")


def value_problem(lengths: Sequence[int], depth: int, quota_bytes: int) -> LakeError | None:
    """Return the error of a value that a space with this quota does not take, or None."""
    if not 1 <= len(lengths) <= KEYED_PARTS_MAX:
        return InvalidArgument(f"a value has 1 to {KEYED_PARTS_MAX} parts, this one {len(lengths)}")
    if not 1 <= min(lengths) <= max(lengths) <= CHUNK_BYTES:
        return InvalidArgument(f"a part has 1 to {CHUNK_BYTES} bytes")
    if not 0 <= depth <= KEYED_DEPTH_MAX:
        return InvalidArgument(f"the depth of a key is 0 to {KEYED_DEPTH_MAX}")
    size_bytes, most, remedy = sum(lengths), KEYED_VALUE_BYTES_MAX, ""
    if quota_bytes and (fits := int(quota_bytes * EVICT_ABOVE) - charge(0, len(lengths))) < most:
        most, remedy = fits, " by its quota; raise that with: lake kv set SPACE --quota SIZE"
    if size_bytes > most:
        return RequestTooLarge(f"the value has {size_bytes} bytes; its space takes at most {most}{remedy}")
    return None
