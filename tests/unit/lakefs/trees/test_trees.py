"""Trees of files: the walk, part files, and puts and gets of many files over a store in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import (
    AlreadyExists,
    BucketNotFound,
    EngineUnreachable,
    InvalidArgument,
    InvalidName,
    LakeError,
    LocalFileError,
)
from lakefs.get.objects import close_object, open_object
from lakefs.get.opened import Opened
from lakefs.names import Name
from lakefs.steps.steps import Steps
from lakefs.trees.get_file import GetOptions, get_to_file, stream_range
from lakefs.trees.get_tree import get_tree, local_target
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import PartFile, is_part, part_names, write_whole
from lakefs.trees.put_tree import PutOptions, put_tree
from lakefs.trees.walk import Fate, FileOutcome, Observer, Totals, Walk, WalkOptions
from tests.part_files import left_part, opened_part, piece_of

MIB = 1 << 20


@dataclass(frozen=True)
class Attributes:
    """The attributes that a file takes over."""

    mode: int = 0o640
    mtime_ns: int = 1_500_000_000_000_000_000


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    (tmp_path / "store").mkdir()
    with open_lake(tmp_path / "store") as opened:
        yield opened


def keys(root: Path, key: str = "k/", options: WalkOptions | None = None, limit: int = 7) -> list[str]:
    walk = Walk(str(root), key, options or WalkOptions())
    found: list[str] = []
    while batch := walk.next_batch(limit):
        assert len(batch) <= limit
        found.extend(entry.key + (" " + entry.ended.fate.value if entry.ended else "") for entry in batch)
    return found


# --- the walk --------------------------------------------------------------------------------------------


def test_a_walk_gives_files_and_empty_folders_in_the_byte_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/x", "b/a/y", "a", "b!", "ü"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty" / "er").mkdir(parents=True)
    assert keys(tmp_path) == ["k/a", "k/b/a/y", "k/b/x", "k/b!", "k/empty/er/", "k/ü"]


def test_a_walk_of_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    assert keys(tmp_path / "f", "name") == ["name"]


def test_a_walk_of_nothing_and_of_an_empty_bucket_root(tmp_path: Path) -> None:
    with pytest.raises(LocalFileError):
        keys(tmp_path / "none")
    assert keys(tmp_path, "") == [""]


def test_a_walk_deeper_than_the_interpreters_stack_ends(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    (last,) = keys(tmp_path)
    assert last.endswith(" failed"), "a key ends at 1024 bytes"


def test_a_walk_refuses_the_folder_it_was_told_to(tmp_path: Path) -> None:
    (tmp_path / "a" / "store").mkdir(parents=True)
    found = (tmp_path / "a" / "store").stat()
    with pytest.raises(InvalidArgument, match="data folder"):
        keys(tmp_path, options=WalkOptions(refused=frozenset({(found.st_dev, found.st_ino)})))


def test_a_walk_that_follows_links_ends_at_loops(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "top").symlink_to(tmp_path)
    (tmp_path / "a" / "here").symlink_to(".")
    found = keys(tmp_path, options=WalkOptions(follow=True))
    assert found == ["k/a/b/top skipped", "k/a/here skipped"]


# --- paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["..", "../x", "a/../../x", "", "/x", "a//x", "./x", "a/.", "a\0b"])
def test_keys_that_are_no_path_below_a_folder_are_refused(key: str) -> None:
    with pytest.raises(InvalidName):
        local_target("/target", key)


def test_other_keys_are_paths_below_the_folder() -> None:
    assert local_target("/target", "a/..b/c..").path == "/target/a/..b/c.."


# --- part files ------------------------------------------------------------------------------------------


def test_a_part_takes_the_targets_name_with_mode_and_time(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old content")
    write_whole(LocalTarget.at(str(target)), b"new", Attributes())
    status = target.stat()
    assert (target.read_bytes(), status.st_mode & 0o7777, status.st_mtime_ns) == (
        b"new",
        0o640,
        1_500_000_000_000_000_000,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_set_uid_is_not_taken_from_a_store(tmp_path: Path) -> None:
    write_whole(LocalTarget.at(str(tmp_path / "x")), b"", Attributes(mode=0o6755))
    assert (tmp_path / "x").stat().st_mode & 0o7777 == 0o755


def test_a_part_that_may_not_replace_leaves_the_target(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(AlreadyExists):
        write_whole(LocalTarget.at(str(tmp_path / "x")), b"new", Attributes(), replace=False)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_one_target_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    first = opened_part(tmp_path / "x")
    with pytest.raises(AlreadyExists, match="another process"):
        opened_part(tmp_path / "x")
    first.discard()
    opened_part(tmp_path / "x").discard()
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_was_replaced_never_gets_the_name(tmp_path: Path) -> None:
    part = opened_part(tmp_path / "x")
    (tmp_path / part.part_name).unlink()
    (tmp_path / part.part_name).write_bytes(b"another's")
    with pytest.raises(LocalFileError, match="replaced"):
        part.finish(Attributes())
    part.discard()
    assert not (tmp_path / "x").exists()
    assert (tmp_path / part.part_name).read_bytes() == b"another's"


def test_a_part_knows_what_an_earlier_one_left(tmp_path: Path) -> None:
    content = os.urandom(100)
    left_part(tmp_path / "x", content[:60])
    part = opened_part(tmp_path / "x")
    assert part.holds(piece_of(content[:40]))
    assert not part.holds(piece_of(content[1:41]))
    assert not part.holds(piece_of(content[40:80], 40)), "it ends inside the piece"
    part.discard()


def test_a_kept_part_is_found_again(tmp_path: Path) -> None:
    part = opened_part(tmp_path / "x")
    part.set_length(4)
    part.deliver(piece_of(b"half"), memoryview(b"half"))
    part.keep()
    again = opened_part(tmp_path / "x")
    assert again.found_bytes == 4
    again.discard()


def test_a_part_that_was_given_up_before_it_was_open_is_not_there(tmp_path: Path) -> None:
    part = PartFile(LocalTarget.at(str(tmp_path / "x")))
    part.discard()
    part.open()
    part.deliver(piece_of(b"late"), memoryview(b"late"))
    part.finish(Attributes())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(part._descriptor)


def test_a_write_that_comes_after_the_end_reaches_no_other_file(tmp_path: Path) -> None:
    part = opened_part(tmp_path / "x")
    part.discard()
    # Its descriptor's number is free now and will be that of the next file that is opened.
    with (tmp_path / "other").open("wb") as other:
        part.deliver(piece_of(b"late"), memoryview(b"late"))
        assert other.tell() == 0
    assert (tmp_path / "other").read_bytes() == b""


def test_a_write_in_progress_keeps_the_descriptor_until_it_ends(tmp_path: Path) -> None:
    part = opened_part(tmp_path / "x")
    assert part._enter()
    part.discard()
    os.fstat(part._descriptor)
    part._leave()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(part._descriptor)


def test_a_name_too_long_for_a_suffix_has_a_part_too(tmp_path: Path) -> None:
    name = "n" * 255
    write_whole(LocalTarget.at(str(tmp_path / name)), b"x", Attributes())
    assert (tmp_path / name).read_bytes() == b"x"
    assert part_names("n" * 254 + "m") != part_names(name)
    assert all(len(part) <= 255 for length in range(230, 256) for part in part_names("n" * length))


# --- putting and getting ---------------------------------------------------------------------------------


def put(lake: Lake, root: Path, options: PutOptions | None = None) -> tuple[Totals, list[FileOutcome]]:
    outcomes: list[FileOutcome] = []
    driver = driver_of(lake)
    steps = put_tree(
        driver.steps,
        [Walk(str(root), "k/", WalkOptions())],
        "bkt",
        options or PutOptions(create_bucket=True),
        Observer(outcomes.append),
    )
    return driver.run(steps), outcomes


def get(lake: Lake, target: Path, observer: Observer | None = None) -> Totals:
    driver = driver_of(lake)
    return driver.run(get_tree(driver.steps, Name("bkt", "k/"), str(target), GetOptions(), observer or Observer()))


def test_many_small_files_go_in_frames_and_come_back(lake: Lake, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    contents = {f"f{index:04}": os.urandom(index * 97 % 70_000) for index in range(600)}
    for name, content in contents.items():
        (root / name).write_bytes(content)
    totals, outcomes = put(lake, root)
    assert totals.files[Fate.STORED] == 600
    assert totals.size_bytes == sum(map(len, contents.values()))
    assert sorted(outcome.name for outcome in outcomes) == [f"bkt/k/{name}" for name in sorted(contents)]
    assert get(lake, tmp_path / "out").files[Fate.FETCHED] == 600
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == contents
    again, _ = put(lake, root)
    assert again.files[Fate.UNCHANGED] == 600
    assert get(lake, tmp_path / "out").files[Fate.UNCHANGED] == 600


def test_progress_adds_up_both_ways(lake: Lake, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    sizes = {"a": 10, "b": 100_000, "c": 5 * MIB, "d": 0}
    for name, size in sizes.items():
        (root / name).write_bytes(os.urandom(size))
    done: list[tuple[int, int]] = []
    observer = Observer(progress=lambda moved, present: done.append((moved, present)))
    walk = Walk(str(root), "k/", WalkOptions())
    driver = driver_of(lake)
    driver.run(put_tree(driver.steps, [walk], "bkt", PutOptions(create_bucket=True), observer))
    assert sum(moved for moved, _ in done) == sum(sizes.values())
    for present in (0, sum(sizes.values())):
        done.clear()
        get(lake, tmp_path / "out", observer)
        assert sum(moved for moved, _ in done) == sum(sizes.values())
        assert sum(there for _, there in done) == present


def test_a_small_safetensors_file_is_cut_as_a_put_of_it_alone_cuts_it(lake: Lake, tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "U8", "shape": [MIB], "data_offsets": [0, MIB]}}).encode()
    content = len(header).to_bytes(8, "little") + header + os.urandom(MIB)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "m").write_bytes(content)
    put(lake, tmp_path / "in")
    assert lake.stat("bkt/k/m").chunk_count == 2
    assert lake.stat("bkt/k/m").blob == lake.put("bkt/alone", tmp_path / "in" / "m").stat.blob
    again, _ = put(lake, tmp_path / "in")
    assert again.files[Fate.UNCHANGED] == 1


def test_a_bucket_that_may_not_be_made_ends_the_put(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(b"x")
    with pytest.raises(BucketNotFound):
        put(lake, tmp_path / "in", PutOptions(create_bucket=False))
    assert lake.buckets() == []


def interrupted(lake: Lake, target: Path, error: BaseException) -> None:
    """Get `b/x` into the target, and end that by an error after its first chunk."""

    def progress(moved: int, present: int) -> None:
        raise error

    driver = driver_of(lake)
    steps = get_to_file(driver.steps, Name("bkt", "x"), str(target), GetOptions(), Observer(progress=progress))
    with pytest.raises(type(error)):
        driver.run(steps)


def test_an_interrupted_get_leaves_the_target_and_no_part(lake: Lake, tmp_path: Path) -> None:
    lake.put("bkt/x", os.urandom(30 * MIB), create_bucket=True)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "x").write_bytes(b"old")
    interrupted(lake, folder / "x", RuntimeError("a stand-in for Ctrl-C"))
    assert [path.name for path in folder.iterdir()] == ["x"]
    assert (folder / "x").read_bytes() == b"old"


def test_a_get_that_lost_its_engine_keeps_its_part_for_the_next(lake: Lake, tmp_path: Path) -> None:
    content = os.urandom(30 * MIB)
    lake.put("bkt/x", content, create_bucket=True)
    interrupted(lake, tmp_path / "x", EngineUnreachable("gone"))
    part = tmp_path / part_names("x")[0]
    assert is_part(str(part))
    there: list[int] = []
    observer = Observer(progress=lambda moved, present: there.append(present))
    driver = driver_of(lake)
    driver.run(get_to_file(driver.steps, Name("bkt", "x"), str(tmp_path / "x"), GetOptions(), observer))
    assert sum(there) >= 4 * MIB
    assert (tmp_path / "x").read_bytes() == content
    assert not part.exists()


def test_a_stream_gives_every_range_in_order(lake: Lake) -> None:
    content = os.urandom(21 * MIB + 11)
    lake.put("bkt/x", content, create_bucket=True)

    driver = driver_of(lake)

    def streamed(offset: int, length: int) -> Steps[bytes]:
        got: list[bytes] = []
        access = driver.steps.access(None)
        opened: Opened = yield from open_object(access, Name("bkt", "x"))
        count = yield from stream_range(access, opened, offset, length, got.append)
        yield from close_object(opened)
        joined = b"".join(got)
        assert count == len(joined)
        return joined

    for offset, length in ((0, 1 << 40), (5, 3), (4 * MIB - 1, 2), (3, 17 * MIB), (21 * MIB + 10, 9), (1 << 40, 1)):
        assert driver.run(streamed(offset, length)) == content[offset : offset + length]


def test_a_file_that_cannot_be_written_fails_alone(lake: Lake, tmp_path: Path) -> None:
    lake.put_many([(f"bkt/k/{index:03}", os.urandom(100_000)) for index in range(40)], create_bucket=True)
    (tmp_path / "out" / "017").mkdir(parents=True)
    outcomes: list[FileOutcome] = []
    totals = get(lake, tmp_path / "out", Observer(outcomes.append))
    assert totals.files[Fate.FETCHED] == 39
    (failed,) = [outcome for outcome in outcomes if outcome.fate is Fate.FAILED]
    assert failed.name == "bkt/k/017"
    assert isinstance(totals.first_error, LakeError)
