"""The feature of keyed blobs: told when it is set, refused by name, cleared when nothing has a record of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import structlog
import trio

from engine.format.features import KNOWN_READ_ONLY, ReadOnlyFeature
from engine.format.layouts import Table
from engine.journal.reader import decode_records, find_end, list_journal, read_groups
from engine.metadata.checkpoint import checkpoints, read_checkpoint
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.superblock import superblock as superblocks
from engine.superblock.superblock import read_superblock
from lakefs.errors import OperationalError, SpaceNotFound, StoreFull, StoreReadOnly, UserError
from lakefs.ids import Sequence
from lakefs.wire import messages as m
from tests.contract.test_requests_keyed import put_keys, space_of
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.sim.world.world import causes_of
from tests.store_rig import ask, client_of, fsck, run, simulated_store

LAST_STEPS = 30
"""Steps of the disk from before the next number's removal to the end of the first life."""
ROUNDS_S = 16.0
"""Time in which upkeep purges a space, and removes the next number in a later round."""


def is_set(disk: SimDisk) -> bool:
    return bool(read_superblock(disk).read_only_features & ReadOnlyFeature.KEYED)


def keyed_records(disk: SimDisk) -> Iterator[str]:
    """Yield the file of each record of keyed blobs that an opening may read."""
    store_id = read_superblock(disk).store_id
    for checkpoint in checkpoints(disk):
        with closing(read_checkpoint(disk, checkpoint.path, store_id)) as reader:
            yield from (checkpoint.path for table, _, _ in reader.records() if table is Table.KEYED)
    files = list_journal(disk, store_id)
    if files:
        before, end = Sequence(files[0].first_sequence - 1), find_end(disk, files, Sequence(0)).sequence
        for group in read_groups(disk, files, before, end):
            changed = decode_records(group.body, group.record_count)
            yield from (group.path for mutation in changed if mutation[1] is Table.KEYED)


async def remove_spaces(store: Store) -> None:
    client = client_of(store)
    for space in (await ask(client, m.SpaceList(), m.Spaces)).spaces:
        await ask(client, m.SpaceRemove(space.name), m.Done)
    await trio.sleep(ROUNDS_S)


async def check_is_clean(client: EmbeddedEngine) -> None:
    assert (await fsck(client))["findings"] == []


async def one_life(disk: SimDisk) -> int:
    """Open a space with a value, and remove it; returns its number."""
    async with simulated_store(disk) as store:
        number = await space_of(client_of(store))
        await put_keys(client_of(store), number, {b"k": [b"v"]})
        await remove_spaces(store)
        return number


def test_the_bit_goes_with_the_first_start_after_the_last_space_was_collected() -> None:
    async def main() -> None:
        disk = SimDisk()
        number = await one_life(disk)
        assert is_set(disk)  # the journal file of that life has records of it
        assert list(keyed_records(disk))
        async with simulated_store(disk) as store:
            await trio.sleep(ROUNDS_S)
            assert not is_set(disk)
            assert not list(keyed_records(disk))
            assert store.features.names() == []
            assert (await fsck(client_of(store)))["damage"] == 0
        assert not is_set(disk)
        async with simulated_store(disk) as store:
            with pytest.raises(SpaceNotFound):
                await put_keys(client_of(store), number, {b"k": [b"other"]})
            assert await space_of(client_of(store)) > number  # a client may still hold the old number
            assert is_set(disk)
        assert is_set(disk)

    run(main)


def test_the_bit_stays_while_there_is_a_space_and_while_one_is_being_opened() -> None:
    async def main() -> None:
        disk = SimDisk()
        await one_life(disk)
        async with simulated_store(disk) as store, store.features.using_spaces() as is_first:
            assert not is_first
            await trio.sleep(ROUNDS_S)
            assert is_set(disk)
        async with simulated_store(disk) as store:
            await space_of(client_of(store))
            await trio.sleep(2 * ROUNDS_S)
            assert is_set(disk)
        async with simulated_store(disk) as store:
            await trio.sleep(2 * ROUNDS_S)
            assert is_set(disk)
            assert store.features.names() == ["spaces of keyed blobs (lake kv)"]

    run(main)


