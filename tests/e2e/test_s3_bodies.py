"""Framing, lengths, digests and elements that requests state of their bodies, and checksums of parts; to one engine.

Each is honoured or refused, never stored or ignored.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from zlib import crc32

import pytest

from gateway.s3.protocol.checksums import Algorithm, start
from tests.e2e.s3_chunks import UNSIGNED_TRAILER, chunked_put, crc32_text
from tests.e2e.s3_raw import UNSIGNED, Answer, Signer, signer_of
from tests.e2e.served import Served, serving

NEW: Final = "/bucket/new"
PAYLOAD: Final = b"the payload, and nothing of its framing"
LARGE: Final = bytes(range(256)) * 20_000
"""Longer than a chunk of the store."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; the bucket `bucket` is there."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    return signer


def nothing_stored(s3: Signer, answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.code) == (status, code), answer
    assert s3.ask("HEAD", NEW).status == 404


# --- framing -------------------------------------------------------------------------------------------


def framed(payload: bytes, trailers: Mapping[str, str] | None = None) -> bytes:
    """Return a payload in unsigned chunks."""
    half = len(payload) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (payload[:half], payload[half:]))
    lines = "".join(f"{name}:{value}\r\n" for name, value in (trailers or {}).items())
    return chunks + b"0\r\n" + lines.encode() + b"\r\n"


