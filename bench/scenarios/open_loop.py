"""Tail latency of small reads at a fixed rate of arrivals, which no answer delays: an open loop.

Requests have their times in advance, evenly spaced; each counts from its intended start, so a server that stalls for
10 ms is charged with every request of those 10 ms.  The rate is the same for all sides, well below our limit, and the
same from run to run, so that runs can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

from bench.harness.arrivals import Readers, sleep_exactly
from bench.harness.content import payload, window
from bench.harness.measure import Bench, Scenario
from bench.harness.process import EngineProcess
from bench.harness.s3_contest import OURS, servers
from bench.harness.s3_load import Load
from bench.harness.s3_requests import BUCKET, Signer
from bench.harness.sampled import NULL, Entrant, Run, Sampled, Side
from bench.peers.null_http import null_server
from bench.peers.s3_sides import Server
from lakefs.histogram import Histogram

SIZE: Final = 4096
KEYS: Final = 100
CONNECTIONS: Final = 64
"""More than are ever in use, so that arrivals wait for the server and not for a connection."""
S3_RATE_PER_S: Final = 1500.0
NATIVE_RATE_PER_S: Final = 1000.0
BUSY_CONNECTIONS: Final = 8
ROUND_S: Final = 2.0
QUICK_S: Final = 0.2
PATIENCE_S: Final = 10.0
FILES: Final = "local files"


def s3_sides(*names: str, rate_per_s: float) -> Callable[[Bench], AbstractContextManager[Sequence[Entrant]]]:
    """Return signed GETs of 4 KiB, hot, from these servers and the null server; nginx serves files, unsigned.

    `rate_per_s`: 0 for a closed loop, in which each connection sends as soon as it is answered.
    """

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
        makers = {name: servers(bench)[name] for name in names}
        side = partial(_s3_side, bench, rate_per_s=rate_per_s)
        yield [
            *(Entrant(name, partial(side, make)) for name, make in makers.items()),
            Entrant(NULL, partial(side, lambda: null_server(SIZE), stores=False)),
        ]

    return sides


@contextmanager
def _s3_side(
    bench: Bench, make: Callable[[], AbstractContextManager[Server]], *, rate_per_s: float, stores: bool = True
) -> Iterator[Side]:
    for_s = QUICK_S if bench.scale.quick else ROUND_S
    sleep_exactly()
    with make() as server, Load(server.endpoint, CONNECTIONS if rate_per_s else BUSY_CONNECTIONS) as load:
        keys = [f"get/{number:04}" for number in range(KEYS)]
        for key in keys if stores else ():
            server.put(key, bytes(window(SIZE)))

        def run() -> Run:
            signer = Signer(server.endpoint)
            requests = [signer.request("GET", f"/{BUCKET}/{key}", answer_bytes=SIZE) for key in keys]
            found = load.run(cycle(requests), for_s=for_s, give_up_s=PATIENCE_S, rate_per_s=rate_per_s)
            latencies = Histogram.of_seconds([*found.latencies_s, *found.unfinished_s])
            more = {"unanswered": float(len(found.unfinished_s))}
            return Run(found.count, found.moved_bytes, latencies, found.elapsed_s, more=more)

        yield Side(run, servers=server.pids)


@contextmanager
def native_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: gets of 4 KiB by name through the client, from two processes; and the same content from
    files."""
    yield [Entrant(OURS, partial(_native_side, bench)), Entrant(FILES, partial(_file_side, bench))]


@contextmanager
def _native_side(bench: Bench) -> Iterator[Side]:
    names = [f"bench/o{number:04}" for number in range(KEYS)]
    with EngineProcess(bench.folder) as engine:
        with engine.connect() as lake:
            lake.put_many([(name, payload(SIZE)) for name in names])
        with Readers(engine.address, names) as readers:
            yield Side(_rounds(bench, readers), servers=lambda: [engine.pid], clients=readers.pids)


@contextmanager
def _file_side(bench: Bench) -> Iterator[Side]:
    folder = bench.folder / "files"
    folder.mkdir()
    names = [str(folder / f"o{number:04}") for number in range(KEYS)]
    for name in names:
        Path(name).write_bytes(payload(SIZE))
    with Readers("", names) as readers:
        yield Side(_rounds(bench, readers), clients=readers.pids)


def _rounds(bench: Bench, readers: Readers) -> Callable[[], Run]:
    for_s = QUICK_S if bench.scale.quick else ROUND_S

    def run() -> Run:
        begin = time.perf_counter()
        taken_ns = readers.run(NATIVE_RATE_PER_S, for_s)
        elapsed_s = time.perf_counter() - begin
        latencies = Histogram()
        for value_ns in taken_ns:
            latencies.record(value_ns)
        return Run(len(taken_ns), SIZE * len(taken_ns), latencies, elapsed_s)

    return run


_ITS_OWN: Final = "beside ours stands a null server at the same rate: its latencies are the generator's own"

SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "open-s3-get-4k",
        f"S3 GET of 4 KiB, hot, {S3_RATE_PER_S:.0f} arrivals a second whatever is answered",
        "p99_us",
        s3_sides(OURS, "openlaked", "nginx", rate_per_s=S3_RATE_PER_S),
        generator=_ITS_OWN,
        expected_s=50,
    ),
    Sampled(
        "open-get-4k",
        f"native get of 4 KiB by name, hot, {NATIVE_RATE_PER_S:.0f} arrivals a second at two processes",
        "p99_us",
        native_sides,
        generator="two processes; the same two read files beside it: their latencies are the generator's own",
        expected_s=25,
    ),
    Sampled(
        "null-http",
        f"S3 GET of 4 KiB, hot, {BUSY_CONNECTIONS} connections, as fast as it is answered",
        "operations_per_s",
        s3_sides(OURS, rate_per_s=0.0),
        generator=NULL,
        expected_s=25,
    ),
)