def test_a_space_that_is_opened_beside_the_clearing_has_its_bit() -> None:
    async def main(wait_s: float) -> None:
        disk = SimDisk()
        await one_life(disk)
        async with simulated_store(disk) as store:
            await trio.sleep(wait_s)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.features.end_unused_spaces)
                nursery.start_soon(space_of, client_of(store), "late")
            assert is_set(disk)
            assert list(keyed_records(disk))

    for wait_s in (0.0, 0.001, 0.01, 1.0, ROUNDS_S):
        run(lambda wait_s=wait_s: main(wait_s))  # type: ignore[misc]


def test_a_crash_at_any_step_leaves_the_bit_or_no_record() -> None:
    begins = [0]

    def life(crash_at: int) -> SimDisk:
        """Live with one space, from its removal on with a power loss at that step; 0: with none."""
        disk = SimDisk(7, crash_at=crash_at or None)

        async def main() -> None:
            begins[0] = await one_life(disk) and disk.operation_count
            async with simulated_store(disk):
                await trio.sleep(ROUNDS_S)

        if not crash_at:
            run(main)
            return disk
        with pytest.raises(BaseException) as caught:
            run(main)
        causes = causes_of(caught.value)
        assert any(isinstance(cause, SimCrashed) for cause in causes)
        assert all(isinstance(cause, SimCrashed | OperationalError) for cause in causes)
        return disk

    async def go_on(disk: SimDisk) -> None:
        async with simulated_store(disk) as store:
            await remove_spaces(store)
            assert (await fsck(client_of(store)))["damage"] == 0
        async with simulated_store(disk):
            await trio.sleep(ROUNDS_S)

    whole = life(0)
    assert not is_set(whole)
    seen = set()
    for crash_at in range(begins[0] - LAST_STEPS, whole.operation_count + 1):
        end = SimDisk.crash if crash_at % 3 else SimDisk.kill
        disk = end(life(crash_at))
        assert is_set(disk) or not list(keyed_records(disk)), crash_at
        seen.add(is_set(disk))
        run(partial(go_on, disk))
        assert not is_set(disk), crash_at
        assert not list(keyed_records(disk)), crash_at
    assert seen == {True, False}


@pytest.mark.parametrize("operation", ["rename", "sync_folder"])
@pytest.mark.parametrize("opens_again", [True, False])
def test_a_superblock_that_cannot_be_written_does_not_open_a_store_with_spaces(
    operation: str, opens_again: bool
) -> None:
    async def main() -> None:
        disk = SimDisk()
        await one_life(disk)
        async with simulated_store(disk) as store:
            disk.fail_next(operation, StoreFull("no room"), path="superblock" if operation == "rename" else "", skip=1)
            store.features._reserve = None  # type: ignore[assignment]  # which would give room
            await trio.sleep(ROUNDS_S)
            assert not disk.faults_to_come
            if opens_again:
                await space_of(client_of(store))
            assert is_set(disk) or not list(keyed_records(disk))
        assert is_set(disk) == opens_again
        assert is_set(disk) == bool(list(keyed_records(disk)))

    run(main)


def test_an_earlier_release_is_refused_by_name_and_opens_the_store_when_the_bit_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        disk = SimDisk()
        await one_life(disk)
        with monkeypatch.context() as earlier:
            earlier.setattr(superblocks, "KNOWN_READ_ONLY", KNOWN_READ_ONLY & ~ReadOnlyFeature.KEYED)
            with pytest.raises(StoreReadOnly, match=r"spaces of keyed blobs \(lake kv\), known from release 0.1.0 on"):
                async with simulated_store(disk):
                    pass
        async with simulated_store(disk):
            await trio.sleep(ROUNDS_S)
        with monkeypatch.context() as earlier:
            earlier.setattr(superblocks, "KNOWN_READ_ONLY", KNOWN_READ_ONLY & ~ReadOnlyFeature.KEYED)
            async with simulated_store(disk) as store:
                assert (await fsck(client_of(store)))["damage"] == 0

    run(main)


