"""Loads of many blocks by keys that are read, summed and shared by two threads: right, or a miss, whatever happens."""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.spaces import Space
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.content.verify import Check
from lakefs.errors import EngineUnreachable, InvalidArgument
from lakefs.limits import KIB
from lakefs.plugins.kv import lmcache_connector
from lakefs.plugins.kv.lmcache_connector import LakeConnector
from tests.e2e.served import Served
from tests.keyed.test_direct import spoil
from tests.known.clients import requests

BLOCK: Final = 64 * KIB
BLOCKS: Final = 16
LONG: Final = 300_000
WAIT_S: Final = 20.0


def block_of(key: bytes, length: int = BLOCK) -> bytes:
    """Return a value that no other key has."""
    return random.Random(key).randbytes(length)


KEYS: Final = [b"block %d" % number for number in range(BLOCKS)]


def stored(space: Space, length: int = BLOCK) -> list[bytes]:
    values = [block_of(key, length) for key in KEYS]
    space.put_many(KEYS, values)
    return values


def warm(space: Space, length: int = BLOCK) -> None:
    for _ in range(3):
        space.get_many_into(KEYS, [bytearray(length) for _ in KEYS])


@pytest.mark.parametrize("length", [BLOCK, LONG])
def test_a_load_that_two_threads_share_is_right_and_needs_no_request(engine: Served, writer: Lake, length: int) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake, lake.pool(size_bytes=BLOCKS * (length + 1)) as pool:
        space = lake.space("space")
        values = stored(space, length)
        warm(space, length)
        offsets = [at * (length + 1) for at in range(BLOCKS)]
        pool.buffer[:] = b"\x7f" * pool.size_bytes
        sent = requests(lake)
        assert space.load(KEYS, pool, offsets, [length] * BLOCKS) == [length] * BLOCKS
        assert sent == []
        assert bytes(pool.buffer) == b"\x7f".join(values) + b"\x7f", "a byte behind a slot was changed"
        buffers = [bytearray(b"\x7f" * (length + 5)) for _ in KEYS]
        assert space.get_many_into(KEYS, buffers) == [length] * BLOCKS
        assert sent == []
        assert buffers == [value + b"\x7f" * 5 for value in values]
        assert space.get_many_into(KEYS, [bytearray(length - 1) for _ in KEYS]) == [0] * BLOCKS
        assert driver_of(lake).helper_thread() is driver_of(lake).helper_thread()


@pytest.mark.one_engine("a head may have the value in its DRAM tier")
@pytest.mark.parametrize("length", [BLOCK, LONG])
def test_a_rotten_block_is_a_miss_and_its_neighbours_are_not(engine: Served, writer: Lake, length: int) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        values = stored(space, length)
        warm(space, length)
        spoil(engine, values[5])
        buffers = [bytearray(length) for _ in KEYS]
        assert space.try_get_many_into(KEYS, buffers) is None, "the engine is to be asked"
        assert space.get_many_into(KEYS, buffers) == [length] * 5 + [0] + [length] * 10
        assert [bytes(buffer) for at, buffer in enumerate(buffers) if at != 5] == values[:5] + values[6:]


def test_what_is_not_known_here_is_not_tried(engine: Served, writer: Lake) -> None:
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")
        writer.space("space").put_many([b"k", b"long"], [b"v" * 100, bytes(5 << 20)])
        buffers = [bytearray(100)]
        sent = requests(lake)
        assert space.try_get_many_into([b"k"], buffers) is None, "there is no index yet"
        assert space.try_match([b"k"]) is None
        assert sent == []
        for _ in range(3):
            space.get_many_into([b"k", b"long"], [bytearray(100), bytearray(5 << 20)])
        sent.clear()
        assert space.try_get_many_into([b"k", b"none"], [*buffers, bytearray(1)]) == [100, 0]
        assert space.try_match([b"k", b"none", b"long"]) == [True, False, True]
        assert space.try_get_many_into([b"k", b"long"], [*buffers, bytearray(5 << 20)]) is None, "it has two parts"
        assert sent == []
        for keys in ([b""], [b"k", b"k"]):
            with pytest.raises(InvalidArgument):
                space.try_match(keys)
            with pytest.raises(InvalidArgument):
                space.try_get_many_into(keys, [bytearray(1) for _ in keys])


def test_a_client_that_checks_by_blake3_is_never_answered_at_once(engine: Served, writer: Lake) -> None:
    with connect(engine.server) as lake:
        space = lake.space("space")
        stored(space)
        warm(space)
        space.match(KEYS)
        assert space.try_get_many_into(KEYS, [bytearray(BLOCK) for _ in KEYS]) is None
        assert space.try_match(KEYS) == [True] * BLOCKS


# --- whatever happens meanwhile ---------------------------------------------------------------------------


