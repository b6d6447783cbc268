"""`lake get -r`: an edit of the user's is not lost, folders keep their modes, and one line says it all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.objects.conftest import Shell

MIB = 1 << 20


@pytest.mark.parametrize("size", [5, 5 * MIB])
@pytest.mark.parametrize("longer", [0, 1])
def test_an_edit_of_a_fetched_file_is_not_lost(shell: Shell, tmp_path: Path, size: int, longer: int) -> None:
    name = f"edits{size}-{longer}"
    shell.lake.put(f"{name}/d/f", bytes(size), create_bucket=True)
    shell.lake.put(f"{name}/d/g", b"g")
    shell.good("get", "-r", f"{name}/d", tmp_path)
    (tmp_path / "f").write_bytes(b"e" * (size + longer))
    done = shell("get", "-r", f"{name}/d", tmp_path)
    assert done.code == 1
    assert f"skipped {tmp_path}/f: changed here after the object was, and different; --force replaces it" in done.err
    assert (tmp_path / "f").read_bytes() == b"e" * (size + longer)
    shell.good("get", "-r", "--force", f"{name}/d", tmp_path)
    assert (tmp_path / "f").read_bytes() == bytes(size)


def test_a_later_time_with_the_same_content_is_no_edit_and_an_older_file_is_replaced(
    shell: Shell, tmp_path: Path
) -> None:
    shell.fill("times/d/same", "times/d/old")
    shell.good("get", "-r", "times/d", tmp_path)
    fetched_ns = (tmp_path / "same").stat().st_mtime_ns
    os.utime(tmp_path / "same")
    (tmp_path / "old").write_bytes(b"other")
    os.utime(tmp_path / "old", ns=(0, fetched_ns - 1))
    shell.good("get", "-r", "times/d", tmp_path)
    assert (tmp_path / "old").read_bytes() == b"times/d/old"
    assert (tmp_path / "same").stat().st_mtime_ns == fetched_ns


def test_no_clobber_says_one_line_however_many_files_are_there(shell: Shell, tmp_path: Path) -> None:
    shell.fill(*[f"lines/{index}" for index in range(5)])
    shell.good("get", "-r", "lines", tmp_path)
    (tmp_path / "3").unlink()
    done = shell.good("get", "-n", "-r", "lines", tmp_path)
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("5 files, 7 B: 1 fetched, 4 there already; ")


def test_put_and_get_of_a_folder_keep_folder_modes(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in" / "shut").mkdir(parents=True)
    (tmp_path / "in" / "shut" / "f").write_bytes(b"f")
    (tmp_path / "in" / "shut").chmod(0o550)
    (tmp_path / "in").chmod(0o700)
    shell.good("put", "-r", tmp_path / "in", "modes/k")
    shell.good("get", "-r", "modes/k", tmp_path / "out")
    found = [(tmp_path / "out" / name).stat().st_mode & 0o777 for name in ("", "shut", "shut/f")]
    assert found == [0o700, 0o550, 0o644]


def test_summaries_go_to_stderr_and_none_stands_before_an_error(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"sums")
    done = shell.good("put", tmp_path / "f", "sums/f")
    assert done.out == ""
    assert done.err.splitlines()[-1].startswith("1 file, 4 B: 1 stored; 4 B new; ")
    done = shell("get", "sums/none", tmp_path / "g")
    assert (done.out, done.err) == ("", "lake: 'sums/none' does not exist; see what does with: lake ls sums/\n")
