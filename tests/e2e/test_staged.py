"""`lake staged`: changes that a killed mount had not stored are listed, and restored byte for byte."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mount_rig import MountProcess, MountRig, mount_rig
from tests.e2e.served import LAKE, Served

pytestmark = [pytest.mark.fuse, pytest.mark.thorough]
MIB = 1 << 20
BASE = random.Random(1).randbytes(9 * MIB + 5)


@pytest.fixture
def rig(served: Served) -> Iterator[MountRig]:
    """A mount point for the store, which has a bucket."""
    served("bucket", "create", "models")
    with mount_rig(LAKE, served.server) as made:
        yield made


@contextmanager
def dirty(rig: MountRig) -> Iterator[MountProcess]:
    """Run a mount that is killed at the end of the block, before what is open in it is closed."""
    process = rig.foreground()
    opened: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real_open = os.open
        patch.setattr(os, "open", lambda *args, **options: _noted(opened, real_open(*args, **options)))
        yield process
    process.signal(signal.SIGKILL).end()
    for descriptor in opened:
        with pytest.raises(OSError):
            os.close(descriptor)
    assert rig.lake("unmount", rig.place).code == 0


def _noted(opened: list[int], descriptor: int) -> int:
    opened.append(descriptor)
    return descriptor


def new(path: Path, content: bytes, flags: int = os.O_CREAT | os.O_WRONLY) -> None:
    """Write a file, and leave it open."""
    os.write(os.open(path, flags), content)


def edited(path: Path) -> bytes:
    """Change a stored file in the middle, lengthen it, and leave it open; return what it holds then."""
    descriptor = os.open(path, os.O_RDWR)
    content = bytearray(BASE)
    for offset, piece in ((5 * MIB, b"middle"), (len(BASE) + 100, b"behind the end")):
        os.pwrite(descriptor, piece, offset)
        content.extend(bytes(max(0, offset + len(piece) - len(content))))
        content[offset : offset + len(piece)] = piece
    return bytes(content)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have another process keep a file open: a fork of this one would close, and so store, what this one has open."""
    script = "import sys; f = open(sys.argv[1], 'wb', 0); f.write(b'mine'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield


def listed(rig: MountRig, *options: str | Path) -> dict[str, dict[str, Any]]:
    """Return the staged files, by name."""
    done = rig.lake("staged", "ls", "--json", *options)
    assert done.code == 0, done
    return {each["name"]: each for each in json.loads(done.text)["staged"]}


