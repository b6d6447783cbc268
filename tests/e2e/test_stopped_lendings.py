"""Memory lent to an engine that is stopped in the middle of a store from it, or a load into it.

The call ends, the memory's owner puts other bytes there, and the engine wakes: no key has those bytes, and none of them
changes.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from lakefs.client.blocking import engine as blocking_engine
from lakefs.client.connect import connect
from lakefs.client.connect_trio import connect_trio
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable
from lakefs.get.pools import Pool
from lakefs.limits import KIB
from lakefs.plugins.kv import movers as moving
from lakefs.plugins.kv.block_moves import BlockMoves, Ended
from lakefs.plugins.kv.movers import Connection, Movers, SpaceSettings
from tests.e2e.served import WAIT_S, Served, serving

pytestmark = pytest.mark.thorough

TIMEOUT_S = 0.4
ROUNDS = 10
BLOCK = 256 * KIB
COUNT = 48


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder)) as served:
        yield served


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up soon, and does not wait for a lost engine."""
    monkeypatch.setattr(blocking_engine, "ENGINE_WAIT_S", 0.0)
    monkeypatch.setattr(moving, "JOB_S", TIMEOUT_S)


def stop_during(engine: Served, call: Callable[[], object], after_s: float, owner: Callable[[], None]) -> None:
    """Stop the engine in the middle of a call; when that has ended, its owner uses the memory, and the engine wakes."""
    assert engine.process is not None
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(after_s)
    engine.process.send_signal(signal.SIGSTOP)
    try:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        owner()
    finally:
        engine.process.send_signal(signal.SIGCONT)


def wait_until_left(engine: Served, count: int) -> None:
    """Wait until the engine has served, or dropped, what lost connections sent: no more memories are lent."""
    with connect(engine.server) as other:
        until = time.monotonic() + WAIT_S
        while other.status()["lent_memory"]["count"] > count:
            assert time.monotonic() < until
            time.sleep(0.01)


def in_rounds() -> list[float]:
    """Return moments at which to stop the engine, from the request's first bytes to after its answer.

    Every second one is early: a request may be served in a few ms.
    """
    return [random.Random(turn).uniform(0.0, (0.004, 0.03)[turn % 2]) for turn in range(ROUNDS)]


def keys_of(name: str, turn: int) -> list[bytes]:
    return [f"{name} {turn} {index}".encode() for index in range(COUNT)]


def test_no_key_has_bytes_that_were_put_to_slots_after_a_store_had_ended(engine: Served) -> None:
    with (
        connect(engine.server, timeout=TIMEOUT_S) as lake,
        connect(engine.server) as other,
        lake.shared_memory(COUNT * BLOCK) as memory,
    ):
        slots = [memory.slot(index * BLOCK, BLOCK) for index in range(COUNT)]
        space, theirs = lake.space("stores"), other.space("stores")
        for turn, after_s in enumerate(in_rounds()):
            keys = keys_of("store", turn)
            for index, slot in enumerate(slots):
                slot.buffer[:] = bytes([index + 1]) * BLOCK

            failed: list[Exception] = []

            def put(keys: list[bytes] = keys, failed: list[Exception] = failed) -> None:
                try:
                    space.put_many(keys, slots)
                except EngineUnreachable as error:
                    failed.append(error)

            def overwrite() -> None:
                memory.buffer[:] = b"w" * len(memory.buffer)

            stop_during(engine, put, after_s, overwrite)
            if failed:
                wait_until_left(engine, 0)
            buffers = [bytearray(BLOCK) for _ in keys]
            for index, length in enumerate(theirs.get_many_into(keys, buffers)):
                assert length in (0, BLOCK)
                assert not length or buffers[index] == bytes([index + 1]) * BLOCK


