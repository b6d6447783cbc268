"""Syncs of a store in this process: each direction, and what is promised of removals and of names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.process.embedded import open_lake
from lakefs.client.blocking.lake import Lake
from lakefs.client.facade import driver_of
from lakefs.errors import BucketNotFound, InvalidArgument, KeyNotFound, LocalFileError
from lakefs.names import Name, parse_name
from lakefs.sync.entries import Comparison
from lakefs.sync.filters import Rules, rules_of
from lakefs.sync.report import Done, SyncObserver, SyncOutcome, SyncTotals
from lakefs.sync.sides import BucketSide, FolderSide, Side
from lakefs.sync.sync import SyncOptions, sync
from tests.odd_names import put_odd

MIB = 1 << 20
LONG_AGO_NS = 1_500_000_000_123_456_789


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    folder = tmp_path_factory.mktemp("lake") / "store"
    folder.mkdir()
    with open_lake(folder) as opened:
        yield opened


@dataclass
class Rig:
    """A lake, a local folder, and a bucket of the test's own."""

    lake: Lake
    folder: Path
    bucket: str
    outcomes: list[SyncOutcome] = field(default_factory=list)

    def side(self, text: str, *, is_target: bool, rules: Rules, follow: bool) -> Side:
        """Return a side: `./NAME` is a folder below the rig's, anything else a name in its bucket."""
        if text.startswith("./"):
            return FolderSide(str(self.folder / text[2:]), rules, follow and not is_target, may_miss=is_target)
        name = parse_name(f"{self.bucket}/{text}")
        return BucketSide(driver_of(self.lake).steps, name, rules, may_miss=is_target)

    def sync(
        self, source: str, target: str, *, rules: Rules | None = None, follow: bool = False, **options: bool
    ) -> SyncTotals:
        self.outcomes.clear()
        contents, update = options.pop("contents", False), options.pop("update", False)
        settings = SyncOptions(Comparison(contents, update), create_bucket=True, follow=follow, **options)
        first = self.side(source, is_target=False, rules=rules or Rules(), follow=follow)
        second = self.side(target, is_target=True, rules=rules or Rules(), follow=follow)
        if isinstance(first, BucketSide):
            first.to_folder = isinstance(second, FolderSide)
        driver = driver_of(self.lake)
        return driver.run(sync(driver.steps, first, second, settings, SyncObserver(self.outcomes.append)))

    def write(self, path: str, content: bytes = b"x", mtime_ns: int = LONG_AGO_NS) -> Path:
        local = self.folder / path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(content)
        os.utime(local, ns=(mtime_ns, mtime_ns))
        return local

    def put(self, key: str, content: bytes = b"x") -> None:
        self.lake.put(f"{self.bucket}/{key}", content, create_bucket=True)

    def keys(self, below: str = "") -> list[str]:
        return [entry.key for entry in self.lake.ls(f"{self.bucket}/{below}")]

    def folders(self) -> list[str]:
        listed = self.lake.ls(f"{self.bucket}/", folders=True)
        return [entry.key for entry in listed if entry.key.endswith("/")]

    def files(self, below: str) -> dict[str, bytes]:
        root = self.folder / below
        found = root.rglob("*") if root.exists() else ()
        return {str(path.relative_to(root)): path.read_bytes() for path in found if path.is_file()}

    def ends(self, done: Done) -> dict[str, str]:
        return {outcome.path: outcome.reason for outcome in self.outcomes if outcome.done is done}


@pytest.fixture
def rig(lake: Lake, tmp_path: Path, request: pytest.FixtureRequest) -> Rig:
    return Rig(lake, tmp_path, f"b{abs(hash(request.node.name)):x}"[:40])


WAYS = [("./a", "k/"), ("k/", "./a"), ("k/", "other/")]
"""Each direction inside one lake."""


def fill(rig: Rig, side: str, names: dict[str, bytes]) -> None:
    for name, content in names.items():
        if side.startswith("./"):
            rig.write(f"{side[2:]}/{name}", content)
        else:
            rig.put(side + name, content)


def held(rig: Rig, side: str) -> dict[str, bytes]:
    if side.startswith("./"):
        return rig.files(side[2:])
    return {key[len(side) :]: rig.lake.get(f"{rig.bucket}/{key}") for key in rig.keys(side)}


