"""Readers of the shared index: what they map, what they refuse, and that nothing they hold can be made writable."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest import mock

import pytest

from lakefs.client.blocking.chunks import Chunks
from lakefs.content.verify import Check
from lakefs.errors import EngineBusy, EngineUnreachable, PermissionDenied, StoreDamaged
from lakefs.shared_index.table import SharedIndexReader, SharedTable
from lakefs.shared_index.table_format import TableHeader, table_bytes
from lakefs.shares.index_in_use import IndexInUse
from lakefs.steps.steps import Send, Start, Wait
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import OpenSharedIndex, SharedIndexOpened
from lakefs.wire.offers import EVERYTHING, Offers

CAPACITY: Final = 1024
HEADER: Final = TableHeader(CAPACITY, b"s" * 16, b"b" * 16)
CHUNK: Final = b"\x01" + b"d" * 32
PLACE: Final = (1, 2, 3, 4, 5)
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x0002 | 0x0004 | 0x0010  # shrink, grow, future write
_NOBODY: Final = 65534


@pytest.fixture
def shared() -> Iterator[tuple[int, SharedTable]]:
    """Make a memfd as the engine does, with its writer's mapping made before the seals."""
    descriptor = os.memfd_create("hot-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, table_bytes(CAPACITY))
    memory = mmap.mmap(descriptor, table_bytes(CAPACITY))
    memory[: len(HEADER.pack())] = HEADER.pack()
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    table = SharedTable(memory, CAPACITY)
    table.put(CHUNK, *PLACE)
    yield descriptor, table
    os.close(descriptor)


def _read_only(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)


def test_a_reader_finds_what_the_writer_puts_and_not_what_it_removed(shared: tuple[int, SharedTable]) -> None:
    descriptor, table = shared
    lent = _read_only(descriptor)
    reader = SharedIndexReader(lent)
    os.close(lent)
    assert reader.header == HEADER
    assert reader.find(CHUNK) == PLACE
    other = b"\x02" + b"o" * 32
    assert reader.find_many([other, CHUNK]) == [None, PLACE]
    table.put(other, 3, 9, 9, 9, 9)
    table.remove(CHUNK)
    assert reader.find_many([other, CHUNK]) == [(3, 9, 9, 9, 9), None]


_TRIES: Final = """
import ctypes, mmap, os, sys
descriptor = int(sys.argv[1])
if os.geteuid() == 0:
    os.setgid({nobody}); os.setuid({nobody})
failed = 0
def refused(what):
    global failed
    try:
        what()
    except OSError:
        return
    failed += 1
for path in (f"/proc/self/fd/{{descriptor}}",):
    refused(lambda: os.write(descriptor, b"x"))
    refused(lambda: os.ftruncate(descriptor, 0))
    refused(lambda: mmap.mmap(descriptor, 4096))
    try:
        again = os.open(path, os.O_RDWR)
    except OSError:
        again = None
    if again is not None:
        refused(lambda: os.write(again, b"x"))
        refused(lambda: os.pwrite(again, b"x", 8))
        refused(lambda: os.ftruncate(again, 0))
        refused(lambda: os.ftruncate(again, 1 << 30))
        refused(lambda: mmap.mmap(again, 4096))
    for held in (descriptor, again):
        if held is not None:
            memory = mmap.mmap(held, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
            libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, held, 0)
            failed += libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0
print("reopened" if again is not None else "not reopened", failed)
"""


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_client_cannot_make_its_descriptor_or_mapping_writable_not_even_reopened_by_another_user(
    shared: tuple[int, SharedTable], is_read_only: bool
) -> None:
    lent = _read_only(shared[0]) if is_read_only else os.dup(shared[0])
    code = _TRIES.format(nobody=_NOBODY)
    done = subprocess.run([sys.executable, "-c", code, str(lent)], pass_fds=[lent], capture_output=True, text=True)
    os.close(lent)
    assert done.stderr == ""
    # A user who may open it again gets a descriptor that allows nothing, either.
    assert done.stdout.split()[-1] == "0", done.stdout
    assert SharedIndexReader(shared[0]).find(CHUNK) == PLACE


def test_a_scribbling_reader_does_not_get_a_mapping_to_scribble_on(shared: tuple[int, SharedTable]) -> None:
    reader = SharedIndexReader(shared[0])
    with pytest.raises(TypeError):
        reader._memory[0:1] = b"x"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = _address_of(reader._memory, shared[0])
    assert libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert reader.find(CHUNK) == PLACE


def _address_of(memory: memoryview, descriptor: int) -> int:
    """Return the address of the only read-only mapping of the descriptor's file."""
    inode = str(os.fstat(descriptor).st_ino)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    [line] = [fields[0] for fields in maps if fields[4] == inode and fields[1] == "r--s"]
    begin, end = (int(each, 16) for each in line.split("-"))
    assert len(memory) <= end - begin
    return begin


def test_memory_that_its_owner_can_cut_is_not_mapped(tmp_path: Path) -> None:
    unsealed = os.memfd_create("hot-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    path = tmp_path / "hot-index"
    path.write_bytes(HEADER.pack() + bytes(table_bytes(CAPACITY)))
    os.ftruncate(unsealed, table_bytes(CAPACITY))
    os.pwrite(unsealed, HEADER.pack(), 0)
    plain = os.open(path, os.O_RDONLY)
    try:
        for descriptor in (unsealed, plain):
            with pytest.raises(PermissionDenied):
                SharedIndexReader(descriptor)
    finally:
        os.close(unsealed)
        os.close(plain)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(table_bytes(CAPACITY)),
        HEADER.pack(),
        HEADER.pack() + bytes(table_bytes(CAPACITY) - 77),
        b"X" + HEADER.pack()[1:] + bytes(table_bytes(CAPACITY)),
    ],
    ids=["empty", "zeros", "header only", "a byte short", "another magic"],
)
def test_what_is_no_whole_table_is_refused(content: bytes) -> None:
    descriptor = os.memfd_create("hot-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    with pytest.raises(StoreDamaged):
        SharedIndexReader(descriptor)
    os.close(descriptor)


def _opened(*answers: Reply | Exception) -> tuple[SharedIndexReader | None, int]:
    """Request the index, with these answers; return the reader, and the number of requests made."""
    client = SimpleNamespace(
        steps=SimpleNamespace(offers=Offers(EVERYTHING, by_memory=True), descriptors=None, check=Check.BLAKE3), epoch=1
    )
    index = IndexInUse(cast("Any", client))
    steps = index.renewal()
    asked = 0
    step = next(steps)
    left = list(answers)
    try:
        while True:
            if isinstance(step, Start):
                asked += 1
                step = steps.send("ticket")
            elif isinstance(answer := left.pop(0), Exception):
                step = steps.throw(answer)
            else:
                step = steps.send(answer)
    except StopIteration:
        reads = index.at_hand()
        if reads is None:
            return None, asked
        assert isinstance(reads.index, SharedIndexReader)
        return reads.index, asked


@pytest.mark.parametrize("error", [EngineBusy("out of descriptors"), EngineUnreachable("gone")])
def test_an_index_that_cannot_be_had_now_is_done_without(error: Exception) -> None:
    assert _opened(error) == (None, 1)


def test_a_table_that_was_replaced_on_its_way_is_asked_for_once_more(shared: tuple[int, SharedTable]) -> None:
    old = os.memfd_create("hot-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(old, table_bytes(CAPACITY))
    fcntl.fcntl(old, _F_ADD_SEALS, _SEALS)
    answers = [Reply(SharedIndexOpened(1), descriptors=[descriptor]) for descriptor in (os.dup(old), os.dup(shared[0]))]
    reader, asked = _opened(*answers)
    assert reader is not None
    assert (reader.find(CHUNK), asked) == (PLACE, 2)
    zeros = [Reply(SharedIndexOpened(1), descriptors=[os.dup(old)]) for _ in range(2)]
    assert _opened(*zeros) == (None, 2)
    os.close(old)


class _Reconnecting:
    """A driver whose connection changes during the first request for the index."""

    steps = SimpleNamespace(
        offers=Offers(EVERYTHING, by_memory=True), descriptors=None, check=Check.BLAKE3, get_chunks=lambda _: None
    )

    def __init__(self, reader: SharedIndexReader) -> None:
        self.epoch = 1
        self._reader = reader
        self.shares = SimpleNamespace(index=IndexInUse(cast("Any", self)))

    def run(self, steps: Generator[Any, Any, Any] | None) -> object:
        if steps is None:
            return [b"content"]
        with mock.patch("lakefs.shares.index_in_use.SharedIndexReader", return_value=self._reader):
            started = [next(steps), steps.send("ticket")]
            assert started == [Start(Send(OpenSharedIndex())), Wait("ticket")]
            self.epoch = 2
            with suppress(StopIteration):
                steps.send(Reply(SharedIndexOpened(1), descriptors=[os.dup(0)]))
        return None


def test_the_index_of_a_connection_that_was_lost_meanwhile_is_not_used(shared: tuple[int, SharedTable]) -> None:
    driver = _Reconnecting(SharedIndexReader(shared[0]))
    chunks = Chunks(cast("Any", driver))
    chunks.get_many([CHUNK])
    assert driver.shares.index.at_hand() is None
    chunks.get_many([CHUNK])
    assert driver.shares.index.at_hand() is not None