def test_nothing_changes_in_a_pool_after_a_load_has_ended(engine: Served) -> None:
    keys = keys_of("load", 0)
    offsets = [index * BLOCK for index in range(COUNT)]
    lost = 0
    with connect(engine.server, check=Check.BLAKE3, timeout=TIMEOUT_S) as lake:
        space = lake.space("loads")
        space.put_many(keys, [bytes([index + 1]) * BLOCK for index in range(COUNT)])
        for after_s in in_rounds():
            with lake.pool(size_bytes=COUNT * BLOCK) as pool:
                space.load(keys, pool, offsets)  # the pool is lent
                failed: list[Exception] = []

                def load(pool: Pool = pool, failed: list[Exception] = failed) -> None:
                    try:
                        space.load(keys, pool, offsets)
                    except EngineUnreachable as error:
                        failed.append(error)

                def overwrite(pool: Pool = pool) -> None:
                    pool.buffer[:] = b"w" * len(pool.buffer)

                stop_during(engine, load, after_s, overwrite)
                if failed:
                    lost += 1
                    wait_until_left(engine, 0)
                assert pool.buffer == b"w" * len(pool.buffer)
                assert space.load(keys, pool, offsets) == [BLOCK] * COUNT
                assert pool.buffer[-BLOCK:] == bytes([COUNT]) * BLOCK
    assert lost


def test_a_trio_client_s_pool_has_other_pages_after_a_load_was_given_up(engine: Served) -> None:
    keys = keys_of("trio", 0)
    offsets = [index * BLOCK for index in range(COUNT)]

    async def main() -> None:
        async with (
            connect_trio(engine.server, check=Check.BLAKE3, timeout=TIMEOUT_S) as lake,
            lake.pool(size_bytes=(COUNT + 1) * BLOCK) as pool,
        ):
            space = await lake.space("trio loads")
            await space.put_many(keys, [bytes([index + 1]) * BLOCK for index in range(COUNT)])
            assert await space.load(keys, pool, offsets) == [BLOCK] * COUNT
            pool.buffer[-BLOCK:] = b"k" * BLOCK
            lent = os.dup(pool.descriptor)
            assert engine.process is not None
            engine.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(EngineUnreachable):
                    await space.load(keys, pool, offsets)
                os.pwrite(lent, b"e" * COUNT * BLOCK, 0)  # as the engine would
                assert pool.buffer[:BLOCK] == b"\x01" * BLOCK
                assert pool.buffer[-BLOCK:] == b"k" * BLOCK
            finally:
                engine.process.send_signal(signal.SIGCONT)
                os.close(lent)
            pool.buffer[: COUNT * BLOCK] = bytes(COUNT * BLOCK)
            assert await space.load(keys, pool, offsets) == [BLOCK] * COUNT
            assert pool.buffer[:BLOCK] == b"\x01" * BLOCK
            assert pool.buffer[-BLOCK:] == b"k" * BLOCK

    trio.run(main)


@pytest.mark.parametrize("is_store", [True, False])
def test_blocks_of_a_host_s_region_are_its_own_after_a_job_has_ended(engine: Served, is_store: bool) -> None:
    region = os.memfd_create("host")
    os.ftruncate(region, COUNT * BLOCK)
    memory = memoryview(mmap.mmap(region, COUNT * BLOCK))
    movers = Movers("test", lambda: Connection(SpaceSettings(engine.server, "blocks", check=Check.BLAKE3)))
    moves = BlockMoves(movers, memory, BLOCK, region)
    values = [bytes([index + 1]) * BLOCK for index in range(COUNT)]
    present = keys_of("block", 0)
    try:
        assert moves.is_lent

        def done(begin: Callable[[], None]) -> Ended:
            begin()
            while not (ends := moves.collect()):
                time.sleep(0.001)
            return ends[0]

        def fill() -> None:
            memory[:] = b"".join(values)

        def overwrite() -> None:
            memory[:] = b"w" * len(memory)

        fill()
        while done(lambda: moves.store(0, present, range(COUNT), [])).failed:
            pass
        failed = 0
        for turn, after_s in enumerate(in_rounds()):
            ends: list[Ended] = []
            keys = keys_of("stored block", turn) if is_store else present

            def job(keys: list[bytes] = keys, turn: int = turn, ends: list[Ended] = ends) -> None:
                if is_store:
                    ends.append(done(lambda: moves.store(turn, keys, range(COUNT), [])))
                else:
                    ends.append(done(lambda: moves.load(turn, keys, range(COUNT))))

            fill()
            stop_during(engine, job, after_s, overwrite)
            if ends[0].failed:
                failed += 1
                wait_until_left(engine, 1)
            assert memory == b"w" * len(memory)
            if is_store:
                with connect(engine.server) as other:
                    buffers = [bytearray(BLOCK) for _ in keys]
                    found = other.space("blocks").get_many_into(keys, buffers)
                assert all(not length or buffers[at] == values[at] for at, length in enumerate(found))
        assert failed
    finally:
        movers.close()
        moves.close()
        os.close(region)
