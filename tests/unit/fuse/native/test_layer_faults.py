"""The native layer when the process lacks what its threads need."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuse.native import layer

if not layer.IS_BUILT:
    pytest.skip("the native module is not built", allow_module_level=True)

from fuse.native import _layer
from lakefs.limits import KIB, MIB
from tests.unit.fuse.native.kernel import IN_HEADER, LOOKUP, ROOM, Answer, kernel, taught

HANDLE = 7
WAIT_S = 20.0


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let this process open no file in the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def thread_count() -> int:
    """Return the number of this process's threads."""
    return os.stat("/proc/self/task").st_nlink - 2


def test_a_layer_whose_threads_could_not_begin_leaves_the_device_to_libfuse(tmp_path: Path) -> None:
    piece = os.urandom(4096)
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    with kernel() as device:
        before = thread_count()
        unique = device.read(HANDLE, 0, 10)
        with no_descriptors_left():
            assert device.given() is None  # it is answered here, and wakes the threads
            until = time.monotonic() + WAIT_S
            while thread_count() > before:
                assert time.monotonic() < until
                time.sleep(0.01)
        assert device.answer() == Answer(unique, 0, piece[:10])
        for _ in range(3):
            unique = device.read(HANDLE, 0, 10)
            assert device.settle() == Answer(unique, 0, piece[:10])
            unique = device.ask(LOOKUP, b"name\0")
            found = device.settle()
            assert isinstance(found, bytes)
            assert IN_HEADER.unpack_from(found)[2] == unique
        content.end()
    os.close(descriptor)


def test_the_bound_of_the_queue_is_of_the_memory_that_requests_take(tmp_path: Path) -> None:
    """A longer request takes all of the memory that a thread had for it, however short it is beside that."""
    piece, count = os.urandom(4096), 200
    content, descriptor = taught(str(tmp_path / "file"), [piece])
    content.add(HANDLE)
    with kernel() as device:
        unique = device.read(HANDLE, 0, 10)
        assert device.settle() == Answer(unique, 0, piece[:10])
        before = _layer.counters()["passed_on"]
        sending = threading.Thread(target=lambda: [device.ask(LOOKUP, bytes(64 * KIB)) for _ in range(count)])
        sending.start()
        sending.join(0.5)
        assert (_layer.counters()["passed_on"] - before) * ROOM <= 16 * MIB
        found = {IN_HEADER.unpack_from(device.next_given())[2] for _ in range(count)}
        sending.join()
        assert len(found) == count
        content.end()
    os.close(descriptor)
