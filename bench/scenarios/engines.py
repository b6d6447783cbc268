"""Many cores: one engine against two on the same machine, and one engine with two clients.

Engines share nothing: each has its own process, folder and client.  So the machine limits two of them: its cores (the
clients need them, too), its disk and its memory bandwidth.  An operation is a call of 16 blocks; rates are of all
clients together, over the time until the last is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Final, Literal

import msgspec

from bench.harness.measure import Bench, Scenario
from bench.harness.process import EngineProcess
from bench.harness.sampled import Entrant, Run, Sampled, Side
from bench.peers.kv_clients import Spec
from bench.peers.kv_contest import KEYS_APART, PUT_KEYS_FROM, KvWorker
from bench.peers.kv_worker import Order

BATCH: Final = 16
KEYS: Final = 256
ONE: Final = "one engine, one client"
_What = Literal["get", "put"]


@contextmanager
def sides(what: _What, block_bytes: int, calls: int, bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: three ways to share two cores."""
    count = bench.scale.pick(calls, 4)
    entered = partial(_entered, bench, what, block_bytes, count)
    yield [
        Entrant(ONE, partial(entered, "one", 1, 1)),
        Entrant("one engine, two clients", partial(entered, "shared", 1, 2)),
        Entrant("two engines, a client each", partial(entered, "two", 2, 1)),
    ]


@contextmanager
def _entered(
    bench: Bench, what: _What, block_bytes: int, count: int, name: str, engines: int, clients: int
) -> Iterator[Side]:
    with ExitStack() as stack:
        processes: list[EngineProcess] = []
        workers: list[_Client] = []
        for engine_number in range(engines):
            folder = bench.folder / f"{name}-{engine_number}"
            folder.mkdir()
            processes.append(stack.enter_context(EngineProcess(folder)))
            for client_number in range(clients):
                worker = KvWorker(folder, Spec("lake", processes[-1].address, block_bytes, KEYS))
                stack.callback(worker.end)
                workers.append(_Client(worker, what, count, (client_number + 1) * KEYS_APART))
        threads = stack.enter_context(ThreadPoolExecutor(len(workers)))

        def run() -> Run:
            list(threads.map(_Client.run, workers))
            done = count * len(workers)
            moved = done * BATCH * block_bytes
            return Run(done, moved, stored_bytes=moved if what == "put" else 0)

        pids = [process.pid for process in processes]
        yield Side(run, servers=lambda: pids, clients=lambda: [client.pid for client in workers])


class _Client:
    """One client process: reads what it stored at first, or stores new content."""

    def __init__(self, worker: KvWorker, what: _What, count: int, first: int) -> None:
        self.pid = worker.pid
        self._worker = worker
        worker.do(Order("fill", first, KEYS, BATCH))
        keys, begin = (KEYS, first) if what == "get" else (count * BATCH, first + PUT_KEYS_FROM)
        self._order = Order(what, begin, keys, BATCH, count)

    def run(self) -> None:
        """Run a round; stored content stays, because it is small."""
        self._worker.do(self._order)
        if self._order.what == "put":
            self._order = msgspec.structs.replace(self._order, key=self._order.key + self._order.keys)


def _scenario(name: str, title: str, what: _What, block_bytes: int, calls: int) -> Scenario:
    set_up: Callable[[Bench], AbstractContextManager[Sequence[Entrant]]] = partial(sides, what, block_bytes, calls)
    return Sampled(
        f"engines-{name}",
        title,
        "bytes_per_s",
        set_up,
        generator="its CPU is beside the engines': clients and engines share the cores, and are both counted",
        expected_s=14,
        stores=what == "put",
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _scenario("get-64k", "get of 16 x 64 KiB in a call", "get", 64 << 10, 400),
    _scenario("get-1m", "get of 16 x 1 MiB in a call", "get", 1 << 20, 40),
    _scenario("put-4k", "durable put of 16 x 4 KiB in a call", "put", 4 << 10, 100),
)
