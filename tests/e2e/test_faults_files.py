"""Odd files, and places that cannot take a file: the error has the name, nothing is half done, nothing is lost."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from lakefs.client.connect import connect
from lakefs.limits import CHUNK_BYTES
from tests.e2e.served import Served
from tests.e2e.small_disk import remount, tmpfs

pytestmark = pytest.mark.thorough

MIB = 1 << 20


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- putting ----------------------------------------------------------------------------------------------


def test_a_tree_of_odd_things_is_stored_but_for_those(served: Served, folder: Path) -> None:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"file")
    with (tree / "sparse").open("wb") as file:
        file.seek(40 * MIB)
        file.write(b"end")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket"))
    (tree / "loop").symlink_to(".")
    (tree / "self").symlink_to("self")
    (tree / "broken").symlink_to("nowhere")
    devices = ["fifo", "socket"]
    if not os.geteuid():
        os.mknod(tree / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends
        devices.append("device")
    done = served.good("put", "-r", tree, "odd/tree")
    for name in (*devices, "loop", "self", "broken"):
        assert f"skipped {tree}/{name}: " in done.err, done.err
    followed = served("put", "-r", "--follow", tree, "odd/tree")
    assert "a folder above it" in followed.err
    assert followed.code == 74, followed  # with --follow, broken links are failures
    assert served.good("ls", "odd/tree/").lines == ["file", "sparse"]
    with connect(served.server) as client:
        assert client.get("odd/tree/sparse") == bytes(40 * MIB) + b"end"


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_a_special_file_by_name_is_refused_at_once(served: Served, folder: Path, kind: str) -> None:
    path = folder / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    done = served("put", path, "special/x")
    assert done.code == 74, done
    assert str(path) in done.err
    assert not served("ls", "special").lines


def test_a_folder_goes_nowhere_inside_itself(served: Served) -> None:
    served.good("put", "-", "inside/folder/x", stdin=b"x")
    for verb in (["mv"], ["cp", "-r"]):
        done = served(*verb, "inside/folder/", "inside/folder/deeper/")
        assert done.code == 2, done
        assert "inside/folder" in done.err
    assert served.good("ls", "-r", "inside").lines == ["folder/x"]


# --- getting ----------------------------------------------------------------------------------------------


def test_a_full_disk_ends_a_get_and_leaves_what_was_there(served: Served, folder: Path) -> None:
    content = os.urandom(12 * MIB)
    with connect(served.server) as client:
        client.put("gets/large", content, create_bucket=True)
        client.put_many([(f"gets/tree/{number}", os.urandom(MIB)) for number in range(12)])
    with tmpfs(folder, 8 * MIB) as disk:
        (disk / "kept").write_bytes(b"what was there")
        done = served("get", "gets/large", disk / "kept")
        assert done.code == 74, done
        assert str(disk / "kept") in done.err
        assert "No space left" in done.err
        assert left_in(disk) == ["kept"]
        assert (disk / "kept").read_bytes() == b"what was there"

        tree = served("get", "-r", "gets/tree", disk / "tree")
        assert tree.code == 74, tree
        assert "No space left" in tree.err
        for entry in (disk / "tree").iterdir():
            assert not entry.name.endswith(".lake-part")
            assert entry.stat().st_size == MIB
        stdout = served("get", "gets/large", "-")
        assert stdout.out == content


def test_a_place_that_may_not_be_written_is_told(served: Served, folder: Path) -> None:
    served.good("put", "-", "gets/small", stdin=b"small")
    with tmpfs(folder, MIB) as disk:
        (disk / "old").write_bytes(b"old")
        remount(disk, "ro")
        for target in (disk / "old", disk / "new"):
            done = served("get", "gets/small", target)
            assert done.code == 74, done
            assert str(target) in done.err
            assert "Read-only file system" in done.err
        assert left_in(disk) == ["old"]
        assert (disk / "old").read_bytes() == b"old"


def test_targets_that_exist_or_are_folders(served: Served, folder: Path) -> None:
    served.good("put", "-", "gets/name", stdin=b"new")
    (folder / "file").write_bytes(b"old")
    (folder / "folder").mkdir()
    kept = served("get", "-n", "gets/name", folder / "file")
    assert kept.code == 73, kept
    assert (folder / "file").read_bytes() == b"old"
    served.good("get", "gets/name", folder / "file")
    assert (folder / "file").read_bytes() == b"new"
    served.good("get", "gets/name", folder / "folder")
    assert (folder / "folder" / "name").read_bytes() == b"new"
    (folder / "folder" / "name").unlink()
    (folder / "folder" / "name").mkdir()
    refused = served("get", "gets/name", folder / "folder")
    assert refused.code == 74, refused
    assert "is a folder" in refused.err
    beneath = served("get", "gets/name", folder / "file" / "beneath")
    assert beneath.code == 74, beneath
    assert left_in(folder) == ["file", "folder"]


# --- files that say they are safetensors -------------------------------------------------------------------


def safetensors(header: bytes, payload_bytes: int, *, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + os.urandom(payload_bytes)


def tensors(*places: tuple[int, int], dtype: str = "U8") -> bytes:
    described = {
        f"t{index}": {"dtype": dtype, "shape": [end - begin], "data_offsets": [begin, end]}
        for index, (begin, end) in enumerate(places)
    }
    return json.dumps(described).encode()


BODY = 9 * MIB
HOSTILE = {
    "overlapping": tensors((0, 5 * MIB), (4 * MIB, BODY)),
    "past the end": tensors((0, BODY + 1)),
    "a gap": tensors((0, MIB), (2 * MIB, BODY)),
    "not all of it": tensors((0, BODY - 1)),
    "backwards": tensors((BODY, 0)),
    "negative": tensors((-1, BODY - 1)),
    "huge": tensors((0, 1 << 62)),
    "beyond any integer": tensors((0, 1 << 200)),
    "another type": tensors((0, BODY), dtype="F99"),
    "wrong shape": b'{"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, %d]}}' % BODY,
    "twice": b'{"t": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}, "t": 1}' % (BODY, BODY),
    "deep": b'{"t": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "not JSON": b"{" * 1000,
    "not text": b'{"\xff\xfe": {}}',
    "a list": b"[]",
    "nothing": b"",
    "offsets of words": b'{"t": {"dtype": "U8", "shape": [1], "data_offsets": ["0", "1"]}}',
}


def test_headers_that_lie_give_fixed_cuts_and_the_same_bytes_back(served: Served, folder: Path) -> None:
    path = folder / "model.safetensors"
    with connect(served.server) as client:
        for name, header in HOSTILE.items():
            content = safetensors(header, BODY)
            path.write_bytes(content)
            stat_ = client.put(f"tensors/{name}", path, create_bucket=True).stat
            assert stat_.chunk_count == -(-len(content) // CHUNK_BYTES), name
            assert client.get(f"tensors/{name}") == content, name
        for name, length in (("longer than the file", 1 << 40), ("the largest", (1 << 64) - 1), ("zero", 0)):
            content = safetensors(tensors((0, BODY)), BODY, length=length)
            path.write_bytes(content)
            client.put(f"tensors/{name}", path)
            assert client.get(f"tensors/{name}") == content, name


def test_a_header_of_a_hundred_megabytes_is_only_bytes(served: Served, folder: Path) -> None:
    header = b'{"t": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}' + b" " * 100_000_000 + b"}"
    content = safetensors(header, 1000)
    (folder / "model.safetensors").write_bytes(content)
    served.good("put", folder / "model.safetensors", "tensors/hundred")
    served.good("get", "tensors/hundred", folder / "back")
    assert (folder / "back").read_bytes() == content
    with connect(served.server) as client:
        assert client.stat("tensors/hundred").chunk_count == -(-len(content) // CHUNK_BYTES)


def test_a_hundred_thousand_tiny_tensors_are_few_chunks(served: Served, folder: Path) -> None:
    header = tensors(*((number * 8, number * 8 + 8) for number in range(100_000)))
    content = safetensors(header, 800_000)
    (folder / "tiny.safetensors").write_bytes(content)
    with connect(served.server) as client:
        stat_ = client.put("tensors/tiny", folder / "tiny.safetensors", create_bucket=True).stat
        assert stat_.chunk_count <= len(content) // MIB + 2
        assert client.get("tensors/tiny") == content
