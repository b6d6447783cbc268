"""Two mounts that work in one folder at once: nothing that was closed is lost, torn, or back."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakefs import connect
from tests.mount.place import pattern
from tests.mount.shared import load
from tests.mount.shared.ground import OVER, SharedMounts, shared_mounts
from tests.mount.shared.worker import Worker, together
from tests.mount.test_close_to_open import beside, both
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import catch_up

pytestmark = [pytest.mark.slow, pytest.mark.fuse]
ONCE = [OVER[0], *(pytest.param(over, marks=pytest.mark.thorough) for over in OVER[1:])]
"""The engine decides who was first, and the kernel who is served: over TCP all is as over a Unix socket, but later."""


@pytest.fixture(scope="module", params=ONCE)
def mounts(request: pytest.FixtureRequest) -> Iterator[SharedMounts]:
    """An engine, two mounts, and a process that works on each."""
    with shared_mounts(request.param) as mounted:
        yield mounted


def test_folders_are_made_by_two_mounts_at_once(mounts: SharedMounts, here: Path, there: Path) -> None:
    assert together(mounts.workers, load.make_folders, both(here, there), 100) == [[], []]
    catch_up(here, there)


def test_one_of_all_mounts_makes_a_name(mounts: SharedMounts, here: Path, there: Path) -> None:
    won = together(mounts.workers, load.make_new, both(here, there), 200)
    assert sorted(won[0] + won[1]) == list(range(200))


@pytest.mark.parametrize("function", [load.append_lines, load.append_by_one_handle])
def test_lines_are_appended_by_two_mounts_at_once(
    mounts: SharedMounts, here: Path, there: Path, function: Callable[..., list[str]]
) -> None:
    assert together(mounts.workers, function, both(here, there), "log", 100) == [[], []]
    assert load.lines_wrong((there / "log").read_bytes(), 2, 100) == ""
    assert load.lines_wrong((here / "log").read_bytes(), 2, 100) == ""


@pytest.mark.parametrize("way", ["overwrite", "edit", "save", "put"])
def test_an_open_of_a_name_that_always_exists_finds_it_whole(
    mounts: SharedMounts, here: Path, there: Path, tmp_path: Path, way: str
) -> None:
    (here / "file").write_bytes(pattern(1, load.SAVED_BYTES))
    catch_up(here, there)
    reader, writer = mounts.workers
    with beside(reader, load.read_beside, both(here, there), tmp_path / "stop") as results:
        if way == "put":
            with connect(mounts.served.server) as client:
                for number in range(200):
                    client.put(f"bucket/{here.name}/file", pattern(number % 50 + 1, load.SAVED_BYTES))
                    threading.Event().wait(0.01)
        else:
            writer.call(load.overwrite, 1, both(here, there), way, 200)
    [(opened, wrong)] = results
    assert wrong == [], f"{len(wrong)} of {opened}"
    assert opened > 100


def test_folders_are_removed_beside_makes_in_them(
    mounts: SharedMounts, here: Path, there: Path, tmp_path: Path
) -> None:
    maker, remover = mounts.workers
    with beside(maker, load.make_beside_removals, both(here, there), tmp_path / "stop") as results:
        wrong = remover.call(load.remove_again_and_again, 1, both(here, there), 60)
    assert (results, wrong) == ([[]], [])
    eventually(lambda: _removed(there / "tree") and _removed(here / "tree"), "the folder cannot be removed")
    eventually(lambda: os.listdir(here) == [], "the folder is back")
    assert os.listdir(there) == []


def test_a_folder_that_is_renamed_away_is_not_made_again_by_makes_in_it(
    mounts: SharedMounts, here: Path, there: Path, tmp_path: Path
) -> None:
    folder_is_not_back(mounts.workers, both(here, there), tmp_path / "stop")


def folder_is_not_back(workers: list[Worker], folders: list[str], stop: Path) -> None:
    """One rank makes names in a folder while the other renames it away and makes it anew."""
    with beside(workers[0], load.make_in_one_folder, folders, stop) as results:
        wrong = workers[1].call(load.rename_away, 1, folders, 150)
    assert (results, wrong) == ([[]], [])


def _removed(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_all_at_once_keeps_what_was_closed(mounts: SharedMounts, here: Path, there: Path, seed: int) -> None:
    load.prepare_mixed(here)
    catch_up(here, there)
    folders = both(here, there)
    assert together(mounts.workers, load.mixed, folders, seed, 150) == [[], []]
    done = together(mounts.workers, load.noted, folders)
    catch_up(here, there)
    assert load.mixed_wrong(there, done) == []
