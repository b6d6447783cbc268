"""Writes that native threads answer: the next bytes of a file, as far as Python has let them, and nothing else."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from fuse.native import layer

if not layer.IS_BUILT:
    pytest.skip("the native module is not built", allow_module_level=True)

from fuse.native import _layer
from lakefs.limits import KIB, MIB
from tests.unit.fuse.native.kernel import IN_HEADER, LOOKUP, WRITE_OUT, Answer, Kernel, kernel

HANDLE = 7
LOCK_OWNER, OF_A_MAPPING, CLEARS_SET_ID = 1 << 1, 1 << 0, 1 << 2
"""Flags of a WRITE."""


@contextmanager
def file_of(path: Path, content: bytes = b"") -> Iterator[int]:
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_answered(device: Kernel, unique: int, size: int) -> bool:
    """Return True if a WRITE was answered with its size; False if libfuse is given it."""
    found = device.settle()
    if isinstance(found, bytes):
        assert IN_HEADER.unpack_from(found)[2] == unique
        return False
    assert found == Answer(unique, 0, WRITE_OUT.pack(size, 0))
    return True


@settings(max_examples=40, deadline=None)
@given(
    begin=st.sampled_from([0, 1, 4096, 5 * MIB]),
    room=st.integers(0, 300_000),
    writes=st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 70_000), st.booleans()), max_size=15),
)
def test_the_next_bytes_are_written_and_all_other_writes_are_pythons(
    tmp_path_factory: pytest.TempPathFactory, begin: int, room: int, writes: list[tuple[int, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("staging") / "file"
    expected = bytearray(begin)
    with file_of(path, bytes(expected)) as descriptor, kernel() as device:
        append = _layer.Append(HANDLE, descriptor, begin, begin + room)
        for number, (shift, size, is_other) in enumerate(writes):
            data = bytes([number + 1]) * size
            offset = len(expected) + shift
            if offset < 0:
                continue
            is_plain = not shift and not is_other and 0 < size <= begin + room - len(expected)
            unique = device.write(HANDLE + is_other, offset, data, flags=(0, LOCK_OWNER, CLEARS_SET_ID, 6)[number % 4])
            assert is_answered(device, unique, size) == is_plain
            if is_plain:
                expected += data
            assert append.found()[0] == len(expected)
            assert path.read_bytes() == expected
        append.end()
        unique = device.write(HANDLE, len(expected), b"more")
        assert not is_answered(device, unique, 4)
        assert path.read_bytes() == expected


@pytest.mark.parametrize("flags", [OF_A_MAPPING, OF_A_MAPPING | CLEARS_SET_ID, 1 << 31])
def test_writes_of_mappings_and_those_with_unknown_flags_are_pythons(tmp_path: Path, flags: int) -> None:
    with file_of(tmp_path / "file") as descriptor, kernel() as device:
        append = _layer.Append(HANDLE, descriptor, 0, MIB)
        assert not is_answered(device, device.write(HANDLE, 0, b"data", flags=flags), 4)
        assert append.found() == (0, 0)
        append.end()


@pytest.mark.parametrize("size", [0, 3, 5, 1 << 31, (1 << 32) - 1])
def test_a_write_of_another_length_than_it_says_is_libfuses(tmp_path: Path, size: int) -> None:
    with file_of(tmp_path / "file") as descriptor, kernel() as device:
        append = _layer.Append(HANDLE, descriptor, 0, MIB)
        assert not is_answered(device, device.write(HANDLE, 0, b"data", size=size), 4)
        unique = device.ask(16, bytes(39))
        found = device.settle()
        assert isinstance(found, bytes)
        assert IN_HEADER.unpack_from(found)[2] == unique
        assert append.found() == (0, 0)
        append.end()


def test_the_time_is_that_of_the_last_write(tmp_path: Path) -> None:
    with file_of(tmp_path / "file") as descriptor, kernel() as device:
        append = _layer.Append(HANDLE, descriptor, 0, MIB)
        for number in range(3):
            before = time.time_ns()
            assert is_answered(device, device.write(HANDLE, 4 * number, b"data"), 4)
            end, time_ns = append.found()
            assert end == 4 * number + 4
            assert before <= time_ns <= time.time_ns()
        append.end()


def test_a_write_that_fails_half_way_is_cut_off_and_is_pythons(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with file_of(tmp_path / "file", b"x" * 1000) as descriptor, kernel() as device:
        append = _layer.Append(HANDLE, descriptor, 1000, MIB)
        failed = _layer.counters()["failed_writes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            answered = is_answered(device, device.write(HANDLE, 1000, b"y" * 8000), 8000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert not answered
        assert (tmp_path / "file").read_bytes() == b"x" * 1000, "the sidecar would count what is behind"
        assert append.found() == (1000, 0)
        assert _layer.counters()["failed_writes"] == failed + 1
        assert is_answered(device, device.write(HANDLE, 1000, b"z" * 10), 10)
        append.end()
    with file_of(tmp_path / "file"), kernel() as device:
        reading = os.open(tmp_path / "file", os.O_RDONLY)
        append = _layer.Append(HANDLE, reading, 0, MIB)
        assert not is_answered(device, device.write(HANDLE, 0, b"data"), 4)
        append.end()
        os.close(reading)


def test_what_may_be_appended_has_bounds(tmp_path: Path) -> None:
    with file_of(tmp_path / "file") as descriptor:
        for wrong in ((-1, 0, 10), (descriptor, 11, 10), (descriptor, 0, 1 << 63)):
            with pytest.raises(OSError, match="Invalid argument"):
                _layer.Append(HANDLE, *wrong)
        appends = [_layer.Append(number, descriptor, 0, 10) for number in range(64)]
        with pytest.raises(OSError, match="No space left") as full:
            _layer.Append(64, descriptor, 0, 10)
        assert full.value.errno == errno.ENOSPC
        appends[5].end()
        appends[5].end()
        with pytest.raises(OSError, match="exists"):
            _layer.Append(6, descriptor, 0, 10)
        appends.append(_layer.Append(64, descriptor, 0, 10))
        with pytest.raises(ValueError, match="once"):
            appends[0].__init__(100, descriptor, 0, 10)  # type: ignore[misc]
        del appends  # each ends when it is freed
        again = [_layer.Append(number, descriptor, 0, 10) for number in range(64)]
        for each in again:
            each.end()


def test_appends_wake_the_threads_which_write_beside_python(tmp_path: Path) -> None:
    """Requests of all other kinds still reach libfuse, in order."""
    data = os.urandom(64 * KIB)
    with file_of(tmp_path / "file") as descriptor, kernel() as device:
        wakes = _layer.counters()["wakes"]
        append = _layer.Append(HANDLE, descriptor, 0, 64 * MIB)
        for number in range(40):
            assert is_answered(device, device.write(HANDLE, number * len(data), data), len(data))
            unique = device.ask(LOOKUP, b"name\0")
            found = device.settle()
            assert isinstance(found, bytes)
            assert IN_HEADER.unpack_from(found)[2] == unique
        assert _layer.counters()["wakes"] == wakes + 1
        append.end()
        assert (tmp_path / "file").read_bytes() == data * 40


def test_when_an_append_has_ended_nothing_more_is_written(tmp_path: Path) -> None:
    """Writes are sent all the time while appends begin and end; what each found at its end stays as it is."""
    count, data = 300, bytes(range(256)) * 16
    with file_of(tmp_path / "file") as descriptor, kernel() as device:
        told = 0
        stop = threading.Event()

        def send() -> None:
            at = 0
            while not stop.is_set():
                if is_answered(device, device.write(HANDLE, at, data), len(data)):
                    at += len(data)

        sending = threading.Thread(target=send)
        sending.start()
        for _ in range(count):
            append = _layer.Append(HANDLE, descriptor, told, told + 5 * len(data))
            time.sleep(0.0005)
            append.end()
            end, _ = append.found()
            assert end == os.fstat(descriptor).st_size
            assert told <= end <= told + 5 * len(data)
            told = end
        stop.set()
        sending.join()
        assert told > 0
        assert (tmp_path / "file").read_bytes() == data * (told // len(data))


def test_a_write_of_a_mapping_is_known_while_it_is_handled() -> None:
    found = []
    with kernel() as device:
        for flags in (0, OF_A_MAPPING, LOCK_OWNER, OF_A_MAPPING | CLEARS_SET_ID, 0):
            device.write(HANDLE, 0, b"bytes", flags=flags)
            device.next_given()
            found.append(layer.write_is_mapped())
            device.ask(LOOKUP, b"name\0")
            device.next_given()
        device.write(HANDLE, 0, b"bytes", flags=OF_A_MAPPING, size=4)  # another length than it says
        device.next_given()
        assert [*found, layer.write_is_mapped()] == [False, True, False, True, False, False]
    assert layer.write_is_mapped() is None
