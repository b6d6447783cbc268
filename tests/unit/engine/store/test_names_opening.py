"""Names without content as a store: opened, served and stopped as a whole one, on one simulated disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest
import trio

from engine.coordinator.coordinator import Put
from engine.coordinator.names_coordinator import open_names_coordinator
from engine.format.features import Feature, ReadOnlyFeature
from engine.process.embedded import EmbeddedEngine
from engine.requests import table
from engine.requests.dispatch import Dispatch
from engine.store.keyed_store import KeyedStore
from engine.store.names_opening import open_names_store
from engine.superblock.superblock import OpenedStore, read_superblock, write_superblock
from lakefs.errors import IndexDamaged, StoreLocked, StoreReadOnly, StoreUnusable
from lakefs.host.offload import InlineOffload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.sim.world.clock import SimClock
from tests.sim.world.disk import SimCrashed, SimDisk
from tests.store_rig import SMALL_SIZES, ask, run
from tests.unit.engine.process.names_machine import bind, keys_of
from tests.unit.support.metadata_rig import NAMES_OF


@asynccontextmanager
async def opened(disk: SimDisk, *, create: bool = True, verify_index: bool = False) -> AsyncIterator[KeyedStore]:
    async with open_names_store(
        disk,
        SimClock(),
        InlineOffload(),
        cluster_id=NAMES_OF,
        create=create,
        verify_index=verify_index,
        sizes=SMALL_SIZES,
        index_committed=disk.note_index_sync,
    ) as store:
        yield store


def spaces_of(store: KeyedStore) -> EngineClient:
    """Return a client that is served spaces."""
    service = Dispatch(store, (table.about(store), table.spaces(store)), watches=False, offers="spaces are kept here")
    return EmbeddedEngine(service, descriptors=False)


def test_names_are_stopped_cleanly_or_as_a_crash_leaves_them() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with opened(disk) as store:
            await bind(store, "1")
            assert read_superblock(disk).clean_sequence is None
            with pytest.raises(StoreLocked):
                async with opened(disk):
                    pass
        superblock = read_superblock(disk)
        assert superblock.clean_sequence == store.metadata.durable_sequence
        assert superblock.incompat_features == Feature.CLUSTER | Feature.CLUSTER_NAMES
        assert superblock.cluster_id == NAMES_OF
        with pytest.raises(ValueError, match="planted"):
            async with opened(disk) as store:
                await bind(store, "2")
                raise ValueError("planted")
        assert read_superblock(disk).clean_sequence is None
        async with opened(disk, create=False) as store:
            assert await keys_of(store) == ["1", "2"]
        assert not disk.open_files

    run(main)


def test_a_crash_at_any_step_of_opening_or_stop_loses_no_acknowledged_name() -> None:
    async def live(disk: SimDisk, expected: list[str], new: str) -> None:
        async with opened(disk, verify_index=True) as store:
            assert set(await keys_of(store) if expected else []) >= set(expected)
            await bind(store, new)
            expected.append(new)

    for step in range(1, 300, 5):
        disk, expected = SimDisk(step), list[str]()
        run(lambda: live(disk, expected, "1"))  # noqa: B023 - called at once
        disk.crash_at = disk.operation_count + step
        try:
            run(lambda: live(disk, expected, "2"))  # noqa: B023
        except* SimCrashed:
            pass
        else:
            assert step > 20
            break
        disk = disk.crash()
        run(lambda: live(disk, expected, "3"))  # noqa: B023


def test_names_are_made_only_with_create_and_an_unknown_feature_is_refused() -> None:
    async def main() -> None:
        disk = SimDisk()
        with pytest.raises(StoreUnusable, match="no store here"):
            async with opened(disk, create=False):
                pass
        async with opened(disk):
            pass
        write_superblock(disk, replace(read_superblock(disk), read_only_features=1 << 40))
        with pytest.raises(StoreReadOnly, match="features that this release does not know"):
            async with opened(disk):
                pass
        assert not disk.open_files

    run(main)


def test_the_coordinator_stands_on_them() -> None:
    async def main() -> None:
        disk = SimDisk()
        for number in range(2):
            async with (
                opened(disk) as store,
                open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features) as coordinator,
            ):
                if number == 0:
                    await coordinator.transact([], [Put(b"key", b"value")])
                found = await coordinator.get(b"key")
                assert found.entry is not None
                assert found.entry.value == b"value"

    run(main)


def test_a_damaged_index_is_rebuilt_while_names_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(SimDisk(), verify_index=True) as store:
            await bind(store, "1")
            await store.index_looked_at.wait()

            async def damaged() -> int:
                monkeypatch.undo()
                raise IndexDamaged("planted")

            index = store.metadata._tables.index
            monkeypatch.setattr(store.metadata, "verify_index", damaged)
            store.metadata.index_suspect.set()
            with trio.fail_after(60):
                while store.metadata._tables.index is index:  # noqa: ASYNC110 - on a clock that jumps
                    await trio.sleep(0.1)
                await store.index_looked_at.wait()
            assert store.index_verified
            assert await keys_of(store) == ["1"]

    run(main)


def test_a_removed_space_is_forgotten_and_the_feature_of_spaces_with_it() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with opened(disk) as store:
            await ask(spaces_of(store), m.SpaceOpen("cache"), m.SpaceStat)
            assert store.features.has(ReadOnlyFeature.KEYED)
        async with opened(disk) as store:
            assert store.keyed.used.is_set()
            await ask(spaces_of(store), m.SpaceRemove("cache"), m.Done)
            await trio.sleep(30)
        async with opened(disk) as store:
            await bind(store, "1")
            await trio.sleep(30)
            assert not store.features.has(ReadOnlyFeature.KEYED)

    run(main)


def test_the_reserve_is_filled_up_again_when_there_is_room() -> None:
    async def main() -> None:
        async with opened(SimDisk()) as store:
            reserve = store.features._reserve
            held = reserve.held_bytes
            assert reserve.release()
            assert reserve.held_bytes < held
            await trio.sleep(61)
            assert reserve.held_bytes == held

    run(main)


def test_the_caller_is_asked_when_the_lock_is_held() -> None:
    seen: list[bool] = []

    @contextmanager
    def while_locked(opened_store: OpenedStore) -> Iterator[None]:
        seen.append(opened_store.created)
        yield
        seen.append(False)

    async def main() -> None:
        async with open_names_store(
            SimDisk(),
            SimClock(),
            InlineOffload(),
            cluster_id=NAMES_OF,
            create=True,
            sizes=SMALL_SIZES,
            while_locked=while_locked,
        ):
            assert seen == [True]
        assert seen == [True, False]

    run(main)
