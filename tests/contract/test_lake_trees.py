"""Trees by the methods of the clients: a folder stored, fetched, removed, and what fails on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.errors import (
    BucketNotFound,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    LakeError,
    LocalFileError,
    PreconditionFailed,
)
from lakefs.trees.walk import Fate, FileOutcome
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, run
from tests.contract.test_lake_odd_arguments import outcome_of

FILES = {"a.bin": b"first", "deep/er/b.bin": bytes(range(256)) * 900, "deep/c": b"", "é": b"utf-8"}


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """A lake in this process, with the bucket `bkt`."""
    with open_lake(tmp_path / "store") as opened:
        opened.create_bucket("bkt")
        yield opened


def make(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def found_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def keys_of(lake: Lake) -> list[str]:
    return [entry.key for entry in lake.ls("bkt", folders=True)]


def test_a_tree_is_stored_fetched_and_removed(kind: Kind) -> None:
    async def body(driven: Driven) -> None:
        lake: Any = driven.lake
        source, back = make(driven.engine.folder / "source"), driven.engine.folder / "back"
        (source / "empty").mkdir()
        ended: list[FileOutcome] = []
        moved: list[int] = []
        put = await outcome_of(
            lake,
            lambda lake: lake.put_tree(
                "bkt/run1", source, outcome=ended.append, progress=lambda done, there: moved.append(done)
            ),
        )
        size = sum(map(len, FILES.values()))
        assert (put.files[Fate.STORED], put.size_bytes, sum(moved)) == (len(FILES), size, size)
        assert {one.name for one in ended} == {f"bkt/run1/{name}" for name in FILES}
        again = await outcome_of(lake, lambda lake: lake.put_tree("lake://bkt/run1/", str(source)))
        assert (again.files[Fate.UNCHANGED], again.files[Fate.STORED]) == (len(FILES), 0)
        await outcome_of(lake, lambda lake: lake.put_many([("bkt/run1", b"object"), ("bkt/run10", b"other")]))
        got = await outcome_of(lake, lambda lake: lake.get_tree("bkt/run1", back))
        assert got.files[Fate.FETCHED] == len(FILES)
        assert found_in(back) == FILES
        assert (back / "empty").is_dir()
        assert await outcome_of(lake, lambda lake: lake.remove_tree("bkt/run1")) >= len(FILES) + 1
        assert [entry.key for entry in await outcome_of(lake, lambda lake: lake.ls("bkt"))] == ["run1", "run10"]
        with pytest.raises(KeyNotFound, match="bkt/run1/ does not exist"):
            await outcome_of(lake, lambda lake: lake.remove_tree("bkt/run1"))

    run(kind, body)


def test_a_bucket_is_a_tree_and_stays_when_it_is_emptied(lake: Lake, tmp_path: Path) -> None:
    assert lake.put_tree("new-one", make(tmp_path / "source"), create_bucket=True).files[Fate.STORED] == len(FILES)
    assert lake.get_tree("new-one", tmp_path / "back").files[Fate.FETCHED] == len(FILES)
    assert found_in(tmp_path / "back") == FILES
    assert lake.remove_tree("new-one") >= len(FILES)
    assert lake.remove_tree("new-one") == 0
    assert lake.bucket("new-one").name == "new-one"


@pytest.mark.parametrize("name", ["nowhere/x", "nowhere"])
def test_trees_of_a_bucket_that_does_not_exist_are_refused(lake: Lake, tmp_path: Path, name: str) -> None:
    source = make(tmp_path / "source")
    for call in (lake.put_tree, lake.get_tree):
        with pytest.raises(BucketNotFound):
            call(name, source)
    with pytest.raises(BucketNotFound):
        lake.remove_tree(name)


def test_one_failure_is_raised_after_all_other_files_were_stored(lake: Lake, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": b"1", "b": b"2", "z": b"3"})
    os.rename(source / "b", os.fsencode(source) + b"/b\xff")
    ended: list[FileOutcome] = []
    with pytest.raises(InvalidName, match="not UTF-8") as raised:
        lake.put_tree("bkt/t", source, outcome=ended.append)
    assert keys_of(lake)[-2:] == ["t/a", "t/z"]
    assert [one.fate for one in ended].count(Fate.FAILED) == 1
    assert raised.value.__notes__ == ["1 files failed; 2 are in place"]


def test_files_that_exist_are_kept_if_that_was_asked(lake: Lake, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": b"one", "b": b"two"})
    lake.put_tree("bkt/t", source)
    (source / "a").write_bytes(b"new")
    with pytest.raises(PreconditionFailed):
        lake.put_tree("bkt/t", source, if_absent=True)
    assert lake.get("bkt/t/a") == b"one"
    assert lake.get_tree("bkt/t", source, replace=False).files[Fate.SKIPPED] == 2
    assert (source / "a").read_bytes() == b"new"
    assert lake.get_tree("bkt/t", source).files == {**dict.fromkeys(Fate, 0), Fate.FETCHED: 1, Fate.UNCHANGED: 1}
    assert (source / "a").read_bytes() == b"one"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("nothing", LocalFileError, "No such file"),
        ("file", LocalFileError, "not a folder; store a file with put"),
        ("store", InvalidArgument, "data folder of the store"),
        (".", InvalidArgument, "data folder of the store"),
    ],
)
def test_what_is_no_tree_to_store_is_refused(
    lake: Lake, tmp_path: Path, source: str, error: type[LakeError], message: str
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(error, match=message):
        lake.put_tree("bkt/t", tmp_path / source)


def test_a_tree_with_names_that_no_path_can_say_is_not_taken_for_whole(lake: Lake, tmp_path: Path) -> None:
    lake.put_tree("bkt/t", make(tmp_path / "source", {"a": b"1"}))
    bad = FileOutcome("", "bkt/t/a//b", Fate.SKIPPED, is_missing=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lakefs.trees.get_tree.TreeGet._wanted", lambda self, entry: self._end(bad))
        with pytest.raises(InvalidName, match="names in it can be no path"):
            lake.get_tree("bkt/t", tmp_path / "back")


def test_a_folder_of_many_folders_is_removed_whole(lake: Lake) -> None:
    for name in ("t/a/b/c", "t/a/x", "t/z", "u"):
        lake.make_folder(f"bkt/{name}")
    lake.put("bkt/t/a/b/file", b"x")
    assert lake.remove_tree("bkt/t") == 4  # those above them exist by them only
    assert keys_of(lake) == ["u/"]
