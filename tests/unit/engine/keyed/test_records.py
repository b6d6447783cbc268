"""Records of keyed blobs in a store: the feature that they set, and what fsck says of those that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.format.features import ReadOnlyFeature
from engine.format.keyed import expiry_key, name_key, space_key, value_key
from engine.format.layouts import Table
from engine.superblock.superblock import read_superblock
from engine.tables.views import Transaction
from lakefs.wire import messages as m
from tests.contract.test_requests_keyed import put_keys, space_of
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, fsck, run, simulated_store, tamper


def test_the_first_space_closes_a_store_to_earlier_releases() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await ask(client, m.SpaceList(), m.Spaces)
            assert read_superblock(disk).read_only_features == 0
            await space_of(client)
            assert read_superblock(disk).read_only_features == ReadOnlyFeature.KEYED
            assert read_superblock(disk).incompat_features == 0
        assert read_superblock(disk).read_only_features == ReadOnlyFeature.KEYED
        async with simulated_store(disk) as store:
            assert store.keyed.used.is_set()

    run(main)


def value_without_space(txn: Transaction, space: int) -> None:
    value = txn.get(Table.KEYED, value_key(space, b"k"))
    assert value is not None
    txn.put(Table.KEYED, value_key(space + 1, b"k"), value)


def value_that_is_cut(txn: Transaction, space: int) -> None:
    value = txn.get(Table.KEYED, value_key(space, b"k"))
    assert value is not None
    txn.put(Table.KEYED, value_key(space, b"k"), value[:-1])


def value_without_expiry(txn: Transaction, space: int) -> None:
    (found,) = [key for key, _ in txn.scan(Table.KEYED, b"\x04", b"\x05")]
    txn.delete(Table.KEYED, found)


def expiry_without_value(txn: Transaction, space: int) -> None:
    txn.put(Table.KEYED, expiry_key(1 << 62, space, b"other"), b"")


def name_without_space(txn: Transaction, space: int) -> None:
    txn.put(Table.KEYED, name_key("nobody"), (space + 1).to_bytes(4, "big"))


def space_of_a_later_release(txn: Transaction, space: int) -> None:
    value = txn.get(Table.KEYED, space_key(space))
    assert value is not None
    txn.put(Table.KEYED, space_key(space), value[:1] + b"\x02" + value[2:])


@pytest.mark.parametrize(
    ("alter", "code", "name"),
    [
        (value_without_space, "keyed-misfiled", "space 2, key 6b"),
        (value_that_is_cut, "keyed-unreadable", "space 'space', key 6b"),
        (value_without_expiry, "keyed-misfiled", "space 'space', key 6b"),
        (expiry_without_value, "keyed-misfiled", "expiry 40"),
        (name_without_space, "keyed-misfiled", "space 'nobody'"),
        (space_of_a_later_release, "keyed-unreadable", "space 1"),
    ],
)
def test_fsck_names_records_that_do_not_fit(alter: Callable[[Transaction, int], None], code: str, name: str) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            space = await space_of(client, ttl_s=1000)
            await put_keys(client, space, {b"k": [b"a value"]})
            assert not (await fsck(client))["damage"]
            await tamper(store, lambda txn: alter(txn, space))
            report = await fsck(client)
            found = [(finding["code"], finding["object"]) for finding in report["findings"]]
            assert any(told == code and what.startswith(name) for told, what in found), found

    run(main)