def put_as(s3: Signer, way: str, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
    """PUT a body under a hash of it, under none, or by a presigned URL, which has none."""
    if way == "presigned":
        path, _, query = target.partition("?")
        amz = {name: value for name, value in headers.items() if name.startswith("x-amz-")}
        more = dict(pair.split("=") for pair in query.split("&") if pair) | amz
        lines = [f"PUT {s3.presigned('PUT', path, more=more)} HTTP/1.1", f"Host: {s3.host}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name not in amz]
        lines += [f"Content-Length: {len(body)}", "", ""]
        return s3.send("\r\n".join(lines).encode() + body)
    return s3.ask("PUT", target, body, headers, payload=UNSIGNED if way == "unsigned" else None)


WAYS: Final = ("hash", "unsigned", "presigned")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("payload", [PAYLOAD, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("coding", ["aws-chunked", "gzip, AWS-Chunked", ""])
def test_framing_is_never_content_whatever_the_hash_says(s3: Signer, way: str, payload: bytes, coding: str) -> None:
    headers = {"x-amz-decoded-content-length": str(len(payload))} | ({"content-encoding": coding} if coding else {})
    assert put_as(s3, way, "/bucket/framed", framed(payload), headers).status == 200
    answer = s3.ask("GET", "/bucket/framed")
    assert answer.body == payload
    assert answer.headers["etag"] == f'"{hashlib.md5(payload).hexdigest()}"'
    assert answer.headers.get("content-encoding") == ("gzip" if "gzip" in coding else None)


@pytest.mark.parametrize("way", WAYS)
def test_a_framed_part_and_framed_xml_are_what_is_inside(s3: Signer, way: str) -> None:
    begun = s3.ask("POST", "/bucket/parts?uploads=").field("UploadId")
    headers = {"x-amz-decoded-content-length": str(len(LARGE)), "content-encoding": "aws-chunked"}
    part = put_as(s3, way, f"/bucket/parts?partNumber=1&uploadId={begun}", framed(LARGE), headers)
    assert part.headers["etag"] == f'"{hashlib.md5(LARGE).hexdigest()}"', part
    assert s3.ask("DELETE", f"/bucket/parts?uploadId={begun}").status == 204
    tags = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
    assert s3.ask("PUT", "/bucket/tagged", b"x").status == 200
    headers = {"x-amz-decoded-content-length": str(len(tags)), "content-encoding": "aws-chunked"}
    assert put_as(s3, way, "/bucket/tagged?tagging=", framed(tags), headers).status == 200
    assert s3.ask("GET", "/bucket/tagged?tagging=").field("Value") == "b"


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_is_not_framed_as_its_headers_say_is_not_stored(s3: Signer, way: str) -> None:
    length, coding = str(len(PAYLOAD)), {"content-encoding": "aws-chunked"}
    for body, headers, refusal in (
        (PAYLOAD, coding, (411, "MissingContentLength")),
        (framed(PAYLOAD), coding, (411, "MissingContentLength")),
        (PAYLOAD, {**coding, "x-amz-decoded-content-length": length}, (400, "IncompleteBody")),
        (PAYLOAD, {"x-amz-decoded-content-length": str(len(PAYLOAD) - 1)}, (400, "IncompleteBody")),
        (PAYLOAD, {"x-amz-decoded-content-length": "many"}, (400, "InvalidArgument")),
        (b"", {**coding, "x-amz-decoded-content-length": "1"}, (400, "IncompleteBody")),
        (framed(PAYLOAD), {**coding, "x-amz-decoded-content-length": str(len(PAYLOAD) - 1)}, (400, "IncompleteBody")),
        (framed(PAYLOAD), {**coding, "x-amz-decoded-content-length": str(len(PAYLOAD) + 1)}, (400, "IncompleteBody")),
    ):
        nothing_stored(s3, put_as(s3, way, NEW, body, headers), *refusal)


def test_an_empty_body_and_a_plain_one_of_the_stated_length_are_content(s3: Signer) -> None:
    for coding, kept in (("aws-chunked", None), ("gzip, aws-chunked", "gzip"), ("deflate, gzip", "deflate, gzip")):
        assert s3.ask("PUT", "/bucket/coded", b"", {"content-encoding": coding}).status == 200
        assert s3.ask("HEAD", "/bucket/coded").headers.get("content-encoding") == kept
    stated = {"x-amz-decoded-content-length": str(len(PAYLOAD))}
    assert s3.ask("PUT", "/bucket/plain", PAYLOAD, stated).status == 200
    assert s3.ask("GET", "/bucket/plain").body == PAYLOAD


def test_the_hash_of_a_framed_body_is_that_of_its_bytes(s3: Signer) -> None:
    headers = {"x-amz-decoded-content-length": str(len(PAYLOAD)), "content-encoding": "aws-chunked"}
    wrong = hashlib.sha256(PAYLOAD).hexdigest()
    answer = s3.ask("PUT", NEW, framed(PAYLOAD), headers, payload=wrong)
    nothing_stored(s3, answer, 400, "XAmzContentSHA256Mismatch")


# --- digests -------------------------------------------------------------------------------------------


def checksum(algorithm: Algorithm, content: bytes) -> str:
    running = start(algorithm)
    running.update(content)
    return b64encode(running.digest()).decode()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("is_framed", [False, True])
def test_every_digest_is_checked_whatever_the_hash_says(
    s3: Signer, way: str, algorithm: Algorithm, is_framed: bool
) -> None:
    name = f"x-amz-checksum-{algorithm.value.lower()}"
    coded = {"content-encoding": "aws-chunked", "x-amz-decoded-content-length": str(len(PAYLOAD))}
    body, more = (framed(PAYLOAD), coded) if is_framed else (PAYLOAD, {})
    wrong_md5 = {"content-md5": b64encode(hashlib.md5(b"other").digest()).decode()}
    nothing_stored(s3, put_as(s3, way, NEW, body, {**more, **wrong_md5}), 400, "BadDigest")
    wrong = {name: checksum(algorithm, b"other")}
    nothing_stored(s3, put_as(s3, way, NEW, body, {**more, **wrong}), 400, "BadDigest")
    if is_framed:
        trailed = {**coded, "x-amz-trailer": name}
        nothing_stored(s3, put_as(s3, way, NEW, framed(PAYLOAD, wrong), trailed), 400, "BadDigest")
        nothing_stored(s3, put_as(s3, way, NEW, framed(PAYLOAD), trailed), 400, "MalformedTrailerError")
        right = framed(PAYLOAD, {name: checksum(algorithm, PAYLOAD)})
        assert put_as(s3, way, "/bucket/kept", right, trailed).headers[name] == checksum(algorithm, PAYLOAD)
    else:
        nothing_stored(s3, put_as(s3, way, NEW, body, {"x-amz-trailer": name}), 400, "InvalidRequest")


def test_a_trailer_beside_a_header_or_of_another_kind_is_refused(s3: Signer) -> None:
    crc = {"x-amz-checksum-crc32": crc32_text(PAYLOAD)}
    both = chunked_put(s3, NEW, (PAYLOAD,), UNSIGNED_TRAILER, crc, trailers={"x-amz-checksum-sha1": "A" * 27 + "="})
    nothing_stored(s3, both.send(), 400, "InvalidRequest")
    other = chunked_put(s3, NEW, (PAYLOAD,), UNSIGNED_TRAILER, trailers={**crc, "x-amz-meta-a": "b"})
    nothing_stored(s3, other.send(), 400, "InvalidRequest")


# --- elements ------------------------------------------------------------------------------------------


def test_a_bucket_with_wishes_that_are_not_offered_is_not_made(s3: Signer) -> None:
    for inside, refusal in (
        ("<Tags><Tag><Key>a</Key><Value>b</Value></Tag></Tags>", (501, "NotImplemented")),
        ("<Location><Name>a</Name><Type>AvailabilityZone</Type></Location>", (501, "NotImplemented")),
        ("<LocationConstraint/><Bucket><Type>Directory</Type></Bucket>", (501, "NotImplemented")),
        ("<Wish/>", (400, "MalformedXML")),
    ):
        body = f"<CreateBucketConfiguration>{inside}</CreateBucketConfiguration>".encode()
        answer = s3.ask("PUT", "/wanted", body)
        assert (answer.status, answer.code) == refusal
        assert s3.ask("HEAD", "/wanted").status == 404


def test_no_key_is_deleted_by_a_body_with_an_unknown_element(s3: Signer) -> None:
    assert s3.ask("PUT", "/bucket/stays", b"x").status == 200
    for more in ("<Wish/>", "<Object><Key>other</Key><Wish>x</Wish></Object>", "text"):
        body = f"<Delete><Object><Key>stays</Key></Object>{more}</Delete>".encode()
        answer = s3.ask("POST", "/bucket?delete=", body)
        assert (answer.status, answer.code) == (400, "MalformedXML")
        assert s3.ask("HEAD", "/bucket/stays").status == 200


# --- checksums of parts --------------------------------------------------------------------------------


def begin(s3: Signer, algorithm: str = "") -> str:
    headers = {"x-amz-checksum-algorithm": algorithm} if algorithm else {}
    return s3.ask("POST", f"{NEW}?uploads=", b"", headers).field("UploadId")


def complete(s3: Signer, upload: str, etag: str, sums: str = "") -> Answer:
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag>{sums}</Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    return s3.ask("POST", f"{NEW}?uploadId={upload}", body)


@pytest.mark.parametrize("sent", ["", "x-amz-checksum-sha1"])
def test_a_completion_states_no_checksum_of_a_part_that_came_without_it(s3: Signer, sent: str) -> None:
    upload = begin(s3)
    headers = {sent: checksum(Algorithm.SHA1, PAYLOAD)} if sent else {}
    etag = s3.ask("PUT", f"{NEW}?partNumber=1&uploadId={upload}", PAYLOAD, headers).headers["etag"]
    stated = f"<ChecksumCRC32>{crc32_text(PAYLOAD)}</ChecksumCRC32>"
    nothing_stored(s3, complete(s3, upload, etag, stated), 400, "InvalidPart")
    right = f"<ChecksumSHA1>{headers[sent]}</ChecksumSHA1>" if sent else ""
    assert complete(s3, upload, etag, right).status == 200
    assert s3.ask("DELETE", NEW).status == 204


def test_an_upload_of_one_algorithm_takes_no_part_of_another(s3: Signer) -> None:
    upload = begin(s3, "SHA256")
    target = f"{NEW}?partNumber=1&uploadId={upload}"
    crc = {"x-amz-checksum-crc32": crc32_text(PAYLOAD)}
    for answer in (
        s3.ask("PUT", target, PAYLOAD, crc),
        s3.ask("PUT", target, PAYLOAD, crc, payload=UNSIGNED),
        chunked_put(s3, target, (PAYLOAD,), UNSIGNED_TRAILER).send(),
    ):
        assert (answer.status, answer.code) == (400, "InvalidRequest")
        assert "expected checksum Type: sha256, actual checksum Type: crc32" in answer.field("Message")
    assert b"<Part>" not in s3.ask("GET", f"{NEW}?uploadId={upload}").body
    etag = s3.ask("PUT", target, PAYLOAD).headers["etag"]
    stated = f"<ChecksumCRC32>{b64encode(crc32(PAYLOAD).to_bytes(4, 'big')).decode()}</ChecksumCRC32>"
    nothing_stored(s3, complete(s3, upload, etag, stated), 400, "InvalidPart")
    right = f"<ChecksumSHA256>{checksum(Algorithm.SHA256, PAYLOAD)}</ChecksumSHA256>"
    assert complete(s3, upload, etag, right).field("ChecksumType") == "COMPOSITE"
    assert s3.ask("DELETE", NEW).status == 204
