"""Signatures: what botocore signs is accepted, and nothing that differs from it by a byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import assume, given, settings, strategies as st
from msgspec.structs import replace

from gateway.http.head import RequestHead
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.signing import AccessKey, Payload, Signature
from gateway.s3.protocol.sigv4 import authenticate
from lakefs.limits import S3_CLOCK_SKEW_S, S3_PRESIGN_S_MAX
from tests.lengths import repeated
from tests.unit.support.signed_heads import KEY, REGION, head_without_hash, presigned_head, signed_at, signed_head

URL = "http://lake:9000/bucket/a%20key%40home"


def check(head: RequestHead, *, after_s: float = 0, region: str = REGION, key: AccessKey | None = KEY) -> Signature:
    found = authenticate(
        head,
        region=region,
        now_s=signed_at(head) + after_s,
        find_key=lambda access_key: key if access_key == KEY.access_key else None,
    )
    assert found is not None
    return found


def refusal(head: RequestHead, **options: object) -> tuple[int, str]:
    with pytest.raises(S3Error) as caught:
        check(head, **options)  # type: ignore[arg-type]
    assert KEY.secret_key not in caught.value.message
    return caught.value.status, caught.value.code


def with_header(head: RequestHead, name: bytes, value: bytes | None) -> RequestHead:
    headers = {other: kept for other, kept in head.headers.items() if other != name}
    return replace(head, headers=headers if value is None else {**headers, name: value})


# --- what is accepted ---------------------------------------------------------------------------------

segments = st.binary(min_size=0, max_size=12).map(lambda raw: quote(raw, safe="~"))
paths = st.lists(segments, max_size=4).map(lambda parts: "/bucket/" + "/".join(parts))
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).map(
    lambda text: quote(text, safe="~")
)
queries = st.lists(st.tuples(words.filter(bool), words), max_size=4).map(
    lambda pairs: "&".join(f"{name}={value}" for name, value in pairs)
)
metadata = st.dictionaries(
    st.from_regex(r"x-amz-meta-[a-z0-9-]{1,8}|range|content-type|cache-control", fullmatch=True),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip),
    max_size=4,
)
methods = st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE"])
payloads = st.sampled_from(["", "UNSIGNED-PAYLOAD", *(kind.value for kind in Payload if "STREAMING" in kind.value)])


@given(methods, paths, queries, metadata, payloads, st.binary(max_size=50))
@settings(max_examples=150)
def test_what_botocore_signs_in_the_header_is_accepted(
    method: str, path: str, query: str, headers: dict[str, str], payload: str, body: bytes
) -> None:
    url = f"http://lake:9000{path}" + (f"?{query}" if query else "")
    head = signed_head(url, method=method, headers=headers, payload=payload, body=body)
    found = check(head)
    assert found.key is KEY
    assert found.seed == head.headers[b"authorization"][-64:].decode()
    assert found.scope == f"{found.timestamp[:8]}/{REGION}/s3/aws4_request"
    if payload:
        assert (found.payload.value, found.payload_sha256) == (payload, "")
    else:
        assert found.payload is Payload.HASH
        assert found.payload_sha256 == head.headers[b"x-amz-content-sha256"].decode()


@given(methods, paths, queries, metadata)
@settings(max_examples=100)
def test_what_botocore_signs_in_the_query_is_accepted(
    method: str, path: str, query: str, headers: dict[str, str]
) -> None:
    url = f"http://lake:9000{path}" + (f"?{query}" if query else "")
    found = check(presigned_head(url, method=method, headers=headers), after_s=60)
    assert (found.key, found.payload) == (KEY, Payload.UNSIGNED)


@pytest.mark.parametrize(
    ("signed", "sent"),
    [
        ("/bucket/a%40b%2B%7E", b"/bucket/a@b+~"),
        ("/bucket/%C3%A9", b"/bucket/%c3%a9"),
        ("/bucket/a~b", b"/bucket/%61%7Eb"),
        ("/bucket?prefix=a%2Fb%20c&max-keys=", b"/bucket?max-keys&prefix=a/b+c"),
    ],
)
def test_a_client_may_send_another_encoding_than_the_one_that_s3_signs(signed: str, sent: bytes) -> None:
    head = signed_head(f"http://lake:9000{signed.replace('%7E', '~')}")
    path, _, query = sent.partition(b"?")
    assert check(replace(head, target=sent, path=path, query=query)).key is KEY


def test_a_path_is_not_normalised() -> None:
    head = signed_head("http://lake:9000/bucket//a/../b/./c%2F")
    assert check(head).key is KEY
    assert refusal(replace(head, path=b"/bucket/b/c/"))[1] == "SignatureDoesNotMatch"


def test_spaces_inside_a_value_are_one_space_for_the_signature() -> None:
    head = signed_head(URL, headers={"x-amz-meta-a": "b   c"})
    assert check(head).key is KEY
    assert check(with_header(head, b"x-amz-meta-a", b"b\t c")).key is KEY


def test_no_signature_is_nobody() -> None:
    head = with_header(signed_head(URL), b"authorization", None)
    assert authenticate(head, region=REGION, now_s=0, find_key=lambda _: KEY) is None
    like_one = replace(head, query=b"prefix=X-Amz-Signature&x=Signature=1")
    assert authenticate(like_one, region=REGION, now_s=0, find_key=lambda _: KEY) is None


# --- what is refused ----------------------------------------------------------------------------------


def changed(text: bytes, at: int, to: int) -> bytes:
    at %= len(text)
    assume(text[at] != to)
    return text[:at] + bytes([to]) + text[at + 1 :]


def meaning(query: bytes) -> list[tuple[bytes, bytes]]:
    """Return a query's names and values, however they are encoded."""
    pairs = (pair.replace(b"+", b" ").partition(b"=") for pair in query.split(b"&") if pair)
    return sorted((unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in pairs)


visible = st.integers(0x21, 0x7E)


@given(st.data())
@settings(max_examples=repeated(200, 500))
def test_one_byte_changed_anywhere_is_refused(data: st.DataObject) -> None:
    head = signed_head(
        "http://lake:9000/bucket/a%20key/x?list-type=2&prefix=a%2Fb",
        headers={"x-amz-meta-a": "some value", "range": "bytes=0-1"},
    )
    at, to = data.draw(st.integers(0, 10_000)), data.draw(visible)
    part = data.draw(st.sampled_from(["method", "path", "query", "authorization", *SIGNED]))
    if part == "method":
        other = replace(head, method=data.draw(st.sampled_from(["PUT", "HEAD", "GETS", "get"])))
    elif part == "path":
        other = replace(head, path=changed(head.path, at, to))
        assume(unquote_to_bytes(other.path) != unquote_to_bytes(head.path))
    elif part == "query":
        other = replace(head, query=changed(head.query, at, to))
        assume(meaning(other.query) != meaning(head.query))
    else:
        name = part.encode()
        other = with_header(head, name, changed(head.headers[name], at, to))
        assume(re.sub(rb"[ \t]+", b" ", other.headers[name]) != head.headers[name])
    with pytest.raises(S3Error):
        authenticate(other, region=REGION, now_s=signed_at(head), find_key={KEY.access_key: KEY}.get)


def test_without_a_body_the_header_of_its_hash_may_be_missing() -> None:
    plain = "http://lake:9000/bucket/key?prefix=a"
    found = check(head_without_hash(plain))
    assert (found.payload, found.payload_sha256) == (Payload.HASH, sha256(b"").hexdigest())
    for body in (b"body", b""):
        head = with_header(head_without_hash(plain, method="PUT", body=body), b"transfer-encoding", b"chunked")
        with pytest.raises(S3Error) as caught:
            check(head)
        assert (caught.value.status, caught.value.code) == (400, "InvalidRequest")
    with pytest.raises(S3Error) as caught:
        check(head_without_hash(plain, method="PUT", body=b"body"))
    assert caught.value.code == "InvalidRequest"


SIGNED = ["host", "range", "x-amz-meta-a", "x-amz-date", "x-amz-content-sha256"]


def test_the_test_above_changes_signed_headers() -> None:
    head = signed_head(URL, headers={"x-amz-meta-a": "b", "range": "bytes=0-1"})
    names = head.headers[b"authorization"].partition(b"SignedHeaders=")[2].partition(b",")[0]
    assert names.decode().split(";") == sorted(SIGNED)


PRESIGNED_HEAD = presigned_head("http://lake:9000/bucket/a%20key/x?response-content-type=text%2Fplain")


@given(st.data())
@settings(max_examples=300)
def test_one_byte_of_a_presigned_url_changed_is_refused(data: st.DataObject) -> None:
    head = PRESIGNED_HEAD
    if data.draw(st.booleans()):
        other = replace(head, path=changed(head.path, data.draw(st.integers(0, 100)), data.draw(visible)))
        assume(unquote_to_bytes(other.path) != unquote_to_bytes(head.path))
    else:
        other = replace(head, query=changed(head.query, data.draw(st.integers(0, 10_000)), data.draw(visible)))
        assume(meaning(other.query) != meaning(head.query))
        assume(b"X-Amz-" in other.query)
    try:
        found = authenticate(other, region=REGION, now_s=signed_at(head), find_key={KEY.access_key: KEY}.get)
    except S3Error:
        return
    # A parameter by another name leaves a request without any signature.
    assert found is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda head: with_header(head, b"x-amz-acl", b"public-read"), (403, "AccessDenied")),
        (lambda head: with_header(head, b"host", None), (403, "AccessDenied")),
        (lambda head: with_header(head, b"x-amz-date", None), (403, "AccessDenied")),
        (lambda head: with_header(head, b"x-amz-date", b"20260230T000000Z"), (403, "AccessDenied")),
        (lambda head: with_header(head, b"x-amz-content-sha256", None), (400, "InvalidRequest")),
        (lambda head: with_header(head, b"x-amz-content-sha256", b"E" * 64), (400, "InvalidArgument")),
        (lambda head: with_header(head, b"x-amz-security-token", b"t"), (400, "InvalidToken")),
        (lambda head: with_header(head, b"authorization", b"AWS key:c2ln"), (400, "InvalidRequest")),
        (lambda head: with_header(head, b"authorization", b"Bearer abc"), (400, "InvalidRequest")),
        (lambda head: with_header(head, b"authorization", b""), (400, "InvalidRequest")),
        (lambda head: with_header(head, b"authorization", b"AWS4-HMAC-SHA256 x"), (400, "InvalidRequest")),
        (
            lambda head: with_header(head, b"authorization", b"AWS4-HMAC-SHA256 Credential=a, " + b"0" * 64),
            (400, "AuthorizationHeaderMalformed"),
        ),
        (lambda head: replace(head, query=b"X-Amz-Signature=0"), (400, "InvalidArgument")),
    ],
)
def test_a_request_that_is_signed_wrongly_is_told_how(
    change: Callable[[RequestHead], RequestHead], expected: tuple[int, str]
) -> None:
    head = signed_head(URL)
    with pytest.raises(S3Error) as caught:
        authenticate(change(head), region=REGION, now_s=signed_at(head), find_key=lambda _: KEY)
    assert (caught.value.status, caught.value.code) == expected


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"/s3/", b"/ec2/", "AuthorizationHeaderMalformed"),
        (b"aws4_request", b"aws5_request", "AuthorizationHeaderMalformed"),
        (b"SignedHeaders=host;", b"SignedHeaders=", "AuthorizationHeaderMalformed"),
        (b"SignedHeaders=host;", b"SignedHeaders=host;host;", "AuthorizationHeaderMalformed"),
        (b"SignedHeaders=host;", b"SignedHeaders=Host;", "AuthorizationHeaderMalformed"),
        (b"AKIDEXAMPLE", b"AKIDEXAMPLX", "InvalidAccessKeyId"),
    ],
)
def test_a_credential_is_read_closely(old: bytes, new: bytes, code: str) -> None:
    head = signed_head(URL)
    authorization = head.headers[b"authorization"].replace(old, new)
    assert authorization != head.headers[b"authorization"]
    assert refusal(with_header(head, b"authorization", authorization))[1] == code


