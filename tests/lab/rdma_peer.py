"""A process at the other end of a link over rxe0, which a test may kill.

It offers memory of that size, filled with one byte, joins the end that it reads, and then serves commands, a line each:
`fill BYTE`; `write`, for writing all of it to the test's memory for ever; `close`, for giving up its memory.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import traceback
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TextIO

import msgspec

from lakefs.errors import FabricFailed
from lakefs.transport.fabric import FabricEnd, Link, Piece, Region, Remote
from lakefs.transport.fabric_mover import Mover
from lakefs.transport.rdma import open_fabric

BOTH: Final = Remote.READ | Remote.WRITE
FAILED: Final = 3
"""Its exit code when what it posts fails."""
OWN: Final = 0x11
"""The byte that the peer's memory is filled with at first."""


class Peer:
    """The process, as a test sees it: a fork of the test's own, since a new interpreter takes long in the guest."""

    def __init__(self, size: int) -> None:
        self._from, to_parent = os.pipe()
        from_parent, self._to = os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(self._from)
            os.close(self._to)
            _serve_and_exit(size, os.fdopen(from_parent), os.fdopen(to_parent, "w"))
        os.close(from_parent)
        os.close(to_parent)
        self._lines = os.fdopen(self._from)
        told = self.line()
        self.size = size
        self.address, self.key = told["address"], told["key"]
        self.end = msgspec.convert(told["end"], FabricEnd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        os.write(self._to, json.dumps(message).encode() + b"\n")

    def line(self) -> Any:
        """Receive a line."""
        text = self._lines.readline()
        assert text, "the peer has ended"
        return json.loads(text)

    def piece(self, region: Region, length: int = 0) -> Piece:
        """Return a READ of its memory into the region."""
        return Piece(region, 0, self.address, self.key, length or self.size)

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            self.wait()
        self._lines.close()
        os.close(self._to)

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code, or the negative number of the signal."""
        _, status = os.waitpid(self.process, 0)
        self.process = 0
        return os.waitstatus_to_exitcode(status)


def _serve_and_exit(size: int, lines: TextIO, answers: TextIO) -> NoReturn:
    try:
        _serve(size, lines, answers)
    except FabricFailed:
        os._exit(FAILED)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


def _serve(size: int, lines: TextIO, answers: TextIO) -> None:
    def say(message: object) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    fabric = open_fabric("rxe0")
    assert not isinstance(fabric, str), fabric
    memory = mmap.mmap(-1, size)
    memory[:] = bytes([OWN]) * size
    region, link = fabric.register(memory, BOTH), fabric.open_link(BOTH)
    say({"address": region.address, "key": region.remote_key, "end": msgspec.to_builtins(link.end)})
    theirs = json.loads(lines.readline())
    link.connect(msgspec.convert(theirs["end"], FabricEnd))
    say("joined")
    for text in lines:
        command, _, argument = json.loads(text).partition(" ")
        if command == "fill":
            memory[:] = bytes([int(argument)]) * size
        elif command == "close":
            region.close()
        elif command == "write":
            piece = Piece(region, 0, theirs["address"], theirs["key"], size, is_write=True)
            say("done")
            while True:
                Mover(link).move([piece], 60.0)
        say("done")
