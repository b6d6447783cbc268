"""`lake get` beside files of the user's: nothing of theirs is written over, removed, or written to through links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import lakefs
from lakefs.client.facade import driver_of
from lakefs.steps.steps import send
from lakefs.trees.part_files import part_names
from lakefs.wire.messages import MakeSymlink, ObjectAttributes
from tests.e2e.served import Finished, Served

MIB = 1 << 20
PART = ".small.lake-part"


def put_all(served: Served, contents: dict[str, bytes]) -> None:
    with lakefs.connect(served.server) as client:
        for name, content in contents.items():
            client.put(name, content, create_bucket=True)


def fates(done: Finished) -> dict[str, str]:
    return {file["name"]: file["status"] for file in json.loads(done.out)["files"]}


@pytest.mark.parametrize("size", [5, 9 * MIB])
def test_an_object_named_as_a_part_is_an_object_like_any_other(served: Served, tmp_path: Path, size: int) -> None:
    contents = {PART: b"m" * size, "small": os.urandom(size), ".small.2.lake-part": b"2"}
    put_all(served, {f"parts{size}/k/{name}": content for name, content in contents.items()})
    for _ in range(2):
        got = json.loads(served.good("get", "-r", "-f", "--json", f"parts{size}/k", tmp_path / "out").out)
        assert got["totals"]["fetched"] == 3
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == contents
        for path in (tmp_path / "out").iterdir():
            path.write_bytes(b"old")


@pytest.mark.parametrize("size", [5, 9 * MIB])
def test_a_users_file_named_as_a_part_is_left_alone(served: Served, tmp_path: Path, size: int) -> None:
    put_all(served, {f"mine{size}/small": os.urandom(size)})
    (tmp_path / PART).write_bytes(b"precious")
    (tmp_path / ".small.2.lake-part").mkdir()
    (tmp_path / ".small.3.lake-part").symlink_to("nowhere")
    os.mkfifo(tmp_path / ".small.4.lake-part")
    before = sorted(path.name for path in tmp_path.iterdir())
    for _ in range(2):
        served.good("get", f"mine{size}/small", tmp_path / "small")
    assert (tmp_path / PART).read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "small"])


def test_a_get_that_finds_every_name_of_a_part_taken_says_so(served: Served, tmp_path: Path) -> None:
    put_all(served, {"taken/small": b"new"})
    for name in part_names("small"):
        (tmp_path / name).write_bytes(b"precious")
    (tmp_path / "small").write_bytes(b"old")
    done = served("get", "taken/small", tmp_path / "small")
    assert done.code == 74
    assert f"the names {PART} to" in done.err
    assert (tmp_path / "small").read_bytes() == b"old"
    assert all((tmp_path / name).read_bytes() == b"precious" for name in part_names("small"))


def test_a_users_file_named_as_a_part_is_put(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / PART).write_bytes(b"mine")
    served.good("put", "-r", root, "putpart/k")
    assert served.good("ls", "putpart/k").lines == [PART]


def test_nothing_is_written_through_a_linked_folder_unless_that_is_asked_for(served: Served, tmp_path: Path) -> None:
    put_all(served, {f"folders/k/{name}": b"new" for name in ("a/b/x", "a/large", "d/y", "z")})
    put_all(served, {"folders/k/a/large": os.urandom(9 * MIB)})
    with lakefs.connect(served.server) as client:
        client.make_folder("folders/k/a/made")
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "x").write_bytes(b"precious")
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").symlink_to(outside)
    done = served("get", "-r", "--json", "folders/k", target)
    assert done.code == 74
    assert "is a symbolic link" in json.loads(done.err)["message"]
    assert fates(done) == {
        "folders/k/a/b/": "failed",
        "folders/k/a/b/x": "failed",
        "folders/k/a/": "failed",
        "folders/k/a/large": "failed",
        "folders/k/a/made/": "failed",
        "folders/k/d/y": "fetched",
        "folders/k/z": "fetched",
    }
    assert json.loads(done.out)["totals"]["failed"] == 5
    assert [str(path.relative_to(outside)) for path in sorted(outside.rglob("*"))] == ["b", "b/x"]
    assert (outside / "b" / "x").read_bytes() == b"precious"
    served.good("get", "-r", "--follow", "--force", "folders/k", target)
    assert (outside / "b" / "x").read_bytes() == b"new"
    assert (outside / "large").stat().st_size == 9 * MIB
    assert (target / "a").is_symlink()


def test_a_folder_that_the_user_names_may_be_a_link(served: Served, tmp_path: Path) -> None:
    put_all(served, {"named/k/x": b"new", "named/x": b"new"})
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    served.good("get", "-r", "named/k", tmp_path / "link")
    assert (tmp_path / "real" / "x").read_bytes() == b"new"


def test_a_link_that_the_user_names_is_written_through_and_no_other(served: Served, tmp_path: Path) -> None:
    put_all(served, {"links/x": b"new"})
    (tmp_path / "outside").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").symlink_to(tmp_path / "outside")
    served.good("get", "links/x", tmp_path / "out")
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert (tmp_path / "out" / "x").read_bytes() == b"new"
    (tmp_path / "named").symlink_to("outside")
    served.good("get", "links/x", tmp_path / "named")
    assert (tmp_path / "outside").read_bytes() == b"new"
    assert (tmp_path / "named").is_symlink()


def test_a_symbolic_link_of_the_lake_is_not_fetched_and_that_is_a_failure(served: Served, tmp_path: Path) -> None:
    put_all(served, {"odd/k/x": b"new", "odd/k/f/": b"content of a folder's own key"})
    with lakefs.connect(served.server) as client:
        driver_of(client).run(send(MakeSymlink("odd", "k/link", b"x", ObjectAttributes())))
    done = served("get", "-r", "--json", "odd/k", tmp_path / "out")
    assert done.code != 0
    assert fates(done) == {"odd/k/f/": "failed", "odd/k/link": "failed", "odd/k/x": "fetched"}
    messages = {file["name"]: file.get("message", "") for file in json.loads(done.out)["files"]}
    assert "symbolic link" in messages["odd/k/link"]
    assert "content" in messages["odd/k/f/"]


def test_a_folder_is_said_to_be_one(served: Served, tmp_path: Path) -> None:
    put_all(served, {"folder/k/x": b"x"})
    commands: dict[str, list[str | Path]] = {
        "folder/k": ["get", "folder/k", tmp_path / "out"],
        "folder/k/": ["get", "folder/k/", tmp_path],
        "lake://folder/k": ["get", "lake://folder/k", "-"],
        "folder/": ["cat", "folder/"],
        "folder": ["get", "folder", tmp_path / "out"],
    }
    for name, command in commands.items():
        done = served(*command)
        assert done.code == 73
        assert f"lake: {name} is a {'bucket' if name.strip('/') == 'folder' else 'folder'}; " in done.err
        assert f"lake get -r {name} DST" in done.err
        assert f"lake ls {name}\n" in done.err
    assert list(tmp_path.iterdir()) == []
    missing = served("cat", "folder/none")
    assert (missing.code, "does not exist" in missing.err) == (66, True)
