"""`lake gateway` in operation: in front of an engine that ends and starts again, several at once, and its end."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, HTTPClientError

from tests.e2e.gateways import Gateway, SlowDownload, gateway, new_key, s3_client
from tests.e2e.served import WAIT_S, Served, lake, serving
from tests.served_devices import SEGMENTS

BIG = 40 << 20
"""More bytes than the buffers between a gateway and its client hold."""


@pytest.fixture
def engine(folder: Path) -> Iterator[Served]:
    """Run an engine without an S3 face of its own."""
    with serving(folder) as started:
        yield started


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition that must come true."""
    for _ in range(int(WAIT_S / 0.05)):
        if is_so():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come")


def stored(client: Any, bucket: str = "models", size: int = BIG) -> tuple[str, bytes]:
    """Make a bucket with an object `big`; return its SHA-256 and content."""
    content = os.urandom(size)
    client.create_bucket(Bucket=bucket)
    client.put_object(Bucket=bucket, Key="big", Body=content)
    return hashlib.sha256(content).hexdigest(), content


def test_what_goes_in_through_a_gateway_comes_out_of_another_and_of_the_command_line(engine: Served) -> None:
    key = new_key(engine)
    with gateway(engine.server) as one, gateway(engine.server) as two:
        first, second = s3_client(one.url, key), s3_client(two.url, key)
        _, content = stored(first)
        first.put_object(Bucket="models", Key="small", Body=b"small")
        assert second.get_object(Bucket="models", Key="big")["Body"].read() == content
        ranged = second.get_object(Bucket="models", Key="big", Range="bytes=70000-4300000")
        assert ranged["Body"].read() == content[70000:4300001]
        assert engine.good("cat", "models/small").out == b"small"


@pytest.mark.one_engine(SEGMENTS)
def test_over_a_unix_socket_content_is_read_from_the_segments_and_checked(engine: Served) -> None:
    key = new_key(engine)
    with gateway(engine.server) as found:
        client = s3_client(found.url, key)
        _, content = stored(client)
        assert client.get_object(Bucket="models", Key="big")["Body"].read() == content
        opened = _opened(found.process.pid)
        segments = {Path(path) for path in opened if path.startswith(str(engine.data / "segments"))}
        assert segments
        _flip_byte_of(content[5_000_000:5_000_064], segments)
        with pytest.raises(HTTPClientError):
            client.get_object(Bucket="models", Key="big")["Body"].read()
        intact = client.get_object(Bucket="models", Key="big", Range="bytes=9000000-9999999")
        assert intact["Body"].read() == content[9_000_000:10_000_000]


def _flip_byte_of(pattern: bytes, segments: set[Path]) -> None:
    for path in segments:
        found = path.read_bytes().find(pattern)
        if found >= 0:
            with path.open("r+b") as file:
                file.seek(found)
                file.write(bytes([pattern[0] ^ 1]))
            return
    raise AssertionError("the content is in no segment")


def test_over_tcp_the_token_lets_a_gateway_in(folder: Path) -> None:
    with serving(folder, "--native", "127.0.0.1:0") as engine:
        [address] = [line.split()[1] for line in engine.printed if line.startswith("listen  tcp:")]
        key = new_key(engine)
        token = engine.token()
        with gateway(address, token=token) as found:
            client = s3_client(found.url, key)
            _, content = stored(client)
            assert client.get_object(Bucket="models", Key="big")["Body"].read() == content
        refused = lake("gateway", "--server", address, "--s3", "127.0.0.1:0", "--admin", "off")
        assert refused.code == 77
        assert "token" in refused.err


def test_without_its_engine_a_gateway_says_so_and_goes_on_when_it_is_back(folder: Path, engine: Served) -> None:
    key = new_key(engine)
    engine.kill()
    with gateway(engine.server) as found:
        assert found.admin("/health")[0] == 200
        status, reason = found.admin("/ready")
        assert (status, "no engine answers" in reason) == (503, True)
        with pytest.raises(ClientError) as caught:
            s3_client(found.url, key).list_buckets()
        answer = caught.value.response
        assert answer["Error"]["Code"] == "ServiceUnavailable"
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert int(answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) > 0
        assert str(folder) not in str(answer)  # a client must not see where the engine is
        engine.start()
        until(lambda: found.admin("/ready")[0] == 200)
        assert s3_client(found.url, key).list_buckets()["Buckets"] == []


