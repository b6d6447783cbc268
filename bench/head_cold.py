"""`python -m bench.head_cold [--rounds N]`: first reads at a head, which its DRAM tier does not have; ours only.

A lake of six members at 4+2 in folders on this machine.  Each round puts new content, waits until it is settled, and
reads each object once.  Printed is CPU per object in ms, split into the client, the parent (the head, and the names
beside it), and the members, with the time of a read.  Rows:

    4 MiB, 64 KiB    `get_into` by name, one after the other, as `bench.rados` reads them
    4 KiB            OpenObjects, 64 in flight: the payload is in the answer
    4 KiB, alone     the same, one after the other
    4 KiB, opened    the same 64 in flight without payload: what names and the client's hop take of the row above
    64 KiB x 16      sixteen chunks by their ids in one ReadChunks
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.harness.content import payload
from bench.harness.cpu import cpu_s
from bench.harness.process import ROOT
from bench.peers.rados_sides import LONG, MIDDLE, SHORT, LakeSide, lake_side, wait_settled
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.link import Ticket
from lakefs.ids import data_chunk_id
from lakefs.wire import messages as m

AT_ONCE: Final = 16
IN_FLIGHT: Final = 64
BY_NAME_4M, BY_NAME_64K, INLINE, ALONE, OPENED, BY_ID = (
    "4 MiB",
    "64 KiB",
    "4 KiB",
    "4 KiB, alone",
    "4 KiB, opened",
    "64 KiB x 16",
)
SIZES: Final = {BY_NAME_4M: LONG, BY_NAME_64K: MIDDLE, INLINE: SHORT, ALONE: SHORT, OPENED: SHORT, BY_ID: MIDDLE}
COUNTS: Final = {BY_NAME_4M: 16, BY_NAME_64K: 256, INLINE: 1024, ALONE: 256, OPENED: 1024, BY_ID: 256}
"""Objects of a round."""

Spent = tuple[float, float, float, float]
"""CPU of client, parent and members, and the time, in s."""


class Reader:
    """A client of the lake, and where its CPU is counted."""

    def __init__(self, side: LakeSide) -> None:
        self._side = side
        self._parent, *self._members = side.pids()
        self._client = connect_blocking(side.address)

    def close(self) -> None:
        """End the client."""
        self._client.close()

    def measure(self, row: str, contents: Sequence[bytes], names: Sequence[str]) -> Spent:
        """Read each object once; return what that took."""
        target = memoryview(bytearray(len(contents[0])))
        reads: dict[str, Callable[[], object]] = {
            BY_NAME_4M: lambda: self._side.get_all(names, target),
            BY_NAME_64K: lambda: self._side.get_all(names, target),
            INLINE: lambda: self._open_all(names, contents, IN_FLIGHT, m.OpenObjects([], lease_inline=False)),
            ALONE: lambda: self._open_all(names, contents, 1, m.OpenObjects([], lease_inline=False)),
            OPENED: lambda: self._open_all(names, (), IN_FLIGHT, m.OpenObjects([], inline_bytes=0)),
            BY_ID: lambda: self._read_all([data_chunk_id(content) for content in contents], len(contents[0])),
        }
        before, began = self._cpu(), time.monotonic()
        reads[row]()
        took_s = time.monotonic() - began
        client, parent, members = (after - at for after, at in zip(self._cpu(), before, strict=True))
        return client, parent, members, took_s

    def _cpu(self) -> tuple[float, float, float]:
        return time.process_time(), cpu_s([self._parent]), cpu_s(self._members)

    def _open_all(self, names: Sequence[str], contents: Sequence[bytes], in_flight: int, like: m.OpenObjects) -> None:
        def start(name: str) -> Ticket:
            return self._client.start(
                m.OpenObjects([("bench", name)], lease_inline=like.lease_inline, inline_bytes=like.inline_bytes)
            )

        tickets = [start(name) for name in names[:in_flight]]
        for number in range(len(names)):
            reply = self._client.finish(tickets[number])
            assert not contents or reply.body.joined() == contents[number], "the payload is in the answer"
            reply.body.release()
            if len(tickets) < len(names):
                tickets.append(start(names[len(tickets)]))

    def _read_all(self, chunks: Sequence[bytes], size: int) -> None:
        for first in range(0, len(chunks), AT_ONCE):
            some = [*chunks[first : first + AT_ONCE]]
            reply = self._client.finish(self._client.start(m.ReadChunks(some, [0] * len(some), [0] * len(some))))
            assert reply.body.nbytes == size * len(some)
            reply.body.release()


def main() -> None:
    """Print a line for each row: medians of the rounds, per object."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_cold")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT, help="where the lake lies; a tmpfs has no disk's waits")
    parser.add_argument("--rows", nargs="*", choices=[*COUNTS], default=[*COUNTS])
    options = parser.parse_args()
    found: dict[str, list[Spent]] = {row: [] for row in options.rows}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".cold-") as name, lake_side(Path(name)) as side:
        assert isinstance(side, LakeSide)
        reader = Reader(side)
        for number, row in itertools.product(range(options.rounds + 1), options.rows):
            contents = [payload(SIZES[row]) for _ in range(COUNTS[row])]
            names = side.put_all(contents, 4 if SIZES[row] == LONG else IN_FLIGHT)
            os.sync()
            wait_settled(side)
            spent = reader.measure(row, contents, names)
            if number:
                found[row].append(spent)
        reader.close()
    for row, spent_each in found.items():
        print(_line(row, spent_each))


def _line(row: str, spent: Sequence[Spent]) -> str:
    ms = [[figure / COUNTS[row] * 1e3 for figure in each] for each in spent]
    client, parent, members, took = (statistics.median(figures) for figures in zip(*ms, strict=True))
    total = [sum(each[:3]) for each in ms]
    return (
        f"{row:<14} CPU {statistics.median(total):7.3f} ms ({min(total):.3f} to {max(total):.3f}): client {client:.3f}"
        f"  parent {parent:.3f}  members {members:.3f}   time {took:.3f} ms"
    )


if __name__ == "__main__":
    main()
