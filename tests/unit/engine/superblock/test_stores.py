"""Stores that past releases wrote hold what they held; features of the future are refused by name.

A store of each format version is committed in `tests/stores`, as a clean stop and as a kill left it.  When the format
gets another version, `python -m tests.stores` writes its store, once.
"""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.format.features import Feature
from engine.format.layouts import FORMAT_VERSION, Table
from engine.host.local_disk import LocalDisk
from engine.journal.reader import decode_records, find_end, list_journal, read_groups
from engine.process.embedded import open_lake
from engine.superblock.superblock import read_superblock, write_superblock
from lakefs.errors import StoreReadOnly, StoreUnusable
from lakefs.ids import Sequence
from tests.stores.contents import contents_of
from tests.style.source_tree import ROOT

FOLDER = ROOT / "tests" / "stores"
ARCHIVES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))
OF_A_CLUSTER = {Table.COORDINATOR}
KEYED = f"v{FORMAT_VERSION}keyed"
"""A store of the present format version with keyed blobs, a feature that the first such store has not."""

_CAREFULLY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11 has this from 3.11.4 on."""


def unpacked(name: str, folder: Path) -> Path:
    store = folder / name
    with tarfile.open(FOLDER / f"{name}.tar.xz") as packed:
        packed.extractall(store, **_CAREFULLY)
    return store


def files_of(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def listed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((FOLDER / f"{name.partition('-')[0]}.json").read_bytes())
    return found


def known(found: Any, expected: Any) -> Any:
    """Return what was found, without the fields that a later release appended."""
    if isinstance(found, dict) and isinstance(expected, list):  # fields of a version or upload, by their position
        return known(list(found.values())[: len(expected)], expected)
    if isinstance(found, dict) and isinstance(expected, dict):
        return {name: known(found[name], value) for name, value in expected.items() if name in found}
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [known(one, other) for one, other in zip(found, expected, strict=True)]
    return found


def check_holds(store: Path, expected: dict[str, Any]) -> None:
    with open_lake(store) as lake:
        found = contents_of(lake)
        assert set(found["buckets"]) == set(expected["buckets"])
        for bucket, held in expected["buckets"].items():
            assert set(found["buckets"][bucket]["names"]) == set(held["names"])
        assert known(found, expected) == expected
        assert lake.fsck(full=True)["damage"] == 0


def test_there_is_a_store_of_the_present_format_version() -> None:
    assert {f"v{FORMAT_VERSION}-killed", f"v{FORMAT_VERSION}-stopped"} <= set(ARCHIVES), "see tests/stores"


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_store_of_each_format_version_holds_what_it_held(name: str, tmp_path: Path) -> None:
    store = unpacked(name, tmp_path)
    check_holds(store, listed(name))
    check_holds(store, listed(name))  # as this release left it


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_store_of_each_format_version_is_rebuilt_without_its_index(name: str, tmp_path: Path) -> None:
    store = unpacked(name, tmp_path)
    shutil.rmtree(store / "index")
    check_holds(store, listed(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_store_of_each_format_version_is_written_to_and_collected(name: str, tmp_path: Path) -> None:
    store = unpacked(name, tmp_path)
    with open_lake(store) as lake:
        lake.put("plain/new", b"new")
        lake.remove("plain/granules")
        lake.gc()
    expected = listed(name)
    with open_lake(store) as lake:
        spaces = contents_of(lake)["spaces"]
    assert known(spaces, expected.get("spaces", [])) == expected.get("spaces", [])
    del expected["buckets"]["plain"]["names"]["granules"]
    with open_lake(store) as lake:
        assert lake.get("plain/new") == b"new"
        lake.remove("plain/new")
        found = contents_of(lake)["buckets"]
        versioned = expected["buckets"]["versioned"]
        assert known(found["versioned"], versioned) == versioned
        for key, held in expected["buckets"]["plain"]["names"].items():
            assert found["plain"]["names"][key].get("blake3") == held.get("blake3"), key
        assert lake.fsck(full=True)["damage"] == 0


def test_the_committed_store_has_records_in_every_table(tmp_path: Path) -> None:
    disk = LocalDisk(unpacked(f"{KEYED}-killed", tmp_path))
    files = list_journal(disk, read_superblock(disk).store_id)
    end = find_end(disk, files, Sequence(0))
    tables = {
        table
        for group in read_groups(disk, files, Sequence(0), end.sequence)
        for _, table, _, _ in decode_records(group.body, group.record_count)
    }
    assert set(Table) - tables - OF_A_CLUSTER == {Table.QUARANTINE}


def test_a_list_that_says_something_else_is_noticed(tmp_path: Path) -> None:
    name = f"v{FORMAT_VERSION}-stopped"
    store = unpacked(name, tmp_path)
    for path in (("names", "packed", "blake3"), ("names", "folder/", "stat", "mode"), ("settings", "anonymous_read")):
        expected = listed(name)
        place = expected["buckets"]["plain"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = "else"
        with pytest.raises(AssertionError):
            check_holds(store, expected)


@pytest.mark.parametrize(
    ("bits", "names"), [(Feature.ENCRYPTION, "encryption"), (Feature.ERASURE_SHARDS | 1 << 40, "bit 40")]
)
def test_a_store_with_an_incompatible_feature_is_refused_by_name_and_not_touched(
    bits: int, names: str, tmp_path: Path
) -> None:
    store = unpacked(f"v{FORMAT_VERSION}-stopped", tmp_path)
    disk = LocalDisk(store)
    write_superblock(disk, replace(read_superblock(disk), incompat_features=int(bits)))
    before = files_of(store)
    with pytest.raises(StoreUnusable, match=names), open_lake(store):
        pass
    assert files_of(store) == before


def test_a_store_with_an_unknown_read_only_feature_is_refused_by_number_and_not_touched(tmp_path: Path) -> None:
    store = unpacked(f"v{FORMAT_VERSION}-stopped", tmp_path)
    disk = LocalDisk(store)
    superblock = read_superblock(disk)
    write_superblock(disk, replace(superblock, read_only_features=superblock.read_only_features | 1 << 50))
    before = files_of(store)
    with pytest.raises(StoreReadOnly, match=r"bit 50; open it with a newer release"), open_lake(store):
        pass
    assert files_of(store) == before
