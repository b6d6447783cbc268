"""One raw connection to an S3 port: bytes are sent as they are, and answers are read byte for byte.

Nothing is taken from the gateway.  An answer ends where HTTP says so; one that ends its connection is read to the end
of the connection, so that no byte behind it is missed.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Final, Self
from urllib.parse import urlsplit

WAIT_S: Final = 30.0
_UNREAD_S: Final = 0.02
"""The longest wait for the server to take bytes; one that keeps them in the socket is not waited for any longer."""
_SOCK_DIAG: Final = 4
_DIAG_BY_FAMILY: Final = 20
_NLM_REQUEST: Final = 1
_NLM_ERROR: Final = 2
_ANY_INTERFACE_AND_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_PIECE_BYTES: Final = 1 << 18
_HEAD_END: Final = b"\r\n\r\n"
_BODILESS: Final = (204, 304)
_OWN: Final = re.compile(rb"(?m)^(Date|x-amz-request-id): [^\r\n]*")
_OWN_TIME: Final = re.compile(rb"(?m)^Last-Modified: [^\r\n]*")
_OWN_XML: Final = re.compile(rb"<(RequestId|HostId)>[^<]*<")


def without_own(answers: bytes) -> bytes:
    """Return bytes of answers without those that differ between gateways and between moments."""
    return _OWN_XML.sub(rb"<\1>-<", _OWN_TIME.sub(b"Last-Modified: -", _OWN.sub(rb"\1: -", answers)))


@dataclass(frozen=True)
class Reply:
    """One answer as received.  `interim`: the answers of class 1xx before it."""

    interim: bytes
    head: bytes
    """Status line and headers, with the empty line."""
    body: bytes
    is_last: bool
    """True if the server ended the connection after it."""

    @property
    def status(self) -> int:
        """Status code."""
        return int(self.head[9:12])

    @property
    def code(self) -> str:
        """The code of an S3 error; "" when it is none."""
        found = re.search(rb"<Code>([^<]*)</Code>", self.body[:400])
        return found[1].decode() if found else ""

    def header(self, name: str) -> str:
        """Return the value of a header, "" without one."""
        found = re.search(rb"(?mi)^%b: ?([^\r\n]*)" % re.escape(name.encode()), self.head)
        return found[1].decode("latin-1") if found else ""

    def masked(self, *, times: bool = False) -> bytes:
        """Return all bytes, without those that differ between two gateways: the date, and the ids of the request and
        the host.  `times`: Last-Modified is left out, too."""
        head = _OWN.sub(rb"\1: -", self.head)
        if times:
            head = _OWN_TIME.sub(b"Last-Modified: -", head)
        body = _OWN_XML.sub(rb"<\1>-<", self.body) if self.body.startswith(b"<?xml") else self.body
        return self.interim + head + body + (b"<end of the connection>" if self.is_last else b"")


class Line:
    """A connection.  `receive_bytes`: size of its receive buffer."""

    def __init__(self, address: tuple[str, int], *, receive_bytes: int = 0) -> None:
        self._socket = socket.socket()
        if receive_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(WAIT_S)
        self._left = b""
        self._has_ended = False
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Port of this end."""
        port: int = self._socket.getsockname()[1]
        return port

    def send(self, raw: bytes) -> None:
        """Send; bytes that the server does not take because it has ended the connection are lost."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(raw)

    def send_and_wait_until_read(self, raw: bytes) -> None:
        """Send, and wait until the server has read these bytes, so that it meets the next ones by themselves."""
        self.send(raw)
        until = time.monotonic() + _UNREAD_S
        while time.monotonic() < until and _diagnosis().unread_bytes(self._socket):
            pass

    def end_sending(self) -> None:
        """Close the sending side."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def reset(self) -> None:
        """Break the connection off: the server gets a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def set_timeout(self, seconds: float) -> None:
        """Set the time that each receive waits at most: TimeoutError."""
        self._socket.settimeout(seconds)

    def ask(self, raw: bytes) -> Reply:
        """Send one request and return its answer."""
        self.send(raw)
        return self.reply(is_head=raw.startswith(b"HEAD "))

    def reply(self, *, is_head: bool = False) -> Reply:
        """Return the next answer.  ConnectionError if the connection ends before it is whole.

        `is_head`: it answers a HEAD, so its length is not that of a body.
        """
        interim, head = b"", self._head()
        while head.startswith(b"HTTP/1.1 1"):
            interim, head = interim + head, self._head()
        if re.search(rb"(?mi)^connection: close\r", head):
            return Reply(interim, head, self.rest(), is_last=True)
        length = re.search(rb"(?mi)^content-length: (\d+)\r", head)
        bodiless = is_head or int(head[9:12]) in _BODILESS or length is None
        body = b"" if bodiless or length is None else self._exactly(int(length[1]))
        return Reply(interim, head, body, is_last=False)

    def rest(self) -> bytes:
        """Return all bytes up to the end of the connection."""
        found = [self._left]
        self._left = b""
        while piece := self._received():
            found.append(piece)
        return b"".join(found)

    def receive(self, size: int) -> bytes:
        """Receive some bytes of an answer, at most `size`; b"" at the end of the connection."""
        if not self._left:
            self._left = self._received()
        found, self._left = self._left[:size], self._left[size:]
        return found

    def put_back(self, received: bytes) -> None:
        """Receive these bytes again next."""
        self._left = received + self._left

    def _head(self) -> bytes:
        while _HEAD_END not in self._left:
            self._more()
        head, _, self._left = self._left.partition(_HEAD_END)
        assert head.startswith(b"HTTP/1.1 "), head[:200]
        return head + _HEAD_END

    def _exactly(self, size: int) -> bytes:
        pieces, count = [self._left], len(self._left)
        while count < size:
            piece = self._received()
            if not piece:
                raise ConnectionError(f"the connection ended after {count} of {size} bytes of a body")
            pieces.append(piece)
            count += len(piece)
        found = b"".join(pieces)
        self._left = found[size:]
        return found[:size]

    def _more(self) -> None:
        piece = self._received()
        if not piece:
            raise ConnectionError(f"the connection ended in the middle of a head: {self._left[:200]!r}")
        self._left += piece

    def _received(self) -> bytes:
        if self._has_ended:
            return b""
        try:
            piece = self._socket.recv(_PIECE_BYTES)
        except ConnectionResetError:
            piece = b""
        self._has_ended = not piece
        return piece


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


class _Diagnosis:
    """Asks the kernel about one socket (sock_diag(7)); /proc/net/tcp would list every connection of the last minute."""

    def __init__(self) -> None:
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)

    def unread_bytes(self, ours: socket.socket) -> int:
        """Return how many bytes the other end has received and not read; 0 if it has closed."""
        here, there = ours.getsockname(), ours.getpeername()
        addresses = (socket.inet_aton(host).ljust(16, b"\0") for host in (there[0], here[0]))
        connection = struct.pack("!HH16s16s", there[1], here[1], *addresses) + _ANY_INTERFACE_AND_COOKIE
        request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + connection
        header = struct.pack("=IHHII", 16 + len(request), _DIAG_BY_FAMILY, _NLM_REQUEST, 1, 0)
        self._kernel.send(header + request)
        answer = self._kernel.recv(4096)
        (kind,) = struct.unpack_from("=H", answer, 4)
        if kind == _NLM_ERROR:
            (code,) = struct.unpack_from("=i", answer, 16)
            if -code == errno.ENOENT:
                return 0
            raise OSError(-code, os.strerror(-code))
        (unread,) = struct.unpack_from("=I", answer, 72)  # idiag_rqueue
        return int(unread)


@cache
def _diagnosis() -> _Diagnosis:
    return _Diagnosis()
