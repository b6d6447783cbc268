"""Any two trees: after a sync with removal the target is the source, and a source without files changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.names import Name
from lakefs.sync.report import Done, SyncObserver, SyncTotals
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.sync.sync import SyncOptions, sync

NAMES = ["a", "a.b", "a/x", "a/y/z", "a!", "b", "b/x", "c/d", "c/d/e", "c/d.e"]
TREES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([b"", b"1", b"22"]), max_size=6)
BUCKET = "trees"
TIME_NS = 1_500_000_000_000_000_000


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    folder = tmp_path_factory.mktemp("lake") / "store"
    folder.mkdir()
    with open_lake(folder) as opened:
        opened.create_bucket(BUCKET)
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local") / "tree"


def as_paths(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Return the names that can be files of one folder: none is a folder of another."""
    return {name: content for name, content in tree.items() if not any(each.startswith(name + "/") for each in tree)}


def fill_folder(root: Path, tree: dict[str, bytes]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(TIME_NS, TIME_NS + len(content)))


def fill_lake(lake: Lake, key: str, tree: dict[str, bytes]) -> None:
    for entry in list(lake.ls(f"{BUCKET}/{key}")):
        lake.remove(f"{BUCKET}/{entry.key}")
    for name, content in tree.items():
        lake.put(f"{BUCKET}/{key}{name}", content)


def in_folder(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def in_lake(lake: Lake, key: str) -> dict[str, bytes]:
    keys = [entry.key for entry in lake.ls(f"{BUCKET}/{key}")]
    return {each[len(key) :]: lake.get(f"{BUCKET}/{each}") for each in keys if not each.endswith("/")}


def synced(lake: Lake, source: Side, target: Side) -> SyncTotals:
    driver = driver_of(lake)
    return driver.run(sync(driver.steps, source, target, SyncOptions(delete=True), SyncObserver()))


def sides(lake: Lake, folder: Path, way: str) -> tuple[Side, Side]:
    steps = driver_of(lake).steps
    if way == "up":
        return FolderSide(str(folder)), BucketSide(steps, Name(BUCKET, "to/"), may_miss=True)
    source = BucketSide(steps, Name(BUCKET, "from/"), to_folder=way == "down", may_miss=True)
    if way == "down":
        return source, FolderSide(str(folder))
    return source, BucketSide(steps, Name(BUCKET, "to/"), may_miss=True)


@pytest.mark.parametrize("way", ["up", "down", "inside"])
@given(source=TREES, target=TREES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_target_becomes_the_source(
    lake: Lake, folder: Path, way: str, source: dict[str, bytes], target: dict[str, bytes]
) -> None:
    if way != "inside":
        source = as_paths(source)
    if way == "down":
        target = as_paths(target)
        fill_lake(lake, "from/", source)
        fill_folder(folder, target)
    else:
        if way == "up":
            fill_folder(folder, source)
        else:
            fill_lake(lake, "from/", source)
        fill_lake(lake, "to/", target)
    totals = [synced(lake, *sides(lake, folder, way)) for _ in range(3)]
    found = in_folder(folder) if way == "down" else in_lake(lake, "to/")
    if not source:
        assert found == target
        assert all(bool(each.withheld) == bool(target) for each in totals)
        return
    assert found == source
    # The first empties a folder that has a file's name, the second writes the file, the third has nothing to do.
    assert (totals[2].unchanged, sum(totals[2].names.values())) == (len(source), 0)
    assert all(each.names[Done.FAILED] == 0 for each in totals)
