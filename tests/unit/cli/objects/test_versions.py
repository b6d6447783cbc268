"""`lake versions`: old versions are listed, fetched, brought back and removed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.objects import versions
from lakefs.names import Name
from lakefs.steps.steps import Steps, send
from lakefs.wire.messages import DeleteNames, NameResult
from tests.unit.cli.objects.conftest import Shell


@pytest.fixture
def kept(shell: Shell) -> str:
    """A bucket with versions, in which `k` was written three times and removed, and `d/x` overwritten."""
    bucket = f"kept{len(shell.lake.buckets())}"
    shell.lake.create_bucket(bucket)
    shell.good("bucket", "set", bucket, "--versioning", "enabled")
    for content in (b"1", b"22", b"333"):
        shell.lake.put(f"{bucket}/k", content)
    shell.lake.put(f"{bucket}/kk", b"beside it")
    shell.lake.put(f"{bucket}/d/x", b"x")
    shell.lake.put(f"{bucket}/d/x", b"later x")
    shell.good("rm", f"{bucket}/k")
    return bucket


def listed(shell: Shell, name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(shell.good("versions", "ls", "--json", name).out)["versions"]
    return found


def test_versions_of_an_object_a_folder_and_a_bucket_are_listed(shell: Shell, kept: str) -> None:
    found = listed(shell, f"{kept}/k")
    assert [(entry["is_marker"], entry["size_bytes"]) for entry in found] == [
        (True, 0),
        (False, 3),
        (False, 2),
        (False, 1),
    ]
    assert [entry["key"] for entry in listed(shell, f"{kept}/d")] == ["d/x", "d/x"]
    assert len(listed(shell, kept)) == 7
    lines = shell.good("versions", "ls", f"{kept}/k").lines
    assert [line.split()[-2:] for line in lines[:2]] == [["deleted", "k"], [str(found[1]["version"]), "k"]]
    assert shell.good("versions", "ls", f"{kept}/d/x").lines[0].split()[-2:] == ["latest", "d/x"]
    assert shell("versions", "ls", f"{kept}/none").code == 66


def test_an_old_version_is_fetched(shell: Shell, kept: str, tmp_path: Path) -> None:
    oldest = str(listed(shell, f"{kept}/k")[-1]["version"])
    shell.good("versions", "get", f"{kept}/k", oldest, tmp_path / "f")
    shell.good("versions", "get", f"{kept}/k", oldest, tmp_path)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "k").read_bytes() == b"1"
    assert shell("versions", "get", f"{kept}/k", "f" * 32, tmp_path / "g").code != 0
    assert not (tmp_path / "g").exists()


def test_a_version_goes_into_a_pipe_as_into_any_stream(shell: Shell, kept: str, tmp_path: Path) -> None:
    oldest = str(listed(shell, f"{kept}/k")[-1]["version"])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        shell.good("versions", "get", f"{kept}/k", oldest, pipe)
        assert os.read(reader, 10) == b"1"
    finally:
        os.close(reader)
    assert pipe.is_fifo(), "/dev/null would become a file"
    assert shell("versions", "get", f"{kept}/k", oldest, f"{tmp_path}/none/").code == 74
    assert not (tmp_path / "none").exists()


def test_what_was_removed_or_overwritten_comes_back(shell: Shell, kept: str) -> None:
    shell.good("versions", "restore", f"{kept}/k", f"{kept}/d/x")
    assert shell.lake.open(f"{kept}/k").read() == b"333"
    assert shell.lake.open(f"{kept}/d/x").read() == b"x"
    oldest = str(listed(shell, f"{kept}/k")[-1]["version"])
    shell.good("versions", "restore", "--version", oldest, f"{kept}/k")
    assert shell.lake.open(f"{kept}/k").read() == b"1"
    assert shell("versions", "restore", f"{kept}/kk").code == 66
    assert "lake versions restore -r" in shell("versions", "restore", f"{kept}/d").err
    assert shell("versions", "restore", "--version", oldest, "-r", f"{kept}/k").code == 2


def test_only_what_was_removed_comes_back_of_a_folder(shell: Shell, kept: str) -> None:
    with_many = [f"{kept}/d/{index:04}" for index in range(1010)]
    shell.fill(*with_many)
    shell.good("rm", "-r", f"{kept}/d")
    shell.lake.put(f"{kept}/d/0007", b"new")
    done = shell.good("versions", "restore", "-r", f"{kept}/d/")
    assert done.err == "1010 objects restored\n"
    assert len(shell.names(kept)) == 1012
    assert shell.lake.open(f"{kept}/d/x").read() == b"later x"
    assert shell.lake.open(f"{kept}/d/0007").read() == b"new"
    assert shell("versions", "restore", "-r", f"{kept}/d/").code == 66


def test_versions_are_removed_for_good(shell: Shell, kept: str) -> None:
    marker, newest, *_, oldest = [str(entry["version"]) for entry in listed(shell, f"{kept}/k")]
    shell.good("versions", "rm", f"{kept}/k", marker, oldest)
    assert shell.lake.open(f"{kept}/k").read() == b"333"
    assert listed(shell, f"{kept}/k")[0]["version"] == newest
    assert len(listed(shell, f"{kept}/k")) == 2
    assert shell("versions", "rm", f"{kept}/k", oldest).code == 66


def test_all_old_versions_are_removed_and_what_is_there_stays(shell: Shell, kept: str) -> None:
    shell.fill(*[f"{kept}/many/{index:04}" for index in range(1010)])
    shell.good("rm", "-r", f"{kept}/many")
    declined = shell.on_terminal("n\n", "versions", "rm", "-r", kept)
    assert (declined.code, len(listed(shell, kept))) == (1, 7 + 2020)
    done = shell.good("versions", "rm", "-r", kept)
    assert done.err == f"{2020 + 3 + 1 + 1} versions removed\n", "all of many, three of k and its marker, one of d/x"
    assert [(entry["key"], entry["is_latest"]) for entry in listed(shell, kept)] == [("d/x", True), ("kk", True)]
    assert shell.lake.open(f"{kept}/d/x").read() == b"later x"
    shell.good("rm", "-r", kept)
    shell.good("versions", "rm", "-r", "-y", kept)
    shell.good("bucket", "rm", kept)
    assert shell("versions", "rm", f"{kept}/k").code == 2


def test_what_is_removed_while_old_versions_go_is_not_there_again(
    shell: Shell, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, calls = versions._delete, list[Name]()

    def and_others_remove(of: Sequence[tuple[str, str]], name: Name) -> Steps[list[NameResult]]:
        found = yield from delete(of, name)
        if not calls:
            yield from send(DeleteNames([(kept, "kk")]))
        calls.append(name)
        return found

    monkeypatch.setattr(versions, "_delete", and_others_remove)
    shell.good("versions", "rm", "-r", kept)
    assert shell.names(kept) == ["d/x"]
    assert [entry["is_marker"] for entry in listed(shell, f"{kept}/kk")] == [True, False]