CONTENTS = {"a": b"1", "a.txt": b"2", "d/x": b"3" * 100, "d/big": os.urandom(5 * MIB), "d/e/y": b"", "ü": b"4"}


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_sync_copies_what_is_missing_and_then_nothing(rig: Rig, source: str, target: str) -> None:
    rig.put("unrelated")
    fill(rig, source, CONTENTS)
    totals = rig.sync(source, target)
    assert held(rig, target) == CONTENTS
    assert (totals.names[Done.COPIED], totals.size_bytes) == (len(CONTENTS), sum(map(len, CONTENTS.values())))
    again = rig.sync(source, target, delete=True)
    assert (again.unchanged, rig.outcomes, again.is_in_step) == (len(CONTENTS), [], True)
    # The way back has nothing to do either: sizes, times and modes are the same.
    assert rig.sync(target, source, delete=True).unchanged == len(CONTENTS)
    assert rig.outcomes == []


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_delete_removes_what_only_the_target_has_and_a_dry_run_nothing(rig: Rig, source: str, target: str) -> None:
    rig.put("unrelated")
    fill(rig, source, {"keep": b"1", "new": b"22"})
    rig.sync(source, target)
    fill(rig, target, {"gone": b"3", "d/gone": b"4", "keep": b"not this"})
    before = held(rig, target)
    totals = rig.sync(source, target, delete=True, dry_run=True)
    assert held(rig, target) == before
    assert rig.ends(Done.COPIED) == {"keep": "size differs"}
    assert sorted(rig.ends(Done.REMOVED)) == ["d/gone", "gone"]
    assert rig.sync(source, target).names[Done.REMOVED] == 0, "only with delete"
    totals = rig.sync(source, target, delete=True)
    assert totals.names[Done.REMOVED] == 2
    assert held(rig, target) == {"keep": b"1", "new": b"22"}
    if target.startswith("./"):
        assert not (rig.folder / "a" / "d").exists(), "a folder that became empty is removed"


def test_mode_and_time_are_set_on_both_sides(rig: Rig) -> None:
    rig.write("a/run.sh").chmod(0o755)
    rig.sync("./a", "k/")
    rig.sync("k/", "./b")
    status = (rig.folder / "b" / "run.sh").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o755, LONG_AGO_NS)
    (rig.folder / "a" / "run.sh").chmod(0o700)
    assert rig.sync("./a", "k/").names[Done.COPIED] == 1
    assert rig.sync("k/", "./b").names[Done.COPIED] == 1
    assert (rig.folder / "b" / "run.sh").stat().st_mode & 0o7777 == 0o700


def test_a_file_of_the_time_0_is_in_step_after_it_was_copied(rig: Rig) -> None:
    rig.write("a/old", mtime_ns=0)
    rig.sync("./a", "k/")
    assert rig.sync("./a", "k/").unchanged == 1
    rig.sync("k/", "./b")
    assert (rig.folder / "b" / "old").stat().st_mtime_ns == 1


def test_attributes_go_from_name_to_name(rig: Rig) -> None:
    rig.lake.put(f"{rig.bucket}/k/a", b"1", content_type="text/x", user_metadata={"m": "1"}, create_bucket=True)
    rig.sync("k/", "other/")
    old, new = (rig.lake.stat(f"{rig.bucket}/{folder}/a") for folder in ("k", "other"))
    for field_name in ("content_type", "user_metadata", "mtime_ns", "etag", "blob", "mode"):
        assert getattr(new, field_name) == getattr(old, field_name), field_name


def test_the_etag_of_parts_goes_from_name_to_name(rig: Rig) -> None:
    rig.put("k/other")
    upload = rig.lake.create_upload(f"{rig.bucket}/k/parts")
    parts = [rig.lake.put_part(upload, number, bytes([number]) * (5 * MIB)) for number in (1, 2)]
    done = rig.lake.complete_upload(upload, [(part.number, part.etag) for part in parts])
    rig.sync("k/", "other/")
    assert rig.lake.stat(f"{rig.bucket}/other/parts").etag == done.etag


# --- what is promised of removals ------------------------------------------------------------------------


def target_of_two(rig: Rig) -> None:
    rig.put("k/one")
    rig.put("k/two")


def test_nothing_is_removed_when_the_source_is_empty_or_missing(rig: Rig) -> None:
    target_of_two(rig)
    (rig.folder / "empty" / "folder").mkdir(parents=True)
    totals = rig.sync("./empty", "k/", delete=True)
    assert "has no file" in totals.withheld
    assert not totals.is_in_step
    with pytest.raises(LocalFileError, match="nothere"):
        rig.sync("./nothere", "k/", delete=True)
    with pytest.raises(KeyNotFound):
        rig.sync("nothere/", "k/", delete=True)
    rig.write("a/x")
    assert "has no file" in rig.sync("./a", "k/", delete=True, rules=rules_of(exclude=["x"])).withheld
    assert rig.keys("k/") == ["k/folder/", "k/one", "k/two"]


