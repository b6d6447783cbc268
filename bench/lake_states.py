"""A lake over six devices at 4+2 in each state that an operator sees: `python -m bench.lake_states`.

The same load runs throughout: four clients, each with one request in flight, put (3 of 10) and get objects of 256 KiB,
and compare what they get.  In turn the lake is healthy, has lost one and two members with all that they have, is healed
onto empty ones, is rebalanced onto a new one, drains a member, and collects garbage.  Printed for each state:
operations and their rate, median, p99 and longest, CPU of all serving processes for each operation, and failures.

Members, names and clients share this machine's cores, and all folders lie on one disk: what a state costs shows in CPU;
rates say how it feels on a machine that is as busy as this one.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.machines import LakeMachine
from bench.harness.measure import wait_until
from bench.harness.process import ROOT

CLIENTS: Final = 4
OBJECT_BYTES: Final = 256 << 10
OBJECTS: Final = 400
"""Objects of each client: 400 MiB of content in all."""
PUT_SHARE: Final = 0.3
STATE_S: Final = 15.0
WAIT_S: Final = 300.0
OUT: Final = ROOT / "bench" / "out"
_ALONE: Final = "127.0.0.1"


@dataclass
class Measured:
    """One state: seconds of each operation, failures, the state's length, and CPU of the serving processes."""

    name: str
    took_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    length_s: float = 0.0
    cpu_s: float = 0.0

    def row(self) -> str:
        """Return the table's row."""
        ordered = sorted(self.took_s)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        rate = len(ordered) / self.length_s
        return (
            f"| {self.name} | {len(ordered)} | {rate:.0f} | {statistics.median(ordered) * 1e3:.1f} | {p99 * 1e3:.0f} | "
            f"{ordered[-1] * 1e3:.0f} | {self.cpu_s / len(ordered) * 1e3:.1f} | {len(self.failures)} |"
        )


class Load:
    """The clients: threads that go on from state to state."""

    def __init__(self, machine: LakeMachine) -> None:
        self.measured = Measured("")
        self._ended = threading.Event()
        self._ready = threading.Barrier(CLIENTS + 1)
        self._threads = [
            threading.Thread(target=self._use, args=(machine, number), daemon=True) for number in range(CLIENTS)
        ]

    def start(self) -> None:
        """Start the clients, and return when each has stored its objects."""
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End the clients."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _use(self, machine: LakeMachine, client: int) -> None:
        rng = random.Random(client)
        known: dict[str, int] = {}
        with machine.connect() as lake:
            for number in range(OBJECTS):
                self._put(lake, rng, f"bench/{client}/{number}", known)
            self._ready.wait()
            while not self._ended.is_set():
                name = f"bench/{client}/{rng.randrange(OBJECTS)}"
                measured, began = self.measured, time.monotonic()
                try:
                    if rng.random() < PUT_SHARE:
                        self._put(lake, rng, name, known)
                    elif lake.get(name) != random.Random(known[name]).randbytes(OBJECT_BYTES):
                        measured.failures.append(f"other bytes of {name}")
                except lakefs.LakeError as error:
                    measured.failures.append(str(error))
                measured.took_s.append(time.monotonic() - began)

    @staticmethod
    def _put(lake: lakefs.Lake, rng: random.Random, name: str, known: dict[str, int]) -> None:
        seed = rng.getrandbits(32)
        lake.put(name, random.Random(seed).randbytes(OBJECT_BYTES))
        known[name] = seed


class States:
    """A lake, its load, and the states that it is put into."""

    def __init__(self, machine: LakeMachine, load: Load) -> None:
        self._machine = machine
        self._load = load
        self.measured: list[Measured] = []

    def measure(self, name: str, until: Callable[[], bool] | None = None) -> None:
        """Measure a state for STATE_S, or until it has passed."""
        before, began = self._cpu_s(), time.monotonic()
        measured = self._load.measured = Measured(name)
        while (not until()) if until is not None else time.monotonic() < began + STATE_S:
            if time.monotonic() > began + WAIT_S:
                raise RuntimeError(f"{name}: not over after {WAIT_S:g} s")
            time.sleep(0.5)
        measured.length_s = time.monotonic() - began
        measured.cpu_s = sum(spent - before.get(pid, 0.0) for pid, spent in self._cpu_s().items())
        self._load.measured = Measured("between")
        self.measured.append(measured)
        print(f"{name}: {measured.length_s:.1f} s", flush=True)

    def _cpu_s(self) -> dict[int, float]:
        """Return the CPU so far of each serving process that runs now."""
        return {pid: cpu_s([pid]) for pid in process_tree(self._machine.pid)}

    def is_whole(self) -> bool:
        """Return True if nothing is to be made anew or moved."""
        found = self._machine.status()
        up = [each for each in found["members"] if each["up"] and (each["places"] or each["state"] == "draining")]
        settled = found["ring_epochs"] == 1 and not found["walker"]["dirty_partitions"]
        return settled and len(up) == len(found["members"])

    def is_drained(self) -> bool:
        """Return True if the draining member may be removed."""
        draining = [each["id"] for each in self._machine.status()["members"] if each["state"] == "draining"]
        try:
            self._machine.lake("cluster", "remove", draining[0])
        except RuntimeError:
            return False
        return True


def main() -> int:
    """Run the command; return its exit code."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT, prefix="states-") as folder, ExitStack() as stack:
        machine = LakeMachine(Path(folder) / "machine", _ALONE, 6, "--protect=4+2", "--accept-loss")
        with machine:
            pass  # the lake is made of six devices
        machine.spares = [machine.devices[0].with_name("disk7")]
        stack.enter_context(machine)
        load = Load(machine)
        load.start()
        states = States(machine, load)
        _through_all(machine, states)
        load.stop()
        _print(states.measured)
    return 1 if any(measured.failures for measured in states.measured) else 0


def _through_all(machine: LakeMachine, states: States) -> None:
    _wait(states.is_whole)
    states.measure("healthy")
    lost = [(machine.devices[1], machine.lose(machine.devices[1]))]
    states.measure("one of six gone")
    lost.append((machine.devices[4], machine.lose(machine.devices[4])))
    states.measure("two of six gone")
    for device, member in lost:
        machine.lake("cluster", "replace", member, str(device))
    states.measure("healing, two replaced", states.is_whole)
    states.measure("healed")
    machine.lake("cluster", "add", str(machine.spares[0]), *machine.data_options())
    _wait(lambda: len(machine.status()["members"]) == 7)
    states.measure("rebalancing onto a seventh", states.is_whole)
    machine.lake("cluster", "drain", str(machine.devices[0]))
    states.measure("draining one of seven", states.is_drained)
    collecting = threading.Thread(target=lambda: [machine.lake("gc") for _ in range(3)], daemon=True)
    collecting.start()
    states.measure("three cycles of gc", lambda: not collecting.is_alive())


def _wait(happens: Callable[[], bool]) -> None:
    wait_until(happens, WAIT_S, "the lake did not become whole")


def _print(rows: list[Measured]) -> None:
    print("\n| state | operations | a second | median, ms | p99, ms | longest, ms | CPU each, ms | failed |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.row())
    for failure in [failure for row in rows for failure in row.failures][:5]:
        print(failure, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
