"""The check of an engine's places for being open to others: modes, owners, groups, and a sticky folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.process.permissions import open_places

GROUP = 4711
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Make a data folder with its secrets, and a socket's path in a folder of its own, as an engine makes them."""
    data, run = tmp_path / "store", tmp_path / "run"
    for folder in (data, run):
        folder.mkdir(mode=0o700)
    for name in ("native.token", "s3-first-key"):
        (data / name).touch(mode=0o600)
    return data, run / "lake.sock"


def test_what_is_as_it_was_made_or_absent_is_not_open(places: tuple[Path, Path]) -> None:
    data, socket = places
    assert open_places(data, socket, None) == []
    assert open_places(data, data / "lake.sock", None) == []
    assert open_places(data, data.parent / "absent" / "lake.sock", None) == []


@pytest.mark.parametrize(
    ("name", "mode", "said", "remedy"),
    [
        ("store", 0o755, "the data folder {} is open to others (mode 0755)", "chmod 700 {}"),
        ("store", 0o1777, "the data folder {} is open to others (mode 1777)", "chmod 700 {}"),
        ("store", 0o750, "the data folder {} is open to its group (mode 0750)", "chmod 700 {}"),
        ("store/native.token", 0o604, "the file {} is open to others (mode 0604)", "chmod 600 {}"),
        ("store/native.token", 0o640, "the file {} is open to its group (mode 0640)", "chmod 600 {}"),
        ("store/s3-first-key", 0o644, "the file {} is open to others (mode 0644)", "chmod 600 {}"),
        ("run", 0o755, "the socket's folder {} is open to others (mode 0755)", "chmod 750 {}"),
        ("run", 0o777, "the socket's folder {} is open to others (mode 0777)", "chmod 750 {}"),
        ("run", 0o770, "the socket's folder {} is open to its group (mode 0770)", "chmod 750 {}"),
    ],
)
def test_each_place_that_is_more_open_is_named_with_what_to_do(
    places: tuple[Path, Path], name: str, mode: int, said: str, remedy: str
) -> None:
    data, socket = places
    path = data.parent / name
    path.chmod(mode)
    assert open_places(data, socket, None) == [f"{said.format(path)}; run: {remedy.format(path)}"]


def test_a_socket_may_lie_in_a_sticky_folder_and_in_one_that_its_own_group_reads(places: tuple[Path, Path]) -> None:
    data, socket = places
    for mode in (0o1777, 0o750, 0o710):
        socket.parent.chmod(mode)
        assert open_places(data, socket, None) == []


@as_root
def test_the_configured_group_may_read_both_folders_and_write_neither(places: tuple[Path, Path]) -> None:
    data, socket = places
    for folder in (data, socket.parent):
        os.chown(folder, -1, GROUP)
        folder.chmod(0o750)
        assert open_places(data, socket, GROUP) == []
        [found] = open_places(data, socket, GROUP + 1)
        assert f"{folder} is open to its group" in found
        folder.chmod(0o770)
        [found] = open_places(data, socket, GROUP)
        assert found.endswith(f"(mode 0770); run: chmod 750 {folder}")
        folder.chmod(0o700)
    os.chown(data / "native.token", -1, GROUP)
    (data / "native.token").chmod(0o640)
    assert len(open_places(data, socket, GROUP)) == 1


@as_root
def test_what_belongs_to_another_user_is_open_whatever_its_mode(places: tuple[Path, Path]) -> None:
    data, socket = places
    for path in (data, data / "native.token", socket.parent):
        os.chown(path, STRANGER, -1)
        [found] = open_places(data, socket, None)
        assert f"{path} belongs to user {STRANGER}" in found
        assert found.endswith(f"run: chown {os.geteuid()} {path}")
        os.chown(path, os.geteuid(), -1)
