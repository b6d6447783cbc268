"""A million short chunks on six members at 4+2: `python -m bench.lake_million [--chunks N]`.

Objects of 100 bytes with content of their own are stored: each is a chunk, and lies three times.  Then:

    gc        puts of 4 KiB, one after the other, alone and beside cycles of gc, in turn; every other object was removed
              before the first cycle.  Printed: 99th percentiles and their ratio, and the share of the removed objects'
              shards that the first two cycles freed
    compare   a member is silent for a while, and serves again with all that it had: every partition is compared with
              its list.
              Printed: time and CPU until nothing is left to compare, and how many shards it has

All processes and folders share this machine's cores and disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lakefs
from bench.harness.content import payload
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.machine import machine as machine_facts
from bench.harness.machines import LakeMachine
from bench.harness.measure import timed, wait_until
from bench.harness.process import ROOT

OUT: Final = ROOT / "bench" / "out"
BATCH: Final = 1000
OBJECT_BYTES: Final = 100
COPIES: Final = 3
"""Shards of a chunk of one granule at 4+2."""
PUTS: Final = 400
"""Puts of each side's turn."""
ROUNDS: Final = 3
WAIT_S: Final = 900.0
_ALONE: Final = "127.0.0.1"


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.lake_million", description="A million chunks.")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    chunks = parser.parse_args().chunks
    OUT.mkdir(parents=True, exist_ok=True)
    facts = machine_facts(OUT)
    print(f"{facts['kind']}; {facts['date']}, commit {facts['commit']}, load before {facts['load']}", flush=True)
    with tempfile.TemporaryDirectory(dir=OUT, prefix="million-") as folder:
        machine = LakeMachine(Path(folder) / "machine", _ALONE, 6, "--protect=4+2", "--accept-loss")
        with machine, machine.connect() as lake:
            _store(machine, lake, chunks)
            _compare(machine)
            _collect(machine, lake, chunks)
    return 0


def _store(machine: LakeMachine, lake: lakefs.Lake, chunks: int) -> None:
    pids, began = process_tree(machine.pid), time.monotonic()
    before = cpu_s(pids)
    for first in range(0, chunks, BATCH):
        numbers = range(first, min(first + BATCH, chunks))
        lake.put_many([(_name(number), payload(OBJECT_BYTES)) for number in numbers])
    took_s, spent_s = time.monotonic() - began, cpu_s(pids) - before
    print(f"stored: {chunks} objects in {took_s:.0f} s, {spent_s / chunks * 1e6:.0f} us of CPU each", flush=True)
    _wait(lambda: not machine.status()["walker"]["dirty_partitions"])


def _name(number: int) -> str:
    return f"bench/{'odd' if number % 2 else 'even'}/{number:08}"


# --- gc --------------------------------------------------------------------------------------------------


def _collect(machine: LakeMachine, lake: lakefs.Lake, chunks: int) -> None:
    numbers, cycles = itertools.count(), list[dict[str, Any]]()

    def puts() -> float:
        taken = sorted(timed(lambda: lake.put(f"bench/new/{next(numbers)}", payload(4096))) for _ in range(PUTS))
        return taken[int(0.99 * (PUTS - 1))]

    machine.lake("rm", "-r", "bench/odd")
    beside, alone = list[float](), list[float]()
    for _ in range(ROUNDS):
        alone.append(puts())
        ended = threading.Event()
        collector = threading.Thread(target=_cycles_until, args=(machine, ended, cycles))
        collector.start()
        beside.append(puts())
        while len(cycles) < 2 and collector.is_alive():  # what was removed is freed by the second cycle from now
            beside.append(puts())
        ended.set()
        collector.join()
    freed = sum(cycle["freed_shards"] for cycle in cycles[:2])
    seconds = statistics.median(cycle["took_s"] for cycle in cycles)
    print(f"gc: a cycle takes {seconds:.1f} s; p99 of puts {_ms(beside)} beside cycles, {_ms(alone)} alone: ", end="")
    print(f"{statistics.median(beside) / statistics.median(alone):.2f}x (goal 1.5x)")
    print(f"gc: two cycles freed {freed / (chunks // 2 * COPIES):.3f} of the removed objects' shards (goal 0.95)")


def _cycles_until(machine: LakeMachine, ended: threading.Event, cycles: list[dict[str, Any]]) -> None:
    while not ended.is_set():
        began = time.monotonic()
        cycle: dict[str, Any] = json.loads(machine.lake("gc", "--json"))
        cycles.append({**cycle, "took_s": time.monotonic() - began})


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})"


# --- compare ---------------------------------------------------------------------------------------------


def _compare(machine: LakeMachine) -> None:
    def walked() -> int:
        return int(machine.status()["walker"]["since_start"]["partitions"])

    device, seen = machine.devices[2], walked()
    pids = machine.pids_of(device)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    _wait(lambda: not all(each["up"] for each in machine.status()["members"]))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    began, before = time.monotonic(), {pid: cpu_s([pid]) for pid in process_tree(machine.pid)}
    _wait(lambda: walked() > seen)
    since_s = time.monotonic()
    _wait(lambda: not machine.status()["walker"]["dirty_partitions"])
    took_s = time.monotonic() - since_s
    spent_s = sum(cpu_s([pid]) - before.get(pid, 0.0) for pid in process_tree(machine.pid))
    print(f"compare: {walked() - seen} partitions from {since_s - began:.1f} s after its return on, ", end="")
    print(f"in {took_s:.1f} s, {spent_s:.1f} s of CPU", flush=True)


def _wait(happens: Callable[[], bool]) -> None:
    wait_until(happens, WAIT_S, f"not so after {WAIT_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
