"""`lake ls|stat|du|rm|mv|cp|bucket`: looking at names and changing them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

import lakefs
from tests.e2e.served import LAKE, Served, environment
from tests.odd_names import put_odd


def fill(served: Served, bucket: str, *keys: str) -> None:
    """Put objects whose content is their key."""
    with lakefs.connect(served.server) as client:
        client.put_many([(f"{bucket}/{key}", key.encode()) for key in keys], create_bucket=True)


def keys_of(served: Served, bucket: str) -> list[str]:
    return served.good("ls", "-r", bucket).lines


def test_buckets_are_made_listed_and_removed(served: Served) -> None:
    served.good("bucket", "create", "made")
    assert served("bucket", "create", "made").code == 73
    assert "made" in served.good("bucket", "ls").lines
    assert "made" in served.good("ls").lines
    found = json.loads(served.good("ls", "--json").out)["buckets"]
    assert "made" in {bucket["name"] for bucket in found}
    assert served.good("ls", "made").lines == []
    served.good("bucket", "rm", "made")
    assert served("bucket", "rm", "made").code == 66
    assert served("ls", "made").code == 66


def test_a_bucket_s_settings_are_shown_and_changed(served: Served) -> None:
    served.good("bucket", "create", "open")
    assert served.good("bucket", "set", "open").lines == ["anonymous-read no", "versioning     never enabled"]
    served.good("bucket", "set", "open", "--anonymous-read", "--versioning", "enabled")
    assert served.good("bucket", "set", "open").lines == ["anonymous-read yes", "versioning     enabled"]
    found = json.loads(served.good("bucket", "ls", "--json").out)["buckets"]
    assert {bucket["name"]: bucket["anonymous_read"] for bucket in found}["open"]
    told = json.loads(served.good("bucket", "set", "open", "--no-anonymous-read", "--json").out)
    assert (told["name"], told["anonymous_read"]) == ("open", False)
    assert served("bucket", "set", "nowhere", "--anonymous-read").code == 66


def test_a_bucket_with_names_is_not_removed(served: Served) -> None:
    fill(served, "full", "x")
    done = served("bucket", "rm", "full")
    assert done.code == 73
    assert "lake rm -r" in done.err
    assert keys_of(served, "full") == ["x"]


def test_a_bucket_name_with_a_key_is_refused(served: Served) -> None:
    assert served("bucket", "create", "a/b").code == 2


def test_ls_shows_one_level_and_folders_end_in_a_slash(served: Served) -> None:
    fill(served, "levels", "a", "d/e/f", "d/g", "z")
    assert served.good("ls", "levels").lines == ["a", "d/", "z"]
    assert served.good("ls", "levels/d").lines == ["e/", "g"]
    assert served.good("ls", "levels/d/").lines == ["e/", "g"]
    assert served.good("ls", "lake://levels/d").lines == ["e/", "g"]
    assert served.good("ls", "levels/d/g").lines == ["g"]
    assert served.good("ls", "-r", "levels").lines == ["a", "d/e/f", "d/g", "z"]
    assert served.good("ls", "-r", "levels/d").lines == ["e/f", "g"]
    assert served("ls", "levels/none").code == 66
    assert served("ls", "levels/none/").code == 66


def test_ls_shows_an_object_and_a_folder_of_one_name(served: Served) -> None:
    fill(served, "same", "a", "a/b")
    assert served.good("ls", "same/a").lines == ["a", "b"]


def test_ls_l_shows_size_time_and_mode(served: Served) -> None:
    fill(served, "long", "four")
    (line,) = served.good("ls", "-l", "long").lines
    mode, size, time, name = line.split()
    assert (mode, size, name) == ("-rw-r--r--", "4", "four")
    assert time.endswith("Z")


def test_ls_lists_more_than_one_page(served: Served) -> None:
    keys = [f"k{index:05}" for index in range(2345)]
    fill(served, "pages", *keys)
    assert keys_of(served, "pages") == keys
    found = json.loads(served.good("ls", "--json", "pages").out)["entries"]
    assert [entry["key"] for entry in found] == keys


def test_a_name_cannot_drive_the_terminal_but_reaches_a_pipe_as_it_is(served: Served) -> None:
    fill(served, "escape", "red\x1b[31m")
    assert served.good("ls", "escape").text == "red\x1b[31m\n"
    leader, follower = pty.openpty()
    subprocess.run([*LAKE, "ls", "escape"], stdout=follower, env=environment(served.server), check=True)
    os.close(follower)
    shown = os.read(leader, 1000)
    os.close(leader)
    assert shown == b"red\\x1b[31m\r\n"


def test_stat_tells_objects_folders_and_buckets_apart(served: Served) -> None:
    fill(served, "stats", "d/x")
    found = json.loads(served.good("stat", "--json", "stats/d/x").out)
    assert (found["name"], found["kind"], found["size_bytes"]) == ("stats/d/x", "object", 3)
    assert json.loads(served.good("stat", "--json", "stats/d").out)["kind"] == "folder"
    assert json.loads(served.good("stat", "--json", "stats/d/").out)["kind"] == "folder"
    assert json.loads(served.good("stat", "--json", "stats").out)["kind"] == "folder"
    assert "size_bytes:    3" in served.good("stat", "stats/d/x").lines
    assert served("stat", "stats/none").code == 66
    assert served("stat", "nostats/none").code == 66


def test_du_sums_sizes_and_counts_objects(served: Served) -> None:
    fill(served, "sums", "a", "d/bb", "d/e/ccc")
    assert served.good("du", "-b", "sums").text.split() == ["12", "3", "sums"]
    found = json.loads(served.good("du", "--json", "-d", "1", "sums").out)["usage"]
    assert found == [
        {"name": "sums/d/", "size_bytes": 11, "objects": 2},
        {"name": "sums", "size_bytes": 12, "objects": 3},
    ]
    assert served.good("du", "-b", "sums/d/bb").text.split() == ["4", "1", "sums/d/bb"]
    assert served("du", "sums/none").code == 66


def test_rm_removes_objects_and_says_what_is_missing(served: Served) -> None:
    fill(served, "gone", "a", "b", "d/x")
    done = served("rm", "gone/a", "gone/none", "gone/b")
    assert done.code == 66
    assert "gone/none does not exist" in done.err
    assert keys_of(served, "gone") == ["d/x"]
    assert served("rm", "gone/d").code == 73
    assert served("rm", "gone/d/").code == 73
    assert keys_of(served, "gone") == ["d/x"]
    served.good("rm", "-f", "gone/none", "gone/d/x")
    assert keys_of(served, "gone") == []


def test_rm_r_removes_folders_of_more_than_a_page_and_nothing_beside_them(served: Served) -> None:
    below = [f"d/{index % 7}/{index:05}" for index in range(2100)]
    fill(served, "tree", "d", "d!", "d0", *below)
    with lakefs.connect(served.server) as client:
        for folder in ("tree/d/made/deep/er", "tree/d/made/deeper"):
            client.make_folder(folder)
    found = json.loads(served.good("rm", "-r", "--json", "tree/d/").out)
    assert found["removed"] >= len(below)
    assert keys_of(served, "tree") == ["d", "d!", "d0"]
    assert served("rm", "-r", "tree/d/").code == 66
    served.good("rm", "-r", "tree")
    assert served.good("ls", "tree").lines == []
    served.good("rm", "-r", "tree")
    served.good("bucket", "rm", "tree")


def test_mv_renames_objects(served: Served) -> None:
    fill(served, "moves", "a", "b")
    served.good("mv", "moves/a", "moves/c")
    served.good("mv", "moves/c", "moves/d/")
    assert keys_of(served, "moves") == ["b", "d/c"]
    assert served("mv", "-n", "moves/b", "moves/d/c").code == 73
    served.good("mv", "moves/b", "moves/d/c")
    assert served.good("cat", "moves/d/c").out == b"b"
    assert served("mv", "moves/none", "moves/x").code == 66


def test_mv_renames_folders_with_and_without_slashes_and_across_buckets(served: Served) -> None:
    fill(served, "folders", "d/e/x", "d/y", "other/z")
    served.good("mv", "folders/d", "folders/new")
    assert keys_of(served, "folders") == ["new/e/x", "new/y", "other/z"]
    served.good("bucket", "create", "folders2")
    served.good("mv", "folders/new/", "folders2/deep/er/")
    assert keys_of(served, "folders2") == ["deep/er/e/x", "deep/er/y"]
    assert served("mv", "folders2/deep", "folders2/deep/er/in").code == 2
    assert served("mv", "folders/other/", "folders2/deep/").code == 73


def test_cp_gives_a_second_name(served: Served) -> None:
    fill(served, "copy", "a", "d/x", "d/y")
    served.good("cp", "copy/a", "copy/b")
    served.good("cp", "copy/a", "copy/into/")
    assert served.good("cat", "copy/b", "copy/into/a").out == b"aa"
    assert served("cp", "-n", "copy/d/x", "copy/b").code == 73
    assert served("cp", "copy/d", "copy/e").code == 2
    served.good("bucket", "create", "copy2")
    served.good("cp", "-r", "copy/d", "copy2/e")
    assert keys_of(served, "copy2") == ["e/x", "e/y"]
    assert served("cp", "-r", "copy/d", "copy/d/inside").code == 2
    assert served("cp", "-r", "copy/none/", "copy/x").code == 66
    assert served("cp", "copy/none", "copy/x").code == 66


def test_a_renamed_folder_keeps_what_a_get_finds(served: Served) -> None:
    fill(served, "kept", "d/x")
    served.good("mv", "kept/d", "kept/e")
    assert served.good("cat", "kept/e/x").out == b"d/x"
    assert served("cat", "kept/d/x").code == 66


def test_put_says_that_it_made_a_bucket_and_nothing_else_makes_one(served: Served, tmp_path: Path) -> None:
    told = "lake: bucket fresh did not exist, and was made\n"
    refused = served("put", "--no-create", "-", "fresh/x", stdin=b"x")
    assert (refused.code, "lake bucket create fresh" in refused.err) == (66, True)
    assert served("put", "-", "fresh/" + "k" * 5000, stdin=b"x").err.count("\n") == 1, "no bucket was made"
    assert "fresh" not in served.good("ls").lines
    assert served.good("put", "-q", "-", "fresh/x", stdin=b"x").err == told
    assert served.good("put", "-q", "-", "fresh/y", stdin=b"x").err == ""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(b"x")
    made = served.good("put", "-r", "--json", tmp_path / "in", "second/k")
    assert json.loads(made.out)["made_bucket"] == "second"
    assert "bucket second" in made.err
    for command in (("mv", "fresh/x", "typo/x"), ("cp", "fresh/x", "typo/x"), ("cp", "-r", "second/k", "typo/k")):
        done = served(*command)
        assert (done.code, "create it with: lake bucket create typo" in done.err) == (66, True)
    assert "typo" not in served.good("ls").lines


@pytest.mark.parametrize("key", ["odd/../x", "./x", "a//x", "/x", "a/.."])
def test_put_cp_and_mv_make_no_name_that_no_path_can_say(served: Served, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_bytes(b"content")
    served.good("put", tmp_path / "file", "said/a")
    for command in (
        ("put", tmp_path / "file", f"said/{key}"),
        ("put", tmp_path / "file", f"said/{key}/"),
        ("put", "-r", tmp_path, f"said/{key}"),
        ("put", "-", f"said/{key}"),
        ("cp", "said/a", f"said/{key}"),
        ("mv", "said/a", f"said/{key}/"),
    ):
        done = served(*command)
        assert done.code == 2, command
        assert "no path" in done.err
    assert served.good("ls", "-r", "said").lines == ["a"]


def test_a_name_that_no_path_can_say_is_shown_fetched_renamed_and_removed(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        for key in ("a//b", "c/../d", "e/.."):
            put_odd(client, "unsaid", key, key.encode())
    served.good("get", "unsaid/a//b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"a//b"
    served.good("mv", "unsaid/a//b", "unsaid/b")
    served.good("cp", "unsaid/c/../d", "unsaid/d")
    assert served("cp", "unsaid/e/..", "unsaid/f/").code == 2
    served.good("rm", "unsaid/c/../d", "unsaid/e/..")
    assert served.good("ls", "-r", "unsaid").lines == ["b", "d"]
