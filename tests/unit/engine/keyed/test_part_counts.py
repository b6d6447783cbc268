"""Parts of values: what they count against a quota, and spaces of earlier releases, which have no count of them."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest
import trio

from engine.format.keyed import NOT_COUNTED, SpaceRecord, space_key
from engine.format.layouts import Table
from engine.keyed import part_counts as part_counts_module, spaces as spaces_module
from engine.keyed.spaces import charge_of_space, find_space
from engine.metadata.metadata_store import Metadata
from engine.store.store import Store
from engine.tables.views import Transaction
from lakefs.errors import StoreReadOnly
from lakefs.limits import CHUNK_BYTES, KEYED_QUOTA_BYTES_MIN, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.test_requests_keyed import put_keys, space_of, stat_of
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, fsck, run, session_of, simulated_store, store_chunks, tamper

QUOTA = KEYED_QUOTA_BYTES_MIN
KIB = 1024


def record_of(store: Store, space: int) -> SpaceRecord:
    with store.metadata.view() as view:
        return find_space(view, space)


async def put_parts(client: EngineClient, space: int, session: bytes, chunk: bytes, count: int) -> m.KeyedOutcomes:
    """Put one value of so many parts, all of them the same chunk."""
    key = random.randbytes(32)
    return await ask(client, m.KeyedCommit(session, space, [key], [count], [chunk] * count), m.KeyedOutcomes)


def test_a_quota_bounds_values_of_many_parts_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces_module, "KEYED_PART_CHARGE", 64 * KIB)  # so that few are enough

    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"p"])
            for _ in range(12):
                assert (await put_parts(client, space, session, chunk, 256)).outcomes == [m.KEYED_STORED]
                assert (await stat_of(client)).entries <= QUOTA // (256 * 64 * KIB)
            await trio.sleep(11)
            assert 0.7 * QUOTA <= charge_of_space(record_of(store, space)) <= 0.99 * QUOTA
            assert store.keyed.garbage.is_set()
            assert not (await fsck(client))["damage"]

    run(main)


def test_a_value_may_have_as_many_parts_as_its_space_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces_module, "KEYED_PART_CHARGE", MIB)

    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space, session = await space_of(client, quota_bytes=QUOTA), await session_of(client)
            (chunk,) = await store_chunks(client, session, [b"p"])
            most = int(QUOTA * 0.99) // (MIB + 1)
            assert (await put_parts(client, space, session, chunk, most)).outcomes == [m.KEYED_STORED]
            assert (await put_parts(client, space, session, chunk, most + 1)).outcomes == [m.KEYED_FAILED]
            await trio.sleep(11)
            assert (await stat_of(client)).entries == 1

    run(main)


def without_count(txn: Transaction, space: int) -> None:
    """Write the space's record as an earlier release did."""
    record = find_space(txn, space).pack()
    txn.put(Table.KEYED, space_key(space), msgspec.msgpack.encode(msgspec.msgpack.decode(record)[:9]))


@pytest.mark.parametrize("takes_writes", [True, False])
def test_a_store_of_an_earlier_release_is_counted_when_it_is_opened(
    monkeypatch: pytest.MonkeyPatch, takes_writes: bool
) -> None:
    disk = SimDisk(random.Random(1))
    monkeypatch.setattr(part_counts_module, "GC_BATCH", 5)
    spaces: list[int] = []

    async def earlier() -> None:
        async with simulated_store(disk) as store:
            client = client_of(store)
            for name in ("one", "two"):
                space = (await ask(client, m.SpaceOpen(name, QUOTA), m.SpaceStat)).number
                spaces.append(space)
                session = await session_of(client)
                (chunk,) = await store_chunks(client, session, [b"x" * 100])
                for count in (1, 3, 256, *([2] * 9)):
                    await put_parts(client, space, session, chunk, count)
            for space in spaces:
                await tamper(store, partial(without_count, space=space))
                assert record_of(store, space).parts == NOT_COUNTED

    async def later() -> None:
        original = Metadata.commit

        async def commit(self: Metadata, decide: object, *, durable: bool = True, grows: bool = False) -> object:
            if not takes_writes and getattr(decide, "func", None) is part_counts_module._record:
                raise StoreReadOnly("the disk takes no writes")
            return await original(self, decide, durable=durable, grows=grows)  # type: ignore[arg-type]

        monkeypatch.setattr(Metadata, "commit", commit)
        async with simulated_store(disk) as store:
            client = client_of(store)
            for space in spaces:
                record = record_of(store, space)
                assert record.entries == 12
                assert record.parts == (278 if takes_writes else NOT_COUNTED)
            await put_keys(client, spaces[0], {b"new": [b"1", b"22"]})
            await ask(client, m.KeyedRemove(spaces[0], [b"new"]), m.KeyedOutcomes)
            assert record_of(store, spaces[0]).parts == (278 if takes_writes else NOT_COUNTED)
            assert not (await fsck(client))["damage"]

    run(earlier)
    run(later)


def test_fsck_notices_a_wrong_count_of_parts() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space = await space_of(client)
            await put_keys(client, space, {b"k": [b"a" * 10, b"b" * CHUNK_BYTES]})

            def alter(txn: Transaction) -> None:
                wrong = msgspec.structs.replace(find_space(txn, space), parts=1)
                txn.put(Table.KEYED, space_key(space), wrong.pack())

            await tamper(store, alter)
            report = await fsck(client)
            assert [finding["code"] for finding in report["findings"]] == ["keyed-usage-wrong"]

    run(main)
