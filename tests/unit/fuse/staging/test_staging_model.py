"""A staged file behaves like a plain file, after every change, at every kill, and on a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings, strategies as st

from fuse.staging.byte_ranges import RangeSet
from fuse.staging.folder import Base, Kind, StagedFile, StagingFolder
from fuse.staging.leftovers import Leftover, forget, restore
from fuse.staging.room import Emptying
from fuse.staging.sidecar import SidecarState, replay
from lakefs.errors import StoreFull
from tests.lengths import repeated

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
LIMIT = 1 << 20


@contextmanager
def fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def content_of(file: StagedFile, base: bytes) -> bytes:
    """Return the content as a reader puts it together, and check the spans."""
    parts: list[bytes] = []
    at = 0
    for kind, offset, length in file.spans(0, file.size + 10):
        assert offset == at
        assert length > 0
        parts.append(base[offset : offset + length] if kind is Kind.BASE else file.read(offset, length))
        assert len(parts[-1]) == length
        assert [found for found in Kind if file.is_all(found, offset, length)] == [kind]
        assert not any(file.is_all(found, offset - 1, length + 1) for found in Kind if at and found is not kind)
        at += length
    assert at == file.size
    return b"".join(parts)


# --- against a plain bytearray -------------------------------------------------------------------------

SIZES = st.integers(0, 60)
BYTES = st.builds(lambda value, length: bytes([value]) * length, st.integers(0, 255), st.integers(0, 25))
WRITES = st.tuples(st.just("write"), SIZES, BYTES)
CHANGES = st.one_of(
    WRITES,
    WRITES,
    st.tuples(st.just("append"), BYTES),
    st.tuples(st.just("truncate"), SIZES),
    st.tuples(st.just("read"), SIZES, SIZES),
    st.tuples(st.just("rename"), st.sampled_from(["b/one", "b/two", "b/\udce9"])),
    st.tuples(st.just("mark_stored")),
    # The next so many calls of pwrite work, then one writes only so many bytes and the disk is full.
    st.tuples(st.just("full"), st.integers(0, 2), st.integers(0, 25)),
    st.tuples(st.just("empty_beside")),
    st.tuples(st.just("let_append")),
    st.tuples(st.just("look")),
    st.tuples(st.just("look_at_ranges")),
)
OPERATIONS = st.lists(st.one_of(CHANGES, st.tuples(st.just("native"), BYTES, CHANGES)), max_size=25)


class NativeThread:
    """A native thread that appends to the file, as far as it is let; no task of the loop learns of it by itself."""

    last: NativeThread

    def __init__(self, handle: int, descriptor: int, end: int, limit: int) -> None:
        self._descriptor, self._end, self._limit = descriptor, end, limit
        self._is_ended = False
        NativeThread.last = self

    def found(self) -> tuple[int, int]:
        return self._end, 1

    def end(self) -> None:
        self._is_ended = True

    def write(self, data: bytes) -> bool:
        """Write the next bytes; return False if the loop has to write them."""
        if self._is_ended or not data or len(data) > self._limit - self._end:
            return False
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self._end + done)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            return False
        self._end += done
        return True


@contextmanager
def native_threads() -> Iterator[None]:
    NativeThread(0, -1, 0, 0).end()
    with (
        mock.patch("fuse.staging.appending.APPEND_BYTES", 40),
        mock.patch("fuse.native.layer.answers_writes", return_value=True),
        mock.patch("fuse.native.layer.NativeAppend", NativeThread),
    ):
        yield


class Disk:
    """The folder's disk: it is full once, after `calls` more writes, with `short` bytes of the last one written.

    After every call that changes something, `looked` gets what a mount would find if the process were killed then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.looked: list[SidecarState] = []
        self._calls_left = -1
        self._short = 0
        self._pwrite, self._ftruncate = os.pwrite, os.ftruncate

    def get_full(self, calls: int, short: int) -> None:
        self._calls_left, self._short = calls + 1, short

    def get_empty(self) -> None:
        self._calls_left = -1

    def pwrite(self, descriptor: int, view: Any, offset: int) -> int:
        if self._calls_left > 0:
            self._calls_left -= 1
        if self._calls_left:
            count = self._pwrite(descriptor, view, offset)
        elif self._short:
            count = self._pwrite(descriptor, bytes(view)[: self._short], offset)
            self._short = 0
        else:
            self._calls_left = -1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.look()
        return count

    def ftruncate(self, descriptor: int, length: int) -> None:
        self._ftruncate(descriptor, length)
        self.look()

    def look(self) -> None:
        for sidecar in self.folder.glob("*.json"):
            state = replay(sidecar.read_bytes(), sidecar.with_suffix(".bytes").stat().st_size)
            if state is not None:
                self.looked.append(state)