def test_a_wrong_region_is_told_the_right_one() -> None:
    for head in (signed_head(URL), presigned_head(URL)):
        with pytest.raises(S3Error) as caught:
            check(head, region="us-east-1")
        assert caught.value.status == 400
        assert caught.value.details == {"Region": "us-east-1"}


def test_another_secret_is_refused() -> None:
    for head in (signed_head(URL), presigned_head(URL)):
        assert refusal(head, key=AccessKey(KEY.access_key, "other")) == (403, "SignatureDoesNotMatch")
        assert refusal(head, key=None) == (403, "InvalidAccessKeyId")


def test_a_clock_may_be_a_quarter_of_an_hour_wrong_and_no_more() -> None:
    head = signed_head(URL)
    for skew in (-S3_CLOCK_SKEW_S, S3_CLOCK_SKEW_S):
        assert check(head, after_s=skew).key is KEY
        assert refusal(head, after_s=skew * 1.01) == (403, "RequestTimeTooSkewed")


def test_a_presigned_url_holds_until_it_expires() -> None:
    head = presigned_head(URL, expires_s=60)
    assert check(head, after_s=-S3_CLOCK_SKEW_S).key is KEY
    assert check(head, after_s=60).key is KEY
    assert refusal(head, after_s=61) == (403, "AccessDenied")
    assert refusal(head, after_s=-S3_CLOCK_SKEW_S - 1) == (403, "AccessDenied")


