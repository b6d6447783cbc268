"""Measured here, at one engine over TCP: what a connection takes, and what a match costs in several requests.

The client is the one by which a head reaches its members (`lakefs.client.trio`), and asks as a head does: all requests
at once, each over a connection of its own.  Memory is what the client's process, or the engine's, has more of than
before; so the client is in a process of its own, which has no memory to use again: `python -m bench.simulate.measured`.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

import blake3
import msgspec
import trio

from bench.harness.accounting import memory_of
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.process import ROOT, EngineProcess, clean_environment
from engine.host.tasks import run_all
from lakefs.client.trio.engine import RemoteEngine, connect_engine
from lakefs.wire import messages as m

KEYS: Final = 128
"""Keys of one match."""
CONNECTIONS: Final = 512
"""Connections of the one whose memory is measured."""
SPLITS: Final = (1, 4, 16, 32, 64, 96, 128)
"""Requests of a match that are measured."""
CALLS: Final = 40
ROUNDS: Final = 7


class Price(NamedTuple):
    """CPU of a match, client and members together: a line through what was measured."""

    match_us: float
    """A match of KEYS keys, without its requests."""
    request_us: float

    def of(self, requests: float) -> float:
        """Return what a match costs in so many requests, in us."""
        return self.match_us + requests * self.request_us


class Measured(NamedTuple):
    """The figures of this machine."""

    price: Price
    head_bytes: float
    """Memory of a connection at its client."""
    member_bytes: float
    """Memory of a connection at its engine."""


def keys_of(begin: int, count: int) -> list[bytes]:
    """Return keys that are always the same."""
    return [blake3.blake3(number.to_bytes(8, "big")).digest() for number in range(begin, begin + count)]


def measure() -> Measured:
    """Measure in a new process."""
    command = [sys.executable, "-m", "bench.simulate.measured"]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, env=clean_environment(), check=True)
    return msgspec.json.decode(done.stdout, type=Measured)


def measure_here() -> Measured:
    """Start an engine, and measure."""
    with tempfile.TemporaryDirectory(prefix="lake-simulate-") as name:
        with EngineProcess(Path(name), "--native", "127.0.0.1:0") as engine:
            address = next(line.split()[1] for line in engine.printed if "tcp://" in line)
            token = (engine.data / "native.token").read_text().strip()
            with engine.connect() as lake:
                space = lake.space("simulate")
                space.put_many(keys_of(0, KEYS), [b"v" * 1024] * KEYS)
                return trio.run(_measure, address, token, space.number, process_tree(engine.pid))


async def _measure(address: str, token: str, space: int, pids: Sequence[int]) -> Measured:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(connect_engine(address, token=token)) for _ in range(max(SPLITS))]
        price = await _price(engines, space, pids)
        gc.collect()
        before = memory_of([os.getpid()]).private_bytes, memory_of(pids).private_bytes
        for _ in range(CONNECTIONS):
            await stack.enter_async_context(connect_engine(address, token=token))
        gc.collect()
        after = memory_of([os.getpid()]).private_bytes, memory_of(pids).private_bytes
        head, member = (now - then for now, then in zip(after, before, strict=True))
        return Measured(price, head / CONNECTIONS, member / CONNECTIONS)


async def _price(engines: Sequence[RemoteEngine], space: int, pids: Sequence[int]) -> Price:
    keys = keys_of(0, KEYS)
    spent: dict[int, list[float]] = {count: [] for count in SPLITS}
    for number in range(ROUNDS):
        for count in SPLITS:
            parts = [(engines[part], keys[part::count]) for part in range(count)]

            async def ask(part: tuple[RemoteEngine, list[bytes]]) -> None:
                engine, some = part
                reply = await engine.call(m.KeyedMatch(space, some, presence=True))
                reply.body.release()

            begun = cpu_s(pids) + time.process_time()
            for _ in range(CALLS):
                await run_all(ask, parts)
            if number:  # the first is the warm-up
                spent[count].append((cpu_s(pids) + time.process_time() - begun) / CALLS * 1e6)
    medians = [statistics.median(spent[count]) for count in SPLITS]
    line = statistics.linear_regression(SPLITS, medians)
    return Price(line.intercept, line.slope)


if __name__ == "__main__":
    print(msgspec.json.encode(measure_here()).decode())
