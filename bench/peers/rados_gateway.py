"""The process between a client and RADOS, and its client.

    python -m bench.peers.rados_gateway CEPH_CONF SOCKET

The process does what a head of a lake does for its clients, as little as that can be: content comes over a Unix socket,
is hashed by BLAKE3, and is stored as one object of RADOS whose name is the hash.  A read is hashed and compared before
it is answered.  It keeps no names.  Requests are started as they arrive, so as many are in flight as the client lets
be; answers come in the order of the requests.  It ends with its one connection.

Both directions have a head of fixed size, then content:

    request     0  kind, 1 byte; 1  zeros, 3 bytes; 4  length of content, u32; 8  name, 32 bytes
    answer      0  status, i32 (0, or minus errno); 4  length of content, u32; 8  name, 32 bytes

`python3-rados` belongs to the system's Python; it is loaded from there, last on the path.
"""

from __future__ import annotations

import errno
import importlib
import json
import queue
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import blake3

SYSTEM_PACKAGES: Final = "/usr/lib/python3/dist-packages"
POOL: Final = "bench"
PUT: Final = 1
GET: Final = 2
COMMAND: Final = 3
"""Content: JSON of a command to the monitor, with `pgid` to the first OSD of that placement group."""
REQUEST: Final = struct.Struct("<B3xI32s")
ANSWER: Final = struct.Struct("<iI32s")
assert REQUEST.size == ANSWER.size == 40
NO_NAME: Final = bytes(32)
ANSWERS_MAX: Final = 256
Answer = tuple[int, bytes, bytes]
"""Status, name, content."""


def load_rados() -> Any:
    """Return the module of python3-rados.  ImportError if it is not installed, or is another Python's."""
    if SYSTEM_PACKAGES not in sys.path:
        sys.path.append(SYSTEM_PACKAGES)
    return importlib.import_module("rados")


# --- the process -----------------------------------------------------------------------------------------


class Gateway:
    """One connection, served by two threads: one starts requests, the other waits for their ends and answers."""

    def __init__(self, cluster: Any, connection: socket.socket) -> None:
        self._cluster = cluster
        self._connection = connection
        self._pool: Any = None
        self._answers: queue.Queue[Callable[[], Answer] | None] = queue.Queue(ANSWERS_MAX)

    def serve(self) -> None:
        """Serve until the client closes."""
        answering = threading.Thread(target=self._answer)
        answering.start()
        while (head := receive(self._connection, REQUEST.size)) is not None:
            kind, length, name = REQUEST.unpack(head)
            self._answers.put(self._start(kind, length, name))
        self._answers.put(None)
        answering.join()

    def _start(self, kind: int, length: int, name: bytes) -> Callable[[], Answer]:
        if kind == GET:
            return self._start_get(name, length)
        content = receive(self._connection, length)
        assert content is not None
        return self._start_put(content) if kind == PUT else lambda: self._command(content)

    def _start_put(self, content: bytes) -> Callable[[], Answer]:
        name = blake3.blake3(content).digest()
        ending = self._opened().aio_write_full(name.hex(), content)

        def finish() -> Answer:
            ending.wait_for_complete()
            return ending.get_return_value(), name, b""

        return finish

    def _start_get(self, name: bytes, length: int) -> Callable[[], Answer]:
        got: list[bytes] = []
        ending = self._opened().aio_read(name.hex(), length, 0, lambda _, content: got.append(content))

        def finish() -> Answer:
            ending.wait_for_complete_and_cb()
            status = ending.get_return_value()
            if status < 0:
                return status, name, b""
            if blake3.blake3(got[0]).digest() != name:
                return -errno.EIO, name, b""
            return 0, name, got[0]

        return finish

    def _command(self, content: bytes) -> Answer:
        command = json.loads(content)
        if "pgid" in command:
            self._cluster.wait_for_latest_osdmap()  # a client that reads and writes nothing has an old one
            status, out, said = self._cluster.pg_command(command["pgid"], json.dumps(command), b"")
        else:
            status, out, said = self._cluster.mon_command(json.dumps(command), b"")
        return status, NO_NAME, out if status == 0 else said.encode()

    def _opened(self) -> Any:
        if self._pool is None:
            self._pool = self._cluster.open_ioctx(POOL)
        return self._pool

    def _answer(self) -> None:
        while (finish := self._answers.get()) is not None:
            status, name, content = finish()
            self._connection.sendall(ANSWER.pack(status, len(content), name))
            if content:
                self._connection.sendall(content)


