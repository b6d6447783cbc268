"""A real engine under clients that come and go, talk nonsense, or claim too much: it serves the others as before."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.connect import connect
from lakefs.limits import BODY_BYTES_MAX, CONTROL_BYTES_MAX
from lakefs.wire.connection import ClientConnection
from lakefs.wire.frames import PROTOCOL_VERSION, Kind, pack_frame
from lakefs.wire.messages import Hello, Ping, StatNames, StoreChunks
from tests.e2e.served import WAIT_S, Served, serving

pytestmark = pytest.mark.thorough

CONNECTIONS = 10_000
AT_ONCE = 100
PARTS = 4
KEPT_KIB = 4
"""Memory that a connection that is gone may leave behind."""
CONTENT = os.urandom(100_000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as engine:
        with connect(engine.server) as client:
            client.put("bkt/x", CONTENT, create_bucket=True)
        yield engine


def dial(served: Served, way: str) -> socket.socket:
    if way == "socket":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(served.socket))
        return sock
    (address,) = [line.split()[1] for line in served.printed if "tcp://" in line]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def check_serves(served: Served) -> None:
    """Check that others are served, and that all that strangers held was given back."""
    with connect(served.server) as client:
        assert client.get("bkt/x") == CONTENT
        while (status := client.status()["clients"])["connections"] > 1:
            pass
        assert (status["sessions"], status["leases"]) == (0, 0)


def process_counts(served: Served) -> tuple[int, int]:
    """Return the engine's open descriptors and resident KiB."""
    assert served.process is not None
    process = Path(f"/proc/{served.process.pid}")
    lines = (process / "status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return len(list((process / "fd").iterdir())), resident


def counts_when_closed(served: Served, descriptors: int) -> tuple[int, int]:
    """Return the same, once no more are open: the engine's own count lacks connections that sent no Hello."""
    until = time.monotonic() + WAIT_S
    while (counts := process_counts(served))[0] > descriptors:
        assert time.monotonic() < until, f"{counts[0]} descriptors are open; {descriptors} should be"
    return counts


def come_and_go(served: Served, chance: random.Random, count: int) -> None:
    """Connect so many times, AT_ONCE at once; each says something, or not, and leaves in one way or another."""
    hello = ClientConnection().request(Hello(PROTOCOL_VERSION, "passing by"))[1]
    ping = pack_frame(Kind.REQUEST, Ping.OP, 1, Ping())
    for _ in range(count // AT_ONCE):
        held: list[socket.socket] = []
        for _ in range(AT_ONCE):
            sock = dial(served, chance.choice(("socket", "socket", "tcp")))
            sent = chance.choice((b"", b"", hello, hello[:10], hello + ping, ping))
            with contextlib.suppress(OSError):  # the engine may have refused it already
                sock.send(sent)
            held.append(sock)
        for sock in held:
            if chance.random() < 0.3:
                # Closed with a reset, in the middle of whatever the engine does.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()


def test_ten_thousand_connections_come_and_go(served: Served) -> None:
    chance = random.Random(1)
    check_serves(served)
    counts = [process_counts(served)]
    for _ in range(PARTS):
        come_and_go(served, chance, CONNECTIONS // PARTS)
        check_serves(served)
        counts.append(counts_when_closed(served, counts[0][0] + 3))
    # Memory of those that are there at once is kept for the next; what leaks grows in every part.
    grown = [after - before for (_, before), (_, after) in pairwise(counts)]
    assert min(grown) <= KEPT_KIB * CONNECTIONS // PARTS, f"memory of connections that are gone: {grown} KiB"


def nonsense() -> dict[str, bytes]:
    """Return bytes that a client may send after its Hello."""
    chance = random.Random(2)
    good = pack_frame(Kind.REQUEST, StatNames.OP, 7, StatNames([("bkt", "x")]))
    flipped = bytearray(good)
    flipped[-1] ^= 1
    return {
        "noise": chance.randbytes(5000),
        "zeros": bytes(5000),
        "http": b"GET / HTTP/1.1\r\nHost: lake\r\n\r\n" * 10,
        "flipped": bytes(flipped),
        "cut off": good[:-3],
        "control too large": oversized(good, control=CONTROL_BYTES_MAX + 1),
        "body too large": oversized(good, body=BODY_BYTES_MAX + 1),
        "endless": oversized(good, control=0xFFFFFFFF, body=0xFFFFFFFF),
        "operation of the future": pack_frame(Kind.REQUEST, 60_000, 7, Ping()),
        "reply from a client": pack_frame(Kind.REPLY, Ping.OP, 7, Ping()),
        "same stream twice": good + good,
        "stream 0": pack_frame(Kind.REQUEST, Ping.OP, 0, Ping()),
        "body that lies": pack_frame(Kind.REQUEST, StoreChunks.OP, 7, StoreChunks(b"s" * 16, [1], [1 << 40]), 10)
        + b"0123456789",
        "body that never comes": pack_frame(
            Kind.REQUEST, StoreChunks.OP, 7, StoreChunks(b"s" * 16, [1], [1 << 20]), 1 << 20
        ),
        "negative": pack_frame(Kind.REQUEST, StoreChunks.OP, 7, StoreChunks(b"s" * 16, [-1], [-5]), 0),
    }


def oversized(frame: bytes, *, control: int = 0, body: int = 0) -> bytes:
    """Return a header that claims more than any frame has; its checksum does not fit either."""
    header = bytearray(frame[:32])
    header[12:16] = (control or 10).to_bytes(4, "little")
    header[16:20] = body.to_bytes(4, "little")
    return bytes(header) + frame[32:]


@pytest.mark.parametrize("way", ["socket", "tcp"])
def test_nonsense_ends_its_own_connection_at_most(served: Served, way: str) -> None:
    token = served.token()
    before = process_counts(served)
    for what, payload in nonsense().items():
        for greeted in (True, False):
            with dial(served, way) as sock:
                if greeted:
                    sock.sendall(ClientConnection().request(Hello(PROTOCOL_VERSION, "odd", 0, token))[1])
                with contextlib.suppress(OSError):
                    sock.sendall(payload)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
        assert served.process is not None
        assert served.process.poll() is None, what
    check_serves(served)
    after = counts_when_closed(served, before[0] + 3)
    assert after[1] <= before[1] + 60_000, "memory for what was only claimed"
