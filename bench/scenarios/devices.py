"""A lake over six devices at 4+2 beside one engine: what its processes spend, keep in memory and store.

Seven processes serve the lake: six members, and the parent with head and names.  Their CPU is counted together.  All
folders lie on one disk, so times say little here, and the scenarios compare CPU.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.harness.content import block, payload, window, write_file
from bench.harness.cpu import cpu_s, process_tree, resident_bytes
from bench.harness.gains import ALL_CPU, SHOWN, counted
from bench.harness.measure import Bench, Figure, Goal, Scenario, Single, at_most, timed
from bench.harness.mounts import forget_pages_below, lake_mounted
from bench.harness.process import EngineProcess, allocated_bytes
from bench.harness.sampled import OURS, Entrant, Run, Sampled, Side, Target
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.lake import Lake
from lakefs.histogram import Histogram
from lakefs.wire import messages as m

MEMBERS: Final = 6
MIB: Final = 1 << 20
LONG: Final = 64 * MIB
SHORT: Final = 4096
CONNECTIONS: Final = 64
ONE: Final = "one engine"
STREAMED: Final = "one engine, by TCP"
_OWN_CPU: Final = "the CPU of the serving processes counts, whatever the generator's speed"
_IDLE_CPU_S: Final = 0.05
"""CPU in a second of a lake that nobody asks."""
_Sided = Callable[[Bench, EngineProcess, Lake], Side]


def six_members(folder: Path) -> EngineProcess:
    """Return the process of a lake over six folders; its members are its children."""
    others = [f"--data={folder}/store-{number}" for number in range(1, MEMBERS)]
    return EngineProcess(folder, *others, "--protect=4+2", "--accept-loss")


@contextmanager
def _served(bench: Bench, name: str, made: Callable[[Path], EngineProcess], side: _Sided) -> Iterator[Side]:
    folder = bench.folder / name
    folder.mkdir()
    with made(folder) as engine, engine.connect() as lake:
        wait_idle(engine, bench.scale.pick(180, 1))
        yield side(bench, engine, lake)


def wait_idle(engine: EngineProcess, patience_s: float) -> None:
    """Wait until the walker has been through a new lake: the processes spend no CPU then."""
    until = time.monotonic() + patience_s
    pids = process_tree(engine.pid)
    spent = math.inf
    while spent > _IDLE_CPU_S and time.monotonic() < until:
        before = cpu_s(pids)
        time.sleep(1)
        spent = cpu_s(pids) - before


@contextmanager
def sides(side: _Sided, bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: a lake over six folders, and one engine."""
    yield [
        Entrant(OURS, partial(_served, bench, "six", six_members, side)),
        Entrant(ONE, partial(_served, bench, "one", EngineProcess, side)),
    ]


# --- puts ----------------------------------------------------------------------------------------------


def _putting_long(bench: Bench, engine: EngineProcess, lake: Lake) -> Side:
    """Put new content of 64 MiB from a stream: its bytes pass the socket."""
    size = bench.scale.pick(LONG, 8 * MIB)
    repeats = bench.scale.pick(4, 1)

    def run() -> Run:
        for _ in range(repeats):
            lake.put("bench/x", io.BytesIO(window(size)))
        return Run(repeats, repeats * size, stored_bytes=repeats * size)

    return counted(run, _nothing, process_tree(engine.pid))


def _putting_short(bench: Bench, engine: EngineProcess, lake: Lake) -> Side:
    """Put new objects of 4 KiB over 64 connections, one request in flight on each."""
    count = bench.scale.pick(4096, 128)
    numbers = itertools.count()
    clients = [_connected(engine) for _ in range(CONNECTIONS)]

    def run() -> Run:
        tickets: list[object] = []
        for number in range(count):
            client = clients[number % CONNECTIONS]
            if number >= CONNECTIONS:
                _finish_put(client, tickets[number - CONNECTIONS])
            change = m.NameChange("bench", f"data/k{next(numbers):012}", b"", m.ObjectAttributes())
            tickets.append(client.start(m.PutObjects([SHORT], [change]), [payload(SHORT)]))
        for number in range(count - CONNECTIONS, count):
            _finish_put(clients[number % CONNECTIONS], tickets[number])
        return Run(count, count * SHORT, stored_bytes=count * SHORT)

    return counted(run, _nothing, process_tree(engine.pid))


def _connected(engine: EngineProcess) -> BlockingEngine:
    return ExitStack().enter_context(connect_blocking(engine.address))  # ends with its engine


