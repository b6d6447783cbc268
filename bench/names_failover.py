"""Measures for how long names are away when their leader, or etcd's, is lost.

    python -m bench.names_failover [--rounds N] [--only WORDS] [--busy N]

Three machines of one lake and an etcd of three nodes, each at a host of its own (a network namespace, which takes
root), all on this machine and its disk.  A client at a machine that is not touched puts one small object after the
other; each fault is counted from its signal to the next put that was acknowledged, and is healed before the next one.
Every acknowledged object is read back at the end.  With `--busy` so many processes take all the CPU that they get.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.etcd import EtcdCluster, running_etcd
from bench.harness.hosts import Host, hosts, hosts_can_be_made
from bench.harness.machines import LakeMachine

WAIT_S: Final = 120.0
GOALS: Final = {
    "the leader's process is killed, and its next one says that it serves (from there)": "1 s",
    "the leader's process is killed, and started again at once": "",
    "the leader's machine is lost": "10 s",
    "the leader's machine is cut off, and everything stays silent": "10 s",
    "etcd's leader is killed": "3 s",
    "etcd's leader is stopped": "3 s",
}


class Bed:
    """The lake and its etcd."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        found = stack.enter_context(hosts("e1", "e2", "e3", "m1", "m2", "m3"))
        at = [found[name] for name in ("e1", "e2", "e3")]
        self.etcd: EtcdCluster = stack.enter_context(running_etcd(folder / "etcd", at=at))
        counts = {"m1": 2, "m2": 1, "m3": 1}
        self.machines = [LakeMachine(folder / name, found[name], count) for name, count in counts.items()]
        self.hosts: dict[str, Host] = {host.address: host for host in found.values()}
        first, *others = self.machines
        first.init("failover", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(self.etcd.urls))
        stack.enter_context(first)
        for machine in others:
            machine.join(first)
            stack.enter_context(machine)
        self.acknowledged: dict[str, bytes] = {}
        with first.connect():
            pass
        self.settle()

    def leader(self) -> LakeMachine:
        """Return the machine whose replica leads."""
        while True:
            for machine in self.machines:
                if machine.leads_names():
                    return machine

    def settle(self) -> None:
        """Wait until all is whole."""
        end = time.monotonic() + WAIT_S
        while not self._is_whole():
            if time.monotonic() > end:
                raise RuntimeError("the lake is not whole again: " + self.machines[0].lake("cluster", "status"))
            time.sleep(0.5)

    def _is_whole(self) -> bool:
        try:
            found = self.machines[0].status()
        except RuntimeError:
            return False
        replicas = found.get("names", {}).get("replicas", [])
        up = [each for each in found.get("members", []) if each["up"] and each["places"]]
        follows = [each for each in replicas if each["state"] in ("leads", "follows") and not each["groups_behind"]]
        return len(up) == 4 and len(follows) == 3 and not found["walker"]["dirty_partitions"]

    def put_until_acknowledged(self, machine: LakeMachine) -> None:
        """Put objects through a machine until one is acknowledged."""
        while True:
            name = f"bench/{len(self.acknowledged)}"
            content = name.encode()
            try:
                with lakefs.connect(machine.address) as lake:
                    lake.put(name, content)
            except lakefs.LakeError:
                continue
            self.acknowledged[name] = content
            return

    def check(self) -> None:
        """Read everything back at every machine."""
        for machine in self.machines:
            with lakefs.connect(machine.address) as lake:
                for name, content in self.acknowledged.items():
                    if bytes(lake.get(name)) != content:
                        raise RuntimeError(f"other bytes of {name}")


Fault = Callable[[Bed, LakeMachine], float]


@contextmanager
def _counted(seconds: list[float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds.append(time.monotonic() - began)


def _process(bed: Bed, leader: LakeMachine) -> float:
    leader.kill()
    seconds: list[float] = []
    leader.start()
    with _counted(seconds):
        bed.put_until_acknowledged(_other(bed, leader))
    return seconds[0]


def _process_and_start(bed: Bed, leader: LakeMachine) -> float:
    seconds: list[float] = []
    with _counted(seconds):
        leader.kill()
        leader.start()
        bed.put_until_acknowledged(_other(bed, leader))
    return seconds[0]


def _machine(bed: Bed, leader: LakeMachine) -> float:
    seconds: list[float] = []
    pids = [pid for device in leader.devices for pid in leader.pids_of(device)]
    with _counted(seconds):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        leader.kill()
        bed.put_until_acknowledged(_other(bed, leader))
    leader.start()
    return seconds[0]


def _cut_off(bed: Bed, leader: LakeMachine) -> float:
    seconds: list[float] = []
    host = bed.hosts[leader.host]
    with _counted(seconds):
        host.cut()
        bed.put_until_acknowledged(_other(bed, leader))
    host.join()
    return seconds[0]


def _etcd_killed(bed: Bed, leader: LakeMachine) -> float:
    seconds: list[float] = []
    node = bed.etcd.leader()
    with _counted(seconds):
        node.kill()
        bed.put_until_acknowledged(_other(bed, leader))
    node.start(bed.etcd.names)
    return seconds[0]


def _etcd_stopped(bed: Bed, leader: LakeMachine) -> float:
    seconds: list[float] = []
    node = bed.etcd.leader()
    with _counted(seconds):
        node.signal(signal.SIGSTOP)
        bed.put_until_acknowledged(_other(bed, leader))
    node.signal(signal.SIGCONT)
    return seconds[0]


def _other(bed: Bed, leader: LakeMachine) -> LakeMachine:
    return next(machine for machine in bed.machines if machine is not leader)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Let so many processes use the processors during the block."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="How long names are away when their leader, or etcd's, is lost.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORDS", help="only faults with these words")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that use the processors beside it")
    options = parser.parse_args()
    if not hosts_can_be_made():
        sys.exit("no network namespaces: they take root, and iproute2")
    faults: tuple[Fault, ...] = (_process, _process_and_start, _machine, _cut_off, _etcd_killed, _etcd_stopped)
    with tempfile.TemporaryDirectory(prefix="failover-") as folder, ExitStack() as stack:
        bed = Bed(stack, Path(folder))
        stack.enter_context(_busy(options.busy))
        print(f"{'fault':<82} {'goal':>5} {'median':>8} {'worst':>8}")
        for (what, goal), fault in zip(GOALS.items(), faults, strict=True):
            if options.only not in what:
                continue
            seconds = []
            for _ in range(options.rounds):
                seconds.append(fault(bed, bed.leader()))
                bed.settle()
            print(f"{what:<82} {goal:>5} {statistics.median(seconds):>6.2f} s {max(seconds):>6.2f} s", flush=True)
        bed.check()
        print(f"{len(bed.acknowledged)} acknowledged objects were read back at each machine")


if __name__ == "__main__":
    main()
