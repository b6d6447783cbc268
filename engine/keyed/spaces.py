"""Spaces of keyed blobs: made, found, listed, removed, on one view or transaction.

Pure decisions, as in `engine.namespace.names`; a function that raises has changed nothing.  Rules kept here:
- A number is handed out once.  A space is named by its number wherever its values are.
- Usage is changed in the transaction that adds or removes values (`Usage`), and never by itself.
- A removed space loses its name at once.  Its record stays, marked as removed, until upkeep has removed its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from engine.format.keyed import (
    NEXT_KEY,
    NOT_COUNTED,
    NUMBER_MAX,
    SPACES_BEGIN,
    SPACES_END,
    KeyedValue,
    SpaceRecord,
    name_key,
    number_of_space,
    space_key,
    unpack_space,
    values_range,
)
from engine.format.layouts import COUNTER_RECORD, Table
from engine.tables.views import Transaction, View
from lakefs.errors import EngineBusy, InvalidArgument, InvalidName, SpaceNotFound
from lakefs.ids import DEFAULT_DOMAIN
from lakefs.limits import KEYED_QUOTA_BYTES_MIN, KEYED_TTL_S_MAX, SPACE_NAME_BYTES_MAX, SPACES_MAX
from lakefs.wire.messages import SpaceOpen, SpaceStat

NS: Final = 10**9
KEYED_PART_CHARGE: Final = 512
"""Bytes counted against its space's quota for each part of a value beside its own, so that a quota bounds values of a
byte too: about what the records of a value with one part and a TTL take on the disk (540 bytes in index and checkpoint,
measured).  Those of a further part take at most that."""
EVICT_ABOVE: Final = 0.99
"""Share of its quota above which values of a space are evicted; no value alone takes more."""
_QUOTA_BYTES_MAX: Final = 1 << 62


def check_name(name: str) -> str:
    """Return a name that a space may have.  Raises InvalidName for any other."""
    if not name.isprintable() or not 0 < len(name.encode()) <= SPACE_NAME_BYTES_MAX:
        shown = name[:80].encode(errors="replace").decode()
        raise InvalidName(f"the name of a space has 1 to {SPACE_NAME_BYTES_MAX} bytes of printable text", subject=shown)
    return name


def check_space(request: SpaceOpen) -> None:
    """Raise InvalidName or InvalidArgument for a name or settings that no space has."""
    check_name(request.name)
    quota = request.quota_bytes
    if quota is not None and quota != 0 and not KEYED_QUOTA_BYTES_MIN <= quota <= _QUOTA_BYTES_MAX:
        least = KEYED_QUOTA_BYTES_MIN >> 20
        raise InvalidArgument(f"the quota of a space is 0, for none, or at least {least} MiB, not {quota} bytes")
    if request.ttl_s is not None and not 0 <= request.ttl_s <= KEYED_TTL_S_MAX:
        raise InvalidArgument(f"the TTL of a space is 0, for none, to {KEYED_TTL_S_MAX} seconds")


def number_of(view: View, name: str) -> int:
    """Return the number of the space of that name.  Raises SpaceNotFound."""
    value = view.get(Table.KEYED, name_key(name))
    if value is None:
        raise SpaceNotFound(f"space {name!r} does not exist; open it first", subject=name)
    return int.from_bytes(value, "big")


def find_space(view: View, number: int) -> SpaceRecord:
    """Return the space with that number.  Raises SpaceNotFound, also for one that was removed."""
    value = view.get(Table.KEYED, space_key(number)) if 0 <= number <= NUMBER_MAX else None
    record = None if value is None else unpack_space(value)
    if record is None or record.removed:
        raise SpaceNotFound(f"space {number} was removed, or never was; open it by its name", subject=str(number))
    return record


def opened_space(view: View, request: SpaceOpen) -> SpaceStat | None:
    """Return the space if it exists with the given settings, so that there is nothing to change; else None."""
    known = view.get(Table.KEYED, name_key(request.name))
    if known is None:
        return None
    number = int.from_bytes(known, "big")
    record = find_space(view, number)
    return to_space_stat(number, record) if _with_settings(record, request) == record else None


def _with_settings(record: SpaceRecord, request: SpaceOpen) -> SpaceRecord:
    quota = record.quota_bytes if request.quota_bytes is None else request.quota_bytes
    ttl_ns = record.ttl_ns if request.ttl_s is None else request.ttl_s * NS
    return msgspec.structs.replace(record, quota_bytes=quota, ttl_ns=ttl_ns)


def open_space(txn: Transaction, request: SpaceOpen, now_ns: int, first_number: int = 1) -> SpaceStat:
    """Return the space, made if need be, with the given settings.  SpaceNotFound, InvalidArgument, EngineBusy.

    `first_number`: the lowest that may be handed out, also if the record of the next number says less.
    """
    known = txn.get(Table.KEYED, name_key(request.name))
    if known is not None or not request.create:
        number = number_of(txn, request.name)
        present = find_space(txn, number)
    else:
        number = _new_number(txn, first_number)
        present = SpaceRecord(1, request.name, DEFAULT_DOMAIN, now_ns, 0, 0, 0, 0, parts=0)
        txn.insert(Table.KEYED, name_key(request.name), number.to_bytes(4, "big"))
        txn.insert(Table.KEYED, space_key(number), present.pack())
    record = _with_settings(present, request)
    if record != present:
        txn.put(Table.KEYED, space_key(number), record.pack())
    return to_space_stat(number, record)


def _new_number(txn: Transaction, first: int) -> int:
    spaces = list(iter_spaces(txn))
    if len(spaces) >= SPACES_MAX:
        if any(record.removed for _, record in spaces):
            raise EngineBusy("too many spaces were removed lately: try again when their values are gone")
        raise InvalidArgument(f"there are {SPACES_MAX} spaces already, the most that a store has; remove some")
    value = txn.get(Table.KEYED, NEXT_KEY)
    number = first if value is None else max(first, COUNTER_RECORD.unpack(value)[0])
    if number > NUMBER_MAX:
        raise InvalidArgument("no more spaces can be made in this store: all their numbers were used")
    txn.put(Table.KEYED, NEXT_KEY, COUNTER_RECORD.pack(number + 1))
    return int(number)


def iter_spaces(view: View) -> Iterator[tuple[int, SpaceRecord]]:
    """Iterate over the numbers and records of all spaces, removed ones too, by number; at most SPACES_MAX."""
    for key, value in view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END):
        yield number_of_space(key), unpack_space(value)


def list_spaces(view: View) -> list[SpaceStat]:
    """Return all spaces that have a name, in byte order of their names."""
    found = [to_space_stat(number, record) for number, record in iter_spaces(view) if not record.removed]
    return sorted(found, key=lambda space: space.name.encode())


def remove_space(txn: Transaction, name: str) -> int:
    """Remove a space; returns its number.  Its values cannot be found any more.  Raises SpaceNotFound."""
    number = number_of(txn, name)
    record = find_space(txn, number)
    txn.delete(Table.KEYED, name_key(name))
    if record.entries or any(True for _ in txn.scan(Table.KEYED, *values_range(number))):
        txn.put(Table.KEYED, space_key(number), msgspec.structs.replace(record, removed=True).pack())
    else:
        txn.delete(Table.KEYED, space_key(number))
    return number


def charge(size_bytes: int, parts: int = 1) -> int:
    """Return the bytes that values with so many bytes and parts together count against a quota."""
    return size_bytes + parts * KEYED_PART_CHARGE


def charge_of_value(value: KeyedValue) -> int:
    """Return the bytes that a value counts against its space's quota."""
    return charge(value.size_bytes, len(value.lengths))


