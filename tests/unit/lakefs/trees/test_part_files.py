"""Part files: recognised by their mark alone, on file systems of every kind, whenever a get is killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lakefs.errors import AlreadyExists, LocalFileError
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import PartFile, is_part, part_names, write_whole
from tests.part_files import left_part, opened_part, piece_of


@dataclass(frozen=True)
class Attributes:
    """The attributes that a file takes over."""

    mode: int = 0o640
    mtime_ns: int = 1_500_000_000_000_000_000


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def without_attributes(patch: pytest.MonkeyPatch) -> None:
    for name in ("setxattr", "getxattr", "removexattr"):
        patch.setattr(os, name, refuse)


def without_unnamed_files(patch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refuse()
        return opened(path, flags, *arguments, **options)

    patch.setattr(os, "open", open_)


KINDS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "everything": [],
    "no attributes": [without_attributes],
    "no unnamed files": [without_unnamed_files],
    "neither": [without_attributes, without_unnamed_files],
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a file system of each kind."""
    for lacks in KINDS[request.param]:
        lacks(monkeypatch)
    return tmp_path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [0, 5, 4095, 4096, 4097, 20_000])
def test_a_part_is_found_again_whatever_length_its_object_has_by_then(folder: Path, size: int) -> None:
    content = os.urandom(8192)
    left = left_part(folder / "x", content)
    assert is_part(str(left))
    part = opened_part(folder / "x")
    assert part.holds(piece_of(content))
    part.set_length(size)
    assert is_part(str(left))
    part.keep()
    part = opened_part(folder / "x")
    new = os.urandom(size)
    part.set_length(size)
    part.deliver(piece_of(new), memoryview(new))
    part.finish(Attributes())
    assert (folder / "x").read_bytes() == new
    assert names_in(folder) == ["x"]
    assert not is_part(str(folder / "x"))


def test_a_kill_at_any_call_leaves_a_part_or_the_whole_object(folder: Path) -> None:
    content = os.urandom(5000)
    strays: list[str] = []

    def looked_behind(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            seen = [path for path in folder.iterdir() if not is_part(str(path))]
            strays.extend(path.name for path in seen if path.read_bytes() != content)
            return result

        return called

    part = PartFile(LocalTarget.at(str(folder / "x")))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ftruncate", "pwrite", "link", "replace", "fchmod", "utime", "removexattr"):
            patch.setattr(os, name, looked_behind(getattr(os, name)))
        part.open()
        part.set_length(len(content))
        part.deliver(piece_of(content), memoryview(content))
        part.finish(Attributes())
    assert strays == []
    assert names_in(folder) == ["x"]


def test_nobody_elses_file_is_taken_for_a_part(folder: Path) -> None:
    precious = folder / part_names("x")[0]
    precious.write_bytes(b"precious")
    part = opened_part(folder / "x")
    assert part.part_name == part_names("x")[1]
    part.discard()
    left = left_part(folder / "x", b"half")
    assert is_part(str(left))
    # A copy with its attributes, under a name that a part of another target has; and what had the target's name.
    shutil.copy2(left, folder / part_names("y")[0])
    shutil.copy2(left, folder / "copied")
    os.rename(folder / "copied", left)
    os.link(left_part(folder / "z", b"half"), folder / "kept by hand")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("x", "y", "z"):
        write_whole(LocalTarget.at(str(folder / name)), b"old", Attributes())
        write_whole(LocalTarget.at(str(folder / name)), b"new", Attributes())
        assert (folder / name).read_bytes() == b"new"
        (folder / name).unlink()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_gets_of_one_target_do_not_spoil_each_other(folder: Path) -> None:
    first = opened_part(folder / "x")
    with pytest.raises(AlreadyExists, match="another process"):
        opened_part(folder / "x")
    first.discard()
    assert names_in(folder) == []


def test_a_part_that_an_object_of_its_name_replaced_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two objects of one tree, `x` and `.x.lake-part`, written side by side."""
    (tmp_path / "x").write_bytes(b"old")
    finish = PartFile.finish
    parts: list[str] = []

    def overtaken(part: PartFile, attributes: Attributes, *, replace: bool = True) -> None:
        if not parts:
            (tmp_path / "other").write_bytes(b"other")
            os.replace(tmp_path / "other", tmp_path / part.part_name)
        parts.append(part.part_name)
        finish(part, attributes, replace=replace)

    monkeypatch.setattr(PartFile, "finish", overtaken)
    write_whole(LocalTarget.at(str(tmp_path / "x")), b"new", Attributes())
    assert parts == part_names("x")[:2]
    assert (tmp_path / "x").read_bytes() == b"new"
    assert (tmp_path / parts[0]).read_bytes() == b"other"


def test_a_link_among_the_folders_is_noticed_when_the_file_is_written(tmp_path: Path) -> None:
    """The folders are checked again then: somebody may have exchanged one since the first look."""
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    target = LocalTarget(str(tmp_path / "out"), ("a",), "x")
    os.close(target.open_folder(make=True))
    (tmp_path / "out" / "a").rmdir()
    (tmp_path / "out" / "a").symlink_to("../elsewhere")
    with pytest.raises(LocalFileError, match="symbolic link"):
        write_whole(target, b"content", Attributes())
    with pytest.raises(LocalFileError, match="symbolic link"):
        PartFile(target).open()
    assert names_in(tmp_path / "elsewhere") == []
    write_whole(LocalTarget(target.root, target.below, "x", follow=True), b"content", Attributes())
    assert names_in(tmp_path / "elsewhere") == ["x"]
