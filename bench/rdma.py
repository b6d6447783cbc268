"""`python -m bench.rdma [DEVICE]`: checked READs over RDMA beside perftest's, in rounds that alternate.

The peer is this process too: its memory is registered with a second opened adapter, and read through the first.
Without an adapter, `lab/run --rdma -- .venv/bin/python -m bench.rdma`: a figure from there is a ratio, never a speed.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from lakefs.content.verify import granule_crcs
from lakefs.transport.fabric import Region, Remote
from lakefs.transport.fabric_mover import Mover, Piece
from lakefs.transport.rdma import RdmaFabric, open_fabric

KIB: Final = 1 << 10
MIB: Final = 1 << 20
ROUNDS: Final = 5
BATCH: Final = 16
_START_S: Final = 1.0
_MOVE_S: Final = 60.0


class Reads:
    """A link between two opened adapters of this machine, and memory at both ends."""

    def __init__(self, device: str) -> None:
        near, far = _opened(device), _opened(device)
        self.memory = mmap.mmap(-1, 4 * MIB)
        self._there = mmap.mmap(-1, 4 * MIB)
        self._there[:] = os.urandom(4 * MIB)
        self._region: Region = near.register(self.memory, Remote.NONE)
        self._theirs: Region = far.register(self._there, Remote.READ)
        self._link, peer = near.open_link(Remote.NONE), far.open_link(Remote.READ)
        self._link.connect(peer.end)
        peer.connect(self._link.end)
        self._mover = Mover(self._link)
        self._view = memoryview(self.memory)

    def move(self, size: int, count: int = 1) -> None:
        """Read so many pieces of that size, in one move."""
        self._mover.move([self._piece(at * size, size) for at in range(count)], _MOVE_S)

    def checked(self, size: int, count: int = 1) -> None:
        """Read like `move`, then take the checksum of each granule."""
        self.move(size, count)
        for at in range(count):
            granule_crcs(self._view[at * size : (at + 1) * size])

    def _piece(self, offset: int, size: int) -> Piece:
        return Piece(self._region, offset, self._theirs.address + offset, self._theirs.remote_key, size)


def _opened(device: str) -> RdmaFabric:
    fabric = open_fabric(device)
    if isinstance(fabric, str):
        raise SystemExit(fabric)
    return fabric


def perftest(tool: str, device: str, gid_index: int, size: int, count: int) -> list[str]:
    """Return the line of figures of a program of perftest, its server and client on this machine."""
    command = [tool, "-d", device, "-x", str(gid_index), "-s", str(size), "-n", str(count), "-F"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        time.sleep(_START_S)
        done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=False)
        server.wait()
    lines = [line.split() for line in done.stdout.splitlines()]
    found = next((words for words in lines if words[:1] == [str(size)]), None)
    if found is None:
        raise SystemExit(f"{tool} gave no figures: {done.stdout}{done.stderr}")
    return found


def _seconds(call: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _bandwidth(reads: Reads, fabric: RdmaFabric, size: int, count: int, batch: int) -> None:
    """Print ours and perftest's mean rate for READs of that size; `batch` of them in one move."""
    rows = []
    for _ in range(ROUNDS):
        theirs = float(perftest("ib_read_bw", fabric.device, fabric.port.gid_index, size, count * batch)[3])
        cpu = time.process_time()
        ours = size * batch / MIB / _seconds(lambda: reads.checked(size, batch), count)
        cpu = (time.process_time() - cpu) / count / batch
        bare = size * batch / MIB / _seconds(lambda: reads.move(size, batch), count)
        rows.append((ours / theirs, ours, theirs, bare, cpu))
    ratio, ours, theirs, bare, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"READ {size // KIB:5d} KiB, {batch:2d} in a move: checked {ours:9.1f} MiB/s, unchecked {bare:9.1f}, "
        f"ib_read_bw {theirs:9.1f}: {ratio:.2f}x (rounds {_span([row[0] for row in rows])}); "
        f"{1e6 * cpu:.0f} us of CPU for each",
        flush=True,
    )


def _latency(reads: Reads, fabric: RdmaFabric, count: int) -> None:
    """Print ours and perftest's typical time of a READ of 64 bytes."""
    rows = []
    for _ in range(ROUNDS):
        theirs = float(perftest("ib_read_lat", fabric.device, fabric.port.gid_index, 64, count)[4])
        cpu = time.process_time()
        ours = 1e6 * statistics.median(_seconds(lambda: reads.move(64), 1) for _ in range(count))
        cpu = 1e6 * (time.process_time() - cpu) / count
        rows.append((ours / theirs, ours, theirs, cpu))
    ratio, ours, theirs, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"READ of 64 bytes: {ours:.1f} us, ib_read_lat {theirs:.1f}: {ratio:.1f}x "
        f"(rounds {_span([row[0] for row in rows])}); {cpu:.0f} us of CPU",
        flush=True,
    )


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> int:
    """Measure and print."""
    device = sys.argv[1] if len(sys.argv) > 1 else ""
    fabric = _opened(device)
    reads = Reads(device)
    _latency(reads, fabric, 300)
    _bandwidth(reads, fabric, 64 * KIB, 60, 1)
    _bandwidth(reads, fabric, 64 * KIB, 4, BATCH)
    _bandwidth(reads, fabric, 4 * MIB, 5, 1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
