"""Checks of what the mount keeps in memory, answers natively and holds: on a mount that is right each passes, and each
bug that is planted in a mount fails one of them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from fuse.native import layer
from lakefs import connect
from lakefs.client.blocking.lake import Lake
from lakefs.limits import MIB
from tests.mount.hot_mounts import forced_mounts
from tests.mount.mounts import LakeMounts, lake
from tests.mount.planted_lake import BUGS, lake_with
from tests.mount.test_native import read_past_cache
from tests.mount.test_small_opens import hanging, read
from tests.mount.tools import spoil

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]
SIZE: Final = 2 * MIB + 4321
needs_native = pytest.mark.skipif(not layer.IS_BUILT, reason="the native module is not built")


def an_overwritten_file_leaves_nothing_to_others_of_its_content(mounts: LakeMounts, client: Lake) -> None:
    here, content = mounts.folders[0], os.urandom(SIZE)
    client.put("bucket/a", content)
    with (here / "a").open("rb") as reading, (here / "a").open("r+b", buffering=0) as writing:
        os.pwrite(writing.fileno(), b"changed", 100)
        assert os.pread(reading.fileno(), 7, 100) == b"changed"
    client.put("bucket/b", content)
    for _ in range(30):  # the first file's memory is free when the kernel has released its handles
        assert (here / "b").read_bytes() == content
        threading.Event().wait(0.02)


def damage_is_an_error(mounts: LakeMounts, client: Lake) -> None:
    content = os.urandom(SIZE)
    client.put("bucket/damaged", content)
    spoil(mounts.served.data, content[MIB : MIB + 512])
    with (mounts.folders[0] / "damaged").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == content[:4096]
        with pytest.raises(OSError, match="Input/output"):
            os.pread(file.fileno(), 128 * 1024, MIB)


def what_is_written_beside_readers_is_stored(mounts: LakeMounts, client: Lake) -> None:
    expected = bytearray(os.urandom(SIZE))
    client.put("bucket/w", bytes(expected))
    with (mounts.folders[0] / "w").open("rb", buffering=0) as reading:
        writing = os.open(mounts.folders[0] / "w", os.O_WRONLY)
        os.pwrite(writing, b"written", 70_000)
        expected[70_000:70_007] = b"written"
        os.close(writing)
        assert client.get("bucket/w") == os.pread(reading.fileno(), 2 * SIZE, 0) == expected


def handles_of_one_file_are_all_read(mounts: LakeMounts, client: Lake) -> None:
    content = os.urandom(SIZE)
    client.put("bucket/many", content)
    opened = [os.open(mounts.folders[0] / "many", os.O_RDONLY) for _ in range(4)]
    for descriptor in opened:
        assert os.pread(descriptor, 2 * SIZE, 0) == content
        os.close(descriptor)


def what_a_mapping_writes_beside_readers_is_stored(mounts: LakeMounts, client: Lake) -> None:
    expected = bytearray(os.urandom(SIZE))
    client.put("bucket/m", bytes(expected))
    with (mounts.folders[0] / "m").open("rb"), (mounts.folders[0] / "m").open("r+b") as writing:
        with mmap.mmap(writing.fileno(), SIZE) as memory:
            memory[MIB : MIB + 6] = expected[MIB : MIB + 6] = b"mapped"
        os.fsync(writing.fileno())
        assert client.get("bucket/m") == expected


def an_open_file_keeps_its_content(mounts: LakeMounts, client: Lake) -> None:
    content = os.urandom(9 * MIB)
    client.put("bucket/kept", content)
    with (mounts.folders[0] / "kept").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == content[:4096]
        threading.Event().wait(0.2)
        client.put("bucket/kept", b"new")
        client.gc()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert b"".join(os.pread(file.fileno(), MIB, at * MIB) for at in range(9)) == content


def what_was_written_shows_to_every_reader(mounts: LakeMounts, client: Lake, name: str = "n") -> None:
    content = os.urandom(SIZE)
    client.put(f"bucket/{name}", content)
    with ExitStack() as opened:
        reading = os.open(mounts.folders[0] / name, os.O_RDONLY | os.O_DIRECT)
        opened.callback(os.close, reading)
        for _ in range(3):
            assert read_past_cache(reading, 0, 4096) == content[:4096]
        writing = os.open(mounts.folders[0] / name, os.O_WRONLY)
        opened.callback(os.close, writing)
        os.pwrite(writing, b"n" * 4096, 0)
        assert read_past_cache(reading, 0, 4096) == b"n" * 4096


def an_open_finds_what_the_name_has(mounts: LakeMounts, client: Lake) -> None:
    for number in range(5):
        client.put("bucket/s", b"%d" % number)
        for _ in range(2):
            assert read(mounts.folders[0] / "s") == b"%d" % number


def a_close_waits_until_it_is_stored(mounts: LakeMounts, client: Lake) -> None:
    client.put("bucket/c", b"before")
    writing = os.open(mounts.folders[0] / "c", os.O_RDWR)
    os.pwrite(writing, b"behind", 0)
    closing = threading.Thread(target=os.close, args=(writing,))
    with hanging(mounts):
        closing.start()
        closing.join(0.5)
        assert closing.is_alive()
    closing.join()


Check = Callable[[LakeMounts, Lake], None]
HOT: Final[tuple[Check, ...]] = (
    an_overwritten_file_leaves_nothing_to_others_of_its_content,
    damage_is_an_error,
    what_is_written_beside_readers_is_stored,
    handles_of_one_file_are_all_read,
    what_a_mapping_writes_beside_readers_is_stored,
)
NATIVE: Final[tuple[Check, ...]] = (
    damage_is_an_error,
    an_open_file_keeps_its_content,
    what_was_written_shows_to_every_reader,
    an_open_finds_what_the_name_has,
    a_close_waits_until_it_is_stored,
)
SEEN_BY: Final[dict[str, Check]] = {
    "backing-kept": an_overwritten_file_leaves_nothing_to_others_of_its_content,
    "check-left-out": damage_is_an_error,
    "written-through": what_is_written_beside_readers_is_stored,
    "cached-beside-passthrough": handles_of_one_file_are_all_read,
    "mappings-not-looked-at": what_a_mapping_writes_beside_readers_is_stored,
    "lease-too-early": an_open_file_keeps_its_content,
    "native-reads-go-on": what_was_written_shows_to_every_reader,
    "open-asks-nobody": an_open_finds_what_the_name_has,
    "close-stores-nothing": a_close_waits_until_it_is_stored,
    "nothing-staged": what_is_written_beside_readers_is_stored,
}


@pytest.fixture(scope="module")
def hot() -> Iterator[LakeMounts]:
    """A mount without a bug, every file in memory at its first open."""
    with forced_mounts() as mounted:
        yield mounted


@pytest.fixture(scope="module")
def native() -> Iterator[LakeMounts]:
    """A mount without a bug and without files in memory."""
    with TemporaryDirectory(prefix="lake-") as path, lake(Path(path), "--hot-memory", "0", any_way=False) as mounted:
        yield mounted


@pytest.mark.parametrize("check", HOT, ids=lambda check: check.__name__)
def test_a_right_mount_with_hot_files_passes(hot: LakeMounts, check: Check) -> None:
    with connect(hot.served.server) as client:
        check(hot, client)


@pytest.mark.parametrize("check", NATIVE, ids=lambda check: check.__name__)
def test_a_right_mount_without_hot_files_passes(native: LakeMounts, check: Check) -> None:
    with connect(native.served.server) as client:
        check(native, client)


def test_every_bug_has_a_check() -> None:
    assert SEEN_BY.keys() == BUGS.keys()


@needs_native
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(hot: LakeMounts, bug: str) -> None:
    check = SEEN_BY[bug]
    options = ("-o", "hot_forced") if check in HOT else ("--hot-memory", "0")
    with (
        TemporaryDirectory(prefix="lake-") as path,
        lake(Path(path), *options, program=lake_with(bug), any_way=False) as mounts,
        connect(mounts.served.server) as client,
        pytest.raises((OSError, AssertionError, pytest.fail.Exception)),
    ):
        check(mounts, client)