def test_a_client_works_on_while_the_engine_is_killed_and_started_again(engine: Served) -> None:
    key = new_key(engine)
    with gateway(engine.server, "--processes", "2") as found:
        client = s3_client(found.url, key, attempts=5)
        client.create_bucket(Bucket="models")
        acknowledged: list[int] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                for number in range(400):
                    body = number.to_bytes(4, "big") * 300
                    client.put_object(Bucket="models", Key=f"{number:04}", Body=body)
                    acknowledged.append(number)
                    assert client.get_object(Bucket="models", Key=f"{number:04}")["Body"].read() == body
            except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
                failure.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        for round_number in (1, 2):
            until(lambda floor=round_number * 60: len(acknowledged) > floor or bool(failure))  # type: ignore[misc]
            engine.kill()
            engine.start()
        worker.join()
        assert failure == []
        assert len(client.list_objects_v2(Bucket="models")["Contents"]) == 400


def test_a_port_is_shared_only_by_gateways_that_are_told_to(engine: Served) -> None:
    with gateway(engine.server) as first:
        address = first.url.removeprefix("http://")
        alone = lake("gateway", "--server", engine.server, "--s3", address, "--admin", "off")
        assert alone.code == 71
        assert "--share-port" in alone.err
        with gateway(engine.server, "--s3", address, "--share-port") as second:
            assert {_served_by(first, second) for _ in range(60)} == {first, second}
            assert first.stop() == 0
            assert {_served_by(second) for _ in range(10)} == {second}


def _served_by(*gateways: Gateway) -> Gateway:
    """Return the gateway that holds the other end of a new connection, of several at one address."""
    host, _, port = gateways[0].url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 403"
        inode = _inode_of(int(port), connection.getsockname()[1])
        [owner] = [found for found in gateways if f"socket:[{inode}]" in _opened(found.process.pid)]
        return owner


def _inode_of(local_port: int, remote_port: int) -> str:
    """Return the inode of the server's end of a connection (proc(5), /proc/net/tcp)."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{local_port:04X}") and fields[2].endswith(f":{remote_port:04X}"):
            return fields[9]
    raise AssertionError("there is no such connection")


def _opened(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(entry))
    return found


def test_a_gateway_told_to_end_finishes_a_slow_download(engine: Served) -> None:
    key = new_key(engine)
    for options in ((), ("--processes", "2")):
        with gateway(engine.server, *options) as found:
            client = s3_client(found.url, key)
            digest, _ = stored(client, f"bucket-{len(options)}")
            download = SlowDownload(client, f"bucket-{len(options)}", "big")
            assert download.status == 200
            found.process.send_signal(signal.SIGTERM)
            until(lambda address=found.url: _refuses(address))  # type: ignore[misc]
            assert found.process.poll() is None
            assert download.rest() == digest
            assert found.ended() == 0


def test_an_engine_told_to_end_finishes_a_slow_download_of_its_own_face(folder: Path) -> None:
    with serving(folder, "--s3", "127.0.0.1:0") as served:
        [url] = [line.split()[1] for line in served.printed if line.startswith("s3 ")]
        client = s3_client(url, new_key(served), attempts=3)
        digest, _ = stored(client)
        download = SlowDownload(client, "models", "big")
        assert served.process is not None
        served.process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(url))
        assert served.process.poll() is None
        assert download.rest() == digest
        assert served.process.stdout is not None
        with served.process.stdout as printed:
            assert printed.read().splitlines()[-1] == "stopped"
        assert served.process.wait(WAIT_S) == 0


def _refuses(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_process_that_dies_is_started_again_and_clients_notice_a_broken_connection_at_most(engine: Served) -> None:
    key = new_key(engine)
    with gateway(engine.server, "--processes", "2") as found:
        client = s3_client(found.url, key, attempts=5)
        digest, _ = stored(client)
        before = found.children()
        assert len(before) == 2
        for deaths, victim in enumerate(before, 1):
            os.kill(victim, signal.SIGKILL)
            body = client.get_object(Bucket="models", Key="big")["Body"].read()
            assert hashlib.sha256(body).hexdigest() == digest
            expected = (f"lake_gateway_restarts_total {deaths}.0", "lake_gateway_processes 2.0")
            until(lambda lines=expected: all(line in found.admin("/metrics")[1] for line in lines))  # type: ignore[misc]
        assert not set(before) & set(found.children())


def test_no_process_outlives_a_leader_that_was_killed(engine: Served) -> None:
    with gateway(engine.server, "--processes", "2") as found:
        members = found.children()
        found.process.kill()
        assert found.ended() == -signal.SIGKILL
        until(lambda: not any(Path(f"/proc/{member}/exe").exists() for member in members))
        with gateway(engine.server, "--s3", found.url.removeprefix("http://")) as again:
            assert again.url == found.url


def test_a_team_that_cannot_start_says_why_once_and_ends(folder: Path) -> None:
    with serving(folder, "--native", "127.0.0.1:0") as engine:
        [address] = [line.split()[1] for line in engine.printed if line.startswith("listen  tcp:")]
        refused = lake("gateway", "--server", address, "--s3", "127.0.0.1:0", "--admin", "off", "--processes", "2")
    assert refused.code == 77
    assert "token" in refused.err
