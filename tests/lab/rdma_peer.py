"""A process at the other end of a link over rxe0, which a test may kill: `python -m tests.lab.rdma_peer SIZE`.

It offers memory of that size, filled with one byte, joins the end that it reads, and then serves commands, a line each:
`fill BYTE`; `write`, for writing all of it to the test's memory for ever; `close`, for giving up its memory.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lakefs.transport.fabric import FabricEnd, Link, Region, Remote
from lakefs.transport.fabric_mover import Mover, Piece
from lakefs.transport.rdma import open_fabric

BOTH: Final = Remote.READ | Remote.WRITE
OWN: Final = 0x11
"""The byte that the peer's memory is filled with at first."""


class Peer:
    """The process, as a test sees it."""

    def __init__(self, size: int, *before: str) -> None:
        command = [*before, sys.executable, "-m", "tests.lab.rdma_peer", str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = self.line()
        self.size = size
        self.address, self.key = told["address"], told["key"]
        self.end = msgspec.convert(told["end"], FabricEnd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def join(self, link: Link, region: Region) -> None:
        """Join a link with it, and say which memory it may write."""
        link.connect(self.end)
        self.say({"end": msgspec.to_builtins(link.end), "address": region.address, "key": region.remote_key})
        assert self.line() == "joined"

    def command(self, text: str) -> None:
        """Have it do something, and wait for its answer."""
        self.say(text)
        assert self.line() == "done", text

    def say(self, message: object) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def line(self) -> Any:
        """Receive a line."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, "the peer has ended"
        return json.loads(text)

    def piece(self, region: Region, length: int = 0) -> Piece:
        """Return a READ of its memory into the region."""
        return Piece(region, 0, self.address, self.key, length or self.size)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Serve one test."""
    size = int(sys.argv[1])
    fabric = open_fabric("rxe0")
    if isinstance(fabric, str):
        _say(fabric)
        return 1
    memory = mmap.mmap(-1, size)
    memory[:] = bytes([OWN]) * size
    region, link = fabric.register(memory, BOTH), fabric.open_link(BOTH)
    _say({"address": region.address, "key": region.remote_key, "end": msgspec.to_builtins(link.end)})
    theirs = json.loads(sys.stdin.readline())
    link.connect(msgspec.convert(theirs["end"], FabricEnd))
    _say("joined")
    for text in sys.stdin:
        command, _, argument = json.loads(text).partition(" ")
        if command == "fill":
            memory[:] = bytes([int(argument)]) * size
        elif command == "close":
            region.close()
        elif command == "write":
            piece = Piece(region, 0, theirs["address"], theirs["key"], size, is_write=True)
            _say("done")
            while True:
                Mover(link).move([piece], 60.0)
        _say("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
