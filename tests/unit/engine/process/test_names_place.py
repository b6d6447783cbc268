"""Names of a lake in real folders: made, lost, made anew, and killed in the midst of commits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest
import trio

from engine.host.local_disk import LocalDisk
from engine.mirror import copy_keeper
from engine.mirror.copy_list import read_copy_file
from engine.process.mirrored_names import LocalNames
from engine.process.names_place import IsUsable, LocalFolder, always, lake_of_names, open_local_names
from engine.store.local_store import open_local_store
from lakefs.errors import StoreLocked, StoreUnusable
from lakefs.ids import CopyId
from tests.e2e.served import environment
from tests.store_rig import SMALL_SIZES
from tests.unit.engine.process.names_machine import bind, keys_of
from tests.unit.support.metadata_rig import NAMES_OF


def device_folders(root: Path, count: int) -> list[Path]:
    """Return the folders of names on so many devices."""
    found = [root / f"device-{number}" / "names" for number in range(count)]
    for folder in found:
        folder.parent.mkdir(exist_ok=True)
    return found


def copy_id(folder: Path) -> CopyId:
    return read_copy_file(LocalDisk(folder)).copy_id


@asynccontextmanager
async def opened(
    folders: Sequence[Path],
    *,
    losses: int = 2,
    is_new: bool = False,
    without: Sequence[CopyId] = (),
    is_usable: IsUsable = always,
) -> AsyncIterator[LocalNames]:
    async with open_local_names(
        folders,
        lake_id=NAMES_OF,
        protection_losses=losses,
        is_new=is_new,
        without=frozenset(without),
        is_usable=is_usable,
        sizes=SMALL_SIZES,
    ) as names:
        yield names


async def until_good(names: LocalNames, count: int) -> list[str]:
    """Wait until so many copies are good; return the names of their devices."""
    with trio.fail_after(30):
        while True:
            good = [copy["folder"] for copy in names.state()["copies"] if copy["state"] == "good"]
            if len(good) == count:
                return sorted(Path(folder).parent.name for folder in good)
            await trio.sleep(0.02)


def test_a_key_is_found_when_a_folder_was_removed_and_its_copy_is_made_anew_in_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        folders = device_folders(tmp_path, 3)
        async with opened(folders, is_new=True) as names:
            await bind(names.store, "k")
            assert lake_of_names(folders) == lake_of_names(folders[1:]) == NAMES_OF
            assert lake_of_names([tmp_path]) is None
            with pytest.raises(StoreLocked):
                async with opened(folders):
                    pass
        folders[0].rename(tmp_path / "lost")  # the index is in it
        async with opened(folders) as names:
            assert await keys_of(names.store) == ["k"]
            assert names.store.metadata.rebuilt_because
            assert names.state()["index_in"] == str(folders[1])
            assert await until_good(names, 3) == ["device-0", "device-1", "device-2"]
        async with opened([folders[0], folders[2]], is_new=True) as names:
            assert await keys_of(names.store) == ["k"]

    trio.run(main)


def test_a_device_that_is_not_mounted_gets_no_copy_and_another_does(tmp_path: Path) -> None:
    async def main() -> None:
        folders = device_folders(tmp_path, 4)
        async with opened(folders, is_new=True) as names:
            await bind(names.store, "k")
        folders[1].parent.rename(tmp_path / "unmounted")
        assert LocalFolder(folders[1]).device() is None
        async with opened(folders) as names:
            assert await until_good(names, 3) == ["device-0", "device-2", "device-3"]
        assert not folders[1].parent.exists()

    trio.run(main)


def test_a_device_that_is_taken_away_gets_no_copy_in_the_empty_folder_that_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_keeper, "LOOK_EVERY_S", 0.05)

    def has_member(device: Path) -> bool:
        return (device / "member").exists()

    async def main() -> None:
        folders = device_folders(tmp_path, 3)
        for folder in folders:
            (folder.parent / "member").touch()
        device = folders[1].parent
        async with opened(folders, is_new=True, is_usable=has_member) as names:
            device.rename(tmp_path / "unmounted")
            device.mkdir()
            assert await until_good(names, 2) == ["device-0", "device-2"]
            for number in range(20):
                await bind(names.store, f"{number}")
                await trio.sleep(0.02)
            assert list(device.iterdir()) == []
            (device / "member").touch()
            assert await until_good(names, 3) == ["device-0", "device-1", "device-2"]

    trio.run(main)


def test_a_stale_folder_is_renamed_and_one_that_was_renamed_before_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        folders = device_folders(tmp_path, 2)
        async with opened(folders, losses=1, is_new=True):
            pass
        for key in ("1", "2"):
            stale = copy_id(folders[1])
            async with opened(folders, losses=1, without=[stale]) as names:
                await bind(names.store, key)
                await until_good(names, 2)
            assert copy_id(folders[1].with_name("names.stale")) == stale
        assert len(list(folders[1].parent.iterdir())) == 2

    trio.run(main)


def test_folders_made_by_an_opening_that_fails_are_removed_if_nobody_has_seen_them(tmp_path: Path) -> None:
    class Failed(Exception):
        pass

    async def fail(folders: list[Path], *, is_kept: bool) -> None:
        with pytest.raises(Failed):
            async with open_local_names(
                folders, lake_id=NAMES_OF, protection_losses=1, is_new=True, is_kept=lambda: is_kept, sizes=SMALL_SIZES
            ):
                raise Failed

    async def main() -> None:
        folders = device_folders(tmp_path, 2)
        await fail(folders, is_kept=False)
        assert not any(folder.exists() for folder in folders)
        await fail(folders, is_kept=True)
        assert all(folder.exists() for folder in folders)
        await fail(folders, is_kept=False)
        assert all(folder.exists() for folder in folders)

    trio.run(main)


def test_a_folder_of_names_is_not_opened_as_a_store_nor_a_store_as_names(tmp_path: Path) -> None:
    async def main() -> None:
        folders = device_folders(tmp_path, 1)
        async with opened(folders, losses=0, is_new=True):
            pass
        for cluster_id in (bytes(16), NAMES_OF):
            with pytest.raises(StoreUnusable, match="one of the copies of the names of the lake"):
                async with open_local_store(folders[0], cluster_id=cluster_id):
                    pass
            folder = tmp_path / cluster_id.hex()
            async with open_local_store(folder, cluster_id=cluster_id):
                pass
            with pytest.raises(StoreUnusable, match="is not empty"):
                async with opened([folder], is_new=True):
                    pass
        async with opened(folders, losses=0):
            pass

    trio.run(main)


def test_a_copy_that_is_made_while_keys_are_bound_has_all_of_them(tmp_path: Path) -> None:
    async def main() -> None:
        folders = device_folders(tmp_path, 2)
        async with opened(folders, losses=1, is_new=True) as names:
            pass
        first = copy_id(folders[0])
        bound: list[str] = []
        async with opened(folders, losses=1, without=[copy_id(folders[1])]) as names, trio.open_nursery() as nursery:

            async def bind_for_ever() -> None:
                while True:
                    await bind(names.store, f"{len(bound):03}")
                    bound.append(f"{len(bound):03}")

            nursery.start_soon(bind_for_ever)
            await until_good(names, 2)
            nursery.cancel_scope.cancel()
        assert len(bound) > 10
        async with opened(folders[1:], losses=1, without=[first]) as names:
            assert set(await keys_of(names.store)) >= set(bound)
            await names.store.metadata.verify_journal()

    trio.run(main)


def test_a_killed_process_loses_no_acknowledged_name_on_either_copy(tmp_path: Path) -> None:
    folders = device_folders(tmp_path, 2)
    command = [sys.executable, "-m", "tests.unit.engine.process.names_writer", *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as writer:
        assert writer.stdout is not None
        seen = list(islice(writer.stdout, 120))
        os.kill(writer.pid, signal.SIGKILL)
        lines = [line for line in [*seen, *writer.stdout] if line.startswith("bound") and line.endswith("\n")]
    acknowledged = {line.split()[1] for line in lines}
    assert len(acknowledged) >= 100
    ids = [copy_id(folder) for folder in folders]

    async def look(number: int) -> set[str]:
        async with opened([folders[number]], losses=1, without=[ids[1 - number]]) as names:
            return set(await keys_of(names.store))

    for number in (0, 1):
        assert trio.run(look, number) >= acknowledged
