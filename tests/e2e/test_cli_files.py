"""`lake put`, `lake get`, `lake cat`: single files, as a user at a shell meets them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from tests.e2e.served import LAKE, Served, environment
from tests.part_files import left_part

MIB = 1 << 20


def random_file(path: Path, size: int) -> bytes:
    content = os.urandom(size)
    path.write_bytes(content)
    return content


def parts_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".lake-part")]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 4 * MIB, 4 * MIB + 1, 9 * MIB + 17])
def test_a_file_comes_back_as_it_went_in(served: Served, tmp_path: Path, size: int) -> None:
    content = random_file(tmp_path / "in", size)
    served.good("put", tmp_path / "in", f"files/{size}")
    served.good("get", f"files/{size}", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    assert parts_in(tmp_path) == []


def test_mode_and_time_come_back(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "in", 10)
    (tmp_path / "in").chmod(0o750)
    os.utime(tmp_path / "in", ns=(1, 1_234_567_890_123_456_789))
    served.good("put", tmp_path / "in", "modes/x")
    served.good("get", "modes/x", tmp_path / "out")
    found = (tmp_path / "out").stat()
    assert stat.S_IMODE(found.st_mode) == 0o750
    assert found.st_mtime_ns == 1_234_567_890_123_456_789


def test_stdin_and_stdout(served: Served) -> None:
    content = os.urandom(9 * MIB + 5)
    served.good("put", "-", "pipes/x", stdin=content)
    assert served.good("get", "pipes/x", "-").out == content
    assert served.good("cat", "pipes/x").out == content
    assert (
        served.good("cat", "--offset", "4194000", "--length", "4200000", "pipes/x").out
        == content[4194000 : 4194000 + 4200000]
    )
    assert served.good("cat", "--offset", str(len(content)), "pipes/x").out == b""
    assert served.good("cat", "pipes/x", "pipes/x").out == content + content


def test_an_empty_stdin_is_an_empty_object(served: Served) -> None:
    served.good("put", "-", "pipes/empty")
    assert served.good("cat", "pipes/empty").out == b""


def test_stdin_needs_the_name_of_an_object(served: Served) -> None:
    done = served("put", "-", "pipes/folder/", stdin=b"x")
    assert done.code == 2
    assert "full name" in done.err


def test_several_sources_go_into_a_folder_by_their_last_names(served: Served, tmp_path: Path) -> None:
    for name in ("a", "b"):
        random_file(tmp_path / name, 10)
    served.good("put", tmp_path / "a", tmp_path / "b", "several/into/")
    assert served.good("ls", "several/into").lines == ["a", "b"]
    assert served("put", tmp_path / "a", tmp_path / "b", "several/name").code == 2


def test_two_sources_of_one_last_name_are_refused(served: Served, tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        random_file(tmp_path / folder / "same", 3)
    done = served("put", tmp_path / "x" / "same", tmp_path / "y" / "same", "twice/")
    assert done.code == 2
    assert "would both be stored as twice/same" in done.err
    assert served("ls", "twice").code == 66


def test_a_file_put_into_a_folder_or_bucket_keeps_its_name(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "name.bin", 5)
    served.good("put", tmp_path / "name.bin", "keeps")
    served.good("put", tmp_path / "name.bin", "keeps/f/")
    assert served.good("ls", "-r", "keeps").lines == ["f/name.bin", "name.bin"]


def test_a_file_fetched_into_a_folder_keeps_its_name(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "keeps2/f/deep", stdin=b"deep")
    served.good("get", "keeps2/f/deep", tmp_path)
    assert (tmp_path / "deep").read_bytes() == b"deep"


def test_a_folder_without_r_is_refused_and_says_how(served: Served, tmp_path: Path) -> None:
    done = served("put", tmp_path, "refused/x")
    assert done.code == 74
    assert "use -r" in done.err


def test_a_missing_source_is_told_before_anything_is_stored(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "there", 3)
    done = served("put", tmp_path / "there", tmp_path / "not there", "missing/")
    assert done.code == 74
    assert "not there: No such file or directory" in done.err
    assert served("ls", "missing").code == 66


def test_a_sparse_file_comes_back_with_its_holes_read_as_zeros(served: Served, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(20 * MIB)
        file.seek(10 * MIB)
        file.write(b"island")
    served.good("put", tmp_path / "sparse", "sparse/x")
    served.good("get", "sparse/x", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "sparse").read_bytes()


def test_a_link_given_by_name_is_followed(served: Served, tmp_path: Path) -> None:
    content = random_file(tmp_path / "real", 100)
    (tmp_path / "link").symlink_to("real")
    served.good("put", tmp_path / "link", "links/x")
    assert served.good("cat", "links/x").out == content


def test_what_is_no_file_is_refused_by_name(served: Served, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        done = served("put", path, "nofile/x")
        assert done.code == 74
        assert "not a regular file" in done.err


def test_a_file_that_hides_its_length_is_not_stored_as_empty(served: Served) -> None:
    done = served("put", "/proc/version", "proc/x")
    assert done.code == 65
    assert "stdin" in done.err
    assert served("stat", "proc/x").code == 66


def test_put_replaces_unless_told_not_to(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "replace/x", stdin=b"old")
    served.good("put", "-", "replace/x", stdin=b"new")
    done = served("put", "--if-absent", "-", "replace/x", stdin=b"third")
    assert done.code == 73
    random_file(tmp_path / "f", 9 * MIB)
    assert served("put", "--if-absent", tmp_path / "f", "replace/x").code == 73
    assert served.good("cat", "replace/x").out == b"new"


def test_no_create_refuses_a_missing_bucket(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "f", 9)
    done = served("put", "--no-create", tmp_path / "f", "nobucket/x")
    assert done.code == 66
    assert "nobucket" in done.err
    assert "nobucket" not in served.good("ls").lines


def test_get_replaces_a_file_and_leaves_it_with_no_clobber(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "clobber/x", stdin=b"new")
    target = tmp_path / "target"
    target.write_bytes(b"old")
    assert served("get", "--no-clobber", "clobber/x", target).code == 73
    assert target.read_bytes() == b"old"
    served.good("get", "clobber/x", target)
    assert target.read_bytes() == b"new"
    assert parts_in(tmp_path) == []


def test_get_through_a_link_replaces_what_it_points_to(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "through/x", stdin=b"new")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    served.good("get", "through/x", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_get_into_a_device_writes_to_it_and_never_replaces_it(served: Served) -> None:
    served.good("put", "-", "device/x", stdin=b"gone")
    served.good("get", "device/x", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    done = served("get", "device/x", "/dev/full")
    assert done.code == 74
    assert "/dev/full: No space left on device" in done.err


def test_get_to_places_that_cannot_take_it(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "places/x", stdin=b"x")
    (tmp_path / "d" / "x").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    for target, words in (
        (tmp_path / "d", "is a folder"),
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
    ):
        done = served("get", "places/x", target)
        assert done.code == 74, done
        assert words in done.err
    assert served("get", "places/x", f"{tmp_path}/none/").code == 74


def test_a_missing_object_leaves_no_file(served: Served, tmp_path: Path) -> None:
    assert served("get", "places/none", tmp_path / "x").code == 66
    assert list(tmp_path.iterdir()) == []


def test_json_tells_each_file_and_the_totals(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "f", 5 * MIB)
    put = json.loads(served.good("put", "--json", tmp_path / "f", "json/f").out)
    assert put["files"] == [
        {"path": str(tmp_path / "f"), "name": "json/f", "status": "stored", "size_bytes": 5 * MIB, "new_bytes": 5 * MIB}
    ]
    assert put["complete"] is True
    assert put["totals"]["stored"] == 1
    again = json.loads(served.good("put", "--json", tmp_path / "f", "json/g").out)
    assert again["totals"]["new_bytes"] == 0
    got = json.loads(served.good("get", "--json", "json/f", tmp_path / "g").out)
    assert got["totals"]["fetched"] == 1
    lost = served("get", "--json", "json/none", tmp_path / "h")
    assert json.loads(lost.out)["totals"]["failed"] == 1
    assert json.loads(lost.err)["error"] == "KeyNotFound"


def test_nothing_but_one_line_is_printed_without_a_terminal(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "f", 9 * MIB)
    served.good("bucket", "create", "quiet")
    done = served.good("put", tmp_path / "f", "quiet/f")
    assert done.out == b"", "the summary is for people"
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("1 file, 9.0 MiB: 1 stored; 9.0 MiB new; ")
    assert served.good("put", "-q", tmp_path / "f", "quiet/f").err == ""


def test_a_terminal_gets_a_bar_and_the_same_last_line(served: Served, tmp_path: Path) -> None:
    random_file(tmp_path / "f", 9 * MIB)
    leader, follower = pty.openpty()
    putting = subprocess.Popen(
        [*LAKE, "put", str(tmp_path / "f"), "bar/f"],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        env=environment(served.server) | {"TERM": "xterm"},
    )
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the signal of a terminal that was closed
        while piece := os.read(leader, 65536):
            shown += piece
    os.close(leader)
    assert putting.wait(60) == 0
    assert "9.0/9.0 MiB" in shown.decode()
    assert "1 file, 9.0 MiB: 1 stored" in shown.decode()


def test_an_interrupt_removes_the_part_and_exits_with_130(served: Served, tmp_path: Path) -> None:
    getting = _long_get(served, tmp_path, 3 * LONG)
    getting.send_signal(signal.SIGINT)
    assert getting.wait(60) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_get_after_a_killed_one_is_whole(served: Served, tmp_path: Path) -> None:
    getting = _long_get(served, tmp_path)
    getting.kill()
    getting.wait(60)
    assert parts_in(tmp_path) == [".out.lake-part"]
    served.good("get", "long/x", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == LONG
    assert subprocess.run(["cmp", tmp_path / "in", tmp_path / "out"]).returncode == 0
    assert parts_in(tmp_path) == []


def test_a_second_get_of_a_target_is_refused_while_the_first_runs(served: Served, tmp_path: Path) -> None:
    getting = _long_get(served, tmp_path)
    getting.send_signal(signal.SIGSTOP)
    done = served("get", "long/x", tmp_path / "out")
    getting.send_signal(signal.SIGCONT)
    assert done.code == 73
    assert "is being written by another process" in done.err
    assert getting.wait(60) == 0


def test_a_killed_get_goes_on_from_what_its_part_holds(served: Served, tmp_path: Path) -> None:
    content = random_file(tmp_path / "in", 64 * MIB)
    served.good("put", tmp_path / "in", "resume/x")
    half = bytearray(content)
    half[8 * MIB + 5] ^= 1
    del half[40 * MIB :]
    left_part(tmp_path / "out", bytes(half))
    got = json.loads(served.good("get", "--json", "resume/x", tmp_path / "out").out)
    assert (tmp_path / "out").read_bytes() == content
    # Ten of sixteen chunks were there, one of them damaged.
    assert got["totals"]["new_bytes"] == 7 * 4 * MIB
    assert parts_in(tmp_path) == []


LONG = 1 << 30
"""All holes: quick to put, and long enough that a signal always finds the get at work."""


def _long_get(served: Served, folder: Path, size: int = LONG) -> subprocess.Popen[bytes]:
    """Start a get into `out`; it has begun to write its part on return."""
    with (folder / "in").open("wb") as file:
        file.truncate(size)
    served.good("put", folder / "in", "long/x")
    getting = served.begin("get", "long/x", folder / "out")
    while not parts_in(folder):
        assert getting.poll() is None
    return getting
