"""The limit of an engine's silence in the blocking client: what is a sign of life, and what is none."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.silence import WAITS, Asked, Silence
from lakefs.errors import EngineUnreachable, LakeError
from lakefs.limits import MIB
from lakefs.plugins.kv import movers as moving
from lakefs.plugins.kv.movers import Connection, Mover, SpaceSettings
from lakefs.wire.connection import ServerConnection
from lakefs.wire.engine_port import Body, Reply, ServedClient
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.keyed_messages import KeyedMatch, SpaceOpen, SpaceStat
from lakefs.wire.messages import HelloReply, Ping, Request, Status, StatusReply, Stored
from tests.engines import InThread, store
from tests.fake_service import FakeService
from tests.slow_machine import excused_when_slow

pytestmark = pytest.mark.thorough

TIMEOUT_S = 0.8
TOO_SLOW_S = TIMEOUT_S / 4
"""The engines are threads of this process: while it waits for a core they are silent, too."""
WAIT_S = 20.0


@pytest.fixture
def engine_thread(unix: str) -> Iterator[InThread]:
    engine = InThread(unix)
    engine.start()
    yield engine
    engine.stop()


# --- the count -------------------------------------------------------------------------------------------


def test_silence_is_over_after_its_limit_if_a_ping_was_sent_at_its_half() -> None:
    silence, asked = Silence(8.0), []

    def ask() -> Asked:
        asked.append(silence.quiet_s)
        return Asked.SENT

    ends = [silence.is_over(0, silence.wait_s, ask) for _ in range(WAITS)]
    assert ends == [False] * (WAITS - 1) + [True]
    assert asked == [4.0]


def test_a_sign_of_life_begins_the_count_anew() -> None:
    silence = Silence(8.0)
    for signs in range(5):
        assert not any(silence.is_over(signs, 1.0, lambda: Asked.SENT) for _ in range(7))


def test_without_a_stream_for_a_ping_an_engine_has_four_times_as_long() -> None:
    silence = Silence(8.0)
    ends = [silence.is_over(0, 1.0, lambda: Asked.NOT_NOW) for _ in range(32)]
    assert ends == [False] * 31 + [True]


def test_a_socket_that_takes_no_ping_for_half_of_the_time_is_lost_and_one_that_takes_it_late_is_asked_then() -> None:
    silence = Silence(8.0)
    assert [silence.is_over(0, 1.0, lambda: Asked.FULL) for _ in range(8)] == [False] * 7 + [True]
    silence, answers = Silence(8.0), iter([Asked.FULL] * 3 + [Asked.SENT] * 9)
    ends = [silence.is_over(0, 1.0, lambda: next(answers)) for _ in range(11)]
    assert ends == [False] * 10 + [True]


# --- signs of life ---------------------------------------------------------------------------------------


@excused_when_slow(TOO_SLOW_S)
def test_a_request_that_takes_long_is_not_cut(engine_thread: InThread) -> None:
    with connect_blocking(engine_thread.address, timeout_s=TIMEOUT_S) as client:
        ticket = client.start(Status())
        threading.Timer(4 * TIMEOUT_S, engine_thread.open_gate).start()
        assert client.finish(ticket).message == StatusReply("{}")
        assert client.epoch == 1
    assert "Ping" in engine_thread.service.served


@excused_when_slow(TOO_SLOW_S)
def test_an_engine_that_answers_no_ping_is_lost(unix: str) -> None:
    engine = InThread(unix)
    engine.start(FakeService(waits=(Status, Ping)))
    try:
        with connect_blocking(unix, timeout_s=TIMEOUT_S) as client:
            began = time.monotonic()
            with pytest.raises(EngineUnreachable, match=r"does not answer, for 0\.8 s now"):
                client.call(Status())
            assert time.monotonic() - began > TIMEOUT_S * 0.9
    finally:
        engine.stop()


@excused_when_slow(TOO_SLOW_S)
def test_threads_that_wait_beside_each_other_all_get_the_error(unix: str) -> None:
    engine = InThread(unix)
    engine.start(FakeService(waits=(Status, Ping)))
    errors: list[LakeError] = []
    try:
        with connect_blocking(unix, timeout_s=TIMEOUT_S) as client:

            def ask() -> None:
                try:
                    client.call(Status())
                except LakeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert [type(error) for error in errors] == [EngineUnreachable] * 4
    finally:
        engine.stop()


class Slow:
    """A server that greets, takes bytes of one body as a test says, and answers then."""

    def __init__(self, take: Callable[[socket.socket, int], None]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._take = take
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the connection."""
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        with self._listening:
            sock, _ = self._listening.accept()
        wire = ServerConnection()
        with sock, suppress(OSError):  # the client may give up
            while True:
                event = wire.next_event()
                if event is None:
                    count = sock.recv_into(wire.reader.space())
                    if not count:
                        return
                    wire.reader.received(count)
                elif not wire.greeted:
                    wire.accept_hello(event.request, token=None, trusted=True)  # type: ignore[union-attr, arg-type]
                    hello = HelloReply(
                        PROTOCOL_VERSION, "slow", b"s" * 16, b"e" * 16, b"b" * 16, 0, [], 64, 1 << 24, 4096, False
                    )
                    sock.sendall(wire.reply(event.stream_id, hello))  # type: ignore[union-attr]
                else:
                    memory = bytearray(event.body_bytes)  # type: ignore[union-attr]
                    missing = wire.reader.take_body([memory])
                    self._take(sock, sum(map(len, missing)))
                    stored = Stored([b"c" * 33], [True])
                    sock.sendall(wire.reply(event.stream_id, stored))  # type: ignore[union-attr]


