"""The spaces of a lake at one of its members: the names of the lake decide on them, the member follows.

A member keeps the values of the keys whose home it is.  Its space has the number, the name and the settings that the
names gave it, and the member's share of the quota.

Pure decisions, as in `engine.keyed.spaces`.  Rules kept here:
- What the member has becomes what is listed: spaces that are not are removed, with their values.
- A list of an earlier version than that which the member has is not used (the caller compares): numbers of spaces are
  used once, so what is not in the latest list is gone for ever.
- Numbers that the lake has used are not handed out by the member itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.format.keyed import NEXT_KEY, NUMBER_MAX, SpaceRecord, name_key, space_key
from engine.format.layouts import COUNTER_RECORD, Table
from engine.keyed.spaces import NS, check_name, iter_spaces, list_spaces, remove_space
from engine.tables.views import Transaction, View
from lakefs.errors import InvalidArgument
from lakefs.ids import DEFAULT_DOMAIN
from lakefs.limits import KEYED_TTL_S_MAX, SPACES_MAX
from lakefs.wire.messages import SpaceStat

_QUOTA_BYTES_MAX = 1 << 62


def check_listed(spaces: Sequence[SpaceStat]) -> None:
    """Raise InvalidArgument or InvalidName for spaces that no lake has."""
    numbers, names = {space.number for space in spaces}, {space.name for space in spaces}
    if not len(spaces) == len(numbers) == len(names) or len(spaces) > SPACES_MAX:
        raise InvalidArgument(f"at most {SPACES_MAX} spaces are listed, each once")
    for space in spaces:
        check_name(space.name)
        if not 1 <= space.number <= NUMBER_MAX or space.created_ns < 0:
            raise InvalidArgument(f"a space has a number from 1 to {NUMBER_MAX}, not {space.number}")
        if not 0 <= space.quota_bytes <= _QUOTA_BYTES_MAX or not 0 <= space.ttl_s <= KEYED_TTL_S_MAX:
            raise InvalidArgument(f"space {space.name!r} is listed with a quota or a TTL that no space has")


def compare(view: View, spaces: Sequence[SpaceStat]) -> tuple[bool, bool]:
    """Return if the member's spaces are others than these or have other settings, and if some of these are new."""
    present = {_settings(space) for space in list_spaces(view)}
    numbers = {number for number, _ in iter_spaces(view)}
    return present != {_settings(space) for space in spaces}, any(space.number not in numbers for space in spaces)


def set_spaces(txn: Transaction, spaces: Sequence[SpaceStat]) -> None:
    """Make the member's spaces these."""
    present = dict(iter_spaces(txn))
    listed = {space.number for space in spaces}
    for number, record in present.items():
        if not record.removed and number not in listed:
            remove_space(txn, record.name)
    for space in spaces:
        record = present.get(space.number) or _new_record(txn, space)
        changed = _with_settings(record, space)
        if changed != record and not record.removed:
            txn.put(Table.KEYED, space_key(space.number), changed.pack())
    value = txn.get(Table.KEYED, NEXT_KEY)
    behind = max((space.number + 1 for space in spaces), default=1)
    if behind > (1 if value is None else COUNTER_RECORD.unpack(value)[0]):
        txn.put(Table.KEYED, NEXT_KEY, COUNTER_RECORD.pack(behind))


def _new_record(txn: Transaction, space: SpaceStat) -> SpaceRecord:
    """Record a new space, without its settings, and return it."""
    record = SpaceRecord(1, space.name, DEFAULT_DOMAIN, space.created_ns, 0, 0, 0, 0, parts=0)
    txn.put(Table.KEYED, name_key(space.name), space.number.to_bytes(4, "big"))  # another space may have had the name
    txn.put(Table.KEYED, space_key(space.number), record.pack())
    return record


def _with_settings(record: SpaceRecord, space: SpaceStat) -> SpaceRecord:
    return SpaceRecord(
        record.version,
        record.name,
        record.domain,
        record.created_ns,
        space.quota_bytes,
        space.ttl_s * NS,
        record.entries,
        record.value_bytes,
        record.removed,
        record.parts,
    )


def _settings(space: SpaceStat) -> tuple[str, int, int, int]:
    return space.name, space.number, space.quota_bytes, space.ttl_s
