"""Sides of a sync as they are named, and its pace."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from cli.moving.sides import Lakes, Place, places_of, side_of
from cli.moving.sync_account import Pace
from cli.moving.watching import _fingerprint
from fuse.kernel import mount_point
from fuse.kernel.mount_point import LAKE_TYPE, MountEntry
from lakefs.client.blocking.lake import Lake
from lakefs.errors import InvalidArgument
from lakefs.sync.filters import Rules
from lakefs.sync.sides import FolderSide


def test_a_folder_in_a_mount_of_a_lake_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path.stat().st_dev
    mounted = f"{os.major(found)}:{os.minor(found)}"

    def mounts(device: str = "") -> list[MountEntry]:
        return [MountEntry(mounted, tmp_path, LAKE_TYPE, "lake")] if device == mounted else []

    lake = cast("Lake", None)
    name, below = "lake://models/k", str(tmp_path / "not" / "there")
    assert places_of(name, below, Lakes(lake, lake))[1].is_folder
    monkeypatch.setattr(mount_point, "all_mounts", mounts)
    for sides in ((name, below), (below, name)):
        with pytest.raises(InvalidArgument, match="in a mount of a lake"):
            places_of(*sides, Lakes(lake, lake))


def test_a_mount_of_a_lake_below_a_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("in/a", "in/mounted"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x").write_bytes(b"x")
    mounted = os.makedev(7, 77)
    entry = MountEntry("7:77", tmp_path / "in" / "mounted", LAKE_TYPE, "lake")
    monkeypatch.setattr(mount_point, "all_mounts", lambda device="": [entry])
    own = FolderSide._identity
    monkeypatch.setattr(
        FolderSide, "_identity", lambda side, folder: (mounted, 1) if folder.endswith("mounted/") else own(side, folder)
    )
    place = Place(str(tmp_path / "in"), cast("Lake", _StatusOnly()), is_folder=True, is_source=True)
    other = Place("lake://bucket", place.lake, is_folder=False, is_source=False)
    side = cast("FolderSide", side_of(place, other, Rules()))
    found = side.read_page()
    assert found is not None
    assert [(entry.path, entry.refusal) for entry in found] == [
        ("a/", ""),
        ("a/x", ""),
        ("mounted/", "a mount of a lake"),
    ]


def test_a_watch_sees_what_changes_behind_a_link_that_is_followed(tmp_path: Path) -> None:
    for folder in ("in", "behind"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "behind")
    before = [_fingerprint(str(tmp_path / "in"), Rules(), follow) for follow in (False, True)]
    (tmp_path / "behind" / "x").write_bytes(b"x")
    after = [_fingerprint(str(tmp_path / "in"), Rules(), follow) for follow in (False, True)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


class _StatusOnly:
    """A lake of another machine."""

    def status(self) -> dict[str, Any]:
        return {}


def test_a_pace_holds_what_moves_to_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(time, "sleep", cast("Any", slept.append))
    pace = Pace(1000)
    for count in (500, 0, 1500):
        pace.moved(count)
    assert slept == [0.5, 1.5]
    Pace(0).moved(1 << 40)
    assert slept == [0.5, 1.5]