@dataclass
class Modelled:
    """A staged file and what it should hold."""

    staging: StagingFolder
    file: StagedFile
    base: bytes
    content: bytearray
    changed: bool
    disk: Disk
    written: set[int] = field(default_factory=set)
    emptying: list[Emptying] = field(default_factory=list)
    """Slots that are emptied beside the loop, when that comes to it."""
    lets: bool = False
    """Native threads may append after each operation."""

    def do(self, operation: tuple[Any, ...]) -> None:
        before, size_before = staged_by(self.file), self.file.size
        was_stale = self.file._sidecar_is_stale
        self.disk.looked.clear()
        native = b""
        if operation[0] == "native":
            native, operation = operation[1:]
            self.native(native)
        size_written = len(self.content)
        getattr(self, operation[0])(*operation[1:])
        if self.lets:
            self.let_append()
        self.check()
        if self.file._sidecar_is_stale:
            return  # what is in the store by now may be taken as new; the next change corrects the sidecar first
        after, size_after = staged_by(self.file), self.file.size
        self.disk.look()
        assert bytes_of(self.disk.looked[-1].ranges) == after
        assert self.disk.looked[-1].size == size_after
        # A change that did not return is in doubt, and nothing else is.
        in_doubt = set(range(size_before, size_before + len(native)))
        sizes = {size_before, size_before + len(native)}
        if operation[0] in ("write", "append"):
            offset = operation[1] if operation[0] == "write" else size_written
            after |= set(range(offset, offset + len(operation[-1])))
            size_after = max(size_after, offset + len(operation[-1]))
        sizes.add(size_after)
        for state in self.disk.looked:
            if not native:
                assert before & after <= bytes_of(state.ranges)
            assert bytes_of(state.ranges) <= before | after | in_doubt
            assert was_stale or min(sizes) <= state.size <= max(sizes)

    def check(self) -> None:
        assert self.file.size == len(self.content)
        assert bytes_of(self.file.written()) == self.written
        assert self.file.changed == self.changed
        assert content_of(self.file, self.base) == self.content

    def write(self, offset: int, data: bytes) -> None:
        staged = set(self.written)
        try:
            self.file.write(offset, data)
        except StoreFull:
            found = content_of(self.file, self.base)
            for at in staged & set(range(offset, offset + len(data))):  # bytes that were already staged may be torn
                assert found[at] in (self.content[at], data[at - offset])
                self.content[at] = found[at]
            self.written |= bytes_of(self.file.written()) & set(range(offset, offset + len(data)))
            return
        if data:
            self.content += bytes(max(0, offset - len(self.content)))
            self.content[offset : offset + len(data)] = data
            self.changed = True
            self.written |= set(range(offset, offset + len(data)))

    def append(self, data: bytes) -> None:
        self.write(len(self.content), data)

    def truncate(self, size: int) -> None:
        try:
            self.file.truncate(size)
        except StoreFull:
            return
        self.changed |= size != len(self.content)
        self.written = {at for at in self.written if at < size}
        self.content = self.content[:size] + bytes(max(0, size - len(self.content)))

    def read(self, offset: int, length: int) -> None:
        assert self.file.size == len(self.content)
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
        self.base, self.changed, self.written = bytes(self.content), False, set()
        assert self.file.written().byte_count == 0

    def full(self, calls: int, short: int) -> None:
        self.disk.get_full(calls, short)

    def let_append(self) -> None:
        self.file.let_append(7, LIMIT, lambda time_ns: None)

    def look(self) -> None:
        """Look at all of the file that a task may look at without its lock."""
        if self.content:
            whole = {at for at in range(len(self.content)) if self.file.is_all(Kind.STAGED, at, 1)}
            assert whole == self.written
        assert self.staging.used_bytes == len(self.written)

    def look_at_ranges(self) -> None:
        assert bytes_of(self.file.written()) == self.written

    def native(self, data: bytes) -> None:
        """Native threads write, if they can, and nobody has looked since."""
        if NativeThread.last.write(data):
            self.written |= set(range(len(self.content), len(self.content) + len(data)))
            self.content += data
            self.changed = True

    def empty_beside(self) -> None:
        while self.emptying:
            self.emptying[0].run()
            self.staging.emptied(self.emptying.pop(0))