def wait(event: threading.Event) -> None:
    event.wait(WAIT_S)
    raise ConnectionError


@excused_when_slow(TOO_SLOW_S)
def test_bytes_that_are_taken_of_a_long_body_are_a_sign_of_life() -> None:
    def take(sock: socket.socket, left: int) -> None:
        step = left // 12 + 1
        while left:
            time.sleep(TIMEOUT_S / 3)
            want = min(step, left)
            while want:
                count = len(sock.recv(min(want, 65536)))
                want -= count
                left -= count

    body = bytes(16 * MIB)
    server = Slow(take)
    with connect_blocking(server.address, timeout_s=TIMEOUT_S) as client:
        began = time.monotonic()
        client.finish(client.start(store(body), [body]))
        assert time.monotonic() - began > 2 * TIMEOUT_S, "the body was taken at once"
        assert client.epoch == 1
    server.join()


@excused_when_slow(TOO_SLOW_S)
def test_a_body_of_which_no_byte_is_taken_is_given_up() -> None:
    is_over = threading.Event()
    server = Slow(lambda *_: wait(is_over))
    body = bytes(16 * MIB)
    with connect_blocking(server.address, timeout_s=TIMEOUT_S) as client:
        began = time.monotonic()
        with pytest.raises(EngineUnreachable):
            client.finish(client.start(store(body), [body]))
        assert time.monotonic() - began < WAIT_S / 2
    is_over.set()
    server.join()


CLIENT = """
import sys
from lakefs.client.blocking.engine import connect_blocking
from lakefs.wire.messages import Status
client = connect_blocking(sys.argv[1], timeout_s=0.8)
ticket = client.start(Status())
print("sent", flush=True)
client.finish(ticket)
print(client.epoch, flush=True)
"""


@excused_when_slow(TOO_SLOW_S)
def test_a_client_that_was_stopped_itself_reads_first_what_has_come(engine_thread: InThread) -> None:
    process = subprocess.Popen([sys.executable, "-c", CLIENT, engine_thread.address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == "sent\n"
            for _ in range(3):
                time.sleep(0.35)
                process.send_signal(signal.SIGSTOP)
                time.sleep(3 * TIMEOUT_S)
                process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGSTOP)
            engine_thread.open_gate()
            time.sleep(3 * TIMEOUT_S)
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "1\n", "it judged before it had read"
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()


# --- an engine behind a disk that hangs ------------------------------------------------------------------


class HungService(FakeService):
    """Answers Pings, and opens spaces; look-ups wait for ever."""

    async def _serve(self, client: ServedClient, request: Request, body: Body, descriptors: Sequence[int]) -> Reply:
        if isinstance(request, SpaceOpen):
            return Reply(SpaceStat(request.name, 1, 0, 0, 0, 0, 0))
        return await super()._serve(client, request, body, descriptors)


@excused_when_slow(TOO_SLOW_S)
def test_a_job_of_a_plug_in_ends_behind_a_hung_disk_and_with_it_its_connection(
    unix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "JOB_S", TIMEOUT_S)
    engine = InThread(unix)
    engine.start(HungService(waits=(KeyedMatch,)))
    ended: list[object] = []
    try:
        mover = Mover("test", Connection(SpaceSettings(unix, "space")))
        try:
            began = time.monotonic()
            for _ in range(3):
                mover.submit(lambda space: space.match([b"key"]), ended.append)
            mover.wait_idle()
            assert time.monotonic() - began < 3 * TIMEOUT_S, "none waits for another's time"
            assert [type(end) for end in ended] == [EngineUnreachable] * 3
            give_up_at = time.monotonic() + WAIT_S
            while not engine.service.cancelled and time.monotonic() < give_up_at:
                time.sleep(0.01)
            assert engine.service.cancelled.count("KeyedMatch") == 1
            engine.open_gate()
        finally:
            mover.close()
    finally:
        engine.stop()
