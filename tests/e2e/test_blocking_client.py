"""The blocking client: tickets in any order, from any thread, while engines end and others start."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine.server.connection import ServerLimits
from lakefs.client.blocking.engine import BlockingEngine, connect_blocking
from lakefs.client.blocking.link import Link
from lakefs.errors import EngineUnreachable, InvalidArgument, LakeError, ProtocolError
from lakefs.ids import data_chunk_id
from lakefs.transport import sockets
from lakefs.wire.messages import (
    BucketCreate,
    Buckets,
    Done,
    Ping,
    ReadChunks,
    SessionOpen,
    SessionOpened,
    Status,
    StatusReply,
    Watch,
)
from tests.engines import InThread, read, store, wait_until_served
from tests.fake_service import FakeService


@pytest.fixture
def engine_thread(unix: str) -> Iterator[InThread]:
    engine = InThread(unix)
    engine.start()
    yield engine
    engine.stop()


def test_the_blocking_client_finishes_tickets_in_any_order(engine_thread: InThread) -> None:
    with connect_blocking(engine_thread.address) as client:
        slow = client.start(Status())
        quick = [client.start(store(bytes([number])), [bytes([number])]) for number in range(60)]
        for number, ticket in reversed(list(enumerate(quick))):
            assert client.finish(ticket).message.chunks == [data_chunk_id(bytes([number]))]  # type: ignore[attr-defined]
        engine_thread.open_gate()
        assert client.finish(slow).message == StatusReply("{}")


def test_many_large_bodies_both_ways_cannot_block_each_other(engine_thread: InThread) -> None:
    payload = random.Random(5).randbytes(3_000_000)
    engine_thread.service.bodies_max = 4
    with connect_blocking(engine_thread.address) as client:
        client.call(store(payload), [payload])
        memories = [bytearray(len(payload)) for _ in range(20)]
        tickets = []
        for memory in memories:
            tickets.append(client.start(read(payload), into=[memoryview(memory)]))
            tickets.append(client.start(store(payload), [payload]))
        for ticket in reversed(tickets):
            client.finish(ticket)
        assert all(memory == payload for memory in memories)


def test_more_tickets_than_the_engine_allows_take_their_turns(unix: str) -> None:
    engine = InThread(unix)
    engine.start(limits=ServerLimits(inflight_max=4))
    try:
        with connect_blocking(unix) as client:
            tickets = [client.start(Ping()) for _ in range(200)]
            assert [client.finish(ticket).message for ticket in tickets] == [Done()] * 200
    finally:
        engine.stop()


def test_threads_share_a_blocking_client(engine_thread: InThread) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(50):
                payload = rng.randbytes(rng.choice([10, 5000, 200_000]))
                client.call(store(payload), [payload])
                assert client.call(read(payload)).body.joined() == payload
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    with connect_blocking(engine_thread.address) as client:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_blocking_client_waits_for_an_engine_that_restarts(unix: str) -> None:
    engine = InThread(unix)
    engine.start(FakeService(waits=(Status, BucketCreate)))
    with connect_blocking(unix) as client:
        again, never = client.start(Status()), client.start(BucketCreate("b"))
        wait_until_served(engine, "BucketCreate")
        session = client.call(SessionOpen()).message
        assert isinstance(session, SessionOpened)
        engine.stop()
        successor = InThread(unix)
        starting = threading.Timer(0.3, successor.start)
        starting.start()

        def open_when_bound() -> None:
            starting.join()  # it has bound its socket then
            successor.open_gate()

        waiting = threading.Timer(0.6, open_when_bound)
        waiting.start()
        assert client.finish(again).message == StatusReply("{}")
        with pytest.raises(EngineUnreachable, match="may or may not"):
            client.finish(never)
        assert client.epoch == 2
        assert successor.service.joined == [session.session]
        starting.join()
        waiting.join()
        successor.stop()


def test_an_idle_blocking_client_notices_a_restart_before_it_asks(unix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakefs.client.blocking.link._IDLE_S", -1.0)
    with connect_blocking_to_first(unix) as client:
        successor = InThread(unix)
        successor.start()
        assert client.call(BucketCreate("b")).message == Buckets([])
        assert client.epoch == 2
        successor.stop()


def connect_blocking_to_first(unix: str) -> BlockingEngine:
    """Return a client whose engine has ended since it connected."""
    engine = InThread(unix)
    engine.start()
    client = connect_blocking(unix)
    engine.stop()
    return client


def test_a_blocking_client_does_not_wait_for_an_engine_that_was_never_there(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(EngineUnreachable):
        connect_blocking(unix)


def test_a_closed_blocking_client_ends_its_tickets_and_connects_anew(engine_thread: InThread) -> None:
    client = connect_blocking(engine_thread.address)
    ticket = client.start(Status())
    client.close()
    with pytest.raises(EngineUnreachable):
        client.finish(ticket)
    assert client.call(Ping()).message == Done()
    assert client.epoch == 2
    client.close()
    client.close()


def test_closing_wakes_a_thread_that_waits(engine_thread: InThread) -> None:
    client = connect_blocking(engine_thread.address)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            client.call(Status())
        except LakeError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until_served(engine_thread, "Status")
    client.close()
    thread.join()
    assert isinstance(outcome[0], EngineUnreachable)


def test_a_cancelled_ticket_leaves_its_memory_alone(engine_thread: InThread) -> None:
    payload = random.Random(6).randbytes(50_000)
    engine_thread.service.waits = (ReadChunks,)
    with connect_blocking(engine_thread.address) as client:
        client.call(store(payload), [payload])
        memory = bytearray(len(payload))
        ticket = client.start(read(payload), into=[memoryview(memory)])
        wait_until_served(engine_thread, "ReadChunks")
        client.cancel(ticket)
        engine_thread.open_gate()
        with pytest.raises(LakeError):
            client.finish(ticket)
        assert client.call(Ping()).message == Done()
        assert memory == bytes(len(payload))


def test_an_interruption_breaks_the_connection_and_not_the_order_of_bytes(
    engine_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lakefs.client.blocking import link as blocking_link

    receive = sockets.receive_with_descriptors

    def interrupted(sock: socket.socket, buffer: memoryview, descriptors: list[int], flags: int) -> int:
        receive(sock, buffer[:10], descriptors)
        raise KeyboardInterrupt

    with connect_blocking(engine_thread.address) as client:
        ticket = client.start(Ping())
        with monkeypatch.context() as patched:
            patched.setattr(blocking_link, "receive_with_descriptors", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.finish(ticket)
        assert client.finish(ticket).message == Done()
        assert client.epoch == 2


class InterruptedLock:
    """A link's lock that interrupts, once, the thread that leaves it to receive."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = link._lock
        self._is_armed = True

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
        if self._is_armed and self._link._receiver_at_work:
            self._is_armed = False
            raise TimeoutError("of a signal's handler")


def test_an_interruption_just_before_receiving_leaves_nobody_waiting(
    engine_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_blocking(engine_thread.address) as client:
        link = client._link
        assert link is not None
        monkeypatch.setattr(link, "_lock", InterruptedLock(link))
        ticket = client.start(Ping())
        with suppress(TimeoutError):
            client.finish(ticket)
        assert not link._receiver_at_work
        assert client.call(Ping()).message == Done()


def test_a_blocking_client_cannot_watch(engine_thread: InThread) -> None:
    with connect_blocking(engine_thread.address) as client, pytest.raises(InvalidArgument):
        client.start(Watch("b"))


@pytest.mark.parametrize("payload", [b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b""])
def test_a_blocking_client_finds_out_what_is_no_engine(
    unix: str, payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not payload:
        monkeypatch.setattr("lakefs.client.blocking.time_limits.HELLO_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(unix.removeprefix("unix:"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(payload)
                while connection.recv(1000):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError if payload else EngineUnreachable):
            connect_blocking(unix)
        thread.join()


def test_the_blocking_client_starts_without_trio() -> None:
    program = "import sys, lakefs.client.blocking.engine; sys.exit('trio' in sys.modules or 'asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
