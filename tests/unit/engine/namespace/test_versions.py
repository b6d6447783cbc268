"""Versions beside gc, over crashes and lost indexes, and fsck's findings about damaged ones."""

from __future__ import annotations

import shutil

from engine.format.features import ReadOnlyFeature
from engine.format.layouts import Table, chunk_key, node_key
from engine.namespace.buckets import find_bucket
from engine.namespace.version_keys import group_of, order_key
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.superblock.superblock import read_superblock
from engine.tables.views import Transaction
from lakefs.ids import ChunkId, NodeId, data_chunk_id
from lakefs.wire import messages as m
from tests.contract.test_requests_versions import get, keep_versions, remove, version_put, versions
from tests.sim.world.disk import SimDisk
from tests.store_rig import ask, client_of, fsck, read, run, simulated_store, tamper
from tests.unit.engine.upkeep.test_gc import race

PAYLOAD = b"p" * 70_000
LONG = "n" * 1000


async def findings(client: EmbeddedEngine) -> dict[str, str]:
    """Return damage by the object's name."""
    report = await fsck(client)
    return {f["object"]: f["message"] for f in report["findings"] if f["severity"] == "damage"}


def test_versions_survive_a_power_loss_and_an_index_that_is_lost() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await keep_versions(client)
            kept = [await version_put(client, key, b"first of " + key.encode()) for key in ("k", LONG)]
            for key in ("k", LONG):
                await version_put(client, key, b"second")
                await remove(client, key)
            before = await versions(client)
        disk = disk.crash()
        shutil.rmtree(disk.local_path("index"), ignore_errors=True)
        async with simulated_store(disk) as store:
            client = client_of(store)
            assert store.metadata.rebuilt_because
            assert await versions(client) == before
            assert await get(client, "k", kept[0]) == b"first of k"
            assert await get(client, LONG, kept[1]) == b"first of " + LONG.encode()
            assert await findings(client) == {}

    run(main)


def test_a_store_says_that_it_has_versions_before_it_has_any() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            client = client_of(store)
            await ask(client, m.BucketCreate("bkt"), m.Buckets)
            assert not read_superblock(disk).read_only_features
            await keep_versions(client)
            assert read_superblock(disk).read_only_features == ReadOnlyFeature.VERSIONS

    run(main)


def test_fsck_names_a_damaged_version_and_one_that_lost_its_node() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await keep_versions(client)
            damaged = await version_put(client, "f/k", PAYLOAD)
            lost = await version_put(client, "f/k", b"lost")
            unread = await version_put(client, LONG, b"unread")
            await version_put(client, "f/k", b"whole")
            await version_put(client, LONG, b"whole")
            with store.metadata.view() as view:
                bucket = find_bucket(view, "bkt").node
            listed = await ask(client, m.ListVersions("bkt"), m.ListedVersions)
            nodes = {entry.version: entry.node for entry in listed.entries}

            def harm(txn: Transaction) -> None:
                txn.delete(Table.CHUNKS, chunk_key(ChunkId(data_chunk_id(PAYLOAD))))
                txn.delete(Table.NODES, node_key(NodeId(nodes[lost])))
                group = group_of(bucket, LONG.encode())
                txn.put(Table.VERSIONS, order_key(group, int(unread, 16)), b"\xc1")

            await tamper(store, harm)
            found = await findings(client)
            assert "is missing" in found.pop(f"bkt/f/k, version {damaged}")
            assert "is missing" in found.pop(f"bkt/f/k, version {lost}")
            assert any("cannot be read" in message and unread in name for name, message in found.items())

    run(main)


def test_a_version_that_is_copied_and_removed_beside_gc_leaves_its_content_to_the_copy() -> None:
    version = ""

    async def prepare(store: Store, client: EmbeddedEngine) -> None:
        nonlocal version
        await keep_versions(client)
        version = await version_put(client, "k", PAYLOAD)
        for number in range(30):
            await version_put(client, f"k{number}", b"others")
        await version_put(client, "k", b"over it")

    async def act(store: Store, client: EmbeddedEngine) -> None:
        await ask(client, m.Copy("bkt", "k", "bkt", "copy", version=version), m.NameResults)
        await remove(client, "k", version)
        await version_put(client, "copy", b"over the copy")
        (newest,) = [entry for entry in await versions(client, prefix="copy") if entry[2]]
        await remove(client, "copy", newest[1])

    async def check(store: Store, client: EmbeddedEngine) -> None:
        assert await read(client, data_chunk_id(PAYLOAD)) == PAYLOAD

    race(prepare, act, check)
