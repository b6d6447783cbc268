"""Folders that are listed again: a listing has what exists, whoever changed it, and whether it was listed before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import lakefs
from tests.mount.mounts import BUCKET, LakeMounts
from tests.mount.test_two_mounts import eventually

pytestmark = [pytest.mark.slow, pytest.mark.fuse]

MANY = 4000
"""Names of 245 bytes each: together more than the 1 MiB that one request can list."""


@pytest.fixture
def elsewhere(mounts: LakeMounts) -> Iterator[lakefs.Lake]:
    """A client that makes and removes names as no mount does: folders are made and removed with what is in them."""
    with lakefs.connect(mounts.served.server) as lake:
        yield lake


def twice(folder: Path) -> list[str]:
    """List a folder twice; return the names of the second time."""
    os.listdir(folder)
    return sorted(os.listdir(folder))


def test_a_folder_that_was_read_shows_what_was_made_and_removed_elsewhere(here: Path, there: Path) -> None:
    (here / "stays").write_bytes(b"1")
    (here / "goes").write_bytes(b"2")
    eventually(lambda: twice(there) == ["goes", "stays"], "the names are not listed")
    (here / "comes").write_bytes(b"3")
    (here / "goes").unlink()
    (here / "folder").mkdir()
    eventually(lambda: os.listdir(there) != ["goes", "stays"], "nothing new is listed")
    eventually(lambda: twice(there) == ["comes", "folder", "stays"], "the listing does not follow")


def test_a_folder_that_was_read_shows_at_once_what_this_mount_does(here: Path) -> None:
    for number in range(20):
        (here / f"f{number}").write_bytes(b"1")
    (here / "inner").mkdir()
    assert len(twice(here)) == 21
    (here / "new").write_bytes(b"22")
    assert len(twice(here)) == 22
    (here / "f0").unlink()
    (here / "f1").rename(here / "renamed")
    (here / "f2").rename(here / "inner" / "f2")
    (here / "f3").rename(here / "f4")
    with (here / "open").open("wb") as file:
        file.write(b"333")
        file.flush()
        found = {entry.name: entry.stat().st_size for entry in os.scandir(here)}
    assert found.keys() == {"inner", "new", "renamed", "open"} | {f"f{number}" for number in range(4, 20)}
    assert (found["new"], found["open"]) == (2, 3)
    assert twice(here / "inner") == ["f2"]


def test_attributes_in_a_folder_that_was_read_follow(here: Path, there: Path) -> None:
    for number in range(10):
        (here / f"f{number}").write_bytes(b"1")
    eventually(lambda: len(twice(there)) == 10, "the names are not listed")
    (here / "f3").write_bytes(b"longer")
    (here / "f4").chmod(0o600)

    def shown() -> tuple[int, int]:
        found = {entry.name: entry.stat() for entry in os.scandir(there)}
        return found["f3"].st_size, found["f4"].st_mode & 0o777

    eventually(lambda: shown() == (6, 0o600), "old attributes are listed")


@pytest.mark.parametrize("was_read", [False, True])
def test_a_reading_goes_on_behind_what_is_removed_and_made_meanwhile(
    here: Path, elsewhere: lakefs.Lake, was_read: bool
) -> None:
    names = make_many(here, elsewhere)
    if was_read:
        assert set(twice(here)) == names
    with os.scandir(here) as entries:
        first = next(entries).name
        gone = sorted(names - {first})[::20]
        for name in gone:
            (here / name).unlink()
        (here / "new").touch()
        moved = max(names - {first, *gone})
        (here / moved).rename(here / "moved")
        shown = {first, *(entry.name for entry in entries)}
    left = names - {*gone, moved}
    assert left <= shown <= names | {"new", "moved"}
    assert not any((here / name).exists() for name in (*gone, moved))
    assert set(twice(here)) == left | {"new", "moved"}


@pytest.mark.parametrize("was_read", [False, True])
def test_a_reading_goes_on_when_others_change_the_folder(here: Path, elsewhere: lakefs.Lake, was_read: bool) -> None:
    names = make_many(here, elsewhere)
    changed = sorted(names)[::100]
    if was_read:
        assert set(twice(here)) == names
    with os.scandir(here) as entries:
        shown = [next(entries).name]
        for name in changed:
            elsewhere.put(f"{BUCKET}/{here.name}/{name}", b"other content")
        eventually(lambda: all((here / name).stat().st_size == 13 for name in changed), "a change is not seen")
        shown += [entry.name for entry in entries]
    assert sorted(shown) == sorted(names)
    assert set(twice(here)) == names


def make_many(here: Path, elsewhere: lakefs.Lake) -> set[str]:
    """Make files, not through this mount, that take the kernel several requests to list; return their names."""
    names = {f"{number:04} {'x' * 240}" for number in range(MANY)}
    elsewhere.put_many([(f"{BUCKET}/{here.name}/{name}", b"1") for name in sorted(names)])
    return names


def test_a_folder_that_comes_and_goes_with_its_file_is_seen(here: Path, elsewhere: lakefs.Lake) -> None:
    assert twice(here) == []
    assert not (here / "made").exists()
    elsewhere.put(f"{BUCKET}/{here.name}/made/by/others", b"1")
    eventually((here / "made").exists, "the folder is not seen")
    assert twice(here) == ["made"]
    assert (here / "made" / "by" / "others").read_bytes() == b"1"
    elsewhere.remove(f"{BUCKET}/{here.name}/made/by/others")
    eventually(lambda: not (here / "made").exists(), "the folder is still seen")
    assert twice(here) == []
