"""`python -m bench.rdma [DEVICE]`: checked READs over RDMA beside perftest's, and an engine over RDMA beside TCP.

What is compared is measured in rounds that alternate.
The peer is this process too: its memory is registered with a second opened adapter, and read through the first.
Without an adapter, `lab/run --rdma -- .venv/bin/python -m bench.rdma`: a figure from there is a ratio, never a speed.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench.rdma_engine import loads, pauses, served
from lakefs.content.verify import GranuleCrcs, granule_crcs
from lakefs.limits import KIB, MIB
from lakefs.transport.fabric import SEND_WINDOW, Piece, Region, Remote
from lakefs.transport.fabric_mover import Mover
from lakefs.transport.rdma import RdmaFabric, open_fabric

ROUNDS: Final = 7
_PORT: Final = 18515
_LISTENS: Final = "0A"
"""State of a listening socket in /proc/net/tcp."""
_PERFTEST_S: Final = 120.0
_MOVE_S: Final = 60.0


class Reads:
    """A link between two opened adapters of this machine, and memory at both ends."""

    def __init__(self, device: str) -> None:
        near, far = _opened(device), _opened(device)
        memory = mmap.mmap(-1, 4 * MIB)
        self._there = mmap.mmap(-1, 4 * MIB)
        self._there[:] = os.urandom(4 * MIB)
        self._region: Region = near.register(memory, Remote.NONE)
        self._theirs: Region = far.register(self._there, Remote.READ)
        self._link, peer = near.open_link(Remote.NONE), far.open_link(Remote.READ)
        self._link.connect(peer.end)
        peer.connect(self._link.end)
        self._mover = Mover(self._link)
        self._view = memoryview(memory)

    def moves(self, size: int, count: int) -> None:
        """Read so many times, without looking at the bytes."""
        for pieces in self._groups(size, count):
            self._mover.move(pieces, _MOVE_S)

    def checked(self, size: int, count: int, first: int = 0, step: int = 1) -> None:
        """Read so many times, and take the checksum of each granule."""
        for pieces in self._groups(size, count)[first::step]:
            length, crcs = len(pieces) * size, GranuleCrcs()
            look = partial(crcs.take, self._view[pieces[0].offset : pieces[0].offset + length])
            self._mover.move(pieces, _MOVE_S, look)
            look(length)

    def checked_by_two(self, size: int, count: int) -> None:
        """Read as `checked`, by two threads that take turns on the link: as clients do."""
        halves = [threading.Thread(target=self.checked, args=(size, count, first, 2)) for first in range(2)]
        for half in halves:
            half.start()
        for half in halves:
            half.join()

    def _groups(self, size: int, count: int) -> list[list[Piece]]:
        """Return the READs that are in flight together: as many as the window takes, as for a client's short chunks."""
        offsets = [at * size % (4 * MIB) for at in range(count)]
        together = min(SEND_WINDOW, 4 * MIB // size)
        there, key = self._theirs.address, self._theirs.remote_key
        pieces = [Piece(self._region, offset, there + offset, key, size) for offset in offsets]
        return [pieces[at : at + together] for at in range(0, count, together)]


def _opened(device: str) -> RdmaFabric:
    fabric = open_fabric(device)
    if isinstance(fabric, str):
        raise SystemExit(fabric)
    return fabric


def perftest(tool: str, device: str, gid_index: int, size: int, count: int) -> list[str]:
    """Return the line of figures of a program of perftest, its server and client on this machine."""
    command = [tool, "-d", device, "-x", str(gid_index), "-s", str(size), "-n", str(count), "-F", "-p", str(_PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for_listener()
            done = subprocess.run(
                [*command, "127.0.0.1"], capture_output=True, text=True, check=False, timeout=_PERFTEST_S
            )
        finally:
            server.kill()
    lines = [line.split() for line in done.stdout.splitlines()]
    found = next((words for words in lines if words[:1] == [str(size)]), None)
    if found is None:
        raise SystemExit(f"{tool} gave no figures: {done.stdout}{done.stderr}")
    return found


def _wait_for_listener() -> None:
    """Wait until something listens on the port; a connection would be taken for the client's."""
    until = time.monotonic() + _PERFTEST_S
    sought = f":{_PORT:04X} "
    while time.monotonic() < until:
        tables = (Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()).splitlines()
        if any(sought in line and f" {_LISTENS} " in line for line in tables):
            return
        time.sleep(0.1)
    raise SystemExit("perftest's server does not listen")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _bandwidth(reads: Reads, fabric: RdmaFabric, size: int, count: int) -> None:
    """Print the rates of ours and perftest's READs of that size."""
    ways: dict[str, Callable[[], None]] = {
        "checked": lambda: reads.checked(size, count),
        "checked, two threads": lambda: reads.checked_by_two(size, count),
        "not checked": lambda: reads.moves(size, count),
    }
    rates: dict[str, list[float]] = {name: [] for name in ("perftest", *ways)}
    for _ in range(ROUNDS):
        rates["perftest"].append(_perftest_rate(fabric, size, count))
        for name, way in ways.items():
            rates[name].append(size * count / MIB / _seconds(way))
    print(f"READ of {size // KIB} KiB: ib_read_bw {max(rates['perftest']):.1f} MiB/s", flush=True)
    for name in ways:
        print(f"    {name}: {max(rates[name]):.1f} MiB/s, {_ratios(rates[name], rates['perftest'])}", flush=True)


def _perftest_rate(fabric: RdmaFabric, size: int, count: int) -> float:
    """Return the rate of ib_read_bw in MiB/s; on a busy machine it prints 0 at times."""
    for _ in range(5):
        rate = float(perftest("ib_read_bw", fabric.device, fabric.port.gid_index, size, count)[3])
        if rate:
            return rate
    raise SystemExit("ib_read_bw gives no rate")


def _latency(reads: Reads, fabric: RdmaFabric, count: int) -> None:
    """Print the typical times of ours and perftest's READ of 64 bytes: the best of all rounds."""
    ours, theirs, user, system = [], [], 0.0, 0.0
    for _ in range(ROUNDS):
        theirs.append(float(perftest("ib_read_lat", fabric.device, fabric.port.gid_index, 64, count)[4]))
        before = os.times()
        ours.append(1e6 * statistics.median(_seconds(lambda: reads.moves(64, 1)) for _ in range(count)))
        after = os.times()
        user, system = user + after.user - before.user, system + after.system - before.system
    print(
        f"READ of 64 bytes: {min(ours):.1f} us; ib_read_lat {min(theirs):.1f} us; {_ratios(ours, theirs, min)}",
        flush=True,
    )
    each = 1e6 / (ROUNDS * count)
    print(f"    CPU of one: {user * each:.0f} us outside of the kernel, {system * each:.0f} inside", flush=True)


def _ratios(ours: list[float], theirs: list[float], best: Callable[[list[float]], float] = max) -> str:
    """Return the ratio of the best, and the middle one of the rounds' own."""
    middle = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{best(ours) / best(theirs):.2f}x of the best, {middle:.2f}x in the middle of {len(ours)} rounds"


def main() -> int:
    """Measure and print."""
    device = sys.argv[1] if len(sys.argv) > 1 else ""
    with served(device or "auto") as engine:
        loads(engine)
        pauses(engine)
    fabric = _opened(device)
    reads = Reads(device)
    granules = bytes(4 * MIB)
    seconds = min(_seconds(lambda: granule_crcs(granules)) for _ in range(ROUNDS))
    print(f"CRC32C alone: {4 / seconds:.0f} MiB/s", flush=True)
    _bandwidth(reads, fabric, 4 * MIB, 5)  # as few as perftest takes
    _bandwidth(reads, fabric, 64 * KIB, 64)
    _latency(reads, fabric, 200)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
