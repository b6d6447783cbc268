"""A proxy between one mount and its engine that holds notices back, and loses answers or whole connections.

It passes whole frames on, both ways, and the descriptors that come with them.  So it stands before a Unix socket as
well as before a TCP port, and what a mount is served by the engine is the same with it.

    late_s     each notice (a frame of a watch) waits a random time up to this; their order stays
    cut        closes all connections: notices that waited are lost with them
    lose       closes the connection in place of the next answer to a request of these kinds: the change was made; or,
               with `unmade`, in place of the request
    refuse     also closes new connections until `accept`
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX
from lakefs.wire.frames import FRAME_HEADER, HEADER_BYTES, Kind
from lakefs.wire.messages import Request

_RECEIVE_BYTES: Final = 1 << 20
_CONTROL_BYTES: Final = FRAME_HEADER.offset_of("control_bytes")
_BODY_BYTES: Final = FRAME_HEADER.offset_of("body_bytes")
_OP: Final = FRAME_HEADER.offset_of("op")
_STREAM_ID: Final = FRAME_HEADER.offset_of("stream_id")
_KIND: Final = FRAME_HEADER.offset_of("kind")


@dataclass(frozen=True)
class _Frame:
    """One whole frame."""

    content: bytes

    @property
    def kind(self) -> int:
        return self.content[_KIND]

    @property
    def op(self) -> int:
        return int.from_bytes(self.content[_OP : _OP + 2], "little")

    @property
    def stream_id(self) -> int:
        return int.from_bytes(self.content[_STREAM_ID : _STREAM_ID + 4], "little")


class _Frames:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._left = bytearray()

    def add(self, received: bytes) -> Iterator[_Frame]:
        """Yield the frames that are whole with these bytes."""
        self._left += received
        while len(self._left) >= HEADER_BYTES:
            parts = (
                int.from_bytes(self._left[offset : offset + 4], "little") for offset in (_CONTROL_BYTES, _BODY_BYTES)
            )
            length = HEADER_BYTES + sum(parts)
            if len(self._left) < length:
                return
            yield _Frame(bytes(self._left[:length]))
            del self._left[:length]


class Meddler:
    """The proxy of one mount: `address` is what the mount is given as its engine."""

    def __init__(self, engine: str, folder: Path, name: str, *, late_s: float = 0.0, seed: int = 0) -> None:
        self.late_s = late_s
        self.lost = threading.Event()
        """Set when an answer was lost."""
        self.passed: Counter[int] = Counter()
        """Number of requests passed to the engine, by their operation's number."""
        self._random = random.Random(seed)
        self._engine = engine
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._losing: tuple[int, ...] = ()
        self._refusing = False
        self._refuses_then = self._unmade = False
        if engine.startswith("unix:"):
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(folder / name))
            self.address = f"unix:{folder / name}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refused = self._refusing
            try:
                engine = None if refused else dial(self._engine)
            except OSError:
                engine = None
            if engine is None:
                client.close()
                continue
            link = _Link(self, client, engine)
            with self._lock:
                self._links.add(link)
            link.start()

    def lose(self, *requests: type[Request], refuse: bool = False, unmade: bool = False) -> None:
        """Close the connection in place of the next answer to one of these requests, or in place of the request.

        With `refuse` new connections are closed from then on, until `accept` is called.
        """
        with self._lock:
            self.lost.clear()
            self._refuses_then, self._unmade = refuse, unmade
            self._losing = tuple(request.OP for request in requests)

    def cut(self, *, refuse: bool = False) -> None:
        """Close all connections; with `refuse` new ones, too, until `accept` is called."""
        with self._lock:
            self._refusing = refuse
            links = list(self._links)
        for link in links:
            link.close()

    def accept(self) -> None:
        """Let the mount connect again."""
        with self._lock:
            self._refusing = False

    def delay_s(self) -> float:
        """Return how long the next notice waits."""
        with self._lock:
            return self._random.random() * self.late_s

    def loses(self, op: int) -> bool:
        """Return True if this request's answer is to be lost; asked once for each request."""
        with self._lock:
            is_lost = op in self._losing
            if is_lost:
                self._losing = ()
            return is_lost

    def lose_request(self) -> None:
        """Raise OSError if a request is to be lost, not its answer."""
        if self._unmade:
            self.note_loss()
            raise OSError("this request is lost")

    def note_loss(self) -> None:
        """Note that an answer was lost, or a request."""
        with self._lock:
            self._refusing = self._refusing or self._refuses_then
        self.lost.set()

    def forget(self, link: _Link) -> None:
        """Note that a connection is closed."""
        with self._lock:
            self._links.discard(link)

    def close(self) -> None:
        """End the proxy and its connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        self.cut()


@dataclass(eq=False)
class _Link:
    """One connection of the mount, and that to the engine which stands behind it."""

    meddler: Meddler
    client: socket.socket
    engine: socket.socket
    _lost: set[int] = field(default_factory=set)
    """Streams whose answer is to be lost."""
    _waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Notices, and when each is passed on."""

    _ending_one: threading.Lock = field(default_factory=threading.Lock)
    _running: int = 2
    """Number of directions that still pass something on."""

    def start(self) -> None:
        """Pass on, both ways, until one end closes."""
        for run in (self._up, self._down):
            threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        """Close both ends; their threads end then."""
        for end in (self.client, self.engine):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        frames = _Frames()
        with suppress(OSError), self._ending():
            while True:
                received, descriptors = _receive(self.client)
                if not received:
                    return
                for frame in frames.add(received):
                    if frame.kind == Kind.REQUEST and self.meddler.loses(frame.op):
                        self.meddler.lose_request()
                        self._lost.add(frame.stream_id)
                    self.meddler.passed[frame.op] += frame.kind == Kind.REQUEST
                _send(self.engine, received, descriptors)

    def _down(self) -> None:
        frames = _Frames()
        unsent: list[int] = []
        with suppress(OSError), self._ending():
            while True:
                self._pass_notices()
                if not select.select([self.engine], [], [], self._patience_s())[0]:
                    continue
                received, descriptors = _receive(self.engine)
                if not received:
                    return
                unsent += descriptors
                passed = b"".join(self._passed(frame) for frame in frames.add(received))
                if passed:
                    _send(self.client, passed, unsent)
                    unsent = []

    def _passed(self, frame: _Frame) -> bytes:
        if frame.kind == Kind.EVENT and self.meddler.late_s:
            earliest = self._waiting[-1][0] if self._waiting else 0.0
            self._waiting.append((max(earliest, time.monotonic() + self.meddler.delay_s()), frame.content))
            return b""
        if frame.kind in (Kind.REPLY, Kind.FAILURE) and frame.stream_id in self._lost:
            self.meddler.note_loss()
            raise OSError("this answer is lost")
        return frame.content

    def _pass_notices(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _send(self.client, self._waiting.popleft()[1], [])

    def _patience_s(self) -> float | None:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.close()
            self.meddler.forget(self)
            with self._ending_one:
                self._running -= 1
                is_last = not self._running
            if is_last:
                self.client.close()
                self.engine.close()


def dial(address: str) -> socket.socket:
    """Connect to an engine's address."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix:"))
        return sock
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    if sock.family != socket.AF_UNIX:
        return sock.recv(_RECEIVE_BYTES), []
    received, descriptors, _, _ = socket.recv_fds(
        sock, _RECEIVE_BYTES, DESCRIPTORS_PER_FRAME_MAX, socket.MSG_CMSG_CLOEXEC
    )
    return received, descriptors


def _send(sock: socket.socket, content: bytes, descriptors: list[int]) -> None:
    """Send all; descriptors go with the first byte, as they came: a frame never arrives before its own."""
    sent = 0
    if descriptors:
        try:
            sent = socket.send_fds(sock, [content], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    sock.sendall(memoryview(content)[sent:])


@contextmanager
def meddling(engine: str, folder: Path, name: str, *, late_s: float = 0.0, seed: int = 0) -> Iterator[Meddler]:
    """Context manager: a proxy for the block."""
    meddler = Meddler(engine, folder, name, late_s=late_s, seed=seed)
    try:
        yield meddler
    finally:
        meddler.close()
