"""GET: the right bytes, from memory, from the disk, to slow clients, in ranges; and never wrong ones."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.e2e.s3_raw import Signer, signer_of
from tests.e2e.served import Served, serving
from tests.served_devices import DEVICES

MIB: Final = 1 << 20
SIZE: Final = 9 * MIB + 12_345
CONTENT: Final = random.Random(11).randbytes(SIZE)
OPTIONS: Final = ("--s3", "127.0.0.1:0", "--dram-tier-bytes", "0")
"""No DRAM tier: it would serve chunks in spite of damage on the disk."""
SMALL: Final = random.Random(12).randbytes(5000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), *OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; `bucket` holds a large and a small object."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    assert signer.ask("PUT", "/bucket/large", CONTENT).status == 200
    assert signer.ask("PUT", "/bucket/small", SMALL).status == 200
    return signer


def drop_pages(served: Served) -> None:
    """Make the page cache forget what is stored."""
    for path in served.segments():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def place_of(served: Served, content: bytes) -> tuple[Path, int]:
    """Return segment file and offset of some stored bytes."""
    for path in served.segments():
        offset = path.read_bytes().find(content)
        if offset >= 0:
            return path, offset
    raise AssertionError("the bytes are in no segment")


def flip(path: Path, offset: int) -> None:
    """Flip one bit; a second time flips it back."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["large", "small"])
def test_content_comes_from_the_disk_as_it_comes_from_memory(served: Served, s3: Signer, name: str) -> None:
    expected = CONTENT if name == "large" else SMALL
    for _ in range(2):
        drop_pages(served)
        assert s3.ask("GET", f"/bucket/{name}").body == expected  # from the disk, the first time
        assert s3.ask("GET", f"/bucket/{name}").body == expected


def test_ranges_are_those_bytes_wherever_they_lie(served: Served, s3: Signer) -> None:
    generator = random.Random(5)
    borders = [0, 1, 64 << 10, 4 * MIB - 1, 4 * MIB, 8 * MIB, SIZE - 1]
    for turn in range(60):
        first = generator.choice([*borders, generator.randrange(SIZE)])
        length = generator.choice([1, 4096, 64 << 10, (64 << 10) + 1, 3 * MIB, SIZE])
        if turn % 10 == 0:
            drop_pages(served)
        answer = s3.ask("GET", "/bucket/large", headers={"range": f"bytes={first}-{first + length - 1}"})
        assert answer.status == 206
        assert answer.body == CONTENT[first : first + length]
        stop = min(first + length, SIZE)
        assert answer.headers["content-range"] == f"bytes {first}-{stop - 1}/{SIZE}"


def test_a_client_that_takes_its_bytes_slowly_gets_the_same(served: Served, s3: Signer) -> None:
    request = s3.request("GET", "/bucket/large", headers={"connection": "close"}).raw()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(s3.address)
        connection.sendall(request)
        received = bytearray()
        sizes = random.Random(3)
        while piece := connection.recv(sizes.choice([1, 1000, 50_000])):
            received += piece
            if len(received) % 7 == 0:
                drop_pages(served)  # what the gateway had read when it began to answer
    assert received.partition(b"\r\n\r\n")[2] == CONTENT


def test_many_clients_that_do_not_read_keep_nobody_waiting(s3: Signer) -> None:
    request = s3.request("GET", "/bucket/large").raw()
    stalled = []
    try:
        for _ in range(50):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(s3.address)
            connection.sendall(request)
            stalled.append(connection)
        assert s3.ask("GET", "/bucket/large").body == CONTENT
        assert s3.ask("GET", "/bucket/small").body == SMALL
    finally:
        for connection in stalled:
            connection.close()


@pytest.mark.parametrize("cold", [False, True])
def test_damaged_content_is_never_sent_but_cut_short_or_read_from_other_shards(
    served: Served, s3: Signer, cold: bool
) -> None:
    place = 5 * MIB + 99
    path, offset = place_of(served, CONTENT[place : place + 64])
    flip(path, offset)
    try:
        if cold:
            drop_pages(served)
        raw = s3.request("GET", "/bucket/large").raw()
        with socket.create_connection(s3.address, timeout=30) as connection:
            connection.sendall(raw)
            received = bytearray()
            while piece := connection.recv(MIB):
                received += piece
                if received.endswith(CONTENT[-64:]):  # whole: the connection stays open
                    break
        body = received.partition(b"\r\n\r\n")[2]
        assert body == CONTENT if DEVICES else len(body) <= place
        assert body == CONTENT[: len(body)]
        ahead = s3.ask("GET", "/bucket/large", headers={"range": "bytes=100-199"})
        assert ahead.body == CONTENT[100:200]  # all else in it is served
    finally:
        flip(path, offset)
    assert s3.ask("GET", "/bucket/large").body == CONTENT


def test_damage_that_is_seen_before_the_answer_begins_is_an_error_but_at_a_lake(served: Served, s3: Signer) -> None:
    path, offset = place_of(served, SMALL[1000:1064])
    flip(path, offset)
    try:
        drop_pages(served)
        answer = s3.ask("GET", "/bucket/small")
        if DEVICES:
            assert answer.body == SMALL
        else:
            assert (answer.status, answer.code) == (500, "InternalError")
            assert SMALL not in answer.body
    finally:
        flip(path, offset)
    assert s3.ask("GET", "/bucket/small").body == SMALL
