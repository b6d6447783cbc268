"""S3 requests whose signature, body or checksum is wrong, to one engine: each is refused, and nothing is stored."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from gateway.s3.protocol.checksums import Algorithm, start
from tests.e2e.s3_chunks import KINDS, SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER, Chunked, chunked_put, crc32_text
from tests.e2e.s3_raw import UNSIGNED, Answer, Signed, Signer, nothing_else_is_left, signer_of
from tests.e2e.served import Served, serving

CONTENT: Final = b"what is stored already"
NEW: Final = "/bucket/new"
BODY: Final = b"what must not be stored"
LARGE: Final = bytes(range(256)) * 20_000
"""Longer than a chunk: stored while it arrives."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own.  At the end nothing may be left of refused requests."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine
        nothing_else_is_left(engine, {"kept": CONTENT})


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; `bucket/kept` is there."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    assert signer.ask("PUT", "/bucket/kept", CONTENT).status == 200
    return signer


def check_refused(s3: Signer, answer: Answer, *expected: tuple[int, str]) -> None:
    """Check that the answer is one of these refusals, and that nothing was stored."""
    assert (answer.status, answer.code) in expected, answer
    assert answer.field("RequestId") == answer.headers["x-amz-request-id"]
    assert s3.secret_key.encode() not in answer.body
    assert s3.ask("HEAD", NEW).status == 404
    assert s3.ask("GET", "/bucket/kept").body == CONTENT


# --- signatures ----------------------------------------------------------------------------------------


def with_header(name: str, change: Callable[[str], str]) -> Callable[[Signed], Signed]:
    def changed(request: Signed) -> Signed:
        return replace(request, headers={**request.headers, name: change(request.headers[name])})

    return changed


def without_header(name: str) -> Callable[[Signed], Signed]:
    return lambda request: replace(
        request, headers={key: value for key, value in request.headers.items() if key != name}
    )


def last_digit(text: str) -> str:
    return text[:-1] + ("1" if text[-1] == "0" else "0")


WRONG_SIGNATURES: Final[dict[str, tuple[Callable[[Signed], Signed], str]]] = {
    "one digit": (with_header("authorization", last_digit), "SignatureDoesNotMatch"),
    "upper case": (
        with_header("authorization", lambda text: text[:-64] + text[-64:].upper()),
        "SignatureDoesNotMatch AuthorizationHeaderMalformed",
    ),
    "too short": (with_header("authorization", lambda text: text[:-1]), "AuthorizationHeaderMalformed"),
    "too long": (with_header("authorization", lambda text: text + "0"), "AuthorizationHeaderMalformed"),
    "none": (with_header("authorization", lambda text: text[:-64]), "AuthorizationHeaderMalformed"),
    "another method": (lambda request: replace(request, method="POST"), "SignatureDoesNotMatch"),
    "another key": (lambda request: replace(request, target="/bucket/kept"), "SignatureDoesNotMatch"),
    "a parameter more": (lambda request: replace(request, target=NEW + "?x-id=PutObject"), "SignatureDoesNotMatch"),
    "another host": (with_header("host", lambda _: "localhost"), "SignatureDoesNotMatch"),
    "another payload": (with_header("x-amz-content-sha256", lambda _: UNSIGNED), "SignatureDoesNotMatch"),
    "a header more": (
        lambda request: replace(request, headers={**request.headers, "x-amz-meta-a": "b"}),
        "AccessDenied",
    ),
    "a header less": (without_header("x-amz-meta-signed"), "SignatureDoesNotMatch AccessDenied"),
    "another value": (with_header("x-amz-meta-signed", lambda _: "2"), "SignatureDoesNotMatch"),
    "no date": (without_header("x-amz-date"), "AccessDenied"),
    "no payload hash": (without_header("x-amz-content-sha256"), "InvalidRequest"),
    "an odd date": (with_header("x-amz-date", lambda _: "20260231T000000Z"), "AccessDenied"),
    "an odd payload hash": (with_header("x-amz-content-sha256", lambda _: "0" * 63), "InvalidArgument"),
    "another scheme": (with_header("authorization", lambda text: "Basic " + text), "InvalidRequest"),
    "an old scheme": (with_header("authorization", lambda _: "AWS AKID:c2ln"), "InvalidRequest"),
    "a token": (
        lambda request: replace(request, headers={**request.headers, "x-amz-security-token": "t"}),
        "InvalidToken",
    ),
    "host not signed": (
        with_header("authorization", lambda text: text.replace("SignedHeaders=host;", "SignedHeaders=")),
        "AuthorizationHeaderMalformed",
    ),
    "in both places": (
        lambda request: replace(request, target=request.signer.presigned("PUT", NEW)),
        "InvalidArgument",
    ),
}


