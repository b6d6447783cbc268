"""A kernel for the native layer: the other end of its device, which sends requests and receives answers.

The layer of a process is one, so each test has it alone: `kernel` attaches it to a new pair of sockets and ends it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import pytest

from fuse.native import _layer
from lakefs.host.crc import crc32c
from lakefs.limits import GRANULE_BYTES

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
OUT_HEADER: Final = struct.Struct("<IiQ")
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_IN: Final = struct.Struct("<QQIIQII")
WRITE_OUT: Final = struct.Struct("<II")
OPEN_OUT: Final = struct.Struct("<QIi")
ENTRY_BYTES: Final = 128
LOOKUP, OPEN, READ, WRITE, INIT, CREATE = 1, 14, 15, 16, 26, 35
ROOM: Final = (1 << 20) + (64 << 10)
WAIT_S: Final = 20
_SO_SNDBUFFORCE: Final = 32


@dataclass
class Answer:
    """One answer, as the kernel gets it."""

    unique: int
    error: int
    body: bytes


@dataclass
class Kernel:
    """The kernel's end of a layer's device, and libfuse's end of the layer."""

    socket: socket.socket
    session: int
    unique: int = 1
    sent: dict[int, bytes] = field(default_factory=dict)

    def ask(self, opcode: int, body: bytes, *, length: int | None = None) -> int:
        """Send a request; return its number.  `length`: another one than its own in its header."""
        self.unique += 2
        total = IN_HEADER.size + len(body) if length is None else length
        self.socket.send(IN_HEADER.pack(total, opcode, self.unique, 2, 0, 0, 0, 0, 0) + body)
        return self.unique

    def read(self, handle: int, offset: int, size: int) -> int:
        """Send a READ."""
        return self.ask(READ, READ_IN.pack(handle, offset, size, 0, 0, 0, 0))

    def write(self, handle: int, offset: int, data: bytes, *, flags: int = 0, size: int | None = None) -> int:
        """Send a WRITE.  `size`: another one than that of the bytes."""
        count = len(data) if size is None else size
        return self.ask(WRITE, WRITE_IN.pack(handle, offset, count, flags, 0, 0, 0) + data)

    def answer(self) -> Answer:
        """Return the next answer."""
        text = self.socket.recv(2 << 20)
        length, error, unique = OUT_HEADER.unpack_from(text)
        assert length == len(text)
        return Answer(unique, error, text[OUT_HEADER.size :])

    def has_answer(self) -> bool:
        """Return True if an answer is waiting."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def given(self) -> bytes | None:
        """Return what libfuse is given now, None if there is nothing."""
        try:
            return _layer.receive(ROOM)
        except InterruptedError:
            return None

    def next_given(self) -> bytes:
        """Wait as pyfuse3 does until libfuse is given a request, and return it."""
        poll = select.epoll()
        try:
            poll.register(self.session, select.EPOLLIN)
            while True:
                assert poll.poll(WAIT_S), "libfuse is given nothing"
                found = self.given()
                if found is not None:
                    return found
        finally:
            poll.close()

    def settle(self) -> Answer | bytes:
        """Return the answer to the last request, or the request, if libfuse was given it."""
        poll = select.epoll()
        try:
            poll.register(self.session, select.EPOLLIN)
            poll.register(self.socket.fileno(), select.EPOLLIN)
            while True:
                assert poll.poll(WAIT_S), "neither answered nor given to libfuse"
                if self.has_answer():
                    return self.answer()
                found = self.given()
                if found is not None:
                    return found
        finally:
            poll.close()


@contextmanager
def kernel(threads: int = 2, *, passthrough: bool = True) -> Iterator[Kernel]:
    """Attach the layer to a new device; `passthrough`: it is taken if the device offers it."""
    ours, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, device):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        with suppress(OSError):  # root may have more: an answer that finds no room is lost
            each.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 32 << 20)
    if ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 8 << 20:
        pytest.skip("only root may have sockets with room for the answers")
    ours.settimeout(WAIT_S)
    _layer.arm(threads, passthrough)
    session = _layer.attach(device.detach())
    try:
        yield Kernel(ours, session)
    finally:
        _layer.end()
        os.close(session)
        ours.close()


def checksums(content: bytes) -> bytes:
    """Return the CRC32C of each granule of a piece, 4 bytes each."""
    granules = (content[at : at + GRANULE_BYTES] for at in range(0, len(content), GRANULE_BYTES))
    return b"".join(crc32c(granule).to_bytes(4, "little") for granule in granules)


def taught(path: str, pieces: list[bytes], *, size: int | None = None, place: int = 4096) -> tuple[_layer.Content, int]:
    """Write pieces to a file with gaps between them; return a content that knows them all, and the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    content = _layer.Content(sum(map(len, pieces)) if size is None else size, [len(piece) for piece in pieces])
    at = place
    for index, piece in enumerate(pieces):
        os.pwrite(descriptor, piece, at)
        content.teach(index, descriptor, at, 0, checksums(piece))
        at += len(piece) + 100
    return content, descriptor
