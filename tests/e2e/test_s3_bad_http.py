"""Requests that HTTP or S3 do not have, over raw sockets, to one engine: each is refused, and nothing is changed."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from lakefs.limits import HTTP_HEAD_TIMEOUT_S
from tests.e2e.s3_raw import UNSIGNED, Signer, nothing_else_is_left, signer_of
from tests.e2e.served import Served, serving

CONTENT: Final = b"what is stored already"
HEAD: Final = b"GET /bucket/kept HTTP/1.1"
SMUGGLED: Final = b"DELETE /bucket/kept HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on its own port and a public bucket.  At the end nothing of refused requests may be left."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine
        nothing_else_is_left(engine, {"kept": CONTENT})


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything; `bucket/kept` is there."""
    signer = signer_of(served)
    assert signer.ask("PUT", "/bucket").status == 200
    assert signer.ask("PUT", "/bucket/kept", CONTENT).status == 200
    served.good("bucket", "set", "bucket", "--anonymous-read")
    return signer


# --- one request that two readers would take for two ---------------------------------------------------

TWO_READINGS: Final = {
    "two lengths": (b"Content-Length: 0", b"Content-Length: 42"),
    "two equal lengths": (b"Content-Length: 0", b"Content-Length: 0"),
    "a list of lengths": (b"Content-Length: 0, 42",),
    "a length with a sign": (b"Content-Length: +0",),
    "a negative length": (b"Content-Length: -1",),
    "a length of another base": (b"Content-Length: 0x10",),
    "a length with a space": (b"Content-Length: 4 2",),
    "a length of no digits": (b"Content-Length: \xb2",),
    "no length": (b"Content-Length:",),
    "a length of 30 digits": (b"Content-Length: " + b"1" * 30,),
    "both framings": (b"Content-Length: 42", b"Transfer-Encoding: chunked"),
    "both framings, turned round": (b"Transfer-Encoding: chunked", b"Content-Length: 42"),
    "two codings": (b"Transfer-Encoding: gzip, chunked",),
    "chunked twice": (b"Transfer-Encoding: chunked, chunked",),
    "two fields of codings": (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "an unknown coding": (b"Transfer-Encoding: xchunked",),
    "a coding that is not the last": (b"Transfer-Encoding: chunked, identity",),
    "a coding in quotes": (b'Transfer-Encoding: "chunked"',),
    "a coding behind a vertical tab": (b"Transfer-Encoding: \x0bchunked",),
    "a space before the colon": (b"Content-Length : 42",),
    "a tab before the colon": (b"Transfer-Encoding\t: chunked",),
    "a folded value": (b"Transfer-Encoding:\r\n chunked",),
    "a folded first header": (b" Content-Length: 42",),
    "a bare LF": (b"X: y\nContent-Length: 42",),
    "a bare CR": (b"X: y\rContent-Length: 42",),
    "a NUL": (b"X: y\x00Content-Length: 42",),
    "a name with a NUL": (b"Content-Length\x00: 42",),
    "a line without a colon": (b"Content-Length 42",),
    "a name of nothing": (b": 42",),
    "a name with a space": (b"Content Length: 42",),
    "two hosts": (b"Host: other",),
    "a host of two": (b"Host: a, b",),
}


@pytest.mark.parametrize("name", TWO_READINGS)
def test_a_request_that_can_be_read_in_two_ways_is_refused_and_ends_the_connection(s3: Signer, name: str) -> None:
    lines = (HEAD, b"Host: " + s3.host.encode(), *TWO_READINGS[name])
    [answer] = s3.send_all(b"\r\n".join(lines) + b"\r\n\r\n" + SMUGGLED)
    assert answer.status in (400, 501), answer
    assert answer.code in ("BadRequest", "NotImplemented")
    assert answer.closed


CHUNKED: Final = {
    "a size of nothing": b"\r\n\r\n",
    "a negative size": b"-1\r\nx\r\n",
    "a size with a sign": b"+1\r\nx\r\n0\r\n\r\n",
    "a size with a prefix": b"0x1\r\nx\r\n0\r\n\r\n",
    "a size with an underscore": b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n",
    "a size of 16 digits": b"f" * 16 + b"\r\nx",
    "a size past all memory": b"f" * 40 + b"\r\nx",
    "a size with a space before it": b" 1\r\nx\r\n0\r\n\r\n",
    "a bare LF": b"1\nx\r\n0\r\n\r\n",
    "a bare LF behind the payload": b"1\r\nx\n0\r\n\r\n",
    "a bare CR": b"1\rx\r\n0\r\n\r\n",
    "a payload too long": b"1\r\nxy\r\n0\r\n\r\n",
    "an extension with a bare LF": b"1;a\nb\r\nx\r\n0\r\n\r\n",
    "an extension of 4 KiB": b"1;" + b"a" * 4096 + b"\r\nx\r\n0\r\n\r\n",
    "a trailer that is a framing": b"1\r\nx\r\n0\r\nContent-Length: 5\r\nTransfer-Encoding\x00: a\r\n\r\n",
    "a trailer with a space": b"0\r\nx y: z\r\n\r\n",
    "trailers of 8 KiB": b"0\r\n" + b"a: b\r\n" * 1500 + b"\r\n",
}


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_that_can_be_read_in_two_ways_are_refused_and_end_the_connection(s3: Signer, name: str) -> None:
    request = s3.request("POST", "/bucket?delete=", b"", {"transfer-encoding": "chunked"}, payload=UNSIGNED)
    del request.headers["content-length"]
    answers = s3.send_all(request.raw() + CHUNKED[name] + SMUGGLED)
    assert [answer.status for answer in answers] == [400], answers
    assert answers[0].closed


def test_chunk_extensions_are_read_over(s3: Signer) -> None:
    body = b"<Delete><Object><Key>none</Key></Object></Delete>"
    request = s3.request("POST", "/bucket?delete=", b"", {"transfer-encoding": "chunked"}, payload=UNSIGNED)
    del request.headers["content-length"]
    answer = s3.send(request.raw() + b'%x;a="b";c\r\n%b\r\n0;d\r\nT: u\r\n\r\n' % (len(body), body))
    assert (answer.status, answer.field("Key")) == (200, "none")


LINES: Final = {
    "two spaces": b"GET  /bucket/kept HTTP/1.1",
    "a tab": b"GET\t/bucket/kept HTTP/1.1",
    "a space behind": b"GET /bucket/kept HTTP/1.1 ",
    "no version": b"GET /bucket/kept",
    "a small version": b"GET /bucket/kept http/1.1",
    "an old version": b"GET /bucket/kept HTTP/0.9",
    "a new version": b"GET /bucket/kept HTTP/2.0",
    "another protocol": b"GET /bucket/kept RTSP/1.0",
    "no target": b"GET  HTTP/1.1",
    "a relative target": b"GET bucket/kept HTTP/1.1",
    "a fragment": b"GET /bucket/kept#x HTTP/1.1",
    "another host": b"GET http://other/bucket/kept HTTP/1.1",
    "another scheme": b"GET ftp://h/bucket/kept HTTP/1.1",
    "a NUL": b"GET /bucket/kept\x00 HTTP/1.1",
    "a byte past ASCII": b"GET /bucket/k\xe9pt HTTP/1.1",
    "a control character": b"GET /bucket/\x01 HTTP/1.1",
    "an unknown method": b"FETCH /bucket/kept HTTP/1.1",
    "a small method": b"get /bucket/kept HTTP/1.1",
    "a tunnel": b"CONNECT other:80 HTTP/1.1",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("name", LINES)
def test_a_first_line_of_another_form_is_refused_and_ends_the_connection(s3: Signer, name: str) -> None:
    [answer] = s3.send_all(LINES[name] + b"\r\nHost: " + s3.host.encode() + b"\r\n\r\n" + SMUGGLED)
    assert answer.status in (400, 405, 501, 505), answer
    assert answer.closed


def test_a_client_that_speaks_tls_is_told_at_once_that_this_port_does_not(s3: Signer) -> None:
    with socket.create_connection(s3.address, timeout=5) as connection:
        with pytest.raises(ssl.SSLError, match=r"(?i)wrong.version.number"):
            ssl.create_default_context().wrap_socket(connection, server_hostname=s3.address[0])
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x16"):
        began = time.monotonic()
        [answer] = s3.send_all(sent)
        assert time.monotonic() - began < HTTP_HEAD_TIMEOUT_S / 2
        assert (answer.status, answer.code, answer.closed) == (400, "BadRequest", True)
        assert "plain HTTP" in answer.field("Message")


@pytest.mark.parametrize("sent", [b"\x00", b"\xff\xfe", b"SSH-2.0-OpenSSH_9.9\r\n", b"\x80\x2e\x01", b"LAK1\x01"])
def test_bytes_of_another_protocol_are_refused_at_once(s3: Signer, sent: bytes) -> None:
    began = time.monotonic()
    [answer] = s3.send_all(sent)
    assert time.monotonic() - began < HTTP_HEAD_TIMEOUT_S / 2
    assert (answer.status, answer.code, answer.closed) == (400, "BadRequest", True)


def test_methods_that_s3_does_not_have_change_nothing(s3: Signer) -> None:
    for method in ("TRACE", "PATCH", "OPTIONS", "PROPFIND", "MOVE", "COPY", "LOCK"):
        answer = s3.ask(method, "/bucket/kept", b"")
        assert answer.status in (400, 405, 501), (method, answer)


# --- floods --------------------------------------------------------------------------------------------


def test_floods_of_headers_are_refused(s3: Signer) -> None:
    host = b"\r\nHost: " + s3.host.encode() + b"\r\n"
    for lines in (b"a: b\r\n" * 200, b"A%b: b\r\n" % (b"x" * 40_000), b"a: " + b"b" * 40_000 + b"\r\n"):
        [answer] = s3.send_all(HEAD + host + lines + b"\r\n")
        assert answer.status in (400, 431), answer
        assert answer.closed
    [answer] = s3.send_all(b"GET /" + b"k" * 40_000 + b" HTTP/1.1" + host + b"\r\n")
    assert (answer.status, answer.closed) == (400, True)
    many = "&".join(f"p{number}=" for number in range(65))
    assert s3.ask("GET", f"/bucket?{many}").code == "InvalidArgument"
    assert s3.ask("GET", "/bucket?prefix=a&prefix=b").code == "InvalidArgument"


def test_metadata_past_two_kib_is_refused(s3: Signer) -> None:
    answer = s3.ask("PUT", "/bucket/kept", b"new", {"x-amz-meta-a": "b" * 2048})
    assert (answer.status, answer.code) == (400, "MetadataTooLarge")


# --- XML -----------------------------------------------------------------------------------------------

ENTITIES: Final = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
BOMBS: Final = {
    "laughs": f'<!DOCTYPE d [<!ENTITY e0 "ha">{ENTITIES}]><Delete><Object><Key>&e9;</Key></Object></Delete>',
    "a quadratic blow-up": f'<!DOCTYPE d [<!ENTITY e "{"x" * 50_000}">]><Delete>{"&e;" * 10_000}</Delete>',
    "a file": '<!DOCTYPE d [<!ENTITY e SYSTEM "file:/etc/passwd">]><Delete><Object><Key>&e;</Key></Object></Delete>',
    "an address": '<!DOCTYPE d SYSTEM "http://127.0.0.1:1/x"><Delete/>',
    "a parameter entity": '<!DOCTYPE d [<!ENTITY % e SYSTEM "file:/etc/passwd"> %e;]><Delete/>',
    "a type without entities": "<!DOCTYPE Delete><Delete><Object><Key>kept</Key></Object></Delete>",
    "an unknown entity": "<Delete><Object><Key>&e;</Key></Object></Delete>",
    "depth": "<Delete>" * 100_000,
    "depth that ends": "<Delete>" * 1000 + "</Delete>" * 1000,
    "elements": "<Delete>" + "<a/>" * 200_000 + "</Delete>",
    "another encoding": '<?xml version="1.0" encoding="utf-7"?><Delete>+ADw-a+AD4-</Delete>',
    "UTF-16": "<Delete><Object><Key>kept</Key></Object></Delete>".encode("utf-16").decode("latin-1"),
    "another version": '<?xml version="9"?><Delete><Object/></Delete>',
    "another root": "<Tagging><TagSet/></Tagging>",
    "two roots": "<Delete><Object><Key>kept</Key></Object></Delete><Delete/>",
    "nothing": "",
    "no XML": "kept",
    "a NUL": "<Delete><Object><Key>ke\0pt</Key></Object></Delete>",
    "a reference to NUL": "<Delete><Object><Key>ke&#0;pt</Key></Object></Delete>",
    "no end": "<Delete><Object><Key>kept</Key></Object>",
    "attributes": "<Delete " + " ".join(f'a{n}="b"' for n in range(1000)) + ">",
    "no objects": "<Delete></Delete>",
    "too many objects": "<Delete>" + "<Object><Key>k</Key></Object>" * 1001 + "</Delete>",
    "a key of nothing": "<Delete><Object><Key></Key></Object></Delete>",
}


@pytest.mark.parametrize("name", BOMBS)
def test_xml_that_is_no_plain_tree_is_refused(s3: Signer, name: str) -> None:
    answer = s3.ask("POST", "/bucket?delete=", BOMBS[name].encode("latin-1"))
    assert (answer.status, answer.code) == (400, "MalformedXML"), answer
    assert b"root:" not in answer.body
    assert s3.ask("GET", "/bucket/kept").body == CONTENT


@pytest.mark.parametrize("target", ["/bucket?delete=", "/bucket/kept?tagging=", "/bucket?versioning="])
def test_xml_bodies_have_a_bound(s3: Signer, target: str) -> None:
    huge = b"<Delete>" + b" " * (5 << 20)
    answer = s3.ask("POST" if "delete" in target else "PUT", target, huge)
    assert (answer.status, answer.code) in ((400, "MaxMessageLengthExceeded"), (501, "NotImplemented"))


# --- what is not offered -------------------------------------------------------------------------------

SUB_RESOURCES: Final = ("abac", "annotation", "metadataConfiguration", "metadataTable", "session")
"""Sub-resources of S3 for which this store has no answer, not even that nothing is set."""
UNKNOWN: Final = ("tiering", "x", "Tagging", "ACL", "uploadid", "partnumber", "Policy", "acl%20")


@pytest.mark.parametrize("name", SUB_RESOURCES)
def test_a_sub_resource_that_is_not_offered_is_501_and_changes_nothing(s3: Signer, name: str) -> None:
    body = b"<Any/>"
    for path in ("/bucket", "/bucket/kept"):
        for method in ("GET", "PUT", "POST", "DELETE"):
            for query in (f"{name}=", f"{name}=1&x-id=Any"):
                answer = s3.ask(method, f"{path}?{query}", body if method in ("PUT", "POST") else b"")
                assert (answer.status, answer.code) == (501, "NotImplemented"), (method, path, answer)
    assert s3.ask("HEAD", f"/bucket/kept?{name}=").status == 501
    assert s3.ask("GET", "/bucket/kept").body == CONTENT


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_write_with_a_parameter_that_nobody_knows_is_501_and_changes_nothing(s3: Signer, name: str) -> None:
    for method in ("PUT", "POST", "DELETE"):
        for path in ("/bucket", "/bucket/kept"):
            signed = name if "%" in name else f"{name}"
            answer = s3.ask(method, f"{path}?{signed}=", b"<Any/>" if method != "DELETE" else b"")
            assert (answer.status, answer.code) == (501, "NotImplemented"), (method, path, answer)
    assert s3.ask("GET", "/bucket/kept").body == CONTENT
    assert s3.ask("GET", f"/bucket/kept?{name}=").status in (200, 501)


def test_versions_of_nothing_are_not_offered(s3: Signer) -> None:
    answer = s3.ask("GET", "/bucket/kept?versionId=other")
    assert answer.status in (400, 404)
    for header in (
        {"x-amz-copy-source": "/bucket"},
        {"x-amz-copy-source": ""},
        {"x-amz-copy-source": "/bucket/../../etc/passwd"},
        {"x-amz-copy-source": "/bucket/%00"},
        {"x-amz-copy-source": "/bucket/none"},
        {"x-amz-copy-source": "/none/kept"},
        {"x-amz-copy-source": "/bucket/kept", "x-amz-metadata-directive": "MERGE"},
        {"x-amz-copy-source": "/bucket/kept", "x-amz-tagging-directive": "MERGE"},
        {"x-amz-copy-source": "/bucket/kept?versionId=other"},
    ):
        assert s3.ask("PUT", "/bucket/copy", b"", header).status in (400, 404), header
    assert s3.ask("HEAD", "/bucket/copy").status == 404


# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/bucket/%00",
        "/bucket/a%00b",
        "/bucket/%ff",
        "/bucket/%ed%a0%80",
        "/bucket/%c0%ae",
        "/bucket/%",
        "/bucket/%2",
        "/bucket/%zz",
        "/bucket/" + "k" * 1025,
        "/bucket/" + "%C3%A9" * 513,
    ],
)
def test_keys_that_s3_does_not_have_are_refused(s3: Signer, path: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        answer = s3.ask(method, path, b"new" if method == "PUT" else b"")
        assert (answer.status, answer.code) in ((400, "InvalidURI"), (400, "KeyTooLongError")), answer


@pytest.mark.parametrize(
    "path",
    [
        "//kept",
        "/../bucket/kept",
        "/..",
        "/.",
        "/%2e%2e/bucket/kept",
        "/bucket%2Fkept",
        "/bu%00cket",
        "/" + "b" * 64,
        "/127.0.0.1",
        "/-bucket",
        "/bucket..two",
    ],
)
def test_names_that_are_no_buckets_are_refused(s3: Signer, path: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        answer = s3.ask(method, path, b"")
        assert (answer.status, answer.code) in (
            (400, "InvalidBucketName"),
            (400, "InvalidURI"),
            (400, "InvalidRequest"),
        ), answer
    assert s3.ask("GET", "/").body.count(b"<Bucket>") == 1