def staged_by(file: StagedFile) -> set[int]:
    """Return the places of staged bytes."""
    spans = [span for span in file.spans(0, file.size) if span.kind is Kind.STAGED]
    return {at for _, offset, length in spans for at in range(offset, offset + length)}


def bytes_of(ranges: RangeSet) -> set[int]:
    return {at for begin, end in ranges for at in range(begin, end)}


def leftovers_if_killed_now(folder: Path) -> tuple[StagingFolder, list[Leftover]]:
    """Return what the next mount finds in a copy of the folder as it is."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    staging = StagingFolder(copy, LIMIT)
    return staging, staging.leftovers()


def check_recovery(modelled: Modelled, folder: Path) -> None:
    """Check that everything that was written is there, and nothing else is taken as written."""
    file, base = modelled.file, modelled.base
    if file._sidecar_is_stale:
        file.sync()  # the full disk had no room for a change that must not fail
    staging, found = leftovers_if_killed_now(folder)
    try:
        staged = [span for span in file.spans(0, file.size) if span.kind is Kind.STAGED]
        if not staged and not modelled.changed:
            assert found == []
            return
        if not found:  # its length was changed, and changed back
            assert not staged
            assert len(base) == file.size
            return
        (leftover,) = found
        assert leftover.name == file.name.encode("utf-8", "replace").decode()
        assert leftover.size_bytes == file.size
        assert leftover.new_bytes == file.written().byte_count
        assert list(leftover.ranges) == [(offset, offset + length) for _, offset, length in staged]
        assert leftover.is_complete == all(span.kind is not Kind.BASE for span in file.spans(0, leftover.base_bytes))
        target = folder.with_name("restored")
        target.unlink(missing_ok=True)
        restore(leftover, target, lambda offset, length: base[offset : offset + length])
        assert target.read_bytes() == modelled.content
        forget(leftover)
        assert staging.leftovers() == []
    finally:
        staging.close()


@contextmanager
def plain_disk(disk: Disk) -> Iterator[Disk]:
    with mock.patch("os.pwrite", disk.pwrite), mock.patch("os.ftruncate", disk.ftruncate):
        yield disk


@settings(max_examples=repeated(300, 1500))
@given(
    st.one_of(st.none(), st.integers(0, 60).map(lambda length: bytes(range(10, 10 + length)))),
    OPERATIONS,
    st.booleans(),
    st.booleans(),
)
def test_a_staged_file_is_a_plain_file_and_so_is_what_a_killed_mount_leaves(
    base: bytes | None, operations: list[tuple[Any, ...]], beside: bool, lets: bool
) -> None:
    with (
        fresh_folder() as path,
        plain_disk(Disk(path / "staging")) as disk,
        mock.patch("fuse.staging.folder.EMPTIED_BESIDE_BYTES", 1),
        native_threads(),
    ):
        staging = StagingFolder(path / "staging", LIMIT)
        file = staging.new("b/k", None if base is None else Base(len(base), 7, b"blob"))
        modelled = Modelled(staging, file, base or b"", bytearray(base or b""), base is None, disk)
        staging.append_from(1)
        staging.empty_beside = modelled.emptying.append if beside else None
        modelled.lets = lets
        for operation in operations:
            modelled.do(operation)
        disk.get_empty()
        check_recovery(modelled, path / "staging")
        assert staging.used_bytes == file.written().byte_count
        file.discard()
        assert staging.used_bytes == 0
        staging.close()
        assert sorted(os.listdir(path / "staging")) == ["lock"]
