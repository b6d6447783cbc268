"""Checks a keyed index, at any instant: it never says what the durable records do not say."""

from __future__ import annotations

from engine.format.keyed import (
    SPACES_BEGIN,
    SPACES_END,
    VALUES_BEGIN,
    VALUES_END,
    number_of_space,
    space_and_key,
    unpack_space,
    unpack_value,
)
from engine.format.layouts import Table, chunk_key, unpack_chunk_record
from engine.store.store import Store
from lakefs.shared_index.key_format import (
    DOUBTFUL,
    PLACED,
    SOME_EXPIRE,
    SPACE_PARTIAL,
    SPACE_WHOLE,
    UNPLACED,
    id_of_record,
)
from tests.shared_index_check import entries_of


def check_keyed_index(store: Store, *, after_moves: bool = True) -> bool:
    """Check that entries are of durable values and spaces that exist, and places those of their chunks.

    `after_moves`: a place may be the one that the chunk had before it was moved.  Returns False, without a look, while
    something is on its way to the journal: entries follow what is durable.
    """
    assert store.keyed_index is not None
    entries = entries_of(store.keyed_index)
    with store.metadata.view() as view:
        values = {key: unpack_value(value) for key, value in view.scan(Table.KEYED, VALUES_BEGIN, VALUES_END)}
        spaces = {key: unpack_space(value) for key, value in view.scan(Table.KEYED, SPACES_BEGIN, SPACES_END)}
        records = {
            chunk: unpack_chunk_record(stored)
            for value in values.values()
            for chunk in value.chunks
            if (stored := view.get(Table.CHUNKS, chunk_key(chunk))) is not None
        }
        if view.sequence > store.metadata.durable_sequence:
            return False
    is_whole = store.keyed_index.state == "ready" and not store.keyed_index.counts.refused
    expiring = {space_and_key(key)[0] for key, value in values.items() if value.expires_ns}
    for key, space in spaces.items():
        entry = entries.pop(id_of_record(key), None)
        if entry is not None:
            flags = (SOME_EXPIRE,) if number_of_space(key) in expiring else (0, SOME_EXPIRE)
            assert entry[3] in flags, f"space {space.name} has values that expire, and its entry does not say so"
            entry = (*entry[:3], 0, entry[4])
        if space.removed:
            assert entry is None, f"space {space.name} was removed, and has an entry"
        elif is_whole:
            assert entry == (SPACE_WHOLE, 0, 0, 0, 0), f"space {space.name}: {entry}"
        else:
            assert entry is None or entry[0] in (SPACE_WHOLE, SPACE_PARTIAL)
    for key, value in values.items():
        entry = entries.pop(id_of_record(key), None)
        if entry is None:
            assert not is_whole, f"value {key!r} has no entry"
        elif entry[0] == PLACED:
            (chunk,) = value.chunks
            record = records[chunk]
            assert entry[3:] == (record.stored_bytes, record.crc), f"value {key!r} has the entry of another"
            assert after_moves or entry[1:3] == (record.segment, record.offset), f"value {key!r} was moved"
        else:
            assert entry in ((UNPLACED, 0, 0, value.size_bytes, 0), (DOUBTFUL, 0, 0, 0, 0)), f"value {key!r}: {entry}"
            assert entry[0] == DOUBTFUL or not is_whole or len(value.chunks) > 1, f"value {key!r} has no place"
    assert not entries, f"{len(entries)} entries are of no value and no space"
    return True