@pytest.mark.parametrize("expires_s", [0, -1, S3_PRESIGN_S_MAX + 1])
def test_a_presigned_url_holds_a_second_to_a_week(expires_s: int) -> None:
    assert check(presigned_head(URL, expires_s=S3_PRESIGN_S_MAX)).key is KEY
    assert refusal(presigned_head(URL, expires_s=expires_s)) == (400, "AuthorizationQueryParametersError")


@pytest.mark.parametrize(
    "edit",
    [
        lambda query: query.replace(b"X-Amz-Algorithm=AWS4", b"X-Amz-Algorithm=AWS5"),
        lambda query: re.sub(rb"&X-Amz-Expires=\d+", b"", query),
        lambda query: query + b"&X-Amz-Date=20260101T000000Z",
        lambda query: query + b"&X%2DAmz-Expires=99",
        lambda query: query.replace(b"SignedHeaders=host", b"SignedHeaders=range"),
        lambda query: query + b"&a=b" * 80,
    ],
)
def test_a_presigned_query_is_read_closely(edit: Callable[[bytes], bytes]) -> None:
    head = presigned_head(URL)
    assert edit(head.query) != head.query
    assert refusal(replace(head, query=edit(head.query))) == (400, "AuthorizationQueryParametersError")


def test_a_presigned_request_may_not_bring_amz_headers_that_were_not_signed() -> None:
    head = presigned_head(URL, method="PUT")
    assert refusal(with_header(head, b"x-amz-tagging", b"a=b")) == (403, "AccessDenied")


