"""A staged file is a plain file to whoever uses it, also after its process was killed, and on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuse import staged_file
from fuse.leftovers import Leftover, forget, restore
from fuse.staging import Base, Kind, StagedFile, StagingFolder
from lakefs.errors import AlreadyExists, InvalidArgument, LakeError, LocalFileError, StoreFull, StoreLocked

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
LIMIT = 1 << 20


@contextmanager
def fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StagingFolder]:
    staging = StagingFolder(tmp_path / "staging", LIMIT)
    yield staging
    staging.close()


def content_of(file: StagedFile, base: bytes) -> bytes:
    """The content as a reader puts it together; spans are checked on the way."""
    parts: list[bytes] = []
    at = 0
    for kind, offset, length in file.spans(0, file.size + 10):
        assert offset == at
        assert length > 0
        parts.append(base[offset : offset + length] if kind is Kind.BASE else file.read(offset, length))
        assert len(parts[-1]) == length
        assert [found for found in Kind if file.is_all(found, offset, length)] == [kind]
        assert not any(
            file.is_all(found, offset - 1, length + 1) for found in Kind if at and found is not kind
        )
        at += length
    assert at == file.size
    return b"".join(parts)


# --- against a plain bytearray -------------------------------------------------------------------------

SIZES = st.integers(0, 120)
WRITES = st.tuples(st.just("write"), SIZES, st.binary(max_size=40))
OPERATIONS = st.lists(
    st.one_of(
        WRITES,
        WRITES,
        st.tuples(st.just("append"), st.binary(max_size=20)),
        st.tuples(st.just("truncate"), SIZES),
        st.tuples(st.just("fill"), SIZES, SIZES),
        st.tuples(st.just("read"), SIZES, SIZES),
        st.tuples(st.just("rename"), st.sampled_from(["b/one", "b/two", "b/\udce9"])),
        st.tuples(st.just("mark_stored")),
        # The next so many calls of pwrite work, then one writes only so many bytes and the disk is full.
        st.tuples(st.just("full"), st.integers(0, 2), st.integers(0, 30)),
    ),
    max_size=25,
)


class FullDisk:
    """`os.pwrite` that finds the disk full once, `calls` calls later, having written `short` bytes."""

    def __init__(self) -> None:
        self._calls_left = -1
        self._short = 0
        self._real = os.pwrite

    def get_full(self, calls: int, short: int) -> None:
        self._calls_left, self._short = calls + 1, short

    def get_empty(self) -> None:
        self._calls_left = -1

    def __call__(self, descriptor: int, view: Any, offset: int) -> int:
        if self._calls_left > 0:
            self._calls_left -= 1
        if self._calls_left:
            return self._real(descriptor, view, offset)
        if self._short:
            count = self._real(descriptor, bytes(view)[: self._short], offset)
            self._short = 0
            return count
        self._calls_left = -1
        raise OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Modelled:
    """A staged file and what it should hold."""

    file: StagedFile
    base: bytes
    content: bytearray
    changed: bool
    disk: FullDisk

    def do(self, operation: tuple[Any, ...]) -> None:
        getattr(self, operation[0])(*operation[1:])
        assert self.file.size == len(self.content)
        assert self.file.changed == self.changed
        assert content_of(self.file, self.base) == self.content

    def write(self, offset: int, data: bytes) -> None:
        staged = [span for span in self.file.spans(0, self.file.size) if span.kind is Kind.STAGED]
        try:
            self.file.write(offset, data)
        except StoreFull:
            found = content_of(self.file, self.base)
            for _, begin, length in staged:  # bytes that were staged before may be torn
                for at in range(max(begin, offset), min(begin + length, offset + len(data))):
                    assert found[at] in (self.content[at], data[at - offset])
                    self.content[at] = found[at]
            return
        if data:
            self.content += bytes(max(0, offset - len(self.content)))
            self.content[offset : offset + len(data)] = data
            self.changed = True

    def append(self, data: bytes) -> None:
        self.write(len(self.content), data)

    def truncate(self, size: int) -> None:
        try:
            self.file.truncate(size)
        except StoreFull:
            return
        self.changed |= size != len(self.content)
        self.content = self.content[:size] + bytes(max(0, size - len(self.content)))

    def fill(self, offset: int, length: int) -> None:
        revision = self.file.revision
        try:
            self.file.fill(offset, self.base[offset : offset + length])
        except StoreFull:
            return
        assert self.file.revision == revision
        spans = self.file.spans(offset, min(length, len(self.base) - offset))
        assert all(span.kind is not Kind.BASE for span in spans)

    def read(self, offset: int, length: int) -> None:
        if all(span.kind is not Kind.BASE for span in self.file.spans(offset, length)):
            assert self.file.read(offset, length) == self.content[offset : offset + length]
        target = bytearray(self.content[offset : offset + length])
        for kind, begin, span_length in self.file.spans(offset, length):
            if kind is not Kind.BASE:
                target[begin - offset : begin - offset + span_length] = b"\xff" * span_length
        self.file.overlay(offset, memoryview(target))
        assert target == self.content[offset : offset + length]

    def rename(self, name: str) -> None:
        self.file.rename(name)

    def mark_stored(self) -> None:
        self.file.begin_storing()
        assert self.file.mark_stored(Base(len(self.content)))
        self.base, self.changed = bytes(self.content), False
        assert self.file.staged_bytes == 0

    def full(self, calls: int, short: int) -> None:
        self.disk.get_full(calls, short)


def leftovers_if_killed_now(folder: Path) -> tuple[StagingFolder, list[Leftover]]:
    """What the next mount finds in a copy of the folder as it is."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    staging = StagingFolder(copy, LIMIT)
    return staging, staging.leftovers()


