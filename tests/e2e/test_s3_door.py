"""The door at work behind a gateway: what users would notice if it were not as exact as Python."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.gateways import Gateway, gateway, new_key, s3_client
from tests.e2e.served import WAIT_S, Served, serving
from tests.e2e.test_s3_operated import figure, logged
from tests.served_devices import CYCLES, DEVICES, SHORT
from tests.slow_machine import LostTime

MIB = 1 << 20


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(folder) as started:
        yield started


def repeated(found: Gateway) -> float:
    """Return how many GETs the door has answered."""
    return figure(found.admin("/metrics")[1], 'lake_s3_repeated_total{operation="GetObject"}')


def got(client: Any, key: str, times: int = 1) -> bytes:
    """Return an object, after so many GETs."""
    contents = [bytes(client.get_object(Bucket="bkt", Key=key)["Body"].read()) for _ in range(times)]
    return contents[-1]


@pytest.mark.one_engine(SHORT)
def test_answers_are_repeated_until_something_changes(served: Served) -> None:
    key = new_key(served)
    with gateway(served.server) as found:
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        for content in (b"first", b"second", os.urandom(5 * MIB)):
            before = repeated(found)
            client.put_object(Bucket="bkt", Key="k", Body=content)
            assert got(client, "k", 6) == content
            assert repeated(found) - before >= 3
        client.delete_object(Bucket="bkt", Key="k")
        with pytest.raises(client.exceptions.NoSuchKey):
            got(client, "k")


def test_without_a_door_every_answer_is_made_anew(served: Served) -> None:
    key = new_key(served)
    with gateway(served.server, "--s3-door", "off") as found:
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        client.put_object(Bucket="bkt", Key="k", Body=b"content")
        assert got(client, "k", 6) == b"content"
        assert repeated(found) == 0


def read_slowly_while_deleted(served: Served, found: Gateway, client: Any, content: bytes) -> bool:
    """Delete and collect an object while a slow client reads it; check its bytes.  Return True if the door sent them.

    On a busy machine the door may have to ask Python just then.  At a lake Python sends them, so the answer is True.
    """
    client.put_object(Bucket="bkt", Key="big", Body=content)
    target = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": "bkt", "Key": "big"}))
    request = f"GET {target.path}?{target.query} HTTP/1.1\r\nHost: {target.netloc}\r\n\r\n".encode()
    known = repeated(found) + (0 if DEVICES else 3)
    while repeated(found) < known:  # until its content stays where the door reads it
        assert whole(target, request, wait_s=0) == content
    before = repeated(found)
    answers: list[bytes] = []
    begun = threading.Event()
    slow = threading.Thread(target=lambda: answers.append(whole(target, request, wait_s=2, begun=begun)))
    slow.start()
    assert begun.wait(60)
    time.sleep(0.5)  # its socket is full by then, and the engine has pinned the rest
    client.delete_object(Bucket="bkt", Key="big")
    for _ in range(CYCLES + 1):
        served.good("gc", "--compact")
    slow.join()
    assert answers == [content]
    return bool(DEVICES) or repeated(found) > before


def test_a_slow_client_gets_all_of_an_object_that_is_deleted_and_collected_meanwhile(served: Served) -> None:
    content = os.urandom(24 * MIB)
    key = new_key(served)
    with gateway(served.server) as found:
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        sent_by_the_door = (read_slowly_while_deleted(served, found, client, content) for _ in range(5))
        assert any(sent_by_the_door)
        assert figure(found.admin("/metrics")[1], "lake_s3_cut_short_total") == 0


def whole(target: Any, request: bytes, wait_s: float, begun: threading.Event | None = None) -> bytes:
    """Send a request on a connection with a small buffer, wait, and return the body of the answer.

    `begun` is set when the answer has begun to come.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.settimeout(30)
        sock.connect((target.hostname, target.port))
        sock.sendall(request)
        sock.recv(1, socket.MSG_PEEK)
        if begun is not None:
            begun.set()
        time.sleep(wait_s)
        with sock.makefile("rb") as file:
            length = 0
            while (line := file.readline()) != b"\r\n":
                assert line, "the connection ended in the head"
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            return file.read(length)


def test_each_repeated_answer_is_a_line_of_the_access_log(folder: Path, served: Served) -> None:
    log = folder / "access.log"
    key = new_key(served)
    with gateway(served.server, "--s3-access-log", str(log)) as found:
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        odd = 'a "quoted" \u00e9 key'
        client.put_object(Bucket="bkt", Key=odd, Body=b"x" * 100)
        assert got(client, odd, 10) == b"x" * 100
        assert repeated(found) >= (0 if DEVICES else 6)
        lines = [line for line in logged(log, 12) if line["operation"] == "GetObject"]
        assert len(lines) == 10
        assert len({line["request_id"] for line in lines}) == 10
        for line in lines:
            assert line.keys() == lines[0].keys()
            assert (line["bucket"], line["key"], line["status"], line["bytes_out"]) == ("bkt", odd, 200, 100)
            assert line["access_key"] == key[0]
            assert line["remote"].startswith("127.0.0.1:")
            assert "Boto3" in line["user_agent"]


