"""Sources that vanish or change while they are read, and names of a source that a side cannot have: nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import LakeError
from lakefs.lake.lake_steps import LakeSteps
from lakefs.names import Name
from lakefs.steps.steps import Steps, send
from lakefs.sync import sides
from lakefs.sync.diff import Difference, Differing, diff
from lakefs.sync.entries import Comparison, Entry
from lakefs.sync.report import Done, SyncObserver, SyncOutcome, SyncTotals
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.sync.sync import SyncOptions, sync
from lakefs.wire.messages import NameChange, ObjectAttributes, ObjectStat, PutObjects
from tests.odd_names import put_odd


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    folder = tmp_path_factory.mktemp("lake") / "store"
    folder.mkdir()
    with open_lake(folder) as opened:
        yield opened


def run(lake: Lake, source: Side, target: Side, outcomes: list[SyncOutcome] | None = None) -> SyncTotals:
    driver = driver_of(lake)
    observer = SyncObserver((outcomes if outcomes is not None else []).append)
    return driver.run(sync(driver.steps, source, target, SyncOptions(delete=True, create_bucket=True), observer))


def differing(lake: Lake, first: Side, second: Side) -> dict[str, Difference]:
    found: list[Differing] = []
    driver_of(lake).run(diff(first, second, Comparison(modes=False), found.append))
    return {one.path: one.difference for one in found}


def keys(lake: Lake, name: str) -> list[str]:
    return [entry.key for entry in lake.ls(name)]


class MovedFolder(FolderSide):
    """A local folder that is moved away, as a disk that is unplugged, once its first page was read."""

    moved: str

    def read_page(self) -> list[Entry] | None:
        page = super().read_page()
        if not os.path.exists(self.moved):
            os.rename(self.moved.removesuffix(".moved"), self.moved)
            os.mkdir(self.moved.removesuffix(".moved"))
        return page


@pytest.mark.parametrize("below", ["", "d/"])
def test_nothing_is_removed_when_the_source_is_moved_away_while_it_is_read(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setattr(sides, "PAGE", 3)
    bucket = f"moved{len(below)}"
    source = tmp_path / "in"
    (source / below).mkdir(parents=True)
    for number in range(9):
        (source / below / f"{number}").write_bytes(b"x")
    run(lake, FolderSide(str(source)), BucketSide(driver_of(lake).steps, Name(bucket, ""), may_miss=True))
    there = keys(lake, f"{bucket}/")
    side = MovedFolder(str(source))
    side.moved = str(source / below).rstrip("/") + ".moved"
    totals = run(lake, side, BucketSide(driver_of(lake).steps, Name(bucket, "")))
    assert not totals.is_in_step
    assert keys(lake, f"{bucket}/") == there


def test_nothing_is_removed_when_the_bucket_of_the_source_is_made_anew_while_it_is_listed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "PAGE", 3)
    for number in range(9):
        lake.put(f"anew/{number}", b"x", create_bucket=True)
    steps = driver_of(lake).steps
    run(lake, BucketSide(steps, Name("anew", "")), BucketSide(steps, Name("copies", ""), may_miss=True))
    totals = run(lake, RemadeBucket(steps, Name("anew", "")), BucketSide(steps, Name("copies", "")))
    assert totals.withheld
    assert len(keys(lake, "copies/")) == 9


class RemadeBucket(BucketSide):
    """A bucket that somebody removes and makes again once its first page was listed."""

    def next_page(self) -> Steps[list[Entry] | None]:
        page = yield from super().next_page()
        names = [Name(self.name.bucket, str(number)) for number in range(9)]
        if (yield from self.steps.exists(str(names[0]))):
            yield from self.steps.remove_many(names)
            yield from self.steps.remove_bucket(self.name.bucket)
            yield from self.steps.create_bucket(self.name.bucket)
        return page


class MovedPrefix(BucketSide):
    """A folder of a bucket that somebody renames once its first page was listed."""

    def next_page(self) -> Steps[list[Entry] | None]:
        page = yield from super().next_page()
        if (yield from self.steps.exists(str(self.name))):
            yield from self.steps.move(str(self.name), f"{self.name.bucket}/elsewhere/")
        return page


def test_nothing_is_removed_when_the_folder_of_the_source_is_renamed_while_it_is_listed(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "PAGE", 3)
    for number in range(9):
        lake.put(f"renamed/in/{number}", b"x", create_bucket=True)
    steps = driver_of(lake).steps
    run(lake, BucketSide(steps, Name("renamed", "in/")), BucketSide(steps, Name("renamed", "out/"), may_miss=True))
    totals = run(lake, MovedPrefix(steps, Name("renamed", "in/")), BucketSide(steps, Name("renamed", "out/")))
    assert totals.withheld
    assert len(keys(lake, "renamed/out/")) == 9


def test_an_object_that_changes_while_it_is_copied_has_failed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.put("changing/in/x", b"before", create_bucket=True)
    steps = driver_of(lake).steps
    stat_many = LakeSteps.stat_many

    def then_changed(self: LakeSteps, names: Sequence[Name]) -> Steps[list[ObjectStat | LakeError]]:
        found = yield from stat_many(self, names)
        change = NameChange("changing", "in/x", b"", ObjectAttributes())
        yield from send(PutObjects([5], [change]), body=[memoryview(b"after")])
        return found

    monkeypatch.setattr(LakeSteps, "stat_many", then_changed)
    sides_of = BucketSide(steps, Name("changing", "in/")), BucketSide(steps, Name("changing", "out/"), may_miss=True)
    outcomes: list[SyncOutcome] = []
    totals = run(lake, *sides_of, outcomes)
    assert [(outcome.path, outcome.done) for outcome in outcomes] == [("x", Done.FAILED)]
    assert not totals.is_in_step


class LinkedFile(FolderSide):
    """A folder in which somebody replaces a file by a link to one outside, once the folder was read."""

    outside: str

    def read_page(self) -> list[Entry] | None:
        page = super().read_page()
        if not os.path.islink(self.path_of("a")):
            os.unlink(self.path_of("a"))
            os.symlink(self.outside, self.path_of("a"))
        return page


@pytest.mark.parametrize("size", [6, 5 << 20])
def test_a_file_that_becomes_a_link_is_not_followed(lake: Lake, tmp_path: Path, size: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_bytes(bytes(size))
    (tmp_path / "secret").write_bytes(b"s" * size)
    side = LinkedFile(str(tmp_path / "in"))
    side.outside = str(tmp_path / "secret")
    outcomes: list[SyncOutcome] = []
    run(lake, side, BucketSide(driver_of(lake).steps, Name("swapped", ""), may_miss=True), outcomes)
    assert [outcome.done for outcome in outcomes] == [Done.FAILED]
    assert not lake.exists("swapped/a")


def test_what_the_target_has_in_a_folder_whose_name_is_too_long_stays(lake: Lake, tmp_path: Path) -> None:
    part = "p" * 250
    deep = tmp_path / "in" / part / part / part / part / part
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"x")
    (tmp_path / "in" / "a").write_bytes(b"x")
    key = str(deep / "x").removeprefix(f"{tmp_path}/in/")
    lake.put(f"long/{key}", b"x", create_bucket=True)
    outcomes: list[SyncOutcome] = []
    totals = run(lake, FolderSide(str(tmp_path / "in")), BucketSide(driver_of(lake).steps, Name("long", "")), outcomes)
    assert key in keys(lake, "long/")
    found = differing(lake, FolderSide(str(tmp_path / "in")), BucketSide(driver_of(lake).steps, Name("long", "")))
    assert set(found.values()) == {Difference.UNREADABLE, Difference.ONLY_SECOND}
    assert not totals.is_in_step
    assert {outcome.done for outcome in outcomes} == {Done.COPIED, Done.SKIPPED}


def test_behind_a_link_of_the_target_nothing_newer_is_replaced_and_nothing_is_removed(
    lake: Lake, tmp_path: Path
) -> None:
    lake.put("links/d/x", b"of the lake", create_bucket=True)
    (tmp_path / "behind").mkdir()
    (tmp_path / "behind" / "x").write_bytes(b"edited")
    (tmp_path / "behind" / "y").write_bytes(b"only here")
    later_s = lake.stat("links/d/x").mtime_ns // 10**9 + 60
    os.utime(tmp_path / "behind" / "x", (later_s, later_s))
    target = tmp_path / "out"
    target.mkdir()
    (target / "d").symlink_to(tmp_path / "behind")
    outcomes: list[SyncOutcome] = []
    lake.sync("links", target, update=True, delete=True, follow=True, outcome=outcomes.append)
    assert [(outcome.path, outcome.done, outcome.reason) for outcome in outcomes] == [
        ("d/x", Done.SKIPPED, "newer at the target")
    ]
    found = {path.name: path.read_bytes() for path in (tmp_path / "behind").iterdir()}
    assert found == {"x": b"edited", "y": b"only here"}
    lake.sync("links", target, delete=True, follow=True)
    assert (tmp_path / "behind" / "x").read_bytes() == b"of the lake"
    assert (tmp_path / "behind" / "y").exists()


@pytest.mark.parametrize("key", ["in/d/", "in/empty/"])
def test_the_content_of_a_folders_own_key_is_not_left_out_in_silence(lake: Lake, key: str) -> None:
    for name in (key, "in/d/x"):
        put_odd(lake, "own", name, name.encode())
    steps, outcomes = driver_of(lake).steps, list[SyncOutcome]()
    totals = run(
        lake, BucketSide(steps, Name("own", "in/")), BucketSide(steps, Name("own", "out/"), may_miss=True), outcomes
    )
    assert not totals.is_in_step
    assert key.removeprefix("in/") in [outcome.path for outcome in outcomes if outcome.done is Done.SKIPPED]
    assert keys(lake, "own/out/") == ["out/d/x"]
    assert differing(lake, BucketSide(steps, Name("own", "in/")), BucketSide(steps, Name("own", "out/"))) == {
        key.removeprefix("in/"): Difference.ONLY_FIRST
    }
    put_odd(lake, "own", key.replace("in/", "out/"), key.encode())
    lake.remove("own/in/d/x")
    lake.remove("own/out/d/x")
    put_odd(lake, "own", "in/d/x", b"")
    assert run(
        lake, BucketSide(steps, Name("own", "in/")), BucketSide(steps, Name("own", "out/"), may_miss=True)
    ).is_in_step
    for name in (key, key.replace("in/", "out/")):
        lake.remove(f"own/{name}")


def test_what_the_target_has_below_a_link_back_to_a_folder_above_it_stays(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "d" / "x").write_bytes(b"x")
    (tmp_path / "in" / "d" / "loop").symlink_to("..")
    lake.put("loops/d/loop/y", b"x", create_bucket=True)
    run(lake, FolderSide(str(tmp_path / "in"), follow=True), BucketSide(driver_of(lake).steps, Name("loops", "")))
    assert keys(lake, "loops/") == ["d/loop/y", "d/x"]
