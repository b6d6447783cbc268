"""The folders that an engine makes: their modes, and what happens to them later."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.process.folders import places_made
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