def charge_of_space(space: SpaceRecord) -> int:
    """Return the bytes that all values of a space count against its quota."""
    return charge(space.value_bytes, space.entries if space.parts == NOT_COUNTED else space.parts)


def to_space_stat(number: int, record: SpaceRecord) -> SpaceStat:
    """Return the message that describes a space."""
    return SpaceStat(
        record.name,
        number,
        record.created_ns,
        record.quota_bytes,
        record.ttl_ns // NS,
        record.entries,
        record.value_bytes,
    )


class Usage:
    """The usage of one space while a transaction adds and removes values; `save` puts it into the space's record."""

    def __init__(self, txn: Transaction, number: int, record: SpaceRecord) -> None:
        self._txn = txn
        self._number = number
        self._record = record
        self._entries = record.entries
        self._parts = None if record.parts == NOT_COUNTED else record.parts
        self.value_bytes = record.value_bytes

    def add(self, value: KeyedValue) -> None:
        """Count a value that was added."""
        self._change(1, value)

    def take(self, value: KeyedValue) -> None:
        """Count a value that was removed."""
        self._change(-1, value)
        if self._record.removed:  # perhaps because its usage was found wrong
            self._entries, self.value_bytes = max(0, self._entries), max(0, self.value_bytes)
            self._parts = self._parts and max(0, self._parts)
        assert min(self._entries, self.value_bytes, self._parts or 0) >= 0, "a value is removed once"

    def _change(self, sign: int, value: KeyedValue) -> None:
        self._entries += sign
        self.value_bytes += sign * value.size_bytes
        if self._parts is not None:
            self._parts += sign * len(value.lengths)

    def save(self) -> None:
        """Record the usage."""
        parts = NOT_COUNTED if self._parts is None else self._parts
        record = msgspec.structs.replace(self._record, entries=self._entries, value_bytes=self.value_bytes, parts=parts)
        if record != self._record:
            self._txn.put(Table.KEYED, space_key(self._number), record.pack())
