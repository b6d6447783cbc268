"""An engine over RDMA and over TCP, for `bench.rdma`: loads beside READs, and pauses of the engine's loop.

The engine is a process of its own, with its store in memory; its clients are this process's.
"""

from __future__ import annotations

import mmap
import os
import signal
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from engine.process.engine_process import run_engine
from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.config.settings import load
from lakefs.content.verify import Check
from lakefs.ids import data_chunk_id
from lakefs.limits import KIB, MIB

ROUNDS: Final = 7
_PORT: Final = 7778
_TICK_S: Final = 0.001
_WAIT_S: Final = 120.0
_LATE: Final = struct.Struct("d")


class Pauses:
    """The longest pause of the engine's loop, in memory that the engine's process writes and this one reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    async def watch(self, _: Any, *, task_status: trio.TaskStatus[None]) -> None:
        """Wake up every millisecond, in the engine, and note the longest delay."""
        task_status.started()
        while True:
            due = time.perf_counter() + _TICK_S
            await trio.sleep(_TICK_S)
            late = time.perf_counter() - due
            if late > _LATE.unpack_from(self._memory)[0]:
                _LATE.pack_into(self._memory, 0, late)

    def longest_in(self, call: Callable[[], object]) -> float:
        """Return the longest delay, in seconds, while the call runs."""
        _LATE.pack_into(self._memory, 0, 0.0)
        call()
        return float(_LATE.unpack_from(self._memory)[0])


class Served:
    """An engine and two clients of it: over RDMA, and over TCP."""

    def __init__(self, rdma: Lake, tcp: Lake, pauses: Pauses) -> None:
        self.rdma = rdma
        self.tcp = tcp
        self.pauses = pauses

    def warm(self, name: str, content: bytes) -> None:
        """Store content, and read it until the DRAM tier has it."""
        self.tcp.put(name, content, create_bucket=True)
        until = time.monotonic() + _WAIT_S
        fills = self.tcp.status()["dram"]["fills"] + -(-len(content) // (4 * MIB))
        while self.tcp.status()["dram"]["fills"] < fills:
            assert time.monotonic() < until, "the tier does not fill"
            self.tcp.get(name)


@contextmanager
def served(device: str) -> Iterator[Served]:
    """Run an engine in a child process, and connect to it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        pauses = Pauses()
        stack.enter_context(_engine(device, folder, pauses))
        token = (folder / "store/native.token").read_text().strip()
        where = partial(connect, f"tcp://127.0.0.1:{_PORT}", token=token, check=Check.CRC32C)
        rdma, tcp = stack.enter_context(where(rdma=True)), stack.enter_context(where(rdma=False))
        yield Served(rdma, tcp, pauses)


@contextmanager
def _engine(device: str, folder: Path, pauses: Pauses) -> Iterator[None]:
    flags = {"native": f"127.0.0.1:{_PORT}", "s3": "off", "admin": "off", "rdma": device, "dram_tier_bytes": "128M"}
    places = {"data": str(folder / "store"), "socket": str(folder / "s")}
    config = load(file="/dev/null", environ={}, flags=flags | places)
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            say = partial(_say, told)
            trio.run(partial(run_engine, config, printer=say, faces=[pauses.watch]))
        finally:
            os._exit(0)
    os.close(told)
    with os.fdopen(ready) as lines:
        assert any(line == "ready\n" for line in lines), "the engine did not start"
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _say(told: int, line: str) -> None:
    os.write(told, f"{line}\n".encode())


def loads(engine: Served) -> None:
    """Print the times of 16 chunks of 64 KiB by one request for the pool, by READs, and over TCP."""
    contents = [os.urandom(64 * KIB) for _ in range(16)]
    for number, content in enumerate(contents):
        engine.warm(f"bench/small-{number}", content)
    engine.warm("bench/opens", os.urandom(4 * MIB))
    chunks = [data_chunk_id(content) for content in contents]
    buffers = [bytearray(64 * KIB) for _ in chunks]
    offsets = [number * 64 * KIB for number in range(16)]
    with engine.rdma.pool(size_bytes=MIB) as pool, engine.tcp.pool(size_bytes=MIB) as tcp_pool:
        engine.rdma.get("bench/opens")
        ways: dict[str, Callable[[], object]] = {
            "READs": lambda: engine.rdma.chunks.get_many_into(chunks, buffers),
            "pool grant": lambda: engine.rdma.load_many(chunks, pool, offsets),
            "TCP": lambda: engine.tcp.load_many(chunks, tcp_pool, offsets),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                begin = time.perf_counter()
                way()
                if turn:
                    taken[name].append(time.perf_counter() - begin)
        assert bytes(pool.buffer) == bytes(tcp_pool.buffer) == b"".join(contents) == b"".join(buffers)
    assert not engine.rdma.rdma.reason
    reads, load, tcp = (statistics.median(each) for each in taken.values())
    print(f"16 x 64 KiB: READs {reads * 1e3:.1f} ms; pool grant {load * 1e3:.1f} ms, {load / reads:.2f}x of them;"
          f" TCP {tcp * 1e3:.1f} ms, {tcp / reads:.2f}x", flush=True)  # fmt: skip


def pauses(engine: Served) -> None:
    """Print the longest pause of the engine's loop over RDMA and over TCP: reads, loads and puts of 4 MiB chunks."""
    content = os.urandom(8 * MIB)
    engine.warm("bench/object", content)

    def work(lake: Lake, pool: Any) -> None:
        assert lake.get("bench/object") == content
        lake.load_many(["bench/object"], pool, [0])
        lake.put("bench/put", os.urandom(8 * MIB))

    with engine.rdma.pool(size_bytes=8 * MIB) as pool, engine.tcp.pool(size_bytes=8 * MIB) as tcp_pool:
        ways = {"RDMA": partial(work, engine.rdma, pool), "TCP": partial(work, engine.tcp, tcp_pool)}
        longest: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                seconds = engine.pauses.longest_in(way)
                if turn:
                    longest[name].append(seconds)
    assert not engine.rdma.rdma.reason
    rdma, tcp = longest.values()
    middle = statistics.median(rdma) / statistics.median(tcp)
    print(f"longest pause of the engine's loop: RDMA {max(rdma) * 1e3:.1f} ms, TCP {max(tcp) * 1e3:.1f} ms,"
          f" {max(rdma) / max(tcp):.2f}x; in the middle of {ROUNDS} rounds {statistics.median(rdma) * 1e3:.1f} and"
          f" {statistics.median(tcp) * 1e3:.1f} ms, {middle:.2f}x", flush=True)  # fmt: skip
