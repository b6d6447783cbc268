"""`lake sync` and `lake diff`: sides as they are typed, exit codes, summaries, two engines, watching, and a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.served import LAKE, Process, Served, environment, lake, serving, started_warm

MIB = 1 << 20
TIME_NS = 1_600_000_000_123_456_789
WAIT_S = 30.0


def write(path: Path, content: bytes = b"x", mtime_ns: int = TIME_NS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def names(served: Served, folder: str) -> list[str]:
    return served("ls", "-r", folder).lines


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def document(out: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return found


def end(process: Process, number: int) -> int:
    """Send a signal; return the exit code."""
    process.send_signal(number)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(WAIT_S)


def test_a_sync_says_what_it_does_and_ends_with_0_in_step(served: Served, tmp_path: Path) -> None:
    for name in ("a", "d/b"):
        write(tmp_path / "in" / name)
    dry = served.good("sync", "-n", tmp_path / "in", "sync-a/k")
    assert dry.lines == ["would copy  a  (1 B; new)", "would copy  d/b  (1 B; new)"]
    assert "dry run: 2 copied, 2 B" in dry.err
    assert not names(served, "sync-a/k"), "nothing was done"
    done = served.good("sync", tmp_path / "in", "sync-a/k")
    assert done.out == b""
    assert "bucket sync-a did not exist, and was made" in done.err
    assert "2 copied, 2 B (1 B new)" in done.err
    assert "0 copied, 0 B (0 B new), 2 unchanged;" in served.good("sync", tmp_path / "in", "sync-a/k").err
    report = document(served.good("sync", "--json", "sync-a/k", f"{tmp_path}/out").out)
    assert (report["totals"]["copied"], report["in_step"], report["complete"]) == (2, True, True)
    assert {one["name"]: one["status"] for one in report["names"]} == {"a": "copied", "d/b": "copied"}


def test_a_name_that_is_skipped_and_removals_that_are_withheld_end_with_1(served: Served, tmp_path: Path) -> None:
    write(tmp_path / "in" / "a")
    (tmp_path / "in" / "link").symlink_to("a")
    done = served("sync", tmp_path / "in", "sync-b")
    assert (done.code, "skipped link: a symbolic link" in done.err) == (1, True)
    (tmp_path / "empty").mkdir()
    done = served("sync", "--delete", tmp_path / "empty", "sync-b")
    assert (done.code, names(served, "sync-b")) == (1, ["a"])
    assert "nothing was removed" in done.err
    done = served("sync", "--delete", "--json", tmp_path / "missing", "sync-b")
    assert (done.code != 0, names(served, "sync-b")) == (True, ["a"])
    assert document(done.out) == {"names": [], "dry_run": False, "complete": False}


def test_sides_are_told_apart_or_refused(served: Served, tmp_path: Path) -> None:
    write(tmp_path / "in" / "a")
    served.good("sync", tmp_path / "in", "sync-c/k")
    (tmp_path / "sync-c").mkdir()
    both = served("sync", "sync-c", "sync-other", cwd=tmp_path)
    assert (both.code, "write ./sync-c or lake://sync-c" in both.err) == (2, True)
    neither = served("sync", "nowhere", "sync-c", cwd=tmp_path)
    assert (neither.code != 0, "neither such a folder here nor a bucket nowhere" in neither.err) == (True, True)
    unmade = served("sync", "lake://sync-c/k", "out", cwd=tmp_path)
    assert (unmade.code, "write ./out for the folder" in unmade.err) == (2, True)
    no_path = served("sync", "./in", "sync-c/../k", cwd=tmp_path)
    assert (no_path.code, "is no path" in no_path.err) == (2, True)
    write(tmp_path / "my folder" / "a")
    assert served("sync", "my folder", "sync-c/spaces", cwd=tmp_path).code == 0
    folders = served("sync", "./in", "./out", cwd=tmp_path)
    assert (folders.code, "both local folders" in folders.err) == (2, True)
    assert served("sync", "in", "sync-c/k2", cwd=tmp_path).code == 0, "a folder, and then a name"
    assert served("sync", "lake://sync-c/k", "./out", cwd=tmp_path).code == 0
    assert (tmp_path / "out" / "a").read_bytes() == b"x"
    inside = served("sync", "sync-c", "sync-c/k/deeper", cwd=tmp_path / "in")
    assert (inside.code, "is inside" in inside.err) == (2, True)
    missing = lake("sync", "--data", tmp_path / "nostore", "lake://sync-c/k", tmp_path / "out2")
    assert (missing.code != 0, (tmp_path / "nostore").exists()) == (True, False)
    own = served("sync", served.data, "sync-c/store")
    assert (own.code, "data folder of a store" in own.err) == (2, True)


def test_options_reach_the_sync(served: Served, tmp_path: Path) -> None:
    for name in ("a.jpg", "b.png", "tmp/c.jpg"):
        write(tmp_path / "in" / name)
    (tmp_path / "rules").write_text("# all but\n- /tmp/\n+ *.jpg\n- *\n")
    served.good("sync", "--filter-from", tmp_path / "rules", tmp_path / "in", "sync-d")
    assert names(served, "sync-d") == ["a.jpg"]
    served.good("sync", "--include", "*.PNG", "--ignore-case", tmp_path / "in", "sync-d")
    assert names(served, "sync-d") == ["a.jpg", "b.png"]
    assert served("sync", "--filter", "*.jpg", tmp_path / "in", "sync-d").code == 2
    write(tmp_path / "in" / "a.jpg", b"newer", TIME_NS + 2)
    assert "1 newer at the target" in served.good("sync", "--update", "sync-d", f"{tmp_path}/in").err
    assert served("sync", "--no-create", tmp_path / "in", "sync-none").code != 0
    write(tmp_path / "slow" / "x", os.urandom(MIB))
    begin_s = time.monotonic()
    served.good("sync", "--bwlimit", "2M", tmp_path / "slow", "sync-d/slow")
    assert time.monotonic() - begin_s > 0.4


def test_a_diff_names_what_differs(served: Served, tmp_path: Path) -> None:
    for name in ("same", "changed", "here"):
        write(tmp_path / "in" / name)
    served.good("sync", tmp_path / "in", "sync-e")
    served.good("rm", "sync-e/here")
    served.good("put", "-", "sync-e/there", stdin=b"1")
    write(tmp_path / "in" / "changed", b"22")
    done = served("diff", tmp_path / "in", "sync-e")
    assert (done.code, done.lines) == (1, ["* changed  (size differs)", "- here", "+ there"])
    report = document(served("diff", "--json", tmp_path / "in", "sync-e").out)
    counts = {key: report[key] for key in ("same", "only_first", "only_second", "different", "unreadable")}
    assert counts == {"same": 1, "only_first": 1, "only_second": 1, "different": 1, "unreadable": 0}
    served.good("sync", "--delete", tmp_path / "in", "sync-e")
    assert served("diff", tmp_path / "in", "sync-e").code == 0
    write(tmp_path / "in" / "same", b"x", TIME_NS + 2)
    assert served("diff", tmp_path / "in", "sync-e").lines == ["* same  (time differs)"]
    assert served("diff", "--checksum", tmp_path / "in", "sync-e").code == 0
    assert served("diff", "only-one-side").code == 2


def test_a_sync_between_two_engines_sends_what_the_other_lacks(served: Served, tmp_path: Path, folder: Path) -> None:
    big = os.urandom(9 * MIB + 5)
    header = json.dumps({"t": {"dtype": "U8", "shape": [MIB], "data_offsets": [0, MIB]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + os.urandom(MIB)
    for name, content in {"big": big, "m.safetensors": tensors, "small": b"1", "zero": b"", "d/x": b"22"}.items():
        write(tmp_path / "in" / name, content)
    (tmp_path / "in" / "small").chmod(0o750)
    served.good("sync", tmp_path / "in", "sync-f/k")
    with serving(folder) as other:
        other.good("put", tmp_path / "in" / "big", "sync-g/has-it")
        report = document(served.good("sync", "--json", "--to-server", other.server, "sync-f/k", "lake://sync-g/k").out)
        assert report["totals"]["copied"] == 5
        assert report["totals"]["new_bytes"] == len(tensors) + 3, "the chunks of the large one were there"
        for name in ("big", "m.safetensors", "small", "zero", "d/x"):
            here, there = (
                document(one("stat", "--json", name_).out)
                for one, name_ in ((served, f"sync-f/k/{name}"), (other, f"sync-g/k/{name}"))
            )
            for field in ("size_bytes", "blob", "etag", "mtime_ns", "mode", "content_type"):
                assert here[field] == there[field], (name, field)
        again = served.good("sync", "--json", "--delete", "--to-server", other.server, "sync-f/k", "lake://sync-g/k")
        assert document(again.out)["names"] == []
        assert served("diff", "--to-server", other.server, "sync-f/k", "lake://sync-g/k").code == 0
        assert served.good("sync", "--to-server", other.server, tmp_path / "in", "sync-g/from-a-folder").code == 0
        assert other.good("cat", "sync-g/from-a-folder/d/x").out == b"22"
        same = lake(
            "sync",
            "--server",
            other.server,
            "--to-server",
            f"unix:{other.socket}",
            "lake://sync-g/k",
            "lake://sync-g/k",
        )
        assert (same.code, "are the same" in same.err) == (2, True)


@pytest.mark.parametrize("way", ["folder", "bucket"])
def test_watching_follows_the_source_until_it_is_interrupted(served: Served, tmp_path: Path, way: str) -> None:
    bucket = f"sync-w{way}"
    write(tmp_path / "in" / "first")
    served.good("sync", tmp_path / "in", bucket)
    sides = (
        [str(tmp_path / "in"), f"lake://{bucket}"] if way == "folder" else [f"lake://{bucket}", str(tmp_path / "out")]
    )
    command = [*LAKE, "sync", "--watch", "--delete", *sides]
    process = started_warm(command, environment(served.server))
    try:
        if way == "folder":
            write(tmp_path / "in" / "second")
            wait_until(lambda: names(served, bucket) == ["first", "second"])
            (tmp_path / "in" / "first").unlink()
            wait_until(lambda: names(served, bucket) == ["second"])
        else:
            wait_until(lambda: (tmp_path / "out" / "first").exists())
            served.good("put", "-", f"{bucket}/second", stdin=b"2")
            wait_until(lambda: (tmp_path / "out" / "second").exists())
            served.good("rm", f"{bucket}/first")
            wait_until(lambda: not (tmp_path / "out" / "first").exists())
    finally:
        code = end(process, signal.SIGINT)
    assert code == 0


def test_a_sync_that_was_killed_does_the_rest(served: Served, tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / "in" / f"{number:02}", os.urandom(MIB // 2))
    command = [*LAKE, "sync", "--bwlimit", "4M", "-j", "1", str(tmp_path / "in"), "lake://sync-k"]
    process = started_warm(command, environment(served.server))
    try:
        wait_until(lambda: len(names(served, "sync-k")) > 0)
    finally:
        end(process, signal.SIGKILL)
    there = len(names(served, "sync-k"))
    assert 0 < there < 40
    totals = document(served.good("sync", "--json", tmp_path / "in", "sync-k").out)["totals"]
    assert (totals["unchanged"], totals["copied"]) == (there, 40 - there)
