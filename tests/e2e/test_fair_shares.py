"""One client takes all that one may have, and all others go on undisturbed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

import lakefs
from lakefs.errors import EngineBusy
from lakefs.limits import (
    CHUNK_BYTES,
    HELLO_TIMEOUT_S,
    SESSIONS_LINGERING_MAX,
    SESSIONS_PER_CONNECTION_MAX,
    STRANGERS_MAX,
)
from lakefs.transport.address import TcpAddress, parse_address
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m
from tests.e2e.served import Served, serving
from tests.raw_client import RawClient, raw_client

CONTENT = os.urandom(CHUNK_BYTES + 1)
"""Longer than an object that is put without a session."""
AT_ONCE = 64


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with TCP beside its Unix socket."""
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as engine:
        yield engine


async def open_sessions(client: RawClient, count: int) -> list[bytes]:
    sessions: list[bytes] = []
    while len(sessions) < count:
        asked = min(AT_ONCE, count - len(sessions))
        for _ in range(asked):
            await client.ask(m.SessionOpen())
        for _ in range(asked):
            opened = await client.message()
            assert isinstance(opened, m.SessionOpened)
            sessions.append(opened.session)
    return sessions


def sessions_of(lake: lakefs.Lake) -> int:
    count = lake.status()["clients"]["sessions"]
    assert isinstance(count, int)
    return count


def test_a_client_that_has_all_its_sessions_keeps_nobody_from_putting(served: Served) -> None:
    async def main() -> None:
        async with raw_client(TrioNetwork(), served.server) as greedy:
            await greedy.hello()
            sessions = await open_sessions(greedy, SESSIONS_PER_CONNECTION_MAX)
            await greedy.ask(m.SessionOpen())
            with pytest.raises(EngineBusy, match="4096 puts are in progress on this connection"):
                await greedy.message()
            await trio.to_thread.run_sync(puts_go_on, served, "beside")
            for number, session in enumerate(sessions[: SESSIONS_LINGERING_MAX + 10]):
                payload = f"payload {number}".encode()
                await greedy.ask(m.StoreChunks(session, [1], [len(payload)]), payload)
                await greedy.message()

    trio.run(main)
    with lakefs.connect(served.server) as lake:
        until = time.monotonic() + 10
        while sessions_of(lake) != SESSIONS_LINGERING_MAX:
            assert time.monotonic() < until, sessions_of(lake)
    puts_go_on(served, "behind")


def puts_go_on(served: Served, name: str) -> None:
    with lakefs.connect(served.server) as lake:
        lake.put(f"fair/{name}", CONTENT, create_bucket=True)
        assert lake.get(f"fair/{name}") == CONTENT


@contextmanager
def silent_strangers(address: TcpAddress) -> Iterator[None]:
    """Open connections that send nothing, almost a thousand a second; the last thousand stay open."""
    ended = threading.Event()

    def come() -> None:
        here: deque[socket.socket] = deque()
        while not ended.wait(0.001):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex((address.host, address.port))
            here.append(stranger)
            if len(here) > 1000:
                here.popleft().close()
        for stranger in here:
            stranger.close()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_flood_of_silent_strangers_over_tcp_keeps_no_client_out(served: Served) -> None:
    [listens] = [line for line in served.printed if "tcp://" in line]
    address = parse_address(listens.split()[1])
    assert isinstance(address, TcpAddress)
    token = served.token()
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(STRANGERS_MAX + 1)]
    try:
        strangers[0].settimeout(HELLO_TIMEOUT_S / 2)
        assert b"not shown the token" in strangers[0].recv(1000)
        with silent_strangers(address):
            for number in range(3):
                puts_go_on(served, f"local-{number}")
                with lakefs.connect(str(address), token=token) as lake:
                    assert lake.get(f"fair/local-{number}") == CONTENT
    finally:
        for stranger in strangers:
            stranger.close()
