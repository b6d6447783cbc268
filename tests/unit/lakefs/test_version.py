"""The commit that a version names: of a checkout in each of git's forms, of a distribution, or none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lakefs import version

HASH = "0123456789abcdef" * 2 + "01234567"


def written(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "tree")


@pytest.mark.parametrize(
    "files",
    [
        {"tree/.git/HEAD": f"{HASH}\n"},
        {"tree/.git/HEAD": "ref: refs/heads/main\n", "tree/.git/refs/heads/main": f"{HASH}\n"},
        {
            "tree/.git/HEAD": "ref: refs/heads/main\n",
            "tree/.git/packed-refs": f"# pack-refs\n{'f' * 40} refs/heads/maine\n{HASH} refs/heads/main\n^{'e' * 40}\n",
        },
        {
            "tree/.git": "gitdir: ../main/.git/worktrees/tree\n",
            "main/.git/worktrees/tree/HEAD": "ref: refs/heads/side\n",
            "main/.git/worktrees/tree/commondir": "../..\n",
            "main/.git/refs/heads/side": f"{HASH}\n",
        },
    ],
    ids=["detached", "branch", "packed", "worktree"],
)
def test_a_checkout_says_its_commit(tmp_path: Path, files: dict[str, str]) -> None:
    assert version.commit_of(written(tmp_path, files)) == HASH


@pytest.mark.parametrize(
    "files",
    [
        {"tree/x": ""},
        {"tree/.git/HEAD": ""},
        {"tree/.git/HEAD": "ref: refs/heads/main"},
        {"tree/.git/HEAD": "ref: ../../../../etc/passwd"},
        {"tree/.git/HEAD": "no hash"},
        {"tree/.git/HEAD": "ref: refs/heads/main", "tree/.git/packed-refs": "refs/heads/main"},
        {"tree/.git": "gitdir: nowhere"},
        {"tree/.git/HEAD/x": ""},
    ],
)
def test_whatever_else_is_there_is_no_commit_and_no_error(tmp_path: Path, files: dict[str, str]) -> None:
    assert version.commit_of(written(tmp_path, files)) == ""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tree/lakefs/commit.txt": HASH, "tree/.git/HEAD": "f" * 40}, HASH[:12]),
        ({"tree/lakefs/commit.txt": "rubbish"}, "unknown"),
        ({"tree/lakefs/x": ""}, "unknown"),
        ({"tree/lakefs/x": "", "tree/.git/HEAD": HASH}, HASH[:12]),
    ],
)
def test_a_distribution_says_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(version, "__file__", written(tmp_path, files) + "/lakefs/version.py")
    assert version.commit.__wrapped__() == said


def test_looking_it_up_takes_next_to_nothing() -> None:
    best_s = min(_timed() for _ in range(5))
    assert best_s < 0.01


def _timed() -> float:
    began = time.perf_counter()
    version.commit.__wrapped__()
    return time.perf_counter() - began
