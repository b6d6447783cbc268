"""S3 over TLS with an authority of its own: boto3, certificates that change under load, handshakes that stall."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import SSLError

from tests.certificates import HOST, Authority
from tests.e2e.gateways import gateway, new_key, s3_client
from tests.e2e.served import WAIT_S, lake, serving


def subject(url: str, authority: Authority) -> str:
    """Open a connection; return the name in the server's certificate."""
    context = ssl.create_default_context(cafile=str(authority.path))
    port = int(url.rpartition(":")[2])
    with socket.create_connection((HOST, port), timeout=WAIT_S) as raw:
        with context.wrap_socket(raw, server_hostname=HOST) as connection:
            shown: Any = connection.getpeercert()
            return str(dict(part[0] for part in shown["subject"])["commonName"])


def until_subject(url: str, authority: Authority, name: str) -> None:
    for _ in range(200):
        if subject(url, authority) == name:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{name} is not shown")


def test_boto3_over_tls_while_certificates_change_and_handshakes_stall(folder: Path) -> None:
    authority = Authority(folder)
    certificate, key = folder / "c.pem", folder / "k.pem"
    authority.issue("first", certificate, key)
    tls = ("--s3-tls-cert", str(certificate), "--s3-tls-key", str(key))
    with serving(folder, "--s3", f"{HOST}:0", *tls) as served:
        [url] = [line.split()[1] for line in served.printed if line.startswith("s3 ")]
        assert url.startswith("https://")
        access = new_key(served)
        stalled = [socket.create_connection((HOST, int(url.rpartition(":")[2]))) for _ in range(20)]
        for connection in stalled[:10]:
            connection.send(b"\x16\x03\x01\x02")  # a handshake that stops here
        client = s3_client(url, access, attempts=3, verify=str(authority.path))
        client.create_bucket(Bucket="sealed")
        content = os.urandom(9 << 20)
        stop = threading.Event()
        counts: list[int] = []
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                mine = s3_client(url, access, verify=str(authority.path))
                while not stop.is_set():
                    mine.put_object(Bucket="sealed", Key=f"k{number}", Body=content)
                    assert mine.get_object(Bucket="sealed", Key=f"k{number}")["Body"].read() == content
                    counts.append(number)
                    if len(counts) % 2:
                        mine.close()  # so that there are new handshakes, too
            except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
                failures.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        assert subject(url, authority) == "first"
        authority.issue("second", certificate, key)
        until_subject(url, authority, "second")  # the engine notices the new certificate itself
        key.write_text("no key")
        assert served.process is not None
        served.process.send_signal(signal.SIGHUP)
        done = len(counts)
        for _ in range(1200):
            if len(counts) >= done + 4 or failures:
                break
            threading.Event().wait(0.05)
        assert subject(url, authority) == "second"  # the broken pair was not loaded
        authority.issue("third", certificate, key)
        served.process.send_signal(signal.SIGHUP)
        until_subject(url, authority, "third")
        stop.set()
        for worker in workers:
            worker.join()
        assert failures == []
        for connection in stalled:
            connection.close()


def test_who_does_not_trust_the_authority_is_not_served_and_plain_http_is_told(folder: Path) -> None:
    authority = Authority(folder)
    certificate, key = folder / "c.pem", folder / "k.pem"
    authority.issue("gateway", certificate, key)
    tls = ("--s3-tls-cert", str(certificate), "--s3-tls-key", str(key))
    with serving(folder) as served, gateway(served.server, *tls, "--processes", "2") as found:
        access = new_key(served)
        assert found.url.startswith("https://")
        with pytest.raises(SSLError):
            s3_client(found.url, access).list_buckets()
        port = int(found.url.rpartition(":")[2])
        with socket.create_connection((HOST, port), timeout=WAIT_S) as plain:
            plain.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert plain.recv(1000).startswith(b"HTTP/1.1 400")
        authority.issue("renewed", certificate, key)
        found.process.send_signal(signal.SIGHUP)
        until_subject(found.url, authority, "renewed")
        half_closed(found.url, authority)


def half_closed(url: str, authority: Authority) -> None:
    """Check that a client which closes its sending side after its request still gets its answer."""
    context = ssl.create_default_context(cafile=str(authority.path))
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(theirs, ours, server_hostname=HOST)
    with socket.create_connection((HOST, int(url.rpartition(":")[2])), timeout=WAIT_S) as raw:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(ours.read())
                theirs.write(raw.recv(65536))
        tls.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(ssl.SSLWantReadError):
            tls.unwrap()
        raw.sendall(ours.read())
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := raw.recv(65536):
            theirs.write(piece)
        with pytest.raises(ssl.SSLZeroReturnError):  # the server's goodbye, after the whole answer
            while True:
                answer += tls.read(65536)
        assert answer.startswith(b"HTTP/1.1 403")


def test_a_certificate_without_its_key_and_one_that_is_not_there_are_refused(folder: Path) -> None:
    common = ("serve", "--data", folder / "store", "--socket", folder / "s", "--admin", "off", "--s3", f"{HOST}:0")
    alone = lake(*common, "--s3-tls-cert", "/nowhere/c.pem")
    assert (alone.code, "s3_tls_key" in alone.err) == (78, True)
    absent = lake(*common, "--s3-tls-cert", "/nowhere/c.pem", "--s3-tls-key", "/nowhere/k.pem")
    assert (absent.code, "/nowhere/c.pem" in absent.err) == (78, True)


def test_an_address_that_others_reach_without_tls_is_warned_of(folder: Path) -> None:
    log = folder / "log"
    with serving(folder) as served, gateway(served.server, "--s3", "0.0.0.0:0", stderr=log):
        assert "without TLS" in log.read_text()
    with serving(folder) as served, gateway(served.server, stderr=log):
        assert "without TLS" not in log.read_text()
