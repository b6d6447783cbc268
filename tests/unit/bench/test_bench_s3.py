"""The S3 bench counts only right answers, measures the waits that it claims, and never sends the same content twice."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import repeat

import pytest

from bench.harness.content import window
from bench.harness.s3_contest import OURS, race
from bench.harness.s3_load import Load, Outcome, WrongAnswer, ask
from bench.harness.s3_requests import Endpoint, Request, Signer
from bench.scenarios.s3_rates import Rates

ASK = Request(b"GET /x HTTP/1.1\r\n\r\n", answer_bytes=5)
RIGHT = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


def read_request(sock: socket.socket) -> bool:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = sock.recv(1 << 16)
        if not piece:
            return False
        received += piece
    return True


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Serve each connection with `serve`, in a thread of its own."""
    threads: list[threading.Thread] = []

    def one(sock: socket.socket) -> None:
        with sock, suppress(ConnectionError):  # a load that ends closes without reading the rest
            serve(sock)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=one, args=(sock,))
            thread.start()
            threads.append(thread)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield Endpoint(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for thread in threads:
        thread.join()


def answering(*pieces: bytes) -> Callable[[socket.socket], None]:
    """Return a server that always sends the same answer, in these pieces."""

    def serve(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while read_request(sock):
            for piece in pieces:
                sock.sendall(piece)

    return serve


@pytest.mark.parametrize(
    "pieces", [(RIGHT,), (RIGHT[:10], RIGHT[10:30], RIGHT[30:]), (RIGHT[:-5], b"he", b"llo"), (CHUNKED,)]
)
def test_every_answer_is_counted_once_however_it_comes(pieces: tuple[bytes, ...]) -> None:
    with server(answering(*pieces)) as endpoint, Load(endpoint, 3) as load:
        outcome = load.run(repeat(ASK, 20))
        again = load.run(repeat(ASK, 7))
    assert (outcome.count, again.count, again.unfinished_s) == (20, 7, [])
    _, _, body = b"".join(pieces).partition(b"\r\n\r\n")
    assert outcome.moved_bytes == 20 * len(body)


@pytest.mark.parametrize("body_bytes", [4096, 5 << 20])
def test_a_body_arrives_whole(body_bytes: int) -> None:
    body = bytes(window(body_bytes))
    digests: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        received = b""
        while len(received) < body_bytes + len(head):
            received += sock.recv(1 << 20)
        digests.append(sha256(received[len(head) :]).digest())
        sock.sendall(RIGHT)

    head = b"PUT /x HTTP/1.1\r\n\r\n"
    with server(serve) as endpoint, Load(endpoint, 1) as load:
        outcome = load.run([Request(head, body)])
    assert digests == [sha256(body).digest()]
    assert outcome.moved_bytes == body_bytes + 5


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_wrong_answer_is_no_figure(wrong: bytes) -> None:
    with server(answering(wrong)) as endpoint, Load(endpoint, 1) as load, pytest.raises(WrongAnswer, match="GET /x"):
        load.run([ASK])


def test_a_connection_that_ends_within_an_answer_is_a_failure() -> None:
    def serve(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(RIGHT[:-2])

    with server(serve) as endpoint, Load(endpoint, 1) as load, pytest.raises(WrongAnswer, match="ended before"):
        load.run([ASK])


def test_a_connection_that_ends_between_requests_is_opened_anew() -> None:
    def serve(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(RIGHT)

    with server(serve) as endpoint, Load(endpoint, 2) as load:
        assert load.run(repeat(ASK, 9)).count == 9


def test_what_is_not_answered_in_time_counts_as_slower_than_all_that_was() -> None:
    answered = threading.Semaphore(3)

    def serve(sock: socket.socket) -> None:
        while read_request(sock):
            if answered.acquire(blocking=False):
                sock.sendall(RIGHT)

    with server(serve) as endpoint, Load(endpoint, 4) as load:
        outcome = load.run(repeat(ASK, 100), give_up_s=0.2)
    assert outcome.count <= 3
    assert len(outcome.unfinished_s) == 4
    assert math.isinf(outcome.percentile_s(0.5))
    assert outcome.count == 0 or math.isfinite(outcome.percentile_s(outcome.count / (outcome.count + 4)))


def test_a_percentile_is_the_smallest_value_that_so_many_do_not_pass() -> None:
    outcome = Outcome(latencies_s=[5, 1, 4, 2, 3])
    assert [outcome.percentile_s(share) for share in (0, 0.2, 0.5, 0.8, 0.99)] == [1, 1, 3, 4, 5]


def test_a_round_in_which_a_peer_moves_nothing_has_no_ratio() -> None:
    def moved(*counts: int) -> list[Outcome]:
        return [Outcome(elapsed_s=1.0, moved_bytes=moved_bytes) for moved_bytes in counts]

    rates = Rates("s3-x", "GET", ("peer",), 1, 1.0)
    row = rates._row("GET", {OURS: moved(800, 900, 1000), "peer": moved(100, 0, 200)}, "peer")
    assert (row.value, row.spread, row.could_not_run) == (6.5, "5..8", "")
    assert rates._row("GET", {OURS: moved(800), "peer": moved(0)}, "peer").could_not_run


def test_the_answer_to_one_request_is_given_whole() -> None:
    with server(answering(RIGHT)) as endpoint:
        assert ask(endpoint, ASK) == (200, b"hello")


def test_windows_are_all_different() -> None:
    found = {sha256(window(4096)).digest() for _ in range(100)}
    assert len(found) == 100
    first, second = (bytes(window(12 << 20)) for _ in range(2))
    chunks = {
        sha256(content[begin : begin + (4 << 20)]).digest()
        for content in (first, second)
        for begin in range(0, len(content), 4 << 20)
    }
    assert len(chunks) == 6


def test_a_request_is_signed_only_for_those_who_have_a_key() -> None:
    assert b"Authorization" not in Signer(Endpoint(1)).request("GET", "/b/k").head
    head = Signer(Endpoint(1, "key", "secret")).request("GET", "/b/k").head
    assert b"Authorization: AWS4-HMAC-SHA256 Credential=key/" in head
    assert b"secret" not in head


@contextmanager
def counting(values: list[int], fails_at: int | None) -> Iterator[Callable[[], int]]:
    def run() -> int:
        values.append(len(values))
        if len(values) == fails_at:
            raise WrongAnswer("no more")
        return values[-1]

    yield run


@pytest.mark.parametrize("fails_at", [None, 2])
def test_a_peer_that_fails_is_out_and_the_others_go_on(fails_at: int | None) -> None:
    sides = {OURS: lambda: counting([], None), "peer": lambda: counting([], fails_at)}
    results, absent = race(sides, 3)
    assert results[OURS] == [0, 1, 2]
    assert (results.get("peer"), absent) == (([0, 1, 2], {}) if fails_at is None else (None, {"peer": "no more"}))


def test_ours_must_not_fail() -> None:
    with pytest.raises(WrongAnswer):
        race({OURS: lambda: counting([], 1)}, 1)


def test_in_an_open_loop_a_stall_is_charged_to_all_that_were_due_meanwhile() -> None:
    asked = iter(range(1000))

    def serve(sock: socket.socket) -> None:
        while read_request(sock):
            if next(asked) == 0:
                threading.Event().wait(0.15)
            sock.sendall(RIGHT)

    with server(serve) as endpoint, Load(endpoint, 1) as load:
        outcome = load.run(repeat(ASK), for_s=0.1, rate_per_s=100)
    assert outcome.count == 10
    # One connection: all ten waited for the first answer, the last of them since its own time.
    assert max(outcome.latencies_s) >= 0.15
    assert min(outcome.latencies_s) >= 0.05


def test_what_was_due_and_never_begun_counts_as_unanswered() -> None:
    ended = threading.Event()

    def serve(sock: socket.socket) -> None:
        read_request(sock)
        ended.wait()

    with server(serve) as endpoint:
        with Load(endpoint, 1) as load:
            outcome = load.run(repeat(ASK), for_s=0.1, give_up_s=0.15, rate_per_s=100)
        ended.set()
    assert outcome.count == 0
    assert len(outcome.unfinished_s) == 10
