"""The folders that an engine makes: their modes, and what becomes of them; and what of its places counts as open."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.process.places import open_places, places_made
from lakefs.config.settings import Config, load
from lakefs.errors import LocalFileError

GROUP = grp.getgrgid(os.getegid()).gr_name


def config_of(place: Path, socket: str, group: str = "") -> Config:
    flags = {"data": f"{place}/data/store", "socket": f"{place}/{socket}", "socket_group": group}
    return load(file="/dev/null", environ={}, flags=flags)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_folders_are_their_owner_s_and_the_socket_s_its_group_s_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with places_made(config_of(tmp_path, "run/s")):
            assert (mode_of(tmp_path / "data/store"), mode_of(tmp_path / "run")) == (0o700, 0o700)
        with places_made(config_of(tmp_path, "run/s", GROUP)):
            assert (mode_of(tmp_path / "data/store"), mode_of(tmp_path / "run")) == (0o700, 0o750)
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_the_data_folder_is_not_opened_to_the_group_of_a_socket_in_it_and_that_is_said(tmp_path: Path) -> None:
    with capture_logs() as logged, places_made(config_of(tmp_path, "data/store/s", GROUP)):
        assert mode_of(tmp_path / "data/store") == 0o700
    assert [line["group"] for line in logged] == [GROUP]


def test_a_folder_that_was_there_is_left_as_it_is_and_one_with_something_in_it_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with places_made(config_of(tmp_path, "run/s")):
        assert mode_of(tmp_path / "run") == 0o755
        (tmp_path / "data/store/mine").touch()
    assert (tmp_path / "run").is_dir()
    assert (tmp_path / "data/store/mine").exists()


def test_what_cannot_be_made_is_told_and_what_was_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(LocalFileError, match="data folder"), places_made(config_of(tmp_path, "run/s")):
        raise AssertionError("the folders were made")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


OTHER_GROUP = 4711
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
        os.chown(folder, -1, OTHER_GROUP)
        folder.chmod(0o750)
        assert open_places(data, socket, OTHER_GROUP) == []
        [found] = open_places(data, socket, OTHER_GROUP + 1)
        assert f"{folder} is open to its group" in found
        folder.chmod(0o770)
        [found] = open_places(data, socket, OTHER_GROUP)
        assert found.endswith(f"(mode 0770); run: chmod 750 {folder}")
        folder.chmod(0o700)
    os.chown(data / "native.token", -1, OTHER_GROUP)
    (data / "native.token").chmod(0o640)
    assert len(open_places(data, socket, OTHER_GROUP)) == 1


@as_root
def test_what_belongs_to_another_user_is_open_whatever_its_mode(places: tuple[Path, Path]) -> None:
    data, socket = places
    for path in (data, data / "native.token", socket.parent):
        os.chown(path, STRANGER, -1)
        [found] = open_places(data, socket, None)
        assert f"{path} belongs to user {STRANGER}" in found
        assert found.endswith(f"run: chown {os.geteuid()} {path}")
        os.chown(path, os.geteuid(), -1)
