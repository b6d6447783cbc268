"""Lent memory whose connection is lost while the engine lives: slots and pools are the client's again at once."""

from __future__ import annotations

import fcntl
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.blocking.engine import BlockingEngine
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable
from lakefs.limits import KIB, MIB
from lakefs.put.shared_memory import Slot
from tests.e2e.served import WAIT_S, Served, serving

pytestmark = pytest.mark.thorough

COUNT = 4


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder)) as served:
        yield served


def lose_connection_during(engine: Served, lake: Lake, call: Callable[[], object]) -> None:
    """Cut the connection while a request waits in the engine's socket; the call has raised when this returns."""
    errors: list[BaseException] = []
    connection = driver_of(lake)._engine
    assert isinstance(connection, BlockingEngine)
    before = _unread_bytes(connection)

    def run() -> None:
        try:
            call()
        except EngineUnreachable as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and _unread_bytes(connection) == before:
        time.sleep(0.001)
    assert thread.is_alive(), "the call needed no engine"
    connection.close()
    thread.join(WAIT_S)
    assert len(errors) == 1


def _unread_bytes(connection: BlockingEngine) -> int:
    """Return how much of what was sent the stopped engine has not read; the kernel counts its own memory for it."""
    link = connection._link
    assert link is not None
    counted: bytes = fcntl.ioctl(link._sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(counted, sys.byteorder)


def wait_until_left(other: Lake) -> None:
    """Wait until the engine has served, or dropped, what the lost connection sent."""
    until = time.monotonic() + WAIT_S
    while other.status()["lent_memory"]["count"] and time.monotonic() < until:
        time.sleep(0.01)
    assert other.status()["lent_memory"]["count"] == 0


@pytest.mark.parametrize("size", [1000, 300_000, 3 * MIB])
@pytest.mark.parametrize("what", ["values", "objects"])
def test_what_is_written_to_slots_after_their_connection_was_lost_is_never_stored(
    engine: Served, what: str, size: int
) -> None:
    names = [f"{what}-{size}-{index}" for index in range(COUNT)]
    keys = [name.encode() for name in names]
    with connect(engine.server) as lake, connect(engine.server) as other, lake.shared_memory(COUNT * size) as memory:
        slots = [memory.slot(index * size, size) for index in range(COUNT)]
        space, theirs = lake.space("lost"), other.space("lost")

        def put(names: list[str], slots: list[Slot]) -> object:
            if what == "values":
                return space.put_many([name.encode() for name in names], slots)
            objects = [(f"bkt/{name}", slot) for name, slot in zip(names, slots, strict=True)]
            return lake.put_many(objects, create_bucket=True)

        put([f"{names[0]}-first"], slots[:1])  # the memory is lent
        memory.buffer[:] = b"r" * len(memory.buffer)
        right = b"r" * size
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
        try:
            lose_connection_during(engine, lake, lambda: put(names, slots))
            memory.buffer[:] = b"w" * len(memory.buffer)  # they are the client's again
        finally:
            engine.process.send_signal(signal.SIGCONT)
        wait_until_left(other)
        if what == "values":
            buffers = [bytearray(size) for _ in keys]
            found = [bytes(buffer[:n]) for buffer, n in zip(buffers, theirs.get_many_into(keys, buffers), strict=True)]
        else:
            found = [other.get(f"bkt/{name}") if other.exists(f"bkt/{name}") else b"" for name in names]
        assert all(value in (b"", right) for value in found), [value[:1] for value in found]
        memory.buffer[:] = b"r" * len(memory.buffer)
        put(names, slots)
        if what == "values":
            buffers = [bytearray(size) for _ in keys]
            assert theirs.get_many_into(keys, buffers) == [size] * COUNT
            assert all(buffer == right for buffer in buffers)
        else:
            assert all(other.get(f"bkt/{name}") == right for name in names)


@pytest.mark.parametrize("size", [1000, 64 * KIB, 3 * MIB])
def test_nothing_is_loaded_to_a_pool_after_its_connection_was_lost(engine: Served, size: int) -> None:
    keys = [b"loaded %d %d" % (size, index) for index in range(COUNT)]
    offsets = [index * size for index in range(COUNT)]
    with (
        connect(engine.server, check=Check.BLAKE3) as lake,
        connect(engine.server) as other,
        lake.pool(size_bytes=COUNT * size) as pool,
    ):
        space = lake.space("lost")
        space.put_many(keys, [b"r" * size] * COUNT)
        space.load(keys, pool, offsets)  # the pool is lent
        assert engine.process is not None
        engine.process.send_signal(signal.SIGSTOP)
        try:
            lose_connection_during(engine, lake, lambda: space.load(keys, pool, offsets))
            pool.buffer[:] = b"w" * len(pool.buffer)  # it is the client's again
        finally:
            engine.process.send_signal(signal.SIGCONT)
        wait_until_left(other)
        assert set(pool.buffer) == set(b"w")
        assert space.load(keys, pool, offsets) == [size] * COUNT
        assert set(pool.buffer) == set(b"r")
