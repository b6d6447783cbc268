"""Checks a shared index, at any instant: it never says what the durable records do not say."""

from __future__ import annotations

from engine.format.layouts import Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import is_whole
from engine.store.store import Store
from engine.tiers.owned_table import OwnedTable
from lakefs.ids import ChunkId
from lakefs.shared_index.table_format import DEAD, ENTRIES_OFFSET, ENTRY_BYTES, PROBE_SLOTS, VACANT, Found, pack_place
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from tests.oracles.shared_table import unpack_entry


def entries_of(index: OwnedTable | None) -> dict[bytes, Found]:
    """Return everything that a table says."""
    assert index is not None
    assert index.table.audit(), "an entry is torn, or not where it belongs"
    found: dict[bytes, Found] = {}
    for slot in range(index.table.capacity + PROBE_SLOTS):
        begin = ENTRIES_OFFSET + slot * ENTRY_BYTES
        entry = unpack_entry(bytes(index.backing.memory[begin : begin + ENTRY_BYTES]))
        if entry.kind not in (VACANT, DEAD):
            found[entry.chunk] = entry.found
    return found


def check_shared_index(store: Store) -> bool:
    """Check that every entry names a live record with the same place, and a ready index all good chunks.

    Returns False, without a look, while something is on its way to the journal: entries follow what is durable.
    """
    entries = entries_of(store.shared_index)
    with store.metadata.view() as view:
        records = {
            chunk_id_of_key(key): unpack_chunk_record(value)
            for key, value in view.scan(Table.CHUNKS, b"", b"\xff")
            if is_whole(key)
        }
        if view.sequence > store.metadata.durable_sequence:
            return False
    assert store.shared_index is not None
    told = {chunk for chunk, found in entries.items() if found[0] == MEDIUM_DRAM}
    assert told == store.shared_index.in_slabs.keys(), "it does not know which entries tell a slab"
    for chunk, found in entries.items():
        assert chunk in records, f"the shared index names {chunk.hex()}, which has no record"
        grant = store.dram.tier and store.dram.tier.grant(ChunkId(chunk))
        if grant:
            place = pack_place(grant.segment, grant.epoch)
            assert found == (MEDIUM_DRAM, place, grant.offset, grant.stored_bytes, grant.crc)
            found = store.shared_index.in_slabs[chunk]
        record = records[chunk_id_of_key(chunk[:1] + b"\0\0" + chunk[1:])]
        assert found == (MEDIUM_SEGMENT, record.segment, record.offset, record.stored_bytes, record.crc)
        assert not store.chunks.is_quarantined(chunk_id_of_key(chunk[:1] + b"\0\0" + chunk[1:]))
    if store.shared_index.state == "ready" and not store.shared_index.counts.refused:
        missing = [c for c in records if c not in entries and not store.chunks.is_quarantined(c)]
        assert not missing, f"{len(missing)} chunks are not in the shared index"
    return True
