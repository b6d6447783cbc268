"""Reads of the coordinator's table through a view: the last state, a key's entry, a page; and comparisons with them.

Nothing here changes the table, or waits: `engine.coordinator.names_coordinator` decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.coordinator.coordinator import Compare, Entry, HasRevision, HasValue, Page
from engine.format.coordinator import STATE_KEY, TABLE, StateRecord, entry_key, unpack_entry, unpack_state
from engine.tables.views import View
from lakefs.limits import COORDINATOR_KEY_COST_BYTES, COORDINATOR_PAGE_BYTES_MAX, COORDINATOR_SEEN_BYTES_MAX


def last_state(view: View) -> StateRecord:
    """Return the state as the last transaction left it."""
    return unpack_state(view.get(TABLE, STATE_KEY))


def entry_of(view: View, key: bytes) -> Entry | None:
    """Return a key's entry; None if it is absent."""
    record = view.get(TABLE, entry_key(key))
    return None if record is None else unpacked(key, record)


def unpacked(key: bytes, record: bytes) -> Entry:
    """Return the entry of a key and its record."""
    revision, lease, value = unpack_entry(record)
    return Entry(key, value, revision, lease)


def page_of(view: View, begin: bytes, end: bytes, limit: int) -> Page:
    """Return the first entries of a range, until there are enough of them."""
    entries: list[Entry] = []
    page_bytes = 0
    more = False
    for key, record in view.scan(TABLE, entry_key(begin), entry_key(end)) if begin < end else ():
        if len(entries) == limit or page_bytes >= COORDINATOR_PAGE_BYTES_MAX:
            more = True
            break
        entries.append(unpacked(key[1:], record))
        page_bytes += len(key) + len(record)
    return Page(tuple(entries), last_state(view).revision, more)


def holds(compare: Compare, entry: Entry | None) -> bool:
    """Return True if a comparison holds for the entry of its key."""
    if isinstance(compare, HasRevision):
        return entry is not None and entry.revision == compare.revision
    if isinstance(compare, HasValue):
        return entry is not None and entry.value == compare.value
    return entry is None


def bounded(seen: Iterable[Entry | None]) -> tuple[Entry | None, ...]:
    """Return what a transaction's comparisons saw, without the values behind COORDINATOR_SEEN_BYTES_MAX."""
    found: list[Entry | None] = []
    seen_bytes = 0
    for entry in seen:
        seen_bytes += 0 if entry is None else len(entry.key) + len(entry.value)
        is_cut = entry is not None and seen_bytes > COORDINATOR_SEEN_BYTES_MAX
        found.append(msgspec.structs.replace(entry, value=b"") if entry is not None and is_cut else entry)
    return tuple(found)


def cost_bytes(entry: Entry | None) -> int:
    """Return what an entry counts in COORDINATOR_BYTES_MAX."""
    return 0 if entry is None else COORDINATOR_KEY_COST_BYTES + len(entry.key) + len(entry.value)