def test_a_key_that_was_removed_is_refused_by_the_door_within_a_second_or_two(served: Served) -> None:
    owners, key = new_key(served), new_key(served)
    with gateway(served.server) as found:
        owner = s3_client(found.url, owners)
        owner.create_bucket(Bucket="bkt")
        for number in range(200):
            owner.put_object(Bucket="bkt", Key=f"k{number}", Body=b"x")
        client = s3_client(found.url, key)
        assert got(client, "k0", 6) == b"x"
        assert served.process is not None
        served.good("key", "rm", key[0])
        refused_at, lost = time.monotonic() + 2.5, LostTime(served.process.pid, found.process.pid)
        for number in range(1, 10_000):
            try:
                got(client, f"k{number % 200}")  # new ones are taught while the keys are read again
            except client.exceptions.ClientError:
                break
            assert time.monotonic() < refused_at + lost.seconds(), "the key still reads"
        for _ in range(20):
            with pytest.raises(client.exceptions.ClientError):
                got(client, "k0")
            time.sleep(0.05)


def noted(served: Served, **wanted: float) -> list[dict[str, Any]]:
    """Wait until the gateways of `lake status` have these sums; return them."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        gateways: list[dict[str, Any]] = json.loads(served.good("status", "--json").text)["gateways"]
        sums = {name: sum(found[name] for found in gateways) for name in wanted}
        if sums == wanted:
            return gateways
        assert time.monotonic() < give_up_at, f"{sums} instead of {wanted}"
        time.sleep(0.2)


def series(found: Gateway, name: str) -> dict[str, float]:
    """Return the values of a metric by what its labels are."""
    lines = re.findall(rf"^{name}{{(.*)}} (\S+)$", found.admin("/metrics")[1], re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


@pytest.mark.one_engine(SHORT)
def test_lake_status_has_how_many_answers_were_repeated_and_why_others_were_not(served: Served) -> None:
    key = new_key(served)
    with gateway(served.server) as found:
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        client.put_object(Bucket="bkt", Key="k", Body=b"first")
        got(client, "k", 4)
        for number in range(3):
            client.put_object(Bucket="bkt", Key=f"{number}", Body=b"new")
            got(client, f"{number}")
        client.put_object(Bucket="bkt", Key="k", Body=b"second")
        got(client, "k", 6)
        client.get_object(Bucket="bkt", Key="k", Range="bytes=0-0,2-2")["Body"].read()
        assert sum(series(found, "lake_s3_requests_total").values()) == 20
        [status] = noted(served, answers=20, repeated=sum(series(found, "lake_s3_repeated_total").values()))
        assert status["repeated"] >= 5
        reasons = {f'reason="{reason}"': count for reason, count in status["passed_on"].items()}
        assert reasons == series(found, "lake_s3_passed_on_total")
        assert status["passed_on"]["field"] >= 1
        assert (status["url"], status["process"], status["door"]) == (found.url, found.process.pid, True)
        lines = served.good("status").lines
        at = lines.index(f"{f's3 {found.url}':<36} {status['repeated']} of 20 answers given by the door")
        assert re.search(r"^  left to Python, by reason +.*\bfield \d\b", lines[at + 1])
        got(client, "k")
        noted(served, answers=21, repeated=sum(series(found, "lake_s3_repeated_total").values()))
    assert noted(served, answers=0) == []


def test_lake_status_has_all_gateways_and_each_of_their_processes(folder: Path) -> None:
    with serving(folder, "--native", "127.0.0.1:0", "--s3", "127.0.0.1:0") as served:
        key = new_key(served)
        assert served.process is not None
        token = served.token()
        [tcp] = [line.split()[1] for line in served.printed if line.startswith("listen  tcp:")]
        [own] = [line.split()[1] for line in served.printed if line.startswith("s3 ")]
        with gateway(served.server, "--processes", "2") as team, gateway(tcp, token=token) as remote:
            s3_client(team.url, key).create_bucket(Bucket="bkt")
            for url in (team.url, remote.url, own):
                client = s3_client(url, key)
                client.put_object(Bucket="bkt", Key="k", Body=b"content")
                got(client, "k", 5)
            gateways = noted(served, answers=19)
            assert {(found["url"], found["process"], found["door"]) for found in gateways} == {
                (own, served.process.pid, True),
                *((team.url, child, True) for child in team.children()),
                (remote.url, remote.process.pid, False),
            }
            text = served.good("status").text
            some = "[0-9]" if DEVICES else "[1-9]"
            assert re.search(rf"^s3 {team.url} +{some} of 7 answers given by the door \(2 processes\)$", text, re.M)
            assert re.search(rf"^s3 {remote.url} at 127\.0\.0\.1 +6 answers, none repeated: no door$", text, re.M)
            assert re.search(rf"^s3 {own} +{some} of 6 answers given by the door$", text, re.M)
