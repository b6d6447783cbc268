"""`lake put -r` and `lake get -r`: folders, and everything odd that is found in them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

import lakefs
from tests.e2e.served import Served, lake
from tests.odd_names import put_odd
from tests.part_files import left_part
from tests.served_devices import DEVICES

MIB = 1 << 20


def make_tree(root: Path) -> None:
    """Make small and large files, nested and empty folders, a safetensors file, names of many kinds."""
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty" / "inside").mkdir(parents=True)
    for index in range(300):
        (root / "sub" / f"f{index:03}").write_bytes(os.urandom(index * 11))
    (root / "sub" / "deep" / "näme \n\x1b[31m").write_bytes(b"odd")
    (root / "zero").write_bytes(b"")
    (root / "edge").write_bytes(os.urandom(4 * MIB))
    (root / "big").write_bytes(os.urandom(9 * MIB + 1))
    header = json.dumps({"t": {"dtype": "U8", "shape": [2 * MIB], "data_offsets": [0, 2 * MIB]}}).encode()
    (root / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(2 * MIB))
    (root / "run.sh").write_bytes(b"#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "sub" / "deep").chmod(0o750)
    (root / "empty").chmod(0o555)
    os.utime(root / "zero", ns=(0, 1_600_000_000_123_456_789))


def listing(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, time and content of each path below; of folders only the mode."""
    found: dict[str, tuple[int, int, bytes]] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_dir():
            found[name] = (stat.S_IMODE(path.stat().st_mode), 0, b"")
        else:
            status = path.stat()
            found[name] = (stat.S_IMODE(status.st_mode), status.st_mtime_ns, path.read_bytes())
    return found


def totals(done_out: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done_out)["totals"]
    return found


def by_name(done_out: bytes) -> dict[str, dict[str, Any]]:
    return {file["name"]: file for file in json.loads(done_out)["files"]}


