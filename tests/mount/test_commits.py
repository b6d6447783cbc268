"""Commits at close: of what was written, made or cut since, also by a mapping; and the error of a release."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from lakefs.client.blocking.engine import connect_blocking
from tests.mount.commits import HALF, Mapped, Sizes, keep_versions, version_sizes
from tests.mount.mounts import BUCKET, LakeMounts, lake
from tests.mount.test_two_mounts import eventually

pytestmark = pytest.mark.fuse


def test_a_reader_that_closes_commits_nothing_of_a_writer(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    with file.open("wb", buffering=0) as opened:
        opened.write(HALF)
        assert file.read_bytes() == HALF
        with file.open("r+b", buffering=0) as other:
            assert other.read() == HALF
        assert sizes(file) == []
    assert sizes(file) == [len(HALF)]
    file.read_bytes()
    with file.open("r+b"):
        pass
    assert sizes(file) == [len(HALF)], "nothing was written"


def test_fsync_commits_whoever_has_the_file_open(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    copy = os.dup(descriptor)
    os.write(descriptor, HALF)
    os.fsync(descriptor)
    assert sizes(file) == [len(HALF)]
    os.close(descriptor)
    os.close(copy)
    assert sizes(file) == [len(HALF)]


def test_a_file_that_was_only_made_or_cut_is_committed_once(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    os.close(os.open(file, os.O_RDONLY | os.O_CREAT))
    assert sizes(file) == [0]
    file.write_bytes(HALF)
    with file.open("r+b", buffering=0) as opened:
        opened.truncate(4)
        subprocess.run(["true"], check=True, pass_fds=[opened.fileno()])
        assert sizes(file) == [0, len(HALF)]
    assert sizes(file) == [0, len(HALF), 4]


def test_a_path_that_is_cut_beside_a_reader_is_committed(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    file.write_bytes(HALF)
    with file.open("rb"):
        os.truncate(file, 3)
        assert sizes(file) == [len(HALF), 3]


def test_what_a_mapping_writes_is_committed_at_close_and_at_its_end(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    file.write_bytes(bytes(8192))
    with file.open("rb") as reader, file.open("r+b") as opened:
        mapping = Mapped(opened.fileno(), 8192)
        mapping.write(0, b"once")
        subprocess.run(["true"], check=True, pass_fds=[opened.fileno()])
        assert sizes(file) == [8192]
        writer = os.open(file, os.O_WRONLY)  # the kernel may send the pages through it
        opened.close()
        assert sizes(file) == [8192] * 2
        mapping.write(4, b"again")
        mapping.close()
        eventually(lambda: sizes(file) == [8192] * 3, "what the mapping wrote is not stored")
        os.close(writer)
        assert os.pread(reader.fileno(), 9, 0) == b"onceagain"
    assert sizes(file) == [8192] * 3


def test_what_a_mapping_writes_into_a_hot_file_is_committed_too(short_folder: Path) -> None:
    folder = short_folder / "hot"
    folder.mkdir()
    with lake(folder, "-o", "hot_forced", any_way=False) as mounts, connect_blocking(mounts.served.server) as engine:
        keep_versions(mounts.served)
        here = mounts.folders[0] / "folder"
        here.mkdir()
        file = here / "file"
        file.write_bytes(bytes(8192))
        with file.open("rb"), file.open("rb") as reader:
            opened = file.open("r+b")
            mapping = Mapped(opened.fileno(), 8192)
            mapping.write(0, b"once")
            subprocess.run(["true"], check=True, pass_fds=[opened.fileno()])
            assert version_sizes(engine, file) == [8192]
            opened.close()
            assert version_sizes(engine, file) == [8192] * 2
            mapping.write(4, b"again")
            mapping.close()
            eventually(lambda: version_sizes(engine, file) == [8192] * 3, "what the mapping wrote is not stored")
            assert os.pread(reader.fileno(), 9, 0) == b"onceagain"


def test_an_error_of_a_release_fails_the_next_open_once_and_the_bytes_are_kept(short_folder: Path) -> None:
    folder = short_folder / "failing"
    folder.mkdir()
    with lake(folder, "-o", "engine_wait=1,hot_memory=0", any_way=False) as mounts:
        here = mounts.folders[0]
        file = here / "file"
        file.write_bytes(bytes(4096))
        opened = file.open("r+b")
        mapping = Mapped(opened.fileno(), 4096)
        opened.close()
        mapping.write(0, b"written")
        mounts.served.stop()
        mapping.close()
        _wait_for_log(mounts, "stays in the staging folder")
        mounts.served.start()
        with pytest.raises(OSError, match="Input/output error"):
            file.read_bytes()
        assert file.read_bytes() == bytes(4096)
        listed = mounts.served.good("staged", "ls", "--staging", folder / "staging0").text
        assert f"{BUCKET}/file" in listed
        mounts.served.good("staged", "restore", "--staging", folder / "staging0", f"{BUCKET}/file")
        eventually(lambda: file.read_bytes()[:7] == b"written", "what was restored is not seen")


def _wait_for_log(mounts: LakeMounts, text: str) -> None:
    until = time.monotonic() + 60
    while text not in mounts.mounts[0].log.read_text():
        assert time.monotonic() < until, mounts.mounts[0].log.read_text()
        time.sleep(0.05)
