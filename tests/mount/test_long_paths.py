"""Paths of more than 1,024 bytes on a mount, and longer ones than a path may have."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.mount.test_two_mounts import eventually
from tests.mount.tools import run

pytestmark = [pytest.mark.slow, pytest.mark.fuse]
PART = "d" * 250


def test_a_tree_below_a_long_path_is_made_renamed_deeper_read_and_removed(here: Path, there: Path) -> None:
    made = here / "made"
    made.mkdir()
    top = os.open(made, os.O_RDONLY)
    at = top
    for _ in range(15):
        os.mkdir(PART, dir_fd=at)
        below = os.open(PART, os.O_RDONLY, dir_fd=at)
        if at != top:
            os.close(at)
        at = below

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags, 0o644, dir_fd=at)

    with open("file", "w", opener=opener) as file:  # 3,775 bytes of path
        file.write("deep")
    with pytest.raises(OSError, match="File name too long") as raised:
        os.mkdir("x/".join(["y" * 200] * 2)[:255].replace("/", "") + "z" * 54, dir_fd=at)
    assert raised.value.errno == errno.ENAMETOOLONG
    (here / "outer" / PART / PART).mkdir(parents=True)
    os.rename(made, here / "outer" / PART / PART / "moved")
    with open("file", opener=opener) as file:
        assert file.read() == "deep"
    with open("file", "r+", opener=opener) as file:
        file.write("DEEP")
    with pytest.raises(OSError, match="File name too long"):
        os.close(opener("new" * 10, os.O_CREAT | os.O_WRONLY))
    os.rename("file", "gile", src_dir_fd=at, dst_dir_fd=at)

    def is_seen() -> bool:
        return len(run("find", ".", "-name", "gile", cwd=there).strip()) > 4200

    eventually(is_seen, "the long name is not seen elsewhere")
    os.rename("gile", here / "short", src_dir_fd=at)
    assert (here / "short").read_text() == "DEEP"
    for opened in (at, top):
        os.close(opened)
    run("rm", "-r", here / "outer")
    assert os.listdir(here) == ["short"]
