"""Key-value sides in turn: each is a client in its own process; sides of one kind share a server.

A scenario states the work (get or put, block size, blocks per call), and its sides.  Every side stores, reads back
and compares before anything counts.  An operation is one call of the client, and its time is that of the call alone;
so is the client's CPU, without the making of blocks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from bench.harness.contest import CouldNotRun
from bench.harness.measure import Bench
from bench.harness.process import ROOT, clean_environment
from bench.harness.sampled import Entrant, Run, Sampled, Side, Target
from bench.peers.kv_clients import Spec
from bench.peers.kv_servers import SERVERS, KvServer
from bench.peers.kv_worker import Answer, Order, Outcome
from bench.peers.packages import PeerUnavailable, last_line
from lakefs.histogram import Histogram

KEYS_APART: Final = 1 << 32
"""Distance between the first keys of two sides: one side's content is new to a store that deduplicates."""
PUT_KEYS_FROM: Final = 1 << 24
TOUCHED_FROM: Final = 1 << 31
END_S: Final = 30.0


@dataclass(frozen=True)
class KvSide:
    """A side: its client and its server.

    `local_bytes`: memory that its client gives to the store.  `touched_bytes`: for a store that fills memory in turn,
    all its memory; stored before puts count, so that they are not measured on untouched memory. `reads`: its gets are
    compared with what was stored.
    """

    name: str
    client: str
    server: str
    local_bytes: int = 0
    touched_bytes: int = 0
    reads: bool = True
    python: Path = Path(sys.executable)
    """The Python that runs its client."""


@dataclass(frozen=True)
class Moved:
    """`count` calls of `batch` blocks a round; `keys` blocks are read in turn, into as many slots."""

    what: Literal["get", "put"]
    block_bytes: int
    batch: int
    keys: int
    count: int


class KvWorker:
    """The client process of a side.  CouldNotRun if it cannot do its work."""

    def __init__(self, folder: Path, spec: Spec, python: Path = Path(sys.executable)) -> None:
        self._log = folder / "client.log"
        if not python.exists():
            raise CouldNotRun(f"there is no {python.relative_to(ROOT)}: make plugins")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "bench.peers.kv_worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment() | {"GLOG_minloglevel": "2"},
            )
        try:
            self._tell(spec)
        except CouldNotRun:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def do(self, order: Order) -> Outcome:
        """Send an order, and return its outcome."""
        return self._tell(order)

    def _tell(self, line: msgspec.Struct) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CouldNotRun(f"its client ended: {self._said()}") from None
        answer = self._process.stdout.readline()
        if not answer:
            raise CouldNotRun(f"its client ended: {self._said()}")
        found = msgspec.json.decode(answer, type=Answer)
        if found.outcome is None:
            raise CouldNotRun(found.failed)
        return found.outcome

    def _said(self) -> str:
        return last_line(self._log.read_text(errors="replace")) or f"exit code {self._process.poll()}"

    def end(self) -> None:
        """Let it close, and wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def kv_scenario(
    name: str,
    title: str,
    moved: Moved,
    sides: Sequence[KvSide],
    *,
    targets: Sequence[Target],
    generator: str,
    expected_s: float,
    figure: str = "bytes_per_s",
) -> Sampled:
    """Return a scenario of sides that do this in turn, the first of them ours."""

    @contextmanager
    def set_up(bench: Bench) -> Iterator[Sequence[Entrant]]:
        with ExitStack() as stack:
            servers = _Servers(bench, stack)
            yield [
                Entrant(side.name, partial(_entered, bench, servers, moved, side, number))
                for number, side in enumerate(sides)
            ]

    return Sampled(name, title, figure, set_up, generator, expected_s, targets, stores=moved.what == "put")


class _Servers:
    """One server of each kind, for all sides that need it; one that cannot run is not tried twice."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._bench = bench
        self._stack = stack
        self._found: dict[str, KvServer | PeerUnavailable] = {}

    def of(self, kind: str) -> KvServer:
        """Return the server of a kind, started if needed.  CouldNotRun if it cannot run."""
        if kind not in self._found:
            folder = self._bench.folder / kind
            folder.mkdir()
            fetch = not self._bench.scale.quick
            try:
                self._found[kind] = self._stack.enter_context(SERVERS[kind](folder, fetch=fetch))
            except PeerUnavailable as reason:
                self._found[kind] = reason
        found = self._found[kind]
        if isinstance(found, PeerUnavailable):
            raise CouldNotRun(str(found))
        return found


@contextmanager
def _entered(bench: Bench, servers: _Servers, moved: Moved, side: KvSide, number: int) -> Iterator[Side]:
    """Context manager: a side that has stored, read back and compared."""
    server = servers.of(side.server)
    folder = bench.folder / f"side-{number}"
    folder.mkdir()
    stored = bench.scale.pick(moved.keys, moved.batch)
    spec = Spec(side.client, server.address, moved.block_bytes, stored, server.package, side.local_bytes)
    first = (number + 1) * KEYS_APART
    worker = KvWorker(folder, spec, side.python)
    try:
        worker.do(Order("fill", first, stored, moved.batch))
        if side.reads:
            worker.do(Order("check", first, stored, moved.batch))
        if moved.what == "put" and not bench.scale.quick:
            blocks = side.touched_bytes // moved.block_bytes
            worker.do(Order("fill", first + TOUCHED_FROM, blocks, moved.batch))
        if moved.what == "get":
            order = Order("get", first, stored, moved.batch, bench.scale.pick(moved.count, 2))
            yield Side(lambda: _run(worker.do(order), order, moved), servers=lambda: server.pids)
        else:
            puts = _Puts(worker, moved, bench.scale.pick(moved.count, 2), first, check=side.reads)
            yield Side(puts.run, puts.prepare, servers=lambda: server.pids)
    finally:
        worker.end()


class _Puts:
    """Rounds of puts, each of blocks that were never stored.  Between rounds some are compared, and all removed."""

    def __init__(self, worker: KvWorker, moved: Moved, count: int, first: int, *, check: bool) -> None:
        self._worker = worker
        self._moved = moved
        self._keys = count * moved.batch
        self._next = Order("put", first + PUT_KEYS_FROM, self._keys, moved.batch, count)
        self._check = check
        self._last: Order | None = None

    def run(self) -> Run:
        """Run a round."""
        order = self._last = self._next
        self._next = msgspec.structs.replace(order, key=order.key + self._keys)
        return _run(self._worker.do(order), order, self._moved)

    def prepare(self) -> None:
        """Remove what the last round stored."""
        if self._last is None:
            return
        last, self._last = self._last, None
        if self._check:
            self._worker.do(msgspec.structs.replace(last, what="check", keys=last.batch))
        self._worker.do(msgspec.structs.replace(last, what="drop"))


def _run(outcome: Outcome, order: Order, moved: Moved) -> Run:
    latencies = Histogram()
    for value_ns in outcome.calls_ns:
        latencies.record(value_ns)
    moved_bytes = order.count * order.batch * moved.block_bytes
    return Run(
        order.count,
        moved_bytes,
        latencies,
        sum(outcome.calls_ns) / 1e9,
        moved_bytes if order.what == "put" else 0,
        {"client_cpu_us": outcome.cpu_s / order.count * 1e6},
    )
