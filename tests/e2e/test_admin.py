"""The admin port over real sockets: right answers, and clients that misbehave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
import structlog
import trio
from prometheus_client import CollectorRegistry

from gateway.admin import server as admin
from gateway.admin.metrics import Reading, new_registry
from gateway.admin.server import bind_admin, serve_admin
from lakefs.config.settings import Address
from lakefs.errors import AddressInUse, ConfigError
from lakefs.limits import ADMIN_CONNECTIONS_MAX, ADMIN_HEAD_BYTES_MAX, ADMIN_REQUEST_TIMEOUT_S

LOOPBACK = Address("127.0.0.1", 0)


@dataclass
class Port:
    """A served admin port and what a test can change about it."""

    number: int = 0
    reason: str | None = None
    registry: CollectorRegistry = field(default_factory=lambda: new_registry(("0.0.0", "c0ffee")))

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.number)

    async def raw(self, request: bytes) -> bytes:
        """Send these bytes; return all that the port sends until it closes."""
        async with await self.connect() as stream:
            await stream.send_all(request)
            return await _rest(stream)

    async def get(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """Send one request; return status and body."""
        answered = await self.raw(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, body = answered.partition(b"\r\n\r\n")
        return int(head.split()[1]), body


async def _rest(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    try:
        while piece := await stream.receive_some(65536):
            received += piece
    except trio.BrokenResourceError:
        pass  # a reset ends a connection, too
    return bytes(received)


def _with_port(scenario: Callable[[Port], Awaitable[None]], port: Port | None = None) -> None:
    served = port or Port()

    async def main() -> None:
        with trio.fail_after(60):  # only against a hang: the result does not depend on the time
            async with trio.open_nursery() as nursery:
                listeners = await nursery.start(_serve, served)
                served.number = listeners[0].socket.getsockname()[1]
                await scenario(served)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def _serve(port: Port, *, task_status: trio.TaskStatus[list[trio.SocketListener]]) -> None:
    await serve_admin(
        await bind_admin(LOOPBACK), ready=lambda: port.reason, registry=port.registry, task_status=task_status
    )


def test_health_is_well_even_when_the_engine_is_not_ready() -> None:
    async def scenario(port: Port) -> None:
        port.reason = "recovering"
        assert await port.get("/health") == (200, b"ok\n")

    _with_port(scenario)


def test_ready_says_why_it_is_not() -> None:
    async def scenario(port: Port) -> None:
        assert await port.get("/ready") == (200, b"ready\n")
        port.reason = "the journal is being read"
        assert await port.get("/ready") == (503, b"the journal is being read\n")
        port.reason = None
        assert (await port.get("/ready"))[0] == 200

    _with_port(scenario)


def test_metrics_are_the_registry_s_text() -> None:
    async def scenario(port: Port) -> None:
        status, body = await port.get("/metrics?name[]=lake_chunks")
        assert status == 200
        assert b"\nlake_chunks 7.0\n" in body
        assert b'lake_build_info{commit="c0ffee",version="0"} 1.0' in body

    _with_port(scenario, Port(registry=new_registry(("0", "c0ffee"), [Reading("lake_chunks", "Chunks.", lambda: 7)])))


def test_head_has_the_headers_of_get_and_no_body() -> None:
    async def scenario(port: Port) -> None:
        whole = await port.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        bare = await port.raw(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert whole.removesuffix(b"ok\n").split(b"\r\n")[1:3] == bare.split(b"\r\n")[1:3]
        assert b"content-length: 3\r\n" in bare.lower()
        assert bare.endswith(b"\r\n\r\n")

    _with_port(scenario)


def test_other_paths_and_methods_are_told_what_there_is() -> None:
    async def scenario(port: Port) -> None:
        status, body = await port.get("/")
        assert status == 404
        assert b"/metrics" in body
        assert (await port.get("/health/"))[0] == 404
        answered = await port.raw(b"DELETE /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 405 ")
        assert b"allow: get, head\r\n" in answered.lower()

    _with_port(scenario)


def test_an_absolute_target_and_an_older_protocol_are_understood() -> None:
    async def scenario(port: Port) -> None:
        assert (await port.get("http://lake.example:9001/health"))[0] == 200
        assert (await port.raw(b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await port.get("http://[/health"))[0] == 400

    _with_port(scenario)


def test_one_connection_answers_many_requests_in_order() -> None:
    async def scenario(port: Port) -> None:
        async with await port.connect() as stream:
            request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            await stream.send_all(request * 20 + b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = await _rest(stream)
        assert received.count(b"HTTP/1.1 200") == 21
        assert received.endswith(b"ready\n")

    _with_port(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"\r\n" * 3 + b"\xff\xfe\r\n\r\n",
    ],
)
def test_garbage_is_refused_and_the_next_client_is_served(garbage: bytes) -> None:
    async def scenario(port: Port) -> None:
        assert (await port.raw(garbage)).startswith(b"HTTP/1.1 400 ")
        assert await port.get("/health") == (200, b"ok\n")

    _with_port(scenario)


@pytest.mark.parametrize("sent", [b"\x16", b"\x16\x03\x01\x02", b"\x80\x2e", b"\xff", b"\x00", b"{"])
def test_bytes_that_begin_no_request_are_refused_at_once(sent: bytes) -> None:
    async def scenario(port: Port) -> None:
        with trio.fail_after(ADMIN_REQUEST_TIMEOUT_S / 2):
            answered = await port.raw(sent)
        assert answered.startswith(b"HTTP/1.1 400 ")
        assert (b"plain HTTP" in answered) is (sent[0] == 0x16)
        assert await port.get("/health") == (200, b"ok\n")

    _with_port(scenario)


@pytest.mark.parametrize(
    "request_with_body",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nGET /",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 4096,
        b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnot hex\r\n",
    ],
)
def test_a_body_that_nobody_asked_for_is_never_taken_for_a_request(request_with_body: bytes) -> None:
    async def scenario(port: Port) -> None:
        answered = await port.raw(request_with_body)
        assert answered.count(b"HTTP/1.1 ") == 1
        assert answered.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in answered.lower()

    _with_port(scenario)


def test_a_head_larger_than_its_bound_is_refused() -> None:
    async def scenario(port: Port) -> None:
        endless = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (2 * ADMIN_HEAD_BYTES_MAX)
        assert (await port.raw(endless)).startswith(b"HTTP/1.1 431 ")
        assert (await port.get("/health"))[0] == 200

    _with_port(scenario)


def test_a_head_that_trickles_in_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "ADMIN_REQUEST_TIMEOUT_S", 0.2)

    async def trickle(stream: trio.SocketStream) -> None:
        try:
            while True:
                await stream.send_all(b"X-Slow: 1\r\n")
                await trio.sleep(0.02)
        except trio.BrokenResourceError:
            pass

    async def scenario(port: Port) -> None:
        async with await port.connect() as stream, trio.open_nursery() as nursery:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            nursery.start_soon(trickle, stream)
            assert await _rest(stream) == b""  # closed by the port, without an answer
            nursery.cancel_scope.cancel()

    _with_port(scenario)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "ADMIN_RESPONSE_TIMEOUT_S", 0.2)
    cut_off = trio.Event()
    send = admin._send

    async def watched_send(*arguments: Any, **options: Any) -> None:
        try:
            await send(*arguments, **options)
        except trio.BrokenResourceError:
            cut_off.set()
            raise

    monkeypatch.setattr(admin, "_send", watched_send)
    large = {f"value-{number:06}-{'x' * 100}": 1.0 for number in range(40_000)}
    registry = new_registry(("0", "c0ffee"), [Reading("lake_large", "Large.", lambda: large, label="of")])

    async def scenario(port: Port) -> None:
        async with await port.connect() as stream:
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await cut_off.wait()
            received = await _rest(stream)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert len(received) < sum(map(len, large))

    _with_port(scenario, Port(registry=registry))


def test_clients_that_only_connect_keep_no_monitor_out() -> None:
    async def scenario(port: Port) -> None:
        idle = [await port.connect() for _ in range(ADMIN_CONNECTIONS_MAX + 40)]
        assert await port.get("/health") == (200, b"ok\n")
        assert await _rest(idle[0]) == b""  # the connection that waited longest was closed
        for stream in idle:
            await stream.aclose()

    _with_port(scenario)


def test_a_thousand_connections_opened_and_dropped_leave_it_serving() -> None:
    async def scenario(port: Port) -> None:
        for number in range(1000):
            stream = await port.connect()
            if number % 3 == 0:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await stream.aclose()
        assert await port.get("/health") == (200, b"ok\n")

    _with_port(scenario)


@pytest.fixture
def log_lines() -> Iterator[list[structlog.typing.EventDict]]:
    """Collect the log events of a test."""
    with structlog.testing.capture_logs() as lines:
        yield lines


def test_a_broken_collector_fails_its_scrape_and_nothing_else(log_lines: list[structlog.typing.EventDict]) -> None:
    def broken() -> float:
        raise ZeroDivisionError

    async def scenario(port: Port) -> None:
        assert (await port.get("/metrics"))[0] == 500
        assert await port.get("/health") == (200, b"ok\n")

    _with_port(scenario, Port(registry=new_registry(("0", "c0ffee"), [Reading("lake_broken", "Broken.", broken)])))
    assert [line["path"] for line in log_lines if line["log_level"] == "error"] == ["/metrics"]


def test_stopping_closes_waiting_clients_and_finishes_the_answer_under_way() -> None:
    async def main() -> None:
        asked = trio.Event()

        def read() -> float:
            asked.set()
            return 1.0

        large = {f"value-{number:06}-{'x' * 100}": 1.0 for number in range(60_000)}
        readings = [Reading("lake_asked", "Asked.", read), Reading("lake_large", "Large.", lambda: large, label="of")]
        port = Port(registry=new_registry(("0", "c0ffee"), readings))
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                listeners = await nursery.start(_serve, port)
                port.number = listeners[0].socket.getsockname()[1]
                waiting = await port.connect()
                scraping = await port.connect()
                await scraping.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await asked.wait()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    async with waiting, scraping:
                        assert await _rest(waiting) == b""
                        received = await _rest(scraping)
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="GET", target="/metrics", headers=[("Host", "x")]))
        reader.receive_data(received)
        events = []
        while (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(event)
            if isinstance(event, h11.EndOfMessage):
                break
        assert isinstance(events[-1], h11.EndOfMessage), "the answer was cut"
        with pytest.raises(OSError, match="all attempts to connect"):
            await port.connect()

    trio.run(main)


def test_a_taken_port_and_an_unknown_host_are_told_with_what_to_do() -> None:
    async def main() -> None:
        [listener] = await bind_admin(LOOPBACK)
        async with listener:
            taken = Address("127.0.0.1", listener.socket.getsockname()[1])
            with pytest.raises(AddressInUse, match="--admin"):
                await bind_admin(taken)
        with pytest.raises(ConfigError, match="no such host"):
            await bind_admin(Address("x" * 64 + ".invalid", 0))
        with pytest.raises(ConfigError, match="cannot be used"):
            await bind_admin(Address("192.0.2.1", 0))

    trio.run(main)
