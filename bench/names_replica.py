"""Measures a replica of the names that begins anew, and etcd's room: `python -m bench.names_replica [--names N]`.

Two machines of one lake (processes with a loopback address each) and an etcd of three nodes, all on this machine and
its disk.  N names (10 million by default) of empty objects are bound, 500 a request; meanwhile the largest size of
etcd's files is noted.  Then a third machine joins.  Its replica copies the leader's checkpoint, takes it over, and
follows the log, while 1,000 names a second are bound; its time is counted from the start of the machine until its
replica has all that is in the log.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench.harness.etcd import etcdctl, running_etcd
from bench.harness.machine import machine
from bench.harness.machines import LakeMachine
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.link import Ticket
from lakefs.ids import EMPTY_BLOB
from lakefs.wire import messages as m

NAMES: Final = 10_000_000
PER_S: Final = 1000
_BUCKET: Final = "bench"
_BATCH: Final = 500
_IN_FLIGHT: Final = 4
_PAUSE_S: Final = 0.05
_WAIT_S: Final = 1200.0


def key_of(number: int) -> str:
    """Return the key of a name: 36 bytes, 1,000 names a folder."""
    return f"set/{number // 1000:06d}/object-{number % 1000:06d}.bin"


class Names:
    """Binds names through the head of one machine."""

    def __init__(self, client: BlockingEngine) -> None:
        self.bound = 0
        self._client = client
        opened = client.call(m.SessionOpen()).message
        assert isinstance(opened, m.SessionOpened), "the answer to SessionOpen"
        self._session = opened.session

    def bind(self, count: int) -> None:
        """Bind so many, some requests at once."""
        tickets: deque[Ticket] = deque()
        end = self.bound + count
        while self.bound < end or tickets:
            while self.bound < end and len(tickets) < _IN_FLIGHT:
                numbers = range(self.bound, min(self.bound + _BATCH, end))
                changes = [m.NameChange(_BUCKET, key_of(at), EMPTY_BLOB, m.ObjectAttributes()) for at in numbers]
                tickets.append(self._client.start(m.Commit(self._session, changes)))
                self.bound = numbers.stop
            self._client.finish(tickets.popleft())


@contextmanager
def beside(step: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Do a step again and again during the block, in a thread; its error ends the program."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(pause_s):
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Room:
    """The largest size of etcd's files on a node."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.most = 0
        self._urls = urls

    def look(self) -> None:
        """Note the size."""
        shown = json.loads(etcdctl(self._urls, "endpoint", "status", "--write-out=json"))
        self.most = max(self.most, *(each["Status"]["dbSize"] for each in shown))

    def __str__(self) -> str:
        return f"etcd's files: at most {self.most / 2**20:,.0f} MiB a node"


def wait_for_replicas(at: LakeMachine, count: int) -> None:
    """Wait until so many replicas have all groups of the log."""
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        replicas: list[dict[str, Any]] = at.status().get("names", {}).get("replicas", [])
        states = [each["state"] for each in replicas if each["groups_behind"] <= PER_S]
        if states.count("leads") == 1 and states.count("follows") == count - 1:
            return
        time.sleep(0.2)
    raise RuntimeError("the replicas are not whole: " + at.lake("cluster", "status"))


def measure(folder: Path, urls: Sequence[str], count: int, stack: ExitStack) -> None:
    """Measure, and print the figures."""
    hosts = [f"127.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}.{number}" for number in (11, 12, 13)]
    first, second, third = (LakeMachine(folder / host, host, 1) for host in hosts)
    first.init("replica", "--protect", "1+1", "--accept-loss", "--etcd", ",".join(urls))
    stack.enter_context(first)
    second.join(first)
    stack.enter_context(second)
    wait_for_replicas(first, 2)
    room = Room(urls)
    with connect_blocking(second.address) as client, beside(room.look, 1.0):
        client.call(m.BucketCreate(_BUCKET))
        names = Names(client)
        began = time.perf_counter()
        names.bind(count)
        took_s = time.perf_counter() - began
        print(f"{count:,} names bound in {took_s:.0f} s, {count / took_s:,.0f} a second; {room}", flush=True)
        wait_for_replicas(first, 2)
        third.join(first)
        with beside(lambda: names.bind(round(PER_S * _PAUSE_S)), _PAUSE_S):
            began = time.perf_counter()
            stack.enter_context(third)
            wait_for_replicas(first, 3)
            print(f"a replica begun anew in {time.perf_counter() - began:.1f} s; {room}", flush=True)
        print(f"{names.bound - count:,} names were bound meanwhile")


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="The time of a replica of the names that begins anew, and etcd's room")
    parser.add_argument("--names", type=int, default=NAMES)
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args(arguments)
    if shutil.which("etcd") is None:
        sys.exit("no etcd: install Debian's etcd-server")
    print(f"a replica of names begun anew; {machine(Path(tempfile.gettempdir()))}\n", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="names-replica-") as folder,
        running_etcd(Path(folder) / "etcd", given.nodes) as etcd,
        ExitStack() as stack,
    ):
        measure(Path(folder), etcd.urls, given.names, stack)


if __name__ == "__main__":
    main(sys.argv[1:])
