"""The conditions under which the door repeats an answer or passes a request on, each alone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lakefs.ids import ChunkId
from lakefs.limits import GRANULE_BYTES
from tests.unit.gateway.s3.door.taught import EMPTY, HOST, LINES, RECORDS, SUMS, TARGET, Taught


@pytest.fixture
def taught() -> Iterator[Taught]:
    made = Taught()
    yield made
    made.close()


def parts(answer: bytes | None) -> tuple[bytes, list[bytes], bytes]:
    """Return status line, header lines without Date and id, and body."""
    assert answer is not None
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, [line for line in lines if not line.startswith((b"Date: ", b"x-amz-request-id: "))], body


def test_get_is_repeated(taught: Taught) -> None:
    answer = taught.ask(taught.request())
    status, lines, body = parts(answer)
    assert status == b"HTTP/1.1 200 OK"
    assert lines == [b"Server: lake", b'ETag: "abc"', b"Content-Type: text/plain", b"Content-Length: 11"]
    assert body == b"the content"
    assert answer is not None
    assert re.search(
        rb"\r\nDate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\nx-amz-request-id: [0-9A-F]{16}\r\n", answer
    )
    assert taught.repeater.answered == [(1, 0), (0, 0), (0, 0)]
    assert taught.repeater.sent_bytes == 11


def test_head_is_get_without_the_content(taught: Taught) -> None:
    get, head = taught.ask(taught.request()), taught.ask(taught.request("HEAD"))
    assert parts(head)[:2] == parts(get)[:2]
    assert parts(head)[2] == b""
    assert taught.repeater.answered == [(1, 0), (1, 0), (0, 0)]


def test_a_range_is_cut_from_the_content(taught: Taught) -> None:
    status, lines, body = parts(taught.ask(taught.request(more={"Range": "bytes=4-6"})))
    assert (status, body) == (b"HTTP/1.1 206 Partial Content", b"con")
    assert lines[-2:] == [b"Content-Range: bytes 4-6/11", b"Content-Length: 3"]
    assert parts(taught.ask(taught.request(more={"Range": "bytes=4-"})))[2] == b"content"
    assert parts(taught.ask(taught.request(more={"Range": "bytes=4-999999999999999999"})))[2] == b"content"
    assert parts(taught.ask(taught.request("HEAD", more={"Range": "bytes=4-6"})))[1][-1] == b"Content-Length: 3"
    assert taught.repeater.answered == [(0, 3), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    "value",
    ["bytes=11-", "bytes=-3", "bytes=5-4", "bytes=0-1,3-4", "bytes= 0-1", "items=0-1", "bytes=0-1 ,", "Bytes=0-1",
     "bytes=", "bytes=-", "bytes=0", "bytes=0-1000000000000000000", "bytes=0x1-2", ""],
)  # fmt: skip
def test_any_other_range_is_passed_on(taught: Taught, value: str) -> None:
    assert taught.ask(taught.request(more={"Range": value})) is None


def test_an_amz_header_that_is_not_signed_is_passed_on(taught: Taught) -> None:
    asked = {"x-amz-checksum-mode": "ENABLED"}
    assert taught.ask(taught.request(more=asked)) is None, "it is not signed"
    assert taught.passed() == {"signature": 1}


def test_headers_that_change_nothing(taught: Taught) -> None:
    more = {
        "Accept": "*/*",
        "accept-encoding": "identity",
        "User-Agent": "a client",
        "amz-sdk-invocation-id": "1",
        "amz-sdk-request": "attempt=1",
        "Connection": "Keep-Alive",
    }
    assert parts(taught.ask(taught.request(more=more)))[2] == b"the content"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("If-None-Match", '"abc"'),
        ("If-Match", '"x"'),
        ("If-Range", '"x"'),
        ("Origin", "http://other"),
        ("Expect", "100-continue"),
        ("Content-Length", "0"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
        ("Connection", "keep-alive, close"),
        ("x-amz-expected-bucket-owner", "me"),
        ("x-amz-security-token", "t"),
        ("x-amz-user-agent", "not signed"),
        ("host", "another"),
        ("Accept", "a\tb"),
        ("Accept", "caf\u00e9"),
        ("Acc ept", "x"),
        ("Accept ", "x"),
    ],
)
def test_other_headers_are_passed_on(taught: Taught, name: str, value: str) -> None:
    assert taught.ask(taught.request(more={name: value})) is None


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS", "get", "GETS", "G"])
def test_other_methods_are_passed_on(taught: Taught, method: str) -> None:
    assert taught.ask(taught.request(method)) is None
    assert taught.passed() == {"head": 1}


def test_another_target_host_or_query_is_not_known(taught: Taught) -> None:
    assert taught.ask(taught.request(target=TARGET + b"2")) is None
    assert taught.ask(taught.request(target=TARGET + b"?x-id=GetObject")) is None
    assert taught.ask(taught.request().replace(b"Host: " + HOST, b"Host: other")) is None
    assert taught.passed() == {"new": 3}


@pytest.mark.parametrize("at", [0, 17, 63])
def test_a_signature_that_is_wrong_in_one_digit(taught: Taught, at: int) -> None:
    request = taught.request()
    begin = request.index(b"Signature=") + len(b"Signature=") + at
    wrong = b"0" if request[begin : begin + 1] != b"0" else b"1"
    assert taught.ask(request[:begin] + wrong + request[begin + 1 :]) is None
    assert taught.passed() == {"signature": 1}


def test_a_signature_of_another_secret_method_or_time(taught: Taught) -> None:
    assert taught.ask(taught.request(secret_day="20200101")) is None
    assert taught.ask(taught.request().replace(b"GET ", b"HEAD ", 1)) is None
    request = taught.request()
    stamp = request.index(b"X-Amz-Date: ") + len(b"X-Amz-Date: ")
    moved = request[: stamp + 14] + (b"1" if request[stamp + 14 : stamp + 15] != b"1" else b"2") + request[stamp + 15 :]
    assert taught.ask(moved) is None
    assert taught.passed() == {"signature": 3}


@pytest.mark.parametrize("shift_s", [-901, 901, -900, 900])
def test_a_clock_that_differs_by_a_quarter_of_an_hour(taught: Taught, shift_s: int) -> None:
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + shift_s + (1 if shift_s > 0 else -1)))
    assert taught.ask(taught.request(date=date)) is None


@pytest.mark.parametrize("date", ["20261301T000000Z", "20260230T000000Z", "2026-11-26T00:00Z", "20261126T240000Z"])
def test_a_date_that_is_none(taught: Taught, date: str) -> None:
    assert taught.ask(taught.request(date=date)) is None


def test_a_body_that_is_announced_is_passed_on(taught: Taught) -> None:
    assert taught.ask(taught.request(content="ab" * 32)) is None
    assert taught.ask(taught.request(content="STREAMING-AWS4-HMAC-SHA256-PAYLOAD")) is None
    assert taught.ask(taught.request(content="UNSIGNED-PAYLOAD")) is not None


def test_a_signer_that_is_not_known_or_forgotten(taught: Taught) -> None:
    other = taught.request().replace(b"AKIDTEST", b"AKIDTESU")
    assert taught.ask(other) is None
    taught.repeater.forget_claims()
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"signature": 2}
    taught.learn_signer()
    assert taught.ask(taught.request()) is not None


def test_claims_end_with_the_keys_they_were_proven_with(taught: Taught) -> None:
    taught.repeater.hold_until(time.monotonic() - 0.001)
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"keys": 1}


@pytest.mark.parametrize(
    ("buckets", "may_read"),
    [(b"bucket\0", True), (b"a\0bucket\0", True), (b"bucke\0", False), (b"bucket2\0b\0", False)],
)
def test_a_key_that_is_limited_to_buckets(buckets: bytes, may_read: bool) -> None:
    taught = Taught(buckets=buckets)
    assert (taught.ask(taught.request()) is not None) == may_read
    taught.close()


# --- stamps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS)
def test_an_answer_is_not_repeated_once_a_record_has_changed(taught: Taught, record: tuple[int, bytes]) -> None:
    assert taught.ask(taught.request()) is not None
    taught.stamps.turn([(1, record[0], record[1], b"")])
    assert taught.ask(taught.request()) is None
    assert taught.ask(taught.request("HEAD")) is None
    assert taught.passed() == {"changed": 1, "new": 1}, "it was dropped at once"
    taught.learn()
    assert taught.ask(taught.request()) is not None


def test_nothing_is_repeated_when_the_engine_has_ended(taught: Taught) -> None:
    taught.stamps.end()
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"changed": 1}


def test_an_answer_without_stamps_is_not_learned(taught: Taught) -> None:
    taught.repeater.learn_answer(
        HOST, b"/bucket/other", of_get=True, canonical_target=b"/bucket/other\n", bucket=b"bucket", lines=LINES,
        sums=SUMS, layout=b"", size_bytes=11, stamps=b"", logged=b"",
    )  # fmt: skip
    assert taught.ask(taught.request(target=b"/bucket/other")) is None
    assert taught.passed() == {"new": 1}


# --- content -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.one_of(st.integers(1, GRANULE_BYTES - 1), st.sampled_from([1, 7, 8, 767, 768, 24575, 24576, 65535])))
def test_content_of_every_length_is_checked_and_sent(length: int) -> None:
    taught = Taught(os.urandom(length))
    assert parts(taught.ask(taught.request()))[2] == taught.content
    taught.close()


def test_an_empty_object(taught: Taught) -> None:
    empty = Taught(b"")
    assert parts(empty.ask(empty.request()))[1:] == (
        [*parts(taught.ask(taught.request()))[1][:-1], b"Content-Length: 0"],
        b"",
    )
    empty.close()


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 4999), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_sent(at: int, bit: int) -> None:
    taught = Taught(bytes(5000))
    taught.slab[64 * 1024 + at] ^= 1 << bit
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"content": 1}
    taught.close()


def test_a_cell_that_holds_something_else_by_now(taught: Taught) -> None:
    taught.set_generation(10)
    assert taught.ask(taught.request()) is None
    taught.set_generation(9)
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"content": 2}


def test_a_chunk_that_has_no_place_or_another_length(taught: Taught) -> None:
    taught.table.remove(taught.chunk)
    assert taught.ask(taught.request()) is None
    taught.place(b"longer than the content")
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"content": 2}
    assert taught.ask(taught.request("HEAD")) is not None


def test_a_segment_is_read_by_its_descriptor(taught: Taught, tmp_path: os.PathLike[str]) -> None:
    from lakefs.host.crc import crc32c

    path = os.path.join(tmp_path, "segment")
    with open(path, "wb") as file:
        file.write(bytes(4096) + b"in a segment")
    made = Taught(b"in a segment")
    made.table.remove(made.chunk)
    assert made.table.put(made.chunk, 1, 77, 4096, 12, crc32c(b"in a segment"))
    assert made.ask(made.request()) is None, "no descriptor yet"
    chunk = ChunkId(made.chunk)
    assert made.repeater.missing([chunk]) == ({(1, 77)}, True)
    descriptor = os.open(path, os.O_RDONLY)
    assert made.repeater.use_segment(77, descriptor, 0) is None
    assert made.repeater.missing([chunk]) == (set(), True)
    assert made.repeater.missing([ChunkId(b"\x01" + bytes(32))]) == (set(), False)
    assert parts(made.ask(made.request()))[2] == b"in a segment"
    os.truncate(path, 4100)
    assert made.ask(made.request()) is None
    made.repeater.drop_segments()
    assert made.repeater.missing([chunk]) == ({(1, 77)}, True)
    made.close()
    os.close(descriptor)


def test_forgetting_drops_everything_but_the_counts(taught: Taught) -> None:
    assert taught.ask(taught.request()) is not None
    taught.repeater.forget()
    assert taught.repeater.held == (0, 0)
    assert taught.ask(taught.request()) is None
    assert taught.repeater.answered == [(1, 0), (0, 0), (0, 0)]


def test_an_answer_of_head_alone_is_not_given_to_get(taught: Taught) -> None:
    taught.learn(of_get=False, target=b"/bucket/other")
    assert taught.ask(taught.request(target=b"/bucket/other")) is None
    assert taught.ask(taught.request("HEAD", target=b"/bucket/other")) is not None


def test_an_answer_of_head_replaces_that_of_get_only_when_something_has_changed(taught: Taught) -> None:
    taught.learn(of_get=False)
    assert taught.ask(taught.request()) is not None
    taught.stamps.turn([(1, *RECORDS[0], b"")])
    taught.learn(of_get=False)
    assert taught.ask(taught.request()) is None
    assert taught.ask(taught.request("HEAD")) is not None


def test_a_target_with_a_signature_of_its_own_is_not_given_to_a_signer(taught: Taught) -> None:
    taught.learn(canonical=b"")
    assert taught.ask(taught.request()) is None
    assert taught.passed() == {"signature": 1}


# --- bounds ------------------------------------------------------------------------------------------------


def test_answers_are_bounded_in_bytes() -> None:
    taught = Taught(memory=64 << 10)
    for number in range(2000):
        taught.learn(target=b"/bucket/%d" % number)
        count, held_bytes = taught.repeater.held
        assert held_bytes <= 64 << 10
    assert count > 50
    assert taught.ask(taught.request(target=b"/bucket/1999")) is not None
    assert taught.ask(taught.request(target=b"/bucket/0")) is None
    taught.close()


def test_long_names_and_many_lines_are_not_learned(taught: Taught) -> None:
    held = taught.repeater.held
    taught.learn(target=b"/bucket/" + b"k" * 5000)
    taught.learn(target=b"/bucket/lines", lines=b"x-amz-meta-a: b\r\n" * 1000)
    assert taught.repeater.held == held


def test_a_request_of_many_headers_or_a_long_name_is_passed_on(taught: Taught) -> None:
    assert taught.ask(taught.request(more={f"x-{number}": "1" for number in range(40)})) is None
    assert taught.ask(taught.request(target=b"/bucket/" + b"k" * 6000)) is None


@given(cut=st.integers(1, 300))
def test_a_head_that_is_not_whole_is_passed_on(cut: int) -> None:
    taught = Taught()
    request = taught.request()
    assert taught.ask(request[: min(cut, len(request) - 1)]) is None
    taught.close()


def test_notes_are_a_sample_of_the_chunks_that_were_read(taught: Taught) -> None:
    for _ in range(200):
        assert taught.ask(taught.request()) is not None
    noted = taught.repeater.take_notes()
    assert 5 < len(noted) < 100
    assert set(noted) == {taught.chunk}
    assert taught.repeater.take_notes() == []


def test_the_lines_of_the_access_log(taught: Taught) -> None:
    taught.repeater.log(1, 10_000)
    taught.ask(taught.request(more={"User-Agent": 'a "quoted\\ agent'}))
    taught.ask(taught.request("HEAD", more={"Range": "bytes=0-3"}))
    lines, lost = taught.repeater.take_log()
    get, head = (msgspec.json.decode(line) for line in lines.splitlines())
    assert lost == 0
    assert get["user_agent"] == 'a "quoted\\ agent'
    assert (get["access_key"], get["remote"], get["bucket"], get["key"]) == ("AKIDTEST", "peer", "bucket", "a key")
    assert (get["operation"], get["method"], get["status"], get["bytes_out"]) == ("GetObject", "GET", 200, 11)
    assert (head["operation"], head["method"], head["status"], head["bytes_out"]) == ("HeadObject", "HEAD", 206, 0)
    assert 0 < get["total_ms"] < 10_000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", get["timestamp"])
    assert taught.repeater.take_log() == (b"", 0)


def test_lines_without_room_are_counted_and_a_sample_is_kept(taught: Taught) -> None:
    taught.repeater.log(3, 700)
    for _ in range(30):
        taught.ask(taught.request())
    lines, lost = taught.repeater.take_log()
    assert lines.count(b"\n") + lost == 10
    assert lost > 5
    assert len(lines) <= 700


def test_times_are_counted_in_their_buckets(taught: Taught) -> None:
    for _ in range(10):
        taught.ask(taught.request())
    counts, took_ns = taught.repeater.times(False)
    assert sum(counts) == 10
    assert len(counts) == 3
    assert took_ns > 0


def test_a_presigned_request_is_known_as_a_whole_for_its_time(taught: Taught) -> None:
    target = TARGET + b"?X-Amz-Signature=abc"
    taught.learn(target=target)
    request = b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, HOST)
    assert taught.ask(request) is None
    now = int(time.time())
    taught.repeater.learn_presigned(b"GET", HOST, target, b"", b'"K"', now - 10, now + 100)
    assert taught.ask(request) is not None
    assert taught.ask(request.replace(b"GET", b"HEAD")) is None
    assert taught.ask(request.replace(b"Host", b"x-amz-date: 1\r\nHost")) is None
    taught.repeater.learn_presigned(b"GET", HOST, target, b"", b'"K"', now - 10, now - 1)
    assert taught.ask(request) is None
    taught.repeater.learn_presigned(b"GET", HOST, target, b"", b'"K"', now + 50, now + 100)
    assert taught.ask(request) is None
    assert EMPTY
