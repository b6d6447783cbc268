"""An HTTP server that does nothing: `python -m bench.peers.null_http BYTES` answers every request with the same
bytes.

A generator's rate against it is the generator's limit.  It listens on loopback, prints its port, and serves until it
is ended.  One thread; requests without bodies only, each received whole or not at all.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bench.harness.process import ROOT, clean_environment
from bench.harness.s3_requests import Endpoint
from bench.peers.s3_sides import Server

_RECEIVE_BYTES: Final = 1 << 16
_END: Final = b"\r\n\r\n"


def serve(answer_bytes: int) -> None:
    """Serve until the process is ended."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % answer_bytes + bytes(answer_bytes)
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener, select.epoll() as epoll:
        print(listener.getsockname()[1], flush=True)
        epoll.register(listener.fileno(), select.EPOLLIN)
        while True:
            for descriptor, _ in epoll.poll():
                if descriptor == listener.fileno():
                    accepted, _ = listener.accept()
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[accepted.fileno()] = accepted
                    epoll.register(accepted.fileno(), select.EPOLLIN)
                    continue
                received = connections[descriptor].recv(_RECEIVE_BYTES)
                if not received:
                    connections.pop(descriptor).close()
                    continue
                connections[descriptor].sendall(answer * received.count(_END))


@contextmanager
def null_server(answer_bytes: int) -> Iterator[Server]:
    """Context manager: a null server; it forgets what is put, and answers every GET with zeros."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.null_http", str(answer_bytes)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield Server("null", Endpoint(int(process.stdout.readline())), process.pid)
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