def _finish_put(client: BlockingEngine, ticket: object) -> None:
    message = client.finish(ticket).message  # type: ignore[arg-type]
    assert isinstance(message, m.NameResults)
    assert message.results[0].failure is None, message.results[0].failure


# --- gets ----------------------------------------------------------------------------------------------


@contextmanager
def long_get_sides(bench: Bench, *, cold: bool) -> Iterator[Sequence[Entrant]]:
    """Context manager: an object of 64 MiB got into memory; one engine's client reads its segments, or by TCP."""
    side = partial(_getting_long, cold=cold)
    with sides(side, bench) as both:
        made = partial(_with_native, bench)
        yield [*both, Entrant(STREAMED, partial(_served, bench, "tcp", made, partial(side, by_tcp=True)))]


def _with_native(bench: Bench, folder: Path) -> EngineProcess:
    return EngineProcess(folder, "--native", "127.0.0.1:0")


def _getting_long(bench: Bench, engine: EngineProcess, lake: Lake, *, cold: bool, by_tcp: bool = False) -> Side:
    size = bench.scale.pick(LONG, 8 * MIB)
    repeats = 1 if cold else bench.scale.pick(4, 1)
    lake.put("bench/x", io.BytesIO(window(size)))
    target = memoryview(bytearray(size))
    reader = _by_tcp(engine) if by_tcp else lake

    def run() -> Run:
        for _ in range(repeats):
            reader.get_into("bench/x", target)
        return Run(repeats, repeats * size)

    def forget() -> None:
        for folder in engine.data.parent.iterdir():
            forget_pages_below(folder)

    return counted(run, forget if cold else _nothing, process_tree(engine.pid))


def _by_tcp(engine: EngineProcess) -> Lake:
    import lakefs

    address = next(line.split()[1] for line in engine.printed if "tcp://" in line)
    return lakefs.connect(address, token=(engine.data / "native.token").read_text().strip())


def _getting_short(bench: Bench, engine: EngineProcess, lake: Lake) -> Side:
    """Get objects of 4 KiB by name: each is one request, answered with the bytes."""
    count = bench.scale.pick(2048, 64)
    names = [f"k{number:06}" for number in range(count)]
    lake.put_many([(f"bench/{name}", payload(SHORT)) for name in names])
    client = _connected(engine)

    def run() -> Run:
        for name in names:
            reply = client.finish(client.start(m.OpenObjects([("bench", name)], lease_inline=False)))
            assert reply.body.nbytes == SHORT, "the payload is in the answer"
            reply.body.release()
        return Run(count, count * SHORT)

    return counted(run, _nothing, process_tree(engine.pid))


# --- the mount -------------------------------------------------------------------------------------------


@contextmanager
def _mounted(bench: Bench, name: str, made: Callable[[Path], EngineProcess]) -> Iterator[Side]:
    """Context manager: a file of 4 KiB written and closed on a mount; the latency is of both, the open too."""
    folder, count = bench.folder / f"mount-{name}", bench.scale.pick(400, 20)
    folder.mkdir()
    with made(folder) as engine, engine.connect() as lake:
        lake.put("bench/first", b"first", create_bucket=True)
        wait_idle(engine, bench.scale.pick(180, 1))
        with lake_mounted(engine, folder) as mount:
            files = (mount.folder / "bench" / f"k{number:06}" for number in itertools.count())
            servers = [*process_tree(engine.pid), mount.process.pid]

            def run() -> Run:
                took_s = [timed(partial(next(files).write_bytes, payload(SHORT))) for _ in range(count)]
                return Run(count, count * SHORT, Histogram.of_seconds(took_s), stored_bytes=count * SHORT)

            yield counted(run, _nothing, servers)


