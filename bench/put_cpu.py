"""CPU of an engine for one put of 4 KiB, by puts in a request; source trees side by side.

    python -m bench.put_cpu [--rounds N] [--like s3|s3-checksums|native] [TREE ...]

A tree is a folder with this source and its native modules, by default this one; the first is the one that the others
are compared with.  An engine of each runs all the time.  The trees take turns, a thousand puts or so each, so that a
busy machine slows all of them.  Counted is the engines' CPU (user and system, all threads), as the kernel keeps it, and
not the time.  The client sends new names of one folder: as the gateway does, each with its own time and MD5, without
or with a checksum, or as the native clients do.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.harness.content import payload
from bench.harness.cpu import cpu_s
from bench.harness.process import ROOT, clean_environment
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.link import Ticket
from lakefs.wire import messages as m

SIZE: Final = 4096
SHAPES: Final = ((64, 2), (32, 2), (8, 8), (1, 64), (1, 1))
"""Puts in a request, and requests in flight."""
PUTS: Final = {64: 1024, 32: 1024, 8: 1024, 1: 512}
"""Puts of one turn, by puts in a request."""
Sent = tuple[m.Request, list[bytes]]
"""A request and its body."""


@dataclass
class Side:
    """The engine of one tree, its client, and CPU for a put in us, of each turn by shape."""

    tree: Path
    pid: int
    client: BlockingEngine
    found: dict[tuple[int, int], list[float]] = field(default_factory=lambda: {shape: [] for shape in SHAPES})


@contextmanager
def side_of(tree: Path, folder: Path) -> Iterator[Side]:
    """Context manager: an engine of the tree, with a store in the folder."""
    socket = f"/tmp/lake-put-cpu-{os.getpid()}-{folder.name}.sock"
    command = [sys.executable, "-m", "cli.main", "serve", "--data", str(folder / "store"), "--socket", socket]
    with subprocess.Popen(
        [*command, "--admin", "off", "--s3", "off", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment() | {"PYTHONPATH": str(tree)},
        cwd=tree,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "ready\n":
                    break
            with connect_blocking(f"unix:{socket}") as client:
                yield Side(tree, process.pid, client)
        finally:
            process.terminate()


def requests_of(count: int, per_request: int, numbers: Iterator[int], like: str) -> list[Sent]:
    """Return requests that put `count` new objects in one folder, and their bodies."""
    requests: list[Sent] = []
    for _ in range(count // per_request):
        payloads = [payload(SIZE) for _ in range(per_request)]
        changes = [_change(next(numbers), content, like) for content in payloads]
        requests.append((m.PutObjects([SIZE] * per_request, changes), payloads))
    return requests


def _change(number: int, content: bytes, like: str) -> m.NameChange:
    attributes = m.ObjectAttributes()
    if like != "native":
        md5 = hashlib.md5(content, usedforsecurity=False).digest()
        sums = {"CRC32": md5[:4]} if like == "s3-checksums" else {}
        attributes = m.ObjectAttributes(
            mtime_ns=time.time_ns(), content_type="binary/octet-stream", etag_kind=1, etag=md5, checksums=sums
        )
    return m.NameChange("bench", f"data/k{number:012}", b"", attributes, create_bucket=True)


def send_all(client: BlockingEngine, requests: Sequence[Sent], in_flight: int) -> None:
    """Send requests, so many in flight."""
    tickets: deque[Ticket] = deque()
    for request, body in requests:
        if len(tickets) == in_flight:
            _finish(client, tickets.popleft())
        tickets.append(client.start(request, body))
    while tickets:
        _finish(client, tickets.popleft())


def _finish(client: BlockingEngine, ticket: Ticket) -> None:
    message = client.finish(ticket).message
    assert isinstance(message, m.NameResults)
    assert all(result.failure is None for result in message.results), message.results[0].failure


def main() -> None:
    """Measure, and print medians and quartiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT], metavar="TREE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--like", choices=("s3", "s3-checksums", "native"), default="s3")
    parser.add_argument("--data", type=Path, default=None, help="folder for the stores")
    arguments = parser.parse_args()
    numbers = itertools.count()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lake-put-cpu-", dir=arguments.data)))
        sides: list[Side] = []
        for index, tree in enumerate(arguments.trees):
            own = folder / str(index)
            own.mkdir()
            sides.append(stack.enter_context(side_of(tree.resolve(), own)))
        for turn in range(1 + arguments.rounds):
            for per_request, in_flight in SHAPES:
                for side in sides if turn % 2 else reversed(sides):
                    requests = requests_of(PUTS[per_request], per_request, numbers, arguments.like)
                    before = cpu_s([side.pid])
                    send_all(side.client, requests, in_flight)
                    each_us = 1e6 * (cpu_s([side.pid]) - before) / (len(requests) * per_request)
                    if turn:  # the first is to warm up
                        side.found[per_request, in_flight].append(each_us)
    for shape in SHAPES:
        first = statistics.median(sides[0].found[shape])
        for side in sides:
            low, middle, high = statistics.quantiles(side.found[shape], n=4)
            print(
                f"{shape[0]:3} in a request, {shape[1]:2} in flight: {middle:6.1f} us of CPU a put "
                f"({low:.1f} to {high:.1f}), x {middle / first:.2f}  {side.tree}"
            )


if __name__ == "__main__":
    main()
