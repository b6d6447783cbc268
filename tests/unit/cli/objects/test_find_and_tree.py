"""`lake find` and `lake tree`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.unit.cli.objects.conftest import Shell

DAY_S = 86_400


@pytest.fixture(scope="module")
def bucket() -> str:
    return "found"


@pytest.fixture(autouse=True)
def _filled(shell: Shell, bucket: str, tmp_path: Path) -> None:
    if shell.lake.exists(bucket):
        return
    now = time.time()
    for name, size, days in (("new.bin", 2000, 0), ("d/old.bin", 1024, 30), ("d/e/old.txt", 10, 30), ("empty", 0, 2)):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (now - days * DAY_S, now - days * DAY_S))
    shell.good("put", "-r", tmp_path / "in", bucket)
    shell.lake.put("found2/x", b"x", create_bucket=True)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), ["d/e/old.txt", "d/old.bin", "empty", "new.bin"]),
        (("--name", "*.bin"), ["d/old.bin", "new.bin"]),
        (("--name", "*.bin", "--name", "em*"), ["d/old.bin", "empty", "new.bin"]),
        (("--path", "d/*.txt"), ["d/e/old.txt"]),
        (("--size", "+1K"), ["new.bin"]),
        (("--size", "1K"), ["d/old.bin"]),
        (("--size", "-1K", "--size", "+0"), ["d/e/old.txt"]),
        (("--newer", "7d"), ["empty", "new.bin"]),
        (("--older", "7d"), ["d/e/old.txt", "d/old.bin"]),
        (("--newer", "7d", "--older", "1d"), ["empty"]),
        (("--newer", "2020-01-01", "--older", "2021-01-01T00:00:00Z"), []),
        (("--max-depth", "2"), ["d/old.bin", "empty", "new.bin"]),
        (("--type", "d"), ["d/", "d/e/"]),
        (("--type", "folder", "--type", "f", "--name", "e*"), ["d/e/", "empty"]),
        (("--type", "symlink"), []),
    ],
)
def test_find_prints_what_fits_all_conditions(
    shell: Shell, bucket: str, options: tuple[str, ...], found: list[str]
) -> None:
    assert shell.good("find", bucket, *options).lines == [f"{bucket}/{key}" for key in found]


def test_find_takes_folders_objects_patterns_and_nothing(shell: Shell, bucket: str) -> None:
    assert shell.good("find", f"{bucket}/d/e", f"{bucket}/new.bin").lines == [
        f"{bucket}/d/e/old.txt",
        f"{bucket}/new.bin",
    ]
    assert shell.good("find", "found*", "--name", "x").lines == ["found2/x"]
    assert shell.good("find", "--size", "2000").lines == [f"{bucket}/new.bin"]
    assert shell.good("find", "-0", f"{bucket}/d/e").out == f"{bucket}/d/e/old.txt\0"
    (entry,) = json.loads(shell.good("find", "--json", f"{bucket}/new.bin").out)["entries"]
    assert (entry["name"], entry["size_bytes"]) == (f"{bucket}/new.bin", 2000)
    assert shell.good("find", "-l", f"{bucket}/new.bin").out.split()[1] == "2000"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--size", "big"), "is not a size"),
        (("--newer", "yore"), "neither an age"),
        (("found/none",), "does not exist"),
    ],
)
def test_find_says_what_it_does_not_understand(shell: Shell, options: tuple[str, ...], said: str) -> None:
    done = shell("find", *options)
    assert (done.code != 0, said in done.err) == (True, True)


def test_tree_draws_folders_and_counts(shell: Shell, bucket: str) -> None:
    done = shell.good("tree", bucket)
    assert done.out == ("found/\n├── d/\n│   ├── e/\n│   │   └── old.txt\n│   └── old.bin\n├── empty\n└── new.bin\n")
    assert done.err == "2 folders, 4 objects, 3.0 KiB\n"
    assert shell.good("tree", "-L", "1", bucket).lines == ["found/", "├── d/", "├── empty", "└── new.bin"]
    assert shell.good("tree", "-d", f"{bucket}/d").lines == ["found/d/", "└── e/"]
    assert shell.good("tree", "-L", "1").lines == ["├── found/", "└── found2/"]
    assert shell.good("tree", "-s", f"{bucket}/d/e").lines[-1] == "└── [      10 B]  old.txt"


def test_tree_of_what_is_no_folder_says_so(shell: Shell, bucket: str) -> None:
    assert "is an object, not a folder" in shell("tree", f"{bucket}/new.bin").err
    assert shell("tree", f"{bucket}/none").code == 66
    assert shell("tree", "nobucket").code == 66