def test_what_a_killed_mount_had_open_is_restored_byte_for_byte(rig: MountRig, served: Served) -> None:
    served.good("put", "-", "models/edited", stdin=BASE)
    served.good("put", "-", "models/emptied", stdin=BASE)
    models = rig.place / "models"
    with dirty(rig):
        new(models / "new", b"new\n" * 1000)
        new(models / "exclusive", b"mine", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        new(models / "emptied", b"short", os.O_WRONLY | os.O_TRUNC)
        expected = edited(models / "edited")
    found = listed(rig)
    assert {name.removeprefix("models/"): each["state"] for name, each in found.items()} == dict.fromkeys(
        ("new", "exclusive", "emptied", "edited"), "ready"
    )
    assert (found["models/new"]["size_bytes"], found["models/new"]["complete"]) == (4000, True)
    assert (found["models/edited"]["written_bytes"], found["models/edited"]["complete"]) == (20, False)
    done = rig.lake("staged", "restore", "--all")
    assert (done.code, len(done.lines)) == (0, 4), done
    assert served.good("cat", "models/new").out == b"new\n" * 1000
    assert served.good("cat", "models/exclusive").out == b"mine"
    assert served.good("cat", "models/emptied").out == b"short"
    assert served.good("cat", "models/edited").out == expected
    assert listed(rig) == {}


def test_a_name_with_newer_content_is_left_alone_unless_told(rig: MountRig, served: Served) -> None:
    with dirty(rig):
        new(rig.place / "models" / "raced", b"staged")
    served.good("put", "-", "models/raced", stdin=b"newer")
    assert listed(rig)["models/raced"]["state"] == "changed"
    refused = rig.lake("staged", "restore", "models/raced")
    assert (refused.code, "--force" in refused.err) == (73, True)
    assert served.good("cat", "models/raced").out == b"newer"
    assert rig.lake("staged", "restore", "--keep", "models/raced", "--to", "models/beside").code == 0
    assert served.good("cat", "models/beside").out == b"staged"
    assert rig.lake("staged", "restore", "--keep", "models/raced", "--to", "models/beside").code == 73
    assert rig.lake("staged", "restore", "--force", "lake://models/raced").code == 0
    assert served.good("cat", "models/raced").out == b"staged"
    assert listed(rig) == {}


def test_parts_of_a_file_whose_content_is_gone_come_with_zeros_only(rig: MountRig, served: Served) -> None:
    served.good("put", "-", "models/parts", stdin=b"x" * 10_000)
    with dirty(rig):
        os.pwrite(os.open(rig.place / "models" / "parts", os.O_RDWR), b"part", 5000)
    served.good("put", "-", "models/parts", stdin=b"something else")
    assert listed(rig)["models/parts"]["state"] == "incomplete"
    out = rig.folder / "out"
    for command in (("--to", "models/whole"), ("--file", str(out)), ("--force",)):
        refused = rig.lake("staged", "restore", "models/parts", *command)
        assert (refused.code, "4 of 10000 bytes" in refused.err, "--zeros" in refused.err) == (66, True, True)
    assert not out.exists()
    assert rig.lake("staged", "restore", "models/parts", "--zeros", "--file", out, "--keep").code == 0
    assert out.read_bytes() == bytes(5000) + b"part" + bytes(4996)
    assert rig.lake("staged", "restore", "models/parts", "--zeros", "--to", "models/whole").code == 0
    assert served.good("cat", "models/whole").out == out.read_bytes()


def test_a_file_is_restored_to_a_local_one_without_an_engine(rig: MountRig, served: Served) -> None:
    with dirty(rig):
        new(rig.place / "models" / "local", b"local")
    nobody = f"unix:{rig.folder}/nobody"
    done = rig.lake("staged", "ls", server=nobody)
    assert (done.code, " unknown " in done.text, "models/local" in done.text) == (0, True, True)
    assert rig.lake("staged", "restore", "models/local", server=nobody).code == 69
    out = rig.folder / "out"
    assert rig.lake("staged", "restore", "models/local", "--file", out, server=nobody).code == 0
    assert out.read_bytes() == b"local"
    assert listed(rig) == {}


def test_the_next_mount_tells_and_its_own_files_are_not_touched(rig: MountRig, served: Served) -> None:
    with dirty(rig):
        new(rig.place / "models" / "old", b"old")
    done = rig.mount()
    [staging] = rig.state.glob("*/staging")
    command = f"lake staged ls --staging {shlex.quote(str(staging))}"
    assert f"1 file of an earlier mount could not be stored and can be restored; see: {command}" in done.err
    assert command in rig.log
    with writing(rig.place / "models" / "mine"):
        found = listed(rig, "--staging", staging)
        assert (found["models/mine"]["state"], found["models/old"]["state"]) == ("in use", "ready")
        for verb in ("restore", "forget"):
            refused = rig.lake("staged", verb, "models/mine")
            assert (refused.code, "open in a running mount" in refused.err) == (75, True)
        assert rig.lake("staged", "restore", "--all").lines == ["restored models/old"]
        assert (rig.place / "models" / "old").read_bytes() == b"old"
    assert served.good("cat", "models/mine").out == b"mine"


def test_what_is_forgotten_is_gone(rig: MountRig) -> None:
    with dirty(rig):
        for name in ("one", "two"):
            new(rig.place / "models" / name, b"x")
    assert rig.lake("staged", "forget").code == 2
    assert rig.lake("staged", "forget", "models/three").code == 66
    done = rig.lake("staged", "forget", "--json", listed(rig)["models/one"]["id"])
    assert [each["name"] for each in json.loads(done.text)["forgotten"]] == ["models/one"]
    assert set(listed(rig)) == {"models/two"}
    assert rig.lake("staged", "forget", "--all").lines == ["forgotten models/two"]
    assert listed(rig) == {}
    [staging] = rig.state.glob("*/staging")
    assert [path.name for path in staging.iterdir()] == ["lock"]


def test_files_of_one_name_are_told_apart_by_their_ids(rig: MountRig, served: Served) -> None:
    for content in (b"first", b"second"):
        with dirty(rig):
            new(rig.place / "models" / "twice", content)
    refused = rig.lake("staged", "restore", "models/twice")
    assert (refused.code, "staged 2 times; give an id" in refused.err) == (2, True)
    done = rig.lake("staged", "ls", "--json")
    first, second = json.loads(done.text)["staged"]
    assert rig.lake("staged", "restore", second["id"]).code == 0
    assert served.good("cat", "models/twice").out == b"second"
    assert rig.lake("staged", "restore", first["id"]).code == 73


def test_a_renamed_file_is_restored_under_its_new_name(rig: MountRig, served: Served) -> None:
    models = rig.place / "models"
    with dirty(rig):
        descriptor = os.open(models / "before", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"one")
        (models / "before").rename(models / "after")
        os.write(descriptor, b" two")
    assert set(listed(rig)) == {"models/after"}
    assert rig.lake("staged", "restore", "models/after").code == 0
    assert served.good("cat", "models/after").out == b"one two"


def test_a_staging_folder_that_cannot_be_read_is_told(rig: MountRig) -> None:
    done = rig.lake("staged", "ls", "--staging", rig.folder / "missing")
    assert (done.code, "missing" in done.err) == (74, True)
