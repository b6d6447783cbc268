"""The end of a connection ends all that a lake holds of its engine: grants, lent memory, loads under way."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from engine.segments.files import SEGMENTS_FOLDER
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.connect import connect
from lakefs.content.verify import Check
from lakefs.errors import ChunkNotFound, SessionLost
from lakefs.limits import MIB
from lakefs.wire import messages as m
from tests.e2e.served import Served, serving


def test_an_object_that_was_opened_on_a_lost_connection_is_not_read_unverified_from_its_old_places(
    folder: Path,
) -> None:
    content = random.Random(1).randbytes(12 * MIB)
    with serving(folder) as served, connect(served.server, check=Check.NONE) as lake:
        lake.put("bkt/gone", content, create_bucket=True)
        lake.put("bkt/kept", random.Random(2).randbytes(12 * MIB))
        with lake.open("bkt/gone") as opened:
            served.kill()
            served.start()
            with connect(served.server) as other:
                other.remove("bkt/gone")
                assert other.gc()["freed_chunks"]
            with pytest.raises(ChunkNotFound):
                opened.read()


def test_a_lending_is_ended_by_its_client_from_another_connection(folder: Path) -> None:
    memory = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.ftruncate(memory, MIB)
    with serving(folder) as served, connect_blocking(served.server) as lost, connect_blocking(served.server) as client:
        number = lost.call(m.LendMemory(MIB, True), descriptors=[memory]).message.memory  # type: ignore[attr-defined]
        client.call(m.ReturnMemory(number))
        with pytest.raises(SessionLost):
            lost.call(m.LoadSlots(number, [], []))
    os.close(memory)


def test_a_load_that_was_interrupted_writes_nothing_more_to_its_pool(folder: Path) -> None:
    count, size = 16, 8 * MIB
    rng = random.Random(3)
    with serving(folder) as served, connect(served.server) as lake:
        names = [f"bkt/{number}" for number in range(count)]
        for name in names:
            lake.put(name, rng.randbytes(size), create_bucket=True)
        with lake.pool(size_bytes=count * size) as pool:
            for _ in range(6):
                _forget_pages(served)
                timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
                try:
                    timer.start()
                    lake.load_many(names, pool, [number * size for number in range(count)])
                    timer.join()
                    time.sleep(1)  # the signal may still be pending
                except KeyboardInterrupt:
                    pass
                before = bytes(pool.buffer[::4096])
                time.sleep(0.2)
                assert bytes(pool.buffer[::4096]) == before
                pool.buffer[:] = bytes(count * size)


def _forget_pages(served: Served) -> None:
    for path in (served.data / SEGMENTS_FOLDER).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
