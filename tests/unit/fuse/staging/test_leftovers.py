"""The leftovers in the staging folder of a mount that ended, in any way, and what its user gets out of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse.staging.folder import Base, StagingFolder
from fuse.staging.leftovers import Leftover, find_leftovers, forget, restore
from lakefs.errors import AlreadyExists, LocalFileError

LIMIT = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StagingFolder]:
    staging = StagingFolder(tmp_path / "staging", LIMIT)
    yield staging
    staging.close()


def test_a_file_that_is_not_stored_is_kept_when_the_mount_ends(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path / "staging", LIMIT)
    base = Base(100, 42, b"\x02blob")
    unchanged, changed, kept = (folder.new(name, base) for name in ("b/0", "b/1", "b/2"))
    changed.write(10, b"new")
    kept.write(0, bytes(100))
    kept.keep_for_recovery()
    kept.keep_for_recovery()
    kept.discard()
    assert [leftover.name for leftover in folder.leftovers()] == ["b/2"]
    folder.close()
    assert unchanged.changed is False
    again = StagingFolder(tmp_path / "staging", LIMIT)
    first, second = again.leftovers()
    assert (first.name, first.size_bytes, first.base, first.is_complete) == ("b/1", 100, base, False)
    assert (first.ranges, first.new_bytes) == (((10, 13),), 3)
    assert (second.name, second.is_complete) == ("b/2", True)
    assert first.time_ns > 0
    restore(first, tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == bytes(10) + b"new" + bytes(87)
    with pytest.raises(AlreadyExists):
        restore(first, tmp_path / "one")
    with pytest.raises(LocalFileError):
        restore(first, tmp_path / "missing" / "one")
    with pytest.raises(LocalFileError):
        restore(first, tmp_path / "two", lambda offset, length: b"")
    assert not (tmp_path / "two").exists()
    forget(first)
    forget(first)
    assert again.leftovers() == [second]
    again.close()


def test_a_large_leftover_stays_sparse(folder: StagingFolder, tmp_path: Path) -> None:
    file = folder.new("b/sparse", None)
    file.write(1 << 40, b"end")
    file.keep_for_recovery()
    (leftover,) = folder.leftovers()
    restore(leftover, tmp_path / "out")
    found = (tmp_path / "out").stat()
    assert found.st_size == (1 << 40) + 3
    assert found.st_blocks * 512 < 1 << 20
    forget(leftover)


def test_a_sidecar_that_cannot_be_read_leaves_the_bytes_to_be_found(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    file = folder.new("b/k", None)
    file.write(0, b"precious")
    file.keep_for_recovery()
    folder.close()
    (sidecar,) = tmp_path.glob("*.json")
    for nonsense in (b"{", b"\xff\n", b'{"format":2}\n', b'{"ranges":[[0,5]]}\n', b"[]\n", b'{"format":1}\n'):
        sidecar.write_bytes(nonsense)
        folder = StagingFolder(tmp_path, LIMIT)
        (leftover,) = folder.leftovers()
        assert (leftover.name, leftover.is_complete, leftover.size_bytes) == ("", False, 8)
        assert leftover.ranges == ((0, 8),)
        folder.close()


def test_a_bytes_file_that_lost_its_end_has_no_bytes_there(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    file = folder.new("b/k", Base(100))
    for offset in (10, 50, 90):
        file.write(offset, b"0123456789")
    file.keep_for_recovery()
    folder.close()
    (path,) = tmp_path.glob("*.bytes")
    os.truncate(path, 55)
    folder = StagingFolder(tmp_path, LIMIT)
    (leftover,) = folder.leftovers()
    assert leftover.ranges == ((10, 20), (50, 55))
    assert (leftover.size_bytes, leftover.base) == (100, Base(100))
    folder.close()


def test_leftovers_are_listed_in_the_order_of_their_last_writes(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    files = [folder.new(f"b/{number}", None) for number in range(12)]
    for file in files:
        file.write(0, b"x")
    for number, path in enumerate(sorted(tmp_path.glob("*.bytes"))):
        os.utime(path, ns=(0, time.time_ns() + 10**9 * (12 - number)))
    folder.close()
    found = find_leftovers(tmp_path)
    assert [leftover.path for leftover in found] == sorted(tmp_path.glob("*.bytes"), reverse=True)


def test_a_leftover_that_became_a_plain_file_is_durable_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StagingFolder(tmp_path / "staging", LIMIT)
    folder.new("b/k", None).write(0, b"bytes")
    folder.close()
    (leftover,) = find_leftovers(tmp_path / "staging")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    restore(leftover, tmp_path / "target")
    assert synced == [str(tmp_path / "target"), str(tmp_path)]


_WRITER = """
import random, sys
from pathlib import Path
from fuse.staging.folder import Base, StagingFolder

rng = random.Random(int(sys.argv[2]))
file = StagingFolder(Path(sys.argv[1]), 1 << 30).new("b/k", Base(20_000))
while True:
    begin, end = sorted(rng.randrange(30_000) for _ in range(2))
    if rng.randrange(10):
        file.write(begin, bytes([1 + begin % 255]) * (end - begin))
        print("write", begin, end, flush=True)
    else:
        file.truncate(end)
        print("truncate", end, flush=True)
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_is_killed_leaves_every_byte_that_it_wrote(tmp_path: Path, seed: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path / "staging"), str(seed)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    lines = [next(writer.stdout) for _ in range(seed * 100 + 1)]
    os.kill(writer.pid, signal.SIGKILL)
    lines += [line for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()
    folder = StagingFolder(tmp_path / "staging", LIMIT)
    (leftover,) = folder.leftovers()
    restore(leftover, tmp_path / "found", lambda offset, length: b"\xff" * length)
    found = (tmp_path / "found").read_bytes()
    folder.close()
    # One change may have been made without its line.
    assert found == done(lines) or differs_by_one_change(found, done(lines), leftover)


def done(lines: list[str]) -> bytes:
    content = bytearray(b"\xff" * 20_000)
    for line in lines:
        change, *numbers = line.split()
        if change == "truncate":
            size = int(numbers[0])
            content = content[:size] + bytes(max(0, size - len(content)))
        else:
            begin, end = map(int, numbers)
            content += bytes(max(0, begin - len(content)))
            content[begin:end] = bytes([1 + begin % 255]) * (end - begin)
    return bytes(content)


def differs_by_one_change(found: bytes, expected: bytes, leftover: Leftover) -> bool:
    """Return whether one more write, of one value, or one truncation makes `found` of `expected`."""
    shorter = min(len(found), len(expected))
    places = [at for at in range(shorter) if found[at] != expected[at]]
    values = {found[at] for at in places}
    grown = set(found[len(expected) :]) - {0}
    return len(values | grown) <= 1 and (not places or len(found) >= len(expected))