@contextmanager
def readers(engine: Served, count: int, step: Callable[[Space, list[bytearray]], None]) -> Iterator[None]:
    """Context manager: threads of one client that repeat a step; their first error is raised at the end."""
    ended, failed = threading.Event(), list[BaseException]()
    with connect(engine.server, check=Check.CRC32C) as lake:
        space = lake.space("space")

        def work() -> None:
            buffers = [bytearray(BLOCK) for _ in KEYS]
            try:
                while not ended.is_set():
                    step(space, buffers)
            except BaseException as error:  # noqa: BLE001 - raised in the test's thread
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_S)
            assert not any(thread.is_alive() for thread in threads), "a load hangs"
    if failed:
        raise failed[0]


def right_or_missed(space: Space, buffers: list[bytearray]) -> None:
    for key, buffer, length in zip(KEYS, buffers, space.get_many_into(KEYS, buffers), strict=True):
        assert length in (0, BLOCK), length
        assert not length or buffer == block_of(key), "other bytes"


def test_no_thread_reads_other_bytes_while_blocks_are_removed_moved_and_put(engine: Served, writer: Lake) -> None:
    space = writer.space("space")
    stored(space)
    rng = random.Random(5)
    with readers(engine, 3, right_or_missed):
        for _ in range(12):
            space.remove(rng.sample(KEYS, 6))
            writer.gc(compact=True)
            stored(space)


def test_an_engine_that_is_killed_amid_loads_makes_misses_or_errors_and_nothing_hangs(tmp_path: Path) -> None:
    engine = Served(tmp_path)
    try:
        with connect(engine.server, check=Check.CRC32C) as lake:
            stored(lake.space("space"))
        longest = [0.0]

        def step(space: Space, buffers: list[bytearray]) -> None:
            began = time.monotonic()
            try:
                right_or_missed(space, buffers)
            except EngineUnreachable:
                time.sleep(0.01)
            longest[0] = max(longest[0], time.monotonic() - began)

        with readers(engine, 2, step):
            away = 0.0
            for _ in range(2):
                time.sleep(0.2)
                killed = time.monotonic()
                engine.kill()
                time.sleep(0.1)
                engine.start()
                away = max(away, time.monotonic() - killed)
            time.sleep(0.2)
        assert longest[0] < away + WAIT_S / 2
    finally:
        engine.kill()


# --- LMCache's connector over an engine -------------------------------------------------------------------


@contextmanager
def connector_of(engine: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[LakeConnector]:
    monkeypatch.setattr(lmcache_connector, "check_host", lambda *_: None)
    connector = LakeConnector(engine.server, "connector")
    try:
        yield connector
    finally:
        connector.close()


def result(connector: LakeConnector, number: int) -> tuple[bool, list[bool]]:
    assert select.select([connector.event_fd()], [], [], WAIT_S)[0], "no completion came"
    [(ended, is_good, _, each)] = connector.drain_completions()
    assert ended == number
    assert each is not None
    return is_good, each


def get_at_once(connector: LakeConnector, names: list[str], buffers: list[memoryview], sent: list[Any]) -> int:
    """Submit a get that has ended when the call returns; return its number.

    The engine may move blocks, and the kernel drop pages, at any time: a get that meets that asks the engine.  The next
    one is at once again.
    """
    give_up_at = time.monotonic() + WAIT_S
    while time.monotonic() < give_up_at:
        sent.clear()
        for buffer in buffers:
            buffer[:] = bytes(BLOCK)
        number = connector.submit_batch_get(names, buffers)
        if select.select([connector.event_fd()], [], [], 0)[0]:
            return number
        assert result(connector, number) == (True, [True] * BLOCKS)
    raise AssertionError("no get has ended when the call returns")


def test_the_connector_reads_at_once_what_is_in_memory_and_never_other_bytes(
    engine: Served, writer: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model@0@0@{number}" for number in range(BLOCKS)]
    values = [block_of(name.encode()) for name in names]
    with connector_of(engine, monkeypatch) as connector:
        connection: Any = connector._movers.reader._connection
        assert result(connector, connector.submit_batch_set(names, [memoryview(value) for value in values]))[0]
        buffers = [memoryview(bytearray(BLOCK)) for _ in names]
        for _ in range(3):
            assert result(connector, connector.submit_batch_get(names, buffers)) == (True, [True] * BLOCKS)
        sent = requests(connection._lake)
        number = get_at_once(connector, names, buffers, sent)
        assert result(connector, number) == (True, [True] * BLOCKS)
        assert [bytes(buffer) for buffer in buffers] == values
        assert result(connector, connector.submit_batch_exists([*names, "none"])) == (True, [True] * BLOCKS + [False])
        assert sent == []
        spoil(engine, values[3])
        missed = [True] * 3 + [False] + [True] * 12
        assert result(connector, connector.submit_batch_get(names, buffers)) == (True, missed)
        assert result(connector, connector.submit_batch_delete(names[:1])) == (True, [True])
        assert result(connector, connector.submit_batch_get(names, buffers)) == (True, [False, *missed[1:]])
        writer.remove_space("connector")
        assert result(connector, connector.submit_batch_get(names, buffers)) == (True, [False] * BLOCKS)
        assert result(connector, connector.submit_batch_exists(names)) == (True, [False] * BLOCKS)
