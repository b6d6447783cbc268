"""`python -m bench.tcp_cpu`: server CPU for content read over TCP, in microseconds a MiB, sides interleaved.

The engine streams an object of 64 MiB over its native protocol, with and without its DRAM tier.  Beside it: a process
that copies, sums (CRC32C of each 64 KiB) and sends a file, and nothing else; and nginx, with sendfile, if it is
installed.  Clients receive and drop the bytes; theirs is not counted.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import write_file
from bench.harness.cpu import cpu_s, process_tree
from bench.harness.process import ROOT, EngineProcess, clean_environment
from bench.harness.s3_requests import BUCKET
from bench.peers.s3_sides import nginx
from bench.peers.s3_stores import StoreUnavailable
from engine.format.checksums import vector_of

MIB: Final = 1 << 20
SIZE: Final = 64 * MIB
ROUNDS: Final = 15
GETS: Final = 4
WARM_UP: Final = 4
WINDOW: Final = 4 * MIB
_BARE: Final = "from bench.tcp_cpu import bare; bare()"

Side = tuple[Callable[[], object], Callable[[], float]]
"""Reads the content once; returns the server's CPU seconds so far."""


def bare() -> None:
    """Copy, sum and send the file of the first argument each time that a byte is received; one connection."""
    descriptor = os.open(sys.argv[1], os.O_RDONLY)
    window = memoryview(bytearray(WINDOW))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            for at in range(0, SIZE, WINDOW):
                count = os.preadv(descriptor, [window], at)
                vector_of(window[:count])
                connection.sendall(window[:count])


def drop(connection: socket.socket, buffer: memoryview, left: int) -> None:
    """Receive so many bytes."""
    while left:
        count = connection.recv_into(buffer, min(left, len(buffer)))
        assert count, "the server closed the connection"
        left -= count


@contextmanager
def engine_side(folder: Path, source: Path, *flags: str) -> Iterator[Side]:
    """Context manager: an engine, and a client over TCP that checks nothing."""
    folder.mkdir()
    with EngineProcess(folder, "--native", "127.0.0.1:0", *flags) as engine:
        with engine.connect() as lake:
            lake.put("bench/x", source)
        address = next(line.split()[1] for line in engine.printed if "tcp://" in line)
        token = (engine.data / "native.token").read_text().strip()
        target = memoryview(bytearray(SIZE))
        with lakefs.connect(address, token=token, check=lakefs.Check.NONE) as lake:
            yield lambda: lake.get_into("bench/x", target), lambda: cpu_s(process_tree(engine.pid))


@contextmanager
def bare_side(source: Path) -> Iterator[Side]:
    """Context manager: a process that runs `bare`, and a connection to it."""
    command = [sys.executable, "-c", _BARE, str(source)]
    environment = clean_environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        buffer = memoryview(bytearray(WINDOW))
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as connection:

            def read() -> None:
                connection.sendall(b"x")
                drop(connection, buffer, SIZE)

            yield read, lambda: cpu_s([process.pid])


@contextmanager
def nginx_side(folder: Path, source: Path) -> Iterator[Side]:
    """Context manager: nginx, and a connection to it.  StoreUnavailable."""
    folder.mkdir()
    with nginx(folder) as server:
        server.put("x", source.read_bytes())
        buffer = memoryview(bytearray(WINDOW))
        with socket.create_connection(("127.0.0.1", server.endpoint.port)) as connection:

            def read() -> None:
                connection.sendall(f"GET /{BUCKET}/x HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(1)
                drop(connection, buffer, SIZE)

            yield read, server.cpu_s


def main() -> None:
    """Print a line for each side: median, least and most CPU a MiB."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".tcp-") as name, ExitStack() as stack:
        folder = Path(name)
        source = folder / "source"
        write_file(source, SIZE)
        sides = {
            "engine, page cache": stack.enter_context(engine_side(folder / "plain", source, "--dram-tier-bytes", "0")),
            "engine, DRAM tier": stack.enter_context(engine_side(folder / "dram", source, "--dram-tier-bytes", "512M")),
            "copy, sum and send": stack.enter_context(bare_side(source)),
        }
        try:
            sides["nginx, sendfile"] = stack.enter_context(nginx_side(folder / "nginx", source))
        except StoreUnavailable as reason:
            print(reason)
        spent: dict[str, list[float]] = {side: [] for side in sides}
        for read, _ in sides.values():
            for _ in range(WARM_UP):
                read()
        for _ in range(ROUNDS):
            for side, (read, cpu) in sides.items():
                before = cpu()
                for _ in range(GETS):
                    read()
                spent[side].append((cpu() - before) / GETS / SIZE * MIB * 1e6)
        print("CPU of the server, us a MiB")
        for side, found in spent.items():
            print(f"{side:<20} median {statistics.median(found):4.0f}, {min(found):.0f} to {max(found):.0f}")


if __name__ == "__main__":
    main()