def test_a_tree_comes_back_as_it_went_in(served: Served, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    served.good("put", "-r", tmp_path / "in", "tree/k/")
    served.good("get", "-r", "tree/k/", tmp_path / "out")
    assert listing(tmp_path / "out") == listing(tmp_path / "in")


def test_a_tree_comes_back_over_tcp_and_from_a_closed_store(tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    store = tmp_path / "data"
    assert lake("--data", store, "put", "-r", tmp_path / "in", "tree/k").code == 0
    assert lake("--data", store, "get", "-r", "tree/k", tmp_path / "out").code == 0
    assert listing(tmp_path / "out") == listing(tmp_path / "in")


def test_what_is_there_already_is_left_alone_both_ways(served: Served, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    served.good("put", "-r", tmp_path / "in", "again/k")
    # Times decide nothing: neither a newer time with the same content, nor the old time with another content.
    os.utime(tmp_path / "in" / "big")
    status = (tmp_path / "in" / "sub" / "f100").stat()
    (tmp_path / "in" / "sub" / "f100").write_bytes(os.urandom(status.st_size))
    os.utime(tmp_path / "in" / "sub" / "f100", ns=(status.st_atime_ns, status.st_mtime_ns))
    put = served.good("put", "-r", "--json", tmp_path / "in", "again/k")
    assert {name for name, file in by_name(put.out).items() if file["status"] == "stored"} == {"again/k/sub/f100"}
    served.good("get", "-r", "again/k", tmp_path / "out")
    for name in ("big", "sub/f200", "m.safetensors"):
        path = tmp_path / "out" / name
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    (tmp_path / "out" / "edge").unlink()
    got = served.good("get", "-r", "--force", "--json", "again/k", tmp_path / "out")
    fetched = {name for name, file in by_name(got.out).items() if file["status"] == "fetched"}
    assert fetched == {f"again/k/{name}" for name in ("big", "sub/f200", "m.safetensors", "edge")}
    out = listing(tmp_path / "out")
    for name, (_, _, content) in listing(tmp_path / "in").items():
        assert out[name][2] == content


def test_several_folders_go_each_below_its_last_name(served: Served, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_bytes(folder.encode())
    (tmp_path / "f").write_bytes(b"f")
    served.good("put", "-r", f"{tmp_path}/a/", tmp_path / "b", tmp_path / "f", "lasts/")
    assert served.good("ls", "-r", "lasts").lines == ["a/x", "b/x", "f"]


def test_a_bucket_takes_a_folders_contents(served: Served, tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "d" / "x").write_bytes(b"x")
    served.good("put", "-r", tmp_path / "in", "rootput")
    assert served.good("ls", "-r", "rootput").lines == ["d/x"]
    served.good("get", "-r", "rootput", tmp_path / "out")
    assert (tmp_path / "out" / "d" / "x").read_bytes() == b"x"


def test_odd_things_are_skipped_or_refused_and_the_rest_is_stored(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "good").write_bytes(b"good")
    (root / "link").symlink_to("good")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    Path(os.fsdecode(os.fsencode(root) + b"/bad\xff")).write_bytes(b"bad")
    done = served("put", "-r", "--json", root, "odd/k")
    assert done.code == 2, done
    states = {name: file["status"] for name, file in by_name(done.out).items()}
    assert states == {
        "odd/k/bad\\udcff": "failed",
        "odd/k/dangling": "skipped",
        "odd/k/good": "stored",
        "odd/k/link": "skipped",
        "odd/k/pipe": "skipped",
    }
    told = served("put", "-r", root, "odd/k").err
    assert "skipped" in told
    assert "not UTF-8" in told
    assert served.good("ls", "odd/k").lines == ["good"]


def test_links_are_followed_on_demand_and_loops_end(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "d").mkdir(parents=True)
    (root / "d" / "x").write_bytes(b"x")
    (root / "d" / "up").symlink_to("..")
    (root / "self").symlink_to("self")
    (root / "file").symlink_to("d/x")
    (root / "other").symlink_to("d")
    done = served("put", "-r", "--follow", "--json", root, "loops/k")
    assert done.code == 74, "a link to itself cannot be read"
    states = {name: file["status"] for name, file in by_name(done.out).items()}
    assert states.pop("loops/k/self") == "failed"
    assert states.pop("loops/k/d/up") == "skipped"
    assert states.pop("loops/k/other/up") == "skipped"
    assert states == dict.fromkeys(("loops/k/d/x", "loops/k/file", "loops/k/other/x"), "stored")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_fails_alone(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a").write_bytes(b"a")
    (root / "b").write_bytes(b"b")
    (root / "a").chmod(0)
    assert served("put", "-r", root, "unreadable/k").code == 74
    assert served.good("ls", "unreadable/k").lines == ["b"]


def test_names_too_long_for_a_key_fail_alone(served: Served, tmp_path: Path) -> None:
    deep = tmp_path / "in"
    for _ in range(6):
        deep = deep / ("d" * 200)
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"x")
    (tmp_path / "in" / "good").write_bytes(b"good")
    done = served("put", "-r", tmp_path / "in", "deep/k")
    assert done.code == 2
    assert "longer than 1024 bytes" in done.err
    assert served.good("cat", "deep/k/good").out == b"good"


def test_the_stores_own_folder_is_not_put_into_itself(served: Served) -> None:
    done = served("put", "-r", served.data.parent, "self/k")
    assert done.code == 2
    assert "data folder of the store" in done.err


def test_a_store_opened_here_is_not_put_into_itself_nor_overwritten(tmp_path: Path) -> None:
    store = tmp_path / "w" / "data"
    assert lake("--data", store, "put", "-", "bkt/x", stdin=b"x").code == 0
    assert lake("--data", store, "put", "-r", tmp_path / "w", "bkt/k").code == 2
    assert lake("--data", store, "get", "-r", "bkt", store / "segments").code == 2


def test_a_changed_mode_is_stored_though_the_content_is(served: Served, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    served.good("put", "-r", tmp_path / "in", "modes/k")
    for name in ("run.sh", "big"):
        (tmp_path / "in" / name).chmod(0o700)
    again = served.good("put", "-r", "--json", tmp_path / "in", "modes/k")
    stored = {name for name, file in by_name(again.out).items() if file["status"] == "stored"}
    assert stored == {"modes/k/run.sh", "modes/k/big"}
    served.good("get", "-r", "modes/k", tmp_path / "out")
    assert listing(tmp_path / "out") == listing(tmp_path / "in")


def test_the_part_of_a_get_that_did_not_end_is_not_stored(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    left_part(root / "x", b"half")
    assert (root / ".x.lake-part").exists()
    (root / "x.lake-part").write_bytes(b"a name like any other")
    served.good("put", "-r", root, "parts/k")
    assert served.good("ls", "parts/k").lines == ["x.lake-part"]


def test_if_absent_refuses_names_that_hold_other_content(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for name in ("a", "b", "c"):
        (root / name).write_bytes(name.encode())
    served.good("put", "-", "absent/k/a", stdin=b"a")
    served.good("put", "-", "absent/k/b", stdin=b"other")
    done = served("put", "-r", "--if-absent", "--json", root, "absent/k")
    assert done.code == 73
    states = {name: file["status"] for name, file in by_name(done.out).items()}
    assert states == {"absent/k/a": "unchanged", "absent/k/b": "failed", "absent/k/c": "stored"}
    assert served.good("cat", "absent/k/b").out == b"other"


ODD_KEYS = ("k/../../../escape", "k/a//b", "k/./x", "k//abs", "k/..", "k/a/..")


def test_keys_that_lead_out_of_the_target_are_refused_one_by_one(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        for key in (*ODD_KEYS, "k/good"):
            put_odd(client, "hostile", key, b"content")
    (tmp_path / "w").mkdir()
    done = served("get", "-r", "--json", "hostile/k", tmp_path / "w" / "out")
    assert done.code == 1
    files = by_name(done.out)
    assert files.pop("hostile/k/good")["status"] == "fetched"
    assert {file["status"] for file in files.values()} == {"skipped"}
    assert {f"hostile/{key}" for key in ODD_KEYS} <= set(files)
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert found == ["w/out/good"]
    told = served("get", "-r", "hostile/k", tmp_path / "w" / "again")
    assert told.code == 1
    for key in ODD_KEYS:
        assert f"lake: skipped hostile/{key}: " in told.err
    assert (tmp_path / "w" / "again" / "good").read_bytes() == b"content"


def test_a_failure_beside_a_skipped_name_has_its_own_code(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        for key in ("k/a//b", "k/good"):
            put_odd(client, "beside", key, b"content")
    (tmp_path / "out" / "good").mkdir(parents=True)
    assert served("get", "-r", "beside/k", tmp_path / "out").code == 74


def test_an_object_and_a_folder_of_one_name_cannot_both_land(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        client.put("both/k/a", b"object", create_bucket=True)
        client.put("both/k/a/b", b"below")
    done = served("get", "-r", "both/k", tmp_path / "out")
    assert done.code == 74
    assert done.err


def test_folders_and_files_in_the_way_fail_alone(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        client.put_many([(f"way/k/{name}", name.encode()) for name in ("a", "b", "d/e")], create_bucket=True)
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "d").write_bytes(b"file")
    done = served("get", "-r", "--json", "way/k", tmp_path / "out")
    assert done.code == 74
    states = {name: file["status"] for name, file in by_name(done.out).items()}
    assert states == {"way/k/a": "failed", "way/k/b": "fetched", "way/k/d/": "failed", "way/k/d/e": "failed"}


def test_no_clobber_leaves_what_is_there(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        client.put_many([("leave/k/a", b"new"), ("leave/k/b", b"new")], create_bucket=True)
    (tmp_path / "a").write_bytes(b"old")
    served.good("get", "-r", "--no-clobber", "leave/k", tmp_path)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "b").read_bytes() == b"new"


def test_a_link_in_the_way_is_replaced_and_not_written_through(served: Served, tmp_path: Path) -> None:
    with lakefs.connect(served.server) as client:
        client.put("linked/k/a", b"new", create_bucket=True)
    (tmp_path / "outside").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "outside")
    served.good("get", "-r", "linked/k", tmp_path / "out")
    assert (tmp_path / "outside").read_bytes() == b"precious"
    assert (tmp_path / "out" / "a").read_bytes() == b"new"


def test_a_missing_folder_is_an_error_and_makes_no_folder(served: Served, tmp_path: Path) -> None:
    served.good("bucket", "create", "nofolder")
    assert served("get", "-r", "nofolder/k", tmp_path / "out").code == 66
    assert served("get", "-r", "nobucket-here", tmp_path / "out").code == 66


def test_a_file_that_changes_while_it_is_put_is_not_stored(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    (root / "good").write_bytes(b"good")
    with (root / "growing").open("wb") as file:
        file.truncate(1 << 30)
        putting = served.begin("put", "-r", root, "growing/k")
        while putting.poll() is None:
            file.write(b"x")
            file.flush()
    assert putting.returncode == 65
    assert served.good("ls", "growing/k").lines == ["good"]


def test_the_tree_survives_an_engine_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    engine = Served(tmp_path)
    engine.good("put", "-r", tmp_path / "in", "killed/k")
    engine.kill()
    engine.start()
    engine.good("get", "-r", "killed/k", tmp_path / "out")
    assert listing(tmp_path / "out") == listing(tmp_path / "in")
    if DEVICES:  # all of a lake is checked only while it is served
        engine.good("fsck", "--full")
    assert engine.stop() == 0
    for folder in [] if DEVICES else engine.folders:
        checked = lake("fsck", "--full", "--data", folder)
        assert checked.code == 0, checked


def test_cp_r_agrees_with_get_r(served: Served, tmp_path: Path) -> None:
    make_tree(tmp_path / "in")
    served.good("put", "-r", tmp_path / "in", "copies/a")
    served.good("cp", "-r", "copies/a", "copies/b")
    served.good("get", "-r", "copies/b", tmp_path / "out")
    differing = subprocess.run(["diff", "-r", tmp_path / "in", tmp_path / "out"], capture_output=True)
    assert differing.returncode == 0, differing.stdout