def receive(connection: socket.socket, length: int) -> bytes | None:
    """Return so many bytes, or None if the connection ended before."""
    received = connection.recv(length, socket.MSG_WAITALL)
    while len(received) < length:
        more = connection.recv(length - len(received), socket.MSG_WAITALL)
        if not more:
            return None
        received += more
    return received


def main() -> None:
    """Run the process."""
    configuration, path = sys.argv[1:]
    cluster = load_rados().Rados(conffile=configuration)
    cluster.connect()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        print("ready", flush=True)
        connection, _ = listener.accept()
    with connection:
        Gateway(cluster, connection).serve()
    cluster.shutdown()


# --- its client ------------------------------------------------------------------------------------------


class RadosError(Exception):
    """RADOS refused a request, or gave other bytes than were stored."""


class GatewayClient:
    """The client of one gateway."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))

    def close(self) -> None:
        """End the connection, and so its gateway."""
        self._socket.close()

    def put_all(self, contents: Sequence[bytes], in_flight: int) -> list[bytes]:
        """Store contents, so many in flight; return their names."""
        names: list[bytes] = []
        waiting = 0
        for content in contents:
            if waiting == in_flight:
                names.append(self._finish()[0])
                waiting -= 1
            self._socket.sendall(REQUEST.pack(PUT, len(content), NO_NAME))
            self._socket.sendall(content)
            waiting += 1
        return names + [self._finish()[0] for _ in range(waiting)]

    def get_all(self, names: Sequence[bytes], target: memoryview, in_flight: int) -> None:
        """Read contents as long as the target, one after the other into it, so many in flight."""
        waiting: deque[bytes] = deque()
        for name in names:
            if len(waiting) == in_flight:
                self._finish_get(waiting.popleft(), target)
            self._socket.sendall(REQUEST.pack(GET, len(target), name))
            waiting.append(name)
        while waiting:
            self._finish_get(waiting.popleft(), target)

    def command(self, **fields: object) -> Any:
        """Run a command of the monitor, or with `pgid` one of a placement group; return its JSON."""
        content = json.dumps({"format": "json"} | fields).encode()
        self._socket.sendall(REQUEST.pack(COMMAND, len(content), NO_NAME) + content)
        _, out = self._finish()
        return json.loads(out) if out.strip() else None

    def _finish_get(self, name: bytes, target: memoryview) -> None:
        answered, length = self._head()
        if answered != name or length != len(target):
            raise RadosError(f"asked for {len(target)} bytes of {name.hex()}, got {length} of {answered.hex()}")
        filled = 0
        while filled < length:
            count = self._socket.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            if not count:
                raise RadosError("the gateway has ended")
            filled += count

    def _finish(self) -> tuple[bytes, bytes]:
        name, length = self._head()
        content = receive(self._socket, length) if length else b""
        if content is None:
            raise RadosError("the gateway has ended")
        return name, content

    def _head(self) -> tuple[bytes, int]:
        head = receive(self._socket, ANSWER.size)
        if head is None:
            raise RadosError("the gateway has ended")
        status, length, name = ANSWER.unpack(head)
        if status < 0:
            said = receive(self._socket, length) if length else b""
            raise RadosError(f"status {status}: {(said or b'').decode(errors='replace')}")
        return name, length


if __name__ == "__main__":
    main()