def check_recovery(modelled: Modelled, folder: Path) -> None:
    """Everything that was written is there, and told from what was not."""
    file, base = modelled.file, modelled.base
    if file._sidecar_is_stale:
        file.sync()  # a full disk had no room for what must not fail
    staging, found = leftovers_if_killed_now(folder)
    try:
        staged = [span for span in file.spans(0, file.size) if span.kind is Kind.STAGED]
        if not staged and not modelled.changed:
            assert found == []
            return
        if not found:  # it was given another length, and then its old one
            assert not staged
            assert len(base) == file.size
            return
        (leftover,) = found
        assert leftover.name == file.name.encode("utf-8", "replace").decode()
        assert leftover.size_bytes == file.size
        assert leftover.new_bytes == file.staged_bytes
        assert list(leftover.ranges) == [(offset, offset + length) for _, offset, length in staged]
        assert leftover.is_complete == all(
            span.kind is not Kind.BASE for span in file.spans(0, leftover.base_bytes)
        )
        target = folder.with_name("restored")
        target.unlink(missing_ok=True)
        restore(leftover, target, lambda offset, length: base[offset : offset + length])
        assert target.read_bytes() == modelled.content
        forget(leftover)
        assert staging.leftovers() == []
    finally:
        staging.close()


@settings(max_examples=1500)
@given(st.one_of(st.none(), st.binary(max_size=100)), OPERATIONS, st.integers(0, 30))
def test_a_staged_file_is_a_plain_file_and_so_is_what_a_killed_mount_leaves(
    base: bytes | None, operations: list[tuple[Any, ...]], looked_at: int
) -> None:
    disk = FullDisk()
    with fresh_folder() as path, mock.patch("os.pwrite", disk):
        staging = StagingFolder(path / "staging", LIMIT)
        file = staging.new("b/k", None if base is None else Base(len(base), 7, b"blob"))
        modelled = Modelled(file, base or b"", bytearray(base or b""), base is None, disk)
        for index, operation in enumerate(operations):
            modelled.do(operation)
            if index == looked_at:
                disk.get_empty()
                check_recovery(modelled, path / "staging")
        disk.get_empty()
        check_recovery(modelled, path / "staging")
        assert staging.used_bytes == file.staged_bytes
        file.discard()
        assert staging.used_bytes == 0
        staging.close()
        assert sorted(os.listdir(path / "staging")) == ["lock"]


# --- the folder ----------------------------------------------------------------------------------------


def test_the_folder_and_its_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "staging"
    path.mkdir(mode=0o755)
    folder = StagingFolder(path, LIMIT)
    folder.new("b/k", None).write(0, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(found.stat().st_mode) for found in path.iterdir()} == {0o600}
    folder.close()


def test_a_folder_is_one_mounts_at_a_time(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, LIMIT)
    with pytest.raises(StoreLocked, match=str(tmp_path)):
        StagingFolder(tmp_path, LIMIT)
    folder.close()
    StagingFolder(tmp_path, LIMIT).close()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalFileError, match="file/staging"):
        StagingFolder(tmp_path / "file" / "staging", LIMIT)