@contextmanager
def mount_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: a mount of a lake over six folders, and one of an engine."""
    yield [
        Entrant(OURS, partial(_mounted, bench, "six", six_members)),
        Entrant(ONE, partial(_mounted, bench, "one", EngineProcess)),
    ]


# --- figures of the lake alone ----------------------------------------------------------------------------


def measure_space(bench: Bench) -> dict[str, float]:
    """Return bytes that the six folders take on disk, without what an empty lake takes, for a byte of content."""
    return {
        "256 MiB": _space(bench, "long", [bench.scale.pick(256, 16) * MIB]),
        "100 KiB": _space(bench, "middle", [100 << 10] * bench.scale.pick(1000, 20)),
        "4 KiB": _space(bench, "short", [SHORT] * bench.scale.pick(10_000, 100)),
    }


def _space(bench: Bench, name: str, sizes: Sequence[int]) -> float:
    folder = bench.folder / name
    folder.mkdir()
    with six_members(folder) as engine, engine.connect():
        pass
    empty = allocated_bytes(folder, leave_out="reserve")
    with six_members(folder) as engine, engine.connect() as lake:
        if sizes[0] > 4 * MIB:
            write_file(bench.folder / "source", sizes[0])
            lake.put("bench/x", bench.folder / "source")
        for start in range(0, len(sizes) if sizes[0] <= 4 * MIB else 0, 1000):
            batch = enumerate(sizes[start : start + 1000], start)
            lake.put_many([(f"bench/k{index:08}", bytes(block(size))) for index, size in batch])
    return (allocated_bytes(folder, leave_out="reserve") - empty) / sum(sizes)


def measure_idle(bench: Bench) -> dict[str, float]:
    """Return memory and CPU of members that nobody asks, and what the lake's start has cost."""
    watched_s = bench.scale.pick(60, 2)
    began = time.monotonic()
    with six_members(bench.folder) as engine:
        started_s = time.monotonic() - began
        pids = process_tree(engine.pid)
        parent, members = pids[0], pids[-MEMBERS:]
        start_cpu_s = cpu_s(pids)
        wait_idle(engine, bench.scale.pick(180, 1))
        before = {pid: cpu_s([pid]) for pid in pids}
        time.sleep(watched_s)
        spent = {pid: (cpu_s([pid]) - before[pid]) * 60 / watched_s for pid in pids}
        return {
            "start, all processes": start_cpu_s,
            "until it serves": started_s,
            "resident, a member": statistics.median(resident_bytes([pid]) for pid in members),
            "private, a member": statistics.median(_private_bytes(pid) for pid in members),
            "CPU a minute, a member": statistics.median(spent[pid] for pid in members),
            "CPU a minute, the parent": spent[parent],
        }


def _private_bytes(pid: int) -> int:
    """Return the bytes that the process does not share with another one."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _nothing() -> None:
    return None


def _against_one(
    name: str, title: str, side: _Sided, goal: Goal, expected_s: float, *, stores: bool = False
) -> Sampled:
    return Sampled(
        f"lake-{name}",
        f"six members at 4+2: {title}",
        ALL_CPU,
        partial(sides, side),
        generator=_OWN_CPU,
        expected_s=expected_s,
        targets=(Target("server_cpu_us", goal, ONE), Target(ALL_CPU, SHOWN, ONE)),
        stores=stores,
    )


def _long_get(name: str, title: str, *, cold: bool) -> Sampled:
    return Sampled(
        f"lake-{name}",
        f"six members at 4+2: {title}",
        ALL_CPU,
        partial(long_get_sides, cold=cold),
        generator=_OWN_CPU,
        expected_s=25,
        targets=(Target(ALL_CPU, SHOWN, ONE), Target(ALL_CPU, SHOWN, STREAMED)),
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _against_one("put-64m", "put of 64 MiB", _putting_long, at_most(2.5, "x"), 30, stores=True),
    _against_one("put-4k", "put of 4 KiB, 64 connections", _putting_short, at_most(3.5, "x"), 40, stores=True),
    _long_get("get-64m", "get of 64 MiB, hot", cold=False),
    _long_get("get-64m-cold", "get of 64 MiB, cold", cold=True),
    _against_one("get-4k", "get of 4 KiB by name, one at a time", _getting_short, at_most(1.5, "x"), 30),
    Sampled(
        "lake-mount-4k",
        "six members at 4+2: write and close of 4 KiB on the mount",
        "p50_us",
        mount_sides,
        generator="one program writes one file after the other",
        expected_s=60,
        targets=(Target("p50_us", at_most(4.0, "x"), ONE), Target(ALL_CPU, SHOWN, ONE)),
        stores=True,
    ),
    Single(
        "lake-space",
        "six members at 4+2: room on disk / bytes stored",
        (
            Figure("256 MiB", at_most(1.52, "x"), "x"),
            Figure("100 KiB", at_most(2.4, "x"), "x"),
            Figure("4 KiB", at_most(3.2, "x"), "x"),
        ),
        measure_space,
    ),
    Single(
        "lake-idle",
        "six members at 4+2, idle",
        (
            Figure("resident, a member", at_most(1e8, " B"), "B"),
            Figure("CPU a minute, a member", at_most(0.2, " s"), "s"),
        ),
        measure_idle,
    ),
)