@pytest.mark.parametrize("name", WRONG_SIGNATURES)
def test_what_was_signed_otherwise_is_refused(s3: Signer, name: str) -> None:
    change, codes = WRONG_SIGNATURES[name]
    answer = change(s3.request("PUT", NEW, BODY, {"x-amz-meta-signed": "1"})).send()
    assert answer.status in (400, 403)
    check_refused(s3, answer, *((answer.status, code) for code in codes.split()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"secret_key": "x" * 40}, (403, "SignatureDoesNotMatch")),
        ({"secret_key": ""}, (403, "SignatureDoesNotMatch")),
        ({"access_key": "A" * 20}, (403, "InvalidAccessKeyId")),
        ({"access_key": "A" * 129}, (400, "AuthorizationHeaderMalformed")),
        ({"region": "eu-west-1"}, (400, "AuthorizationHeaderMalformed")),
        ({"region": ""}, (400, "AuthorizationHeaderMalformed")),
        ({"service": "ec2"}, (400, "AuthorizationHeaderMalformed")),
        ({"offset_s": -16 * 60}, (403, "RequestTimeTooSkewed")),
        ({"offset_s": 16 * 60}, (403, "RequestTimeTooSkewed")),
        ({"offset_s": -365 * 86_400}, (403, "RequestTimeTooSkewed")),
    ],
)
def test_the_wrong_key_region_service_and_time_are_refused(
    s3: Signer, changes: dict[str, str | int], expected: tuple[int, str]
) -> None:
    other = replace(s3, **changes)  # type: ignore[arg-type]
    check_refused(s3, other.ask("PUT", NEW, BODY), expected)
    check_refused(s3, chunked_put(other, NEW, (BODY,), SIGNED).send(), expected)


def test_the_day_of_the_scope_is_that_of_the_time(s3: Signer) -> None:
    request = s3.request("PUT", NEW, BODY)
    changed = with_header("x-amz-date", lambda text: "2020" + text[4:])(request)
    check_refused(s3, changed.send(), (403, "AccessDenied"))


PRESIGNED: Final[dict[str, tuple[Callable[[str], str], tuple[int, str]]]] = {
    "one digit": (last_digit, (403, "SignatureDoesNotMatch")),
    "another key": (lambda url: url.replace("/new?", "/kept?"), (403, "SignatureDoesNotMatch")),
    "longer": (lambda url: url.replace("Expires=60", "Expires=61"), (403, "SignatureDoesNotMatch")),
    "much too long": (
        lambda url: url.replace("Expires=60", "Expires=604801"),
        (400, "AuthorizationQueryParametersError"),
    ),
    "negative": (lambda url: url.replace("Expires=60", "Expires=-1"), (400, "AuthorizationQueryParametersError")),
    "no number": (lambda url: url.replace("Expires=60", "Expires=6%D9%A0"), (400, "AuthorizationQueryParametersError")),
    "twice": (
        lambda url: url.replace("X-Amz-Expires=60", "X-Amz-Expires=60&X-Amz-Expires=60"),
        (400, "AuthorizationQueryParametersError"),
    ),
    "no signature": (lambda url: url[: url.index("&X-Amz-Signature")], (400, "AuthorizationQueryParametersError")),
    "a parameter more": (lambda url: url + "&acl", (403, "SignatureDoesNotMatch")),
    "old": (lambda _: NEW + "?AWSAccessKeyId=a&Signature=b&Expires=9999999999", (400, "InvalidRequest")),
}


@pytest.mark.parametrize("name", PRESIGNED)
def test_a_presigned_url_is_good_for_what_it_says_only(s3: Signer, name: str) -> None:
    change, expected = PRESIGNED[name]
    check_refused(s3, put_presigned(s3, change(s3.presigned("PUT", NEW))), expected)


def put_presigned(s3: Signer, url: str) -> Answer:
    head = f"PUT {url} HTTP/1.1\r\nHost: {s3.host}\r\nContent-Length: {len(BODY)}\r\n\r\n"
    return s3.send(head.encode() + BODY)


def test_a_presigned_url_that_has_expired_is_refused_and_so_is_one_of_the_future(s3: Signer) -> None:
    for offset_s, expires_s in ((-61, 60), (-7 * 86_400 - 1, 7 * 86_400), (16 * 60, 3600)):
        url = replace(s3, offset_s=offset_s).presigned("PUT", NEW, expires_s)
        check_refused(s3, put_presigned(s3, url), (403, "AccessDenied"), (403, "RequestTimeTooSkewed"))


