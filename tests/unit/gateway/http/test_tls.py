"""TLS streams beyond the contract of streams: handshakes, goodbyes, sealed bytes that wait, certificates read anew."""

from __future__ import annotations

import random
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from gateway.http.tls import Certificates, TlsStream, load_pair
from lakefs.errors import ConfigError, EngineUnreachable
from lakefs.ports import Network, Stream
from lakefs.transport.streams import TrioNetwork
from tests.certificates import CA_FILE, HOST, Authority, encrypt
from tests.sim.world.network import SimulatedNetwork
from tests.stream_pairs import receive_exactly


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make the contexts of a server and of a client that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    Authority(folder).issue("unit", folder / "c", folder / "k")
    return (load_pair(folder / "c", folder / "k"), ssl.create_default_context(cafile=str(folder / CA_FILE)))


Pair = tuple[ssl.SSLContext, ssl.SSLContext]


Body = Callable[[TlsStream, TlsStream, Stream], Awaitable[None]]


def between(pair: Pair, body: Body, *, simulated: bool = False) -> None:
    """Run `body(server, client, the client's raw stream)`, without a handshake yet."""

    async def main() -> None:
        network: Network = SimulatedNetwork(random.Random(3), capacity_bytes=10_000) if simulated else TrioNetwork()
        listener = await network.listen("tcp://simulated:1" if simulated else "tcp://127.0.0.1:0")
        raw = await network.connect(listener.address)
        server = TlsStream(await listener.accept(), pair[0])
        client = TlsStream(raw, pair[1], server_name=HOST)
        await body(server, client, raw)
        for stream in (server, client):
            await stream.aclose()
        await listener.aclose()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0) if simulated else None)


async def shake_hands(*streams: TlsStream) -> None:
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(stream.shake_hands)


def test_a_stalled_handshake_ends_in_time(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await raw.send([b"\x16\x03\x01"])
        with pytest.raises(EngineUnreachable, match="handshake"):
            await server.receive_into(memoryview(bytearray(1)))
        assert 9 < trio.current_time() < 11

    between(pair, body, simulated=True)


def test_who_speaks_plain_http_is_told_so(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await raw.send([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
        with pytest.raises(EngineUnreachable):
            await server.receive_into(memoryview(bytearray(1)))
        assert (await receive_exactly(raw, 12)) == b"HTTP/1.1 400"

    between(pair, body)


def test_a_client_that_has_said_goodbye_is_still_answered(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await shake_hands(server, client)
        await client.send([b"the last request"])
        client._say_goodbye()  # only half closed: the other end still reads
        buffer = memoryview(bytearray(100))
        assert await server.receive_into(buffer) == 16
        assert await server.receive_into(buffer) == 0
        await server.send([b"the answer"])
        await server.aclose()
        sealed = bytearray(4096)
        count = await raw.receive_into(memoryview(sealed))
        assert count > 10
        assert sealed[0] == 23  # application data, RFC 8446: the answer, or a ticket before it

    between(pair, body)


def test_an_end_without_a_goodbye_is_an_end(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await shake_hands(server, client)
        await raw.aclose()
        assert await server.receive_into(memoryview(bytearray(1))) == 0

    between(pair, body, simulated=True)


def test_closing_says_goodbye(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await shake_hands(server, client)
        await server.aclose()
        assert await client.receive_into(memoryview(bytearray(1))) == 0
        client._tls.unwrap()  # the server has said goodbye, so nothing is missing

    between(pair, body)


def test_what_was_sealed_and_not_taken_arrives_once_however_it_is_offered_again(pair: Pair) -> None:
    content = random.Random(5).randbytes(700_000)

    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await shake_hands(server, client)

        async def send() -> None:
            done = 0
            while done < len(content) - 100_000:
                left = memoryview(content)[done:]
                count = server.send_nowait([left[:7], left[7:90_000], left[90_000:]])
                done += count
                if not count:
                    await server.wait_writable()
            await server.send([memoryview(content)[done:]])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert await receive_exactly(client, len(content)) == content

    between(pair, body, simulated=True)


def test_garbage_after_the_handshake_ends_the_connection(pair: Pair) -> None:
    async def body(server: TlsStream, client: TlsStream, raw: Stream) -> None:
        await shake_hands(server, client)
        await raw.send([bytes(100)])
        with pytest.raises(EngineUnreachable):
            await server.receive_into(memoryview(bytearray(1)))

    between(pair, body)


def test_tls_older_than_1_2_is_refused(pair: Pair) -> None:
    assert pair[0].minimum_version == ssl.TLSVersion.TLSv1_2


# --- certificates ------------------------------------------------------------------------------------


def in_time(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_changed_pair_is_taken_a_broken_one_is_not_and_both_are_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = tmp_path / "c", tmp_path / "k"
    authority.issue("one", certificate, key)

    async def main() -> None:
        certificates = Certificates(certificate, key)
        first = certificates.current()
        authority.issue("two", certificate, key)
        await trio.sleep(1.1)
        second = certificates.current()
        assert second is not first
        with structlog.testing.capture_logs() as logs:
            certificate.write_text("no certificate")
            await trio.sleep(1.1)
            assert certificates.current() is second
            await trio.sleep(1.1)
            assert certificates.current() is second
        assert [line["event"] for line in logs] == ["certificate_not_reloaded"]
        assert str(certificate) in logs[0]["reason"]
        authority.issue("three", certificate, key)
        assert certificates.current() is second  # checked a moment ago
        await trio.sleep(1.1)
        assert certificates.current() is not second

    in_time(main)


def test_a_pair_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key, other = tmp_path / "c", tmp_path / "k", tmp_path / "other"
    authority.issue("one", certificate, other)
    authority.issue("two", tmp_path / "c2", key)
    with pytest.raises(ConfigError, match="do not belong together"):
        Certificates(certificate, key)
    with pytest.raises(ConfigError, match="absent"):
        Certificates(tmp_path / "absent", key)
    sealed, garbage = tmp_path / "sealed", tmp_path / "garbage"
    encrypt(other, sealed)
    garbage.write_bytes(b"no key at all")
    for unfit in ((key, certificate), (garbage, other), (certificate, garbage), (certificate, sealed)):
        with pytest.raises(ConfigError, match=f"{unfit[0]} and {unfit[1]} .* no PEM file .* encrypted"):
            Certificates(*unfit)
