"""Patterns of names: what they match, that literal names win, and each command that takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cli.objects.patterns import _path_matches, folder_of
from tests.odd_names import put_odd
from tests.unit.cli.objects.conftest import Shell

KEYS = ("a.bin", "b.txt", ".hidden", "d/x.bin", "d/deep/er/y.bin", "e/x.bin", "e/z/x.txt", "[1].bin", "new\nline.bin")


@pytest.fixture
def bucket(shell: Shell) -> str:
    name = f"glob{len(shell.lake.buckets())}"
    shell.fill(*[f"{name}/{key}" for key in KEYS])
    return name


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.bin", ["[1].bin", "a.bin", "new\nline.bin"]),
        ("*", [".hidden", "[1].bin", "a.bin", "b.txt", "d/", "e/", "new\nline.bin"]),
        ("*/", ["d/", "e/"]),
        ("?.[bt]*", ["a.bin", "b.txt"]),
        ("[!a].txt", ["b.txt"]),
        ("*/x.bin", ["d/x.bin", "e/x.bin"]),
        ("d*/*", ["d/deep/", "d/x.bin"]),
        ("**/x.*", ["d/x.bin", "e/x.bin", "e/z/x.txt"]),
        ("**/er/*", ["d/deep/er/y.bin"]),
        ("d/**", ["d/deep/", "d/deep/er/", "d/deep/er/y.bin", "d/x.bin"]),
        ("**/deep/**/*.bin", ["d/deep/er/y.bin"]),
        ("**/z/", ["e/z/"]),
        ("e/*/x.txt", ["e/z/x.txt"]),
        ("[[]1].bin", ["[1].bin"]),
        ("[1].bin", ["[1].bin"]),
    ],
)
def test_a_pattern_matches_as_a_shell_would(shell: Shell, bucket: str, pattern: str, found: list[str]) -> None:
    done = shell.good("ls", "--json", f"{bucket}/{pattern}")
    assert [entry["key"] for entry in json.loads(done.out)["entries"]] == found


def test_ls_shows_matches_below_the_folder_that_the_pattern_begins_with(shell: Shell, bucket: str) -> None:
    assert shell.good("ls", f"{bucket}/d/*").lines == ["deep/", "x.bin"]
    assert shell.good("ls", f"lake://{bucket}/e/*/x.txt").lines == ["z/x.txt"]
    assert shell.good("ls", f"{bucket[:-1]}?/b.t*").lines[-1].endswith("/b.txt")
    assert folder_of("b/x*y/z") == "b/"


def test_a_pattern_without_a_match_is_an_error_that_says_where_to_look(shell: Shell, bucket: str) -> None:
    done = shell("rm", f"{bucket}/d/*.none")
    assert (done.code, done.err) == (
        66,
        f"lake: nothing matches {bucket}/d/*.none; see what is there with: lake ls {bucket}/d/\n",
    )
    assert shell("ls", "nosuch*/x").code == 66
    assert shell("ls", "nosuch/*").code == 66


def test_a_key_with_a_star_stays_reachable_and_alone(shell: Shell) -> None:
    shell.fill("stars/*", "stars/x", "stars/d/y", "stars/[a]/z")
    shell.good("rm", "stars/*")
    assert shell.names("stars") == ["[a]/z", "d/y", "x"]
    assert shell.good("ls", "stars/[a]").lines == ["z"]


def test_rm_du_stat_and_cat_take_patterns(shell: Shell, bucket: str) -> None:
    found = json.loads(shell.good("stat", "--json", f"{bucket}/?.*").out)
    assert [stat["name"] for stat in found] == [f"{bucket}/a.bin", f"{bucket}/b.txt"]
    usage = json.loads(shell.good("du", "--json", f"{bucket}/*/").out)["usage"]
    assert [row["objects"] for row in usage] == [2, 2]
    done = shell("rm", f"{bucket}/*")
    assert done.code == 73, "of the folders"
    assert [key for key in shell.names(bucket) if "/" not in key] == []
    shell.good("rm", "-r", f"{bucket}/*")
    assert shell.names(bucket) == []


def test_get_puts_matches_into_a_folder_and_refuses_two_of_one_name(shell: Shell, bucket: str, tmp_path: Path) -> None:
    shell.good("get", f"{bucket}/?.*", tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["a.bin", "b.txt"]
    shell.good("get", f"{bucket}/*.txt", tmp_path / "one.txt")
    assert (tmp_path / "one.txt").read_text() == f"{bucket}/b.txt"
    shell.good("get", "-r", f"{bucket}/?/", tmp_path / "folders")
    assert (tmp_path / "folders" / "d" / "deep" / "er" / "y.bin").exists()
    shell.good("get", "-r", f"{bucket}/[bd]*", tmp_path / "mixed")
    assert sorted(path.name for path in (tmp_path / "mixed").iterdir()) == ["b.txt", "d"]
    done = shell("get", f"{bucket}/*/x.bin", tmp_path / "twice")
    assert done.code == 2
    assert "would both become" in done.err
    assert not (tmp_path / "twice").exists()


def test_below_the_folder_no_link_is_followed_and_no_edit_lost(shell: Shell, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "d").symlink_to(tmp_path / "outside")
    (tmp_path / "out" / "a.bin").symlink_to(tmp_path / "precious")
    assert shell("get", "-r", f"{bucket}/*", tmp_path / "out").code == 74
    shell.good("get", f"{bucket}/?.*", tmp_path / "out")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert list((tmp_path / "outside").iterdir()) == []
    (tmp_path / "out" / "b.txt").write_bytes(b"an edit")
    assert shell("get", "-r", f"{bucket}/?.*", tmp_path / "out").code == 1
    assert (tmp_path / "out" / "b.txt").read_bytes() == b"an edit"
    shell.good("get", "-r", "--follow", f"{bucket}/d/", tmp_path / "out" / "d")
    assert (tmp_path / "outside" / "x.bin").exists()


@pytest.mark.parametrize("options", [(), ("-r",)])
def test_a_match_that_no_file_can_be_called_leads_nowhere(
    shell: Shell, tmp_path: Path, options: tuple[str, ...]
) -> None:
    bucket = f"dots{len(options)}"
    put_odd(shell.lake, bucket, "d/../escaped", b"escaped")
    put_odd(shell.lake, bucket, "d/..", b"dots")
    done = shell("get", *options, f"{bucket}/d/*", tmp_path / "in" / "out")
    assert done.code == 2
    assert "ends in no name that a file can have" in done.err
    assert list(tmp_path.iterdir()) == []


def test_cp_and_mv_put_matches_into_a_folder(shell: Shell, bucket: str) -> None:
    shell.good("cp", f"{bucket}/*.bin", f"{bucket}/copies/")
    shell.good("cp", "-r", f"{bucket}/[de]/", f"{bucket}/copies/")
    copies = [key.removeprefix("copies/") for key in shell.names(bucket) if key.startswith("copies/")]
    assert copies == sorted([key for key in KEYS if "/" in key or key.endswith(".bin")], key=str.encode)
    moved = json.loads(shell.good("mv", "--json", f"{bucket}/copies/*.bin", f"{bucket}/moved/").out)
    assert moved == {"moved": 3}
    assert shell("cp", f"{bucket}/*.bin", f"{bucket}/copies").code == 2
    assert shell("cp", f"{bucket}/*", f"{bucket}/copies/").code == 2
    assert shell("cp", f"{bucket}/*/x.bin", f"{bucket}/copies/").code == 2


PARTS = st.lists(st.sampled_from(["a", "b", "**", "*"]), min_size=1, max_size=4)


@given(PARTS, st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5))
def test_any_folders_match_as_their_meaning_says(pattern: list[str], path: list[str]) -> None:
    def means(pattern: list[str], path: list[str]) -> bool:
        if not pattern:
            return not path
        if pattern[0] == "**":
            if len(pattern) == 1:
                return bool(path)
            return any(means(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
        return bool(path) and pattern[0] in ("*", path[0]) and means(pattern[1:], path[1:])

    assert _path_matches(pattern, path) == means(["**", *pattern], path)


def test_a_pattern_that_takes_the_target_too_moves_the_others(shell: Shell) -> None:
    shell.fill("moving/a", "moving/m/x", "moving/z", "moving/d/e/y")
    done = shell("mv", "moving/*", "moving/m/")
    assert (done.code, "cannot be moved below itself" in done.err) == (2, True)
    assert shell.names("moving") == ["m/a", "m/d/e/y", "m/x", "m/z"]
    shell.fill("moving/p/q/r/s")
    assert json.loads(shell.good("mv", "--json", "moving/p/**", "moving/t/").out)["name"] == "moving/t/q/"
    assert "t/q/r/s" in shell.names("moving"), "what was in a folder that was moved is no error"