def test_nothing_is_removed_when_a_folder_of_the_source_cannot_be_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_of_two(rig)
    rig.write("a/ok")
    rig.write("a/locked/two")
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("locked/"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    totals = rig.sync("./a", "k/", delete=True)
    assert "could not be read whole" in totals.withheld
    assert rig.ends(Done.SKIPPED) == {"locked": "Permission denied"}
    assert rig.keys("k/") == ["k/ok", "k/one", "k/two"]


def test_nothing_is_removed_when_a_file_could_not_be_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    target_of_two(rig)
    rig.write("a/bad")
    opened = os.open

    def refusing(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith("a/bad"):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
    totals = rig.sync("./a", "k/", delete=True)
    assert totals.withheld == "not everything could be copied"
    assert list(rig.ends(Done.FAILED)) == ["bad"]
    assert rig.keys("k/") == ["k/one", "k/two"]


def test_what_changed_since_it_was_compared_is_not_removed(rig: Rig) -> None:
    rig.put("k/x")
    rig.write("a/here")
    rig.write("a/gone")
    driver = driver_of(rig.lake)
    source = BucketSide(driver.steps, Name(rig.bucket, "k/"), to_folder=True)
    target = FolderSide(str(rig.folder / "a"))

    def written(outcome: SyncOutcome) -> None:
        if outcome.done is Done.COPIED:
            rig.write("a/here", b"somebody wrote this meanwhile", LONG_AGO_NS + 1)

    totals = driver.run(sync(driver.steps, source, target, SyncOptions(delete=True), SyncObserver(written)))
    assert (totals.names[Done.REMOVED], totals.names[Done.SKIPPED]) == (1, 1)
    assert sorted(rig.files("a")) == ["here", "x"]


def test_names_of_links_that_are_not_followed_stay_at_the_target(rig: Rig) -> None:
    rig.write("elsewhere/x", b"1")
    rig.write("a/file", b"2")
    (rig.folder / "a" / "link").symlink_to("../elsewhere")
    (rig.folder / "a" / "other").symlink_to("file")
    assert rig.sync("./a", "k/", follow=True).is_in_step
    followed = rig.keys("k/")
    assert followed == ["k/file", "k/link/x", "k/other"]
    totals = rig.sync("./a", "k/", delete=True)
    assert (rig.keys("k/"), totals.names[Done.REMOVED], totals.withheld) == (followed, 0, "")
    assert sorted(rig.ends(Done.SKIPPED)) == ["link", "other"]
    assert not totals.is_in_step


@pytest.mark.parametrize(("source", "target"), [("k/", "k/"), ("k/", "k/in/"), ("k/in/", "k/"), ("", "k/")])
def test_a_side_inside_the_other_is_refused(rig: Rig, source: str, target: str) -> None:
    rig.put("k/in/x")
    with pytest.raises(InvalidArgument):
        rig.sync(source, target, delete=True)


# --- names that a side cannot have -----------------------------------------------------------------------


def test_names_that_a_lake_cannot_have_are_named_and_skipped(rig: Rig) -> None:
    rig.write("a/good")
    (rig.folder / "a" / os.fsdecode(b"bad\xff")).write_bytes(b"")
    os.mkfifo(rig.folder / "a" / "pipe")
    deep = rig.folder / "a" / ("d" * 250)
    for _ in range(4):
        deep = deep / ("e" * 250)
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"")
    totals = rig.sync("./a", "k/", delete=True)
    skipped = rig.ends(Done.SKIPPED)
    assert skipped["bad\\xff"] == "the name is not UTF-8"
    assert skipped["pipe"] == "not a regular file"
    assert [reason for path, reason in skipped.items() if path.startswith("d")] == [
        "its key would be longer than 1024 bytes"
    ]
    assert (totals.names[Done.COPIED], totals.is_in_step) == (1, False)


def test_names_that_a_folder_cannot_have_are_named_and_skipped(rig: Rig) -> None:
    rig.put("k/good")
    put_odd(rig.lake, rig.bucket, "k/content/", b"1")
    for key in ("k/../up", "k//double", "k/" + "n" * 300, "k/both", "k/both/x", "k/file/x"):
        put_odd(rig.lake, rig.bucket, key, b"1")
    rig.write("a/file")
    totals = rig.sync("k/", "./a")
    assert sorted(rig.ends(Done.SKIPPED)) == ["../up", "/double", "both/x", "content/", "file/x", "n" * 300]
    assert rig.files("a") == {"good": b"x", "both": b"1", "file": b"x"}
    assert totals.names[Done.FAILED] == 0
    # A folder that only the target has gives way to a file once it was emptied.
    rig.write("b/good/inner")
    rig.sync("k/", "./b", delete=True)
    assert rig.ends(Done.SKIPPED)["good"] == "a folder at the target"
    rig.sync("k/", "./b", delete=True)
    assert rig.files("b")["good"] == b"x"


def test_nothing_is_written_through_a_link_of_the_target(rig: Rig) -> None:
    rig.put("k/link/x")
    rig.write("elsewhere/y")
    (rig.folder / "a").mkdir()
    (rig.folder / "a" / "link").symlink_to("../elsewhere")
    totals = rig.sync("k/", "./a", delete=True)
    assert (rig.files("elsewhere"), totals.is_in_step) == ({"y": b"x"}, False)


def test_empty_folders_are_made_and_removed(rig: Rig) -> None:
    (rig.folder / "a" / "empty" / "in").mkdir(parents=True)
    rig.write("a/f")
    rig.sync("./a", "k/")
    assert rig.folders() == ["k/", "k/empty/", "k/empty/in/"]
    rig.sync("k/", "./b")
    assert (rig.folder / "b" / "empty" / "in").is_dir()
    (rig.folder / "a" / "empty" / "in").rmdir()
    (rig.folder / "a" / "empty").rmdir()
    rig.sync("./a", "k/", delete=True)
    assert rig.folders() == ["k/"]
    rig.sync("k/", "./b", delete=True)
    assert not (rig.folder / "b" / "empty").exists()


# --- what differs ----------------------------------------------------------------------------------------


def test_contents_are_compared_with_checksum(rig: Rig) -> None:
    big = os.urandom(5 * MIB)
    fill(rig, "./a", {"same": b"1", "big": big, "other": b"22"})
    rig.sync("./a", "k/")
    rig.write("a/same", b"1", LONG_AGO_NS + 5)
    rig.write("a/big", big, LONG_AGO_NS + 5)
    rig.write("a/other", b"33")
    assert rig.sync("./a", "k/").names[Done.COPIED] == 2, "by time: the content that changed under it is not seen"
    rig.write("a/same", b"1", LONG_AGO_NS + 9)
    rig.write("a/big", big, LONG_AGO_NS + 9)
    for source, target in (("./a", "k/"), ("k/", "./a")):
        rig.sync(source, target, contents=True, dry_run=True)
        assert rig.ends(Done.COPIED) == {"other": "content differs"}
    rig.sync("./a", "k/", contents=True)
    assert rig.lake.get(f"{rig.bucket}/k/other") == b"33"


def test_update_leaves_what_is_newer_at_the_target(rig: Rig) -> None:
    fill(rig, "./a", {"x": b"1", "y": b"1"})
    rig.sync("./a", "k/")
    rig.write("a/x", b"mine", LONG_AGO_NS + 1)
    assert rig.sync("k/", "./a", update=True).newer == 1
    assert rig.files("a")["x"] == b"mine"
    assert rig.sync("k/", "./a").names[Done.COPIED] == 1
    assert rig.files("a")["x"] == b"1"


def test_rules_hold_for_both_sides(rig: Rig) -> None:
    fill(rig, "./a", {"a.jpg": b"1", "a.tmp": b"2", "cache/x": b"3"})
    fill(rig, "k/", {"old.tmp": b"4", "old.jpg": b"5"})
    rules = rules_of(exclude=["*.tmp", "/cache/"])
    rig.sync("./a", "k/", delete=True, rules=rules)
    assert rig.keys("k/") == ["k/a.jpg", "k/old.tmp"]


def test_a_file_that_changed_while_it_was_read_is_read_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakefs.put.sources import FileSource

    local = rig.write("a/busy", b"1")
    changes = iter((b"22", b""))
    verify = FileSource.verify_unchanged

    def changing(source: FileSource) -> None:
        if content := next(changes, b""):
            local.write_bytes(content)
        verify(source)

    monkeypatch.setattr(FileSource, "verify_unchanged", changing)
    assert rig.sync("./a", "k/").is_in_step
    assert rig.lake.get(f"{rig.bucket}/k/busy") == b"22"
    changes = iter((b"333", b"4444"))
    local.write_bytes(b"5")
    assert rig.sync("./a", "k/").names[Done.FAILED] == 1
    assert "changed while it was read" in rig.ends(Done.FAILED)["busy"]


def test_a_bucket_that_is_missing_is_an_empty_target_and_no_source(rig: Rig) -> None:
    with pytest.raises(BucketNotFound):
        rig.sync("k/", "./a")
    rig.write("a/x")
    assert rig.sync("./a", "k/", dry_run=True).names[Done.COPIED] == 1
    assert not rig.lake.exists(f"{rig.bucket}/")
    assert rig.sync("./a", "k/").is_in_step