def test_the_first_space_is_told_once_in_the_log_and_to_the_client() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            with structlog.testing.capture_logs() as logs:
                first = await ask(client, m.SpaceOpen("a"), m.SpaceStat)
                others = [await ask(client, m.SpaceOpen(name), m.SpaceStat) for name in ("a", "b")]
            assert first.is_first
            assert not any(stat.is_first for stat in others)
            told = [entry["event"] for entry in logs if "lake kv" in entry["event"]]
            assert told == [
                "the store has spaces of keyed blobs (lake kv) from now on: releases before 0.1.0 do not open it"
            ]

    run(main)


def test_a_first_space_during_a_check_is_no_damage() -> None:
    async def main() -> None:
        for steps in range(60):
            async with simulated_store() as store, trio.open_nursery() as nursery:
                client = client_of(store)
                nursery.start_soon(check_is_clean, client)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                await space_of(client)

    run(main)


def test_a_superblock_without_the_bit_beside_records_is_found_and_mended_by_the_next_start() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with simulated_store(disk) as store:
            await space_of(client_of(store))
            store.features.superblock = replace(store.features.superblock, read_only_features=0)
            report = await fsck(client_of(store))
            assert [found["code"] for found in report["findings"]] == ["superblock-feature-missing"]
        assert not is_set(disk)
        async with simulated_store(disk) as store:
            assert is_set(disk)
            assert store.keyed.used.is_set()
            assert (await fsck(client_of(store)))["damage"] == 0

    run(main)


def test_a_release_that_does_not_know_special_nodes_does_not_open_a_store_that_has_had_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        disk = SimDisk(8)
        async with simulated_store(disk) as store:
            await ask(client_of(store), m.BucketCreate("bkt"), m.Buckets)
            assert not read_superblock(disk).read_only_features
            await ask(client_of(store), m.MakeNode("bkt", "pipe", 5, m.ObjectAttributes()), m.NameResults)
            assert read_superblock(disk).read_only_features == ReadOnlyFeature.SPECIAL_NODES
        async with simulated_store(disk) as store:
            await check_is_clean(client_of(store))
        monkeypatch.setattr(superblocks, "KNOWN_READ_ONLY", KNOWN_READ_ONLY & ~ReadOnlyFeature.SPECIAL_NODES)
        with pytest.raises(StoreReadOnly, match="pipes, sockets and device nodes"):
            async with simulated_store(disk):
                pass

    run(main)


def test_what_is_refused_leaves_the_store_open_to_earlier_releases() -> None:
    async def main() -> None:
        disk = SimDisk(8)
        async with simulated_store(disk) as store:
            client = client_of(store)
            await ask(client, m.BucketCreate("bkt"), m.Buckets)
            for bucket, key, kind, device in (
                ("bkt", "a", 9, 0),
                ("bkt", "a", 2, 0),
                ("bkt", "a", 5, 1),
                ("bkt", "a/", 5, 0),
                ("missing", "a", 5, 0),
            ):
                with pytest.raises(UserError):
                    await client.call(m.MakeNode(bucket, key, kind, m.ObjectAttributes(), device))
            for request in (
                m.BucketSet("missing", versioning="enabled"),
                m.BucketSet("bkt", versioning="sometimes"),
                m.UploadCreate("missing", "a", m.ObjectAttributes()),
            ):
                with pytest.raises(UserError):
                    await client.call(request)
            assert not read_superblock(disk).read_only_features

    run(main)