def test_a_presigned_request_that_was_good_is_refused_again_and_again_once_it_has_expired(s3: Signer) -> None:
    url = s3.presigned("GET", "/bucket/kept", 4)
    raw = f"GET {url} HTTP/1.1\r\nHost: {s3.host}\r\n\r\n".encode()
    assert s3.send(raw).body == CONTENT
    while (answer := s3.send(raw)).status == 200:
        pass
    check_refused(s3, answer, (403, "AccessDenied"))


# --- bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("payload", [None, UNSIGNED], ids=["signed", "unsigned"])
def test_a_body_that_ends_early_is_not_stored(s3: Signer, body: bytes, payload: str | None) -> None:
    for sent in (body[:-1], body[: len(body) // 2], b""):
        request = replace(s3.request("PUT", NEW, body, payload=payload), body=sent)
        check_refused(s3, request.send(end=True), (400, "IncompleteBody"))


@pytest.mark.parametrize("body", [BODY, LARGE], ids=["small", "large"])
def test_a_body_that_is_not_the_signed_one_is_not_stored(s3: Signer, body: bytes) -> None:
    for sent in (body[:-1] + b"!", b"!" + body[1:], body[:-1], body + b"!"):
        request = s3.request("PUT", NEW, body)
        headers = {**request.headers, "content-length": str(len(sent))}
        answer = replace(request, headers=headers, body=sent).send()
        check_refused(s3, answer, (400, "XAmzContentSHA256Mismatch"))


def test_who_sends_on_after_a_refusal_is_told_why(s3: Signer) -> None:
    for _ in range(5):
        answer = replace(s3, secret_key="x").ask("PUT", NEW, LARGE * 3)
        check_refused(s3, answer, (403, "SignatureDoesNotMatch"))
        assert answer.closed


def test_what_follows_a_body_is_another_request_and_a_bad_one_ends_the_connection(s3: Signer) -> None:
    request = s3.request("PUT", "/bucket/kept", CONTENT)
    answer = s3.send(request.raw() + b"DELETE")
    assert (answer.status, answer.closed) == (200, False)
    both = replace(request, body=CONTENT + b"more\r\n\r\n").raw()
    with_answers = s3.send_all(both)
    assert [answer.status for answer in with_answers] == [200, 400]
    assert with_answers[-1].closed


def test_a_put_without_a_length_is_refused(s3: Signer) -> None:
    request = without_header("content-length")(s3.request("PUT", NEW, BODY, payload=UNSIGNED))
    chunked = replace(request, headers={**request.headers, "transfer-encoding": "chunked"}, body=b"1\r\nx\r\n0\r\n\r\n")
    check_refused(s3, chunked.send(), (411, "MissingContentLength"))


# --- checksums -----------------------------------------------------------------------------------------


def checksum(algorithm: Algorithm, content: bytes) -> str:
    running = start(algorithm)
    running.update(content)
    return b64encode(running.digest()).decode()


@pytest.mark.parametrize("body", [BODY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_wrong_checksum_stores_nothing(s3: Signer, algorithm: Algorithm, body: bytes) -> None:
    header = f"x-amz-checksum-{algorithm.value.lower()}"
    wrong = checksum(algorithm, body + b"!")
    answer = s3.ask("PUT", NEW, body, {header: wrong}, payload=UNSIGNED)
    check_refused(s3, answer, (400, "BadDigest"))
    pieces = (body[:-10], body[-10:])
    for kind in (SIGNED_TRAILER, UNSIGNED_TRAILER):
        trailed = chunked_put(s3, NEW, pieces, kind, trailers={header: wrong})
        check_refused(s3, trailed.send(), (400, "BadDigest"))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-md5": b64encode(hashlib.md5(b"other").digest()).decode()}, "BadDigest"),
        ({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg"}, "InvalidDigest"),
        ({"content-md5": ""}, "InvalidDigest"),
        ({"x-amz-checksum-crc32": "AAAA"}, "InvalidRequest"),
        ({"x-amz-checksum-crc32": "AAAAAA"}, "InvalidRequest"),
        ({"x-amz-checksum-crc32": crc32_text(BODY) + " "}, "InvalidRequest SignatureDoesNotMatch"),
        ({"x-amz-checksum-crc32": crc32_text(BODY), "x-amz-checksum-crc32c": "AAAAAA=="}, "InvalidRequest"),
    ],
)
def test_a_digest_that_is_none_is_refused(s3: Signer, headers: dict[str, str], code: str) -> None:
    answer = s3.ask("PUT", NEW, BODY, headers)
    check_refused(s3, answer, *((answer.status, one) for one in code.split()))
    assert answer.status in (400, 403)


# --- aws-chunked ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("payloads", [(CONTENT,), (CONTENT[:9], CONTENT[9:]), tuple(bytes([b]) for b in CONTENT)])
def test_chunks_that_are_right_are_stored(s3: Signer, kind: str, payloads: tuple[bytes, ...]) -> None:
    assert chunked_put(s3, "/bucket/kept", payloads, kind).send().status == 200


FRAMING: Final[dict[str, Callable[[Chunked], Chunked]]] = {
    "a size too large": lambda put: put.changed(0, b"8", b"9"),
    "a size too small": lambda put: put.changed(0, b"8", b"7"),
    "a size of nothing": lambda put: put.changed(0, b"8", b""),
    "a negative size": lambda put: put.changed(0, b"8", b"-8"),
    "a size with a sign": lambda put: put.changed(0, b"8", b"+8"),
    "a size with a prefix": lambda put: put.changed(0, b"8", b"0x8"),
    "a size of 16 digits": lambda put: put.changed(0, b"8", b"8" * 16),
    "a size of 15 digits": lambda put: put.changed(0, b"8", b"f" * 15),
    "a size with a space": lambda put: put.changed(0, b"8", b" 8"),
    "a line without CR": lambda put: put.changed(0, b"\r\n", b"\n"),
    "a line without LF": lambda put: put.changed(0, b"\r\n", b"\r"),
    "a line with a lone CR": lambda put: put.changed(0, b"8", b"8\r"),
    "a line of 2 KiB": lambda put: put.changed(0, b"\r\n", b";" + b"x" * 2048 + b"\r\n"),
    "another extension": lambda put: put.changed(0, b"\r\n", b";a=b\r\n"),
    "a payload without its end": lambda put: put.changed(1, b"\r\n", b""),
    "a payload with LF": lambda put: put.changed(1, b"\r\n", b"\n"),
    "a chunk less": lambda put: put.without(3).without(2),
    "a chunk twice": lambda put: put.with_piece(2, put.pieces[1]).with_piece(2, put.pieces[0]),
    "chunks in another order": lambda put: Chunked(put.request, (*put.pieces[2:4], *put.pieces[:2], *put.pieces[4:])),
    "no last chunk": lambda put: put.without(4),
    "nothing": lambda put: Chunked(put.request, ()),
    "the end alone": lambda put: Chunked(put.request, put.pieces[4:]),
    "no empty line": lambda put: put.without(-1),
    "bytes behind the end": lambda put: put.with_piece(len(put.pieces), b"x"),
    "another body behind the end": lambda put: Chunked(put.request, put.pieces * 2),
    "an empty chunk in the middle": lambda put: put.with_piece(2, put.pieces[4]),
    "the payload as it is": lambda put: Chunked(put.request, (b"01234567", b"89")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FRAMING)
def test_broken_framing_stores_nothing(s3: Signer, name: str, kind: str) -> None:
    broken = FRAMING[name](chunked_put(s3, NEW, (b"01234567", b"89"), kind))
    answer = broken.send()
    codes = ("InvalidRequest", "IncompleteBody", "SignatureDoesNotMatch", "MalformedTrailerError", "BadDigest")
    check_refused(s3, answer, *((answer.status, code) for code in codes))
    assert answer.status in (400, 403)


@pytest.mark.parametrize("kind", [SIGNED, SIGNED_TRAILER])
@pytest.mark.parametrize("payloads", [(BODY[:9], BODY[9:]), (LARGE[:70_000], LARGE[70_000:])])
def test_a_wrong_chunk_signature_stores_nothing(s3: Signer, kind: str, payloads: tuple[bytes, ...]) -> None:
    put = chunked_put(s3, NEW, payloads, kind)
    other = chunked_put(s3, NEW, (*payloads[::-1],), kind)
    last = put.pieces[4]
    for broken in (
        put.changed(1, put.pieces[1][:1], b"!"),
        put.changed(3, put.pieces[3][-3:-2], b"!"),
        Chunked(put.request, (other.pieces[0], *put.pieces[1:])),
        Chunked(put.request, (*put.pieces[:4], last.replace(last[-5:-2], b"zzz"), *put.pieces[5:])),
        put.changed(0, b"chunk-signature", b"chunk-Signature"),
        put.changed(0, b";chunk-signature=", b""),
    ):
        check_refused(s3, broken.send(), (403, "SignatureDoesNotMatch"), (400, "InvalidRequest"))


def test_wrong_trailers_store_nothing(s3: Signer) -> None:
    good = crc32_text(BODY).encode()
    put = chunked_put(s3, NEW, (BODY,), SIGNED_TRAILER)
    signature = put.pieces[4]
    bad_trailer = (400, "MalformedTrailerError")
    unsigned = chunked_put(s3, NEW, (BODY,), UNSIGNED_TRAILER)
    cases = [
        (put.changed(3, good, crc32_text(b"other").encode()), (403, "SignatureDoesNotMatch")),
        (put.changed(4, signature[-5:-2], b"zzz"), (403, "SignatureDoesNotMatch")),
        (put.without(4), (403, "SignatureDoesNotMatch")),
        (put.without(3), bad_trailer),
        (Chunked(put.request, (*put.pieces[:3], signature, put.pieces[3], b"\r\n")), bad_trailer),
        (put.with_piece(3, b"x-amz-meta-a:b\r\n"), bad_trailer),
        (put.with_piece(3, put.pieces[3]), bad_trailer),
        (unsigned.changed(3, good, crc32_text(b"other").encode()), (400, "BadDigest")),
        (unsigned.without(3), bad_trailer),
        (unsigned.with_piece(4, signature), bad_trailer),
        (unsigned.changed(3, b"crc32", b"crc32c"), bad_trailer),
        (unsigned.changed(3, b":", b" :"), bad_trailer),
        (unsigned.changed(3, b":" + good, b""), bad_trailer),
        (unsigned.changed(3, b"\r\n", b"\r\n" + b"a" * 5000 + b"\r\n"), bad_trailer),
    ]
    for number, (broken, expected) in enumerate(cases):
        answer = broken.send()
        assert (answer.status, answer.code) in (expected, (400, "InvalidRequest")), (number, answer)
        check_refused(s3, answer, expected, (400, "InvalidRequest"))


def test_the_decoded_length_is_what_is_decoded(s3: Signer) -> None:
    name = "x-amz-decoded-content-length"
    for kind in KINDS:
        for text, expected in (
            (str(len(BODY) - 1), (400, "IncompleteBody")),
            (str(len(BODY) + 1), (400, "IncompleteBody")),
            ("0", (400, "IncompleteBody")),
            ("9" * 18, (400, "IncompleteBody")),
            ("-1", (400, "InvalidArgument")),
            ("1e3", (400, "InvalidArgument")),
            ("9" * 19, (400, "InvalidArgument")),
            ("\u00b2", (400, "InvalidArgument")),
        ):
            put = chunked_put(s3, NEW, (BODY,), kind, {name: text})
            check_refused(s3, put.send(), expected)


# --- parts and XML -------------------------------------------------------------------------------------


def test_a_part_that_is_refused_is_not_a_part(s3: Signer) -> None:
    upload = s3.ask("POST", f"{NEW}?uploads=").field("UploadId")
    target = f"{NEW}?partNumber=1&uploadId={upload}"
    assert s3.ask("PUT", target, BODY, {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}).code == "BadDigest"
    assert s3.ask("PUT", target, LARGE, {"x-amz-checksum-sha1": "A" * 27 + "="}).code == "BadDigest"
    assert replace(s3.request("PUT", target, LARGE), body=LARGE[:-1]).send(end=True).code == "IncompleteBody"
    put = chunked_put(s3, target, (LARGE,), SIGNED)
    assert put.changed(1, LARGE[:5], b"other").send().code == "SignatureDoesNotMatch"
    listed = s3.ask("GET", f"{NEW}?uploadId={upload}")
    assert listed.status == 200
    assert b"<Part>" not in listed.body
    assert s3.ask("DELETE", f"{NEW}?uploadId={upload}").status == 204
    assert s3.ask("PUT", target, BODY).code == "NoSuchUpload"


def test_a_body_of_xml_is_what_was_signed_or_nothing_is_done(s3: Signer) -> None:
    named = b"<Delete><Object><Key>none</Key></Object></Delete>"
    other = b"<Delete><Object><Key>kept</Key></Object></Delete>"
    changed = replace(s3.request("POST", "/bucket?delete=", named), body=other).send()
    check_refused(s3, changed, (400, "XAmzContentSHA256Mismatch"))
    for headers in ({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, {"x-amz-checksum-crc32": "AAAAAA=="}):
        answer = s3.ask("POST", "/bucket?delete=", other, headers, payload=UNSIGNED)
        check_refused(s3, answer, (400, "BadDigest"))
    made = b"<CreateBucketConfiguration></CreateBucketConfiguration>"
    answer = replace(s3.request("PUT", "/new-bucket", made), body=made.upper()).send()
    check_refused(s3, answer, (400, "XAmzContentSHA256Mismatch"))
    assert s3.ask("HEAD", "/new-bucket").status == 404
