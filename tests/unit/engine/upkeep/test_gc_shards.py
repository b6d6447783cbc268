"""Garbage collection beside shards: a record of the table `chunks` that is no whole chunk's is not its to free."""

from __future__ import annotations

from engine.format.layouts import Table, chunk_key, unpack_chunk_record
from engine.tables.views import Transaction
from lakefs.ids import data_chunk_id
from tests.store_rig import client_of, delete, gc, put, run, simulated_store, tamper

PAYLOAD = b"payload of a chunk" * 5000
KEY = chunk_key(data_chunk_id(PAYLOAD))
SHARD = KEY[:-1] + b"\x02"


def become_a_shard(txn: Transaction) -> None:
    value = txn.get(Table.CHUNKS, KEY)
    assert value is not None
    txn.delete(Table.CHUNKS, KEY)
    txn.insert(Table.CHUNKS, SHARD, value)


def test_what_is_no_whole_chunk_stays_with_its_room() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await put(client, "gone", PAYLOAD)
            await delete(client, "gone")
            await tamper(store, become_a_shard)
            for _ in range(2):
                report = await gc(client)
                assert (report["freed_chunks"], report["live_chunks"]) == (0, 1)
            with store.metadata.view() as view:
                value = view.get(Table.CHUNKS, SHARD)
            assert value is not None
            assert await store.segments.reader.read_chunk(unpack_chunk_record(value)) == PAYLOAD

    run(main)