def test_the_limit_counts_staged_bytes_of_all_files(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, 100)
    first, second = folder.new("b/1", None), folder.new("b/2", Base(1000))
    first.write(0, bytes(60))
    first.write(10, bytes(50))  # no more than before
    second.truncate(5000)
    second.write(4000, bytes(40))
    assert folder.used_bytes == 100
    with pytest.raises(StoreFull, match=str(tmp_path)) as raised:
        second.write(3999, b"xx")
    assert raised.value.subject == "b/2"
    with pytest.raises(StoreFull):
        first.fill(0, b"")
        second.fill(0, bytes(1))
    assert second.spans(3000, 1001) == [(Kind.HOLE, 3000, 1000), (Kind.STAGED, 4000, 1)]
    first.truncate(50)
    second.write(0, bytes(10))
    assert folder.used_bytes == 100
    first.discard()
    second.discard()
    assert folder.used_bytes == 0
    folder.close()


def test_the_number_of_ranges_is_bounded(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_file, "RANGES_MAX", 10)
    file = folder.new("b/k", Base(1000))
    for at in range(10):
        file.write(at * 10, b"x")
    with pytest.raises(StoreFull, match="places"):
        file.write(500, b"x")
    file.write(1, bytes(8))
    file.write(9, b"x")  # joins two
    file.write(500, b"x")
    file.discard()


def test_a_full_disk_is_said_with_the_folders_name(
    folder: StagingFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder.new("b/k", None)
    file.write(0, b"there")

    def failing(number: int) -> Any:
        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            raise OSError(number, os.strerror(number))

        return pwrite

    kinds: list[tuple[int, type[LakeError]]] = [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EFBIG, InvalidArgument),
        (errno.EIO, LocalFileError),
    ]
    for number, kind in kinds:
        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", failing(number))
            with pytest.raises(kind, match=f"b/k.*{folder.path}"):
                file.write(5, b"more")
            with pytest.raises(kind, match=f"b/x.*{folder.path}"):
                folder.new("b/x", None)
    assert file.read(0, 100) == b"there"
    assert folder.used_bytes == 5
    file.discard()


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


def test_many_changes_do_not_make_a_sidecar_long(folder: StagingFolder) -> None:
    file = folder.new("b/k", Base(100))
    for number in range(5000):
        file.write(50 + number % 2, b"x")
        file.truncate(50)
        file.truncate(100)
    (sidecar,) = folder.path.glob("*.json")
    assert sidecar.stat().st_size < 100_000
    file.write(60, b"y")
    staging, (leftover,) = leftovers_if_killed_now(folder.path)
    assert leftover.ranges == ((60, 61),)
    assert (leftover.size_bytes, leftover.base_bytes) == (100, 50)
    staging.close()
    file.discard()


def test_writing_on_at_the_end_costs_one_line_in_the_sidecar(folder: StagingFolder) -> None:
    file = folder.new("b/k", None)
    for number in range(200):
        file.write(number * 100, bytes(100))
    (sidecar,) = folder.path.glob("*.json")
    assert len(sidecar.read_bytes().splitlines()) == 2
    file.discard()


def test_staging_files_are_used_again(folder: StagingFolder) -> None:
    for number in range(300):
        file = folder.new(f"b/{number}", None)
        file.write(0, b"x" * number)
        file.discard()
        file.discard()
    assert len(os.listdir(folder.path)) == 3
    several = [folder.new(f"b/{number}", None) for number in range(100)]
    for file in several:
        file.discard()
    assert len(os.listdir(folder.path)) == 1 + 2 * 64


def test_a_change_during_a_store_is_not_taken_for_stored(folder: StagingFolder) -> None:
    file = folder.new("b/k", None)
    file.write(0, b"first")
    file.begin_storing()
    file.write(0, b"later")
    assert not file.mark_stored(Base(5))
    assert file.changed
    assert file.read(0, 5) == b"later"
    file.begin_storing()
    assert file.mark_stored(Base(5))
    assert file.spans(0, 5) == [(Kind.BASE, 0, 5)]
    file.discard()


def test_base_bytes_are_not_read_from_the_staging_file(folder: StagingFolder) -> None:
    file = folder.new("b/k", Base(10))
    file.write(5, b"x")
    with pytest.raises(AssertionError):
        file.read(4, 2)
    assert file.read(5, 1) == b"x"
    assert file.read(100, 5) == b""
    file.discard()