def test_version_2_signatures_are_refused_not_anonymous() -> None:
    head = with_header(signed_head(URL), b"authorization", None)
    for query in (b"AWSAccessKeyId=a&Expires=1&Signature=b", b"Expires=1&Signature=b"):
        with pytest.raises(S3Error) as caught:
            authenticate(replace(head, query=query), region=REGION, now_s=0, find_key=lambda _: KEY)
        assert caught.value.code == "InvalidRequest"
        for remedy in ('signature_version="s3v4"', "us-east-1", 's3_signature_v2 = "on"'):
            assert remedy in caught.value.message


def test_secrets_are_in_no_repr() -> None:
    found = check(signed_head(URL))
    shown = repr(found) + repr(found.key) + repr(found.signing_key) + str(found)
    assert KEY.secret_key not in shown
    assert "AKIDEXAMPLE" in shown


authorizations = st.lists(
    st.one_of(
        st.sampled_from([b"AWS4-HMAC-SHA256", b" ", b"Credential=", b"AKIDEXAMPLE", b"/", b"20260101", b"eu-lake-1"]),
        st.sampled_from([b"s3", b",", b";", b"aws4_request", b"SignedHeaders=", b"host", b"Signature=", b"0" * 64]),
        st.sampled_from([b"=", b"\xff", b"%b"]),
    ),
    max_size=20,
).map(b"".join)
SIGNED_HEAD = signed_head(URL)


@pytest.mark.slow
@given(authorizations, st.binary(max_size=20), st.lists(authorizations, max_size=3).map(b"&X-Amz-Signature=".join))
@settings(max_examples=repeated(200, 600))
def test_any_bytes_are_refused_in_s3s_words(authorization: bytes, timestamp: bytes, query: bytes) -> None:
    head = SIGNED_HEAD
    headers = {**head.headers, b"authorization": authorization, b"x-amz-date": timestamp}
    with pytest.raises(S3Error):
        authenticate(replace(head, headers=headers), region=REGION, now_s=0, find_key=lambda _: KEY)
    presigned = replace(with_header(head, b"authorization", None), query=b"X-Amz-Signature=" + query)
    with pytest.raises(S3Error):
        authenticate(presigned, region=REGION, now_s=0, find_key=lambda _: KEY)
