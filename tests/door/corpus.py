"""Odd HTTP, made by hand: each entry is a request that a fast reader of heads is likely to read wrongly.

An entry is sent three times, and between two good requests for the same object, which the door repeats.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tests.door.asks import DOMAIN, Ask, Flaw, Way
from tests.door.stored import KEPT, KIB, OPEN, THINGS
from tests.door.world import World

_PATH: Final = f"/{THINGS}/size-{4 * KIB}"
_HOST: Final = f"Host: {DOMAIN}".encode()
_FIRST_LINE: Final = re.compile(rb"(GET|HEAD) (/[^ ?#]*)(?:\?([^ ]*))? ?[^ ]*\r\n")
_HOST_LINE: Final = re.compile(rb"(?mi)^host: ?([^\r\n]*)")
GOOD: Final = Ask(_PATH, headers=(("user-agent", "lake-test"), ("accept-encoding", "identity")))


def _lines(*more: bytes, method: bytes = b"GET") -> bytes:
    """Return a request of a stranger for an object that strangers may read."""
    target = f"/{OPEN}/size-{4 * KIB}".encode()
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", _HOST, *more, b"", b""])


_STRANGERS: Final[Mapping[str, bytes]] = {
    "a plain request": _lines(),
    "a plain HEAD": _lines(method=b"HEAD"),
    "an empty line before": b"\r\n" + _lines(),
    "three empty lines before": b"\r\n\r\n\r\n" + _lines(),
    "a bare LF before": b"\n" + _lines(),
    "a space before": b" " + _lines(),
    "lines that end with LF": _lines().replace(b"\r\n", b"\n") + b"\r\n\r\n",
    "one line that ends with LF": _lines(b"x: y\nz: w"),
    "a CR in a value": _lines(b"x: y\rz"),
    "a NUL in a value": _lines(b"x: y\0z"),
    "a NUL in a name": _lines(b"x\0: y"),
    "DEL in a value": _lines(b"x: \x7f"),
    "bytes past ASCII in a value": _lines(b"x: \x80\xff"),
    "bytes past ASCII in a name": _lines(b"\xe9: y"),
    "no name": _lines(b": y"),
    "no colon": _lines(b"x"),
    "a space before the colon": _lines(b"range : bytes=0-0"),
    "a tab before the colon": _lines(b"range\t: bytes=0-0"),
    "no space behind the colon": _lines(b"range:bytes=0-0"),
    "many spaces behind the colon": _lines(b"range:   \t bytes=0-0 \t "),
    "a vertical tab behind the colon": _lines(b"range:\x0bbytes=0-0"),
    "an empty value": _lines(b"range:"),
    "a folded range": _lines(b"range: bytes=0-\r\n 9"),
    "a folded last line": _lines(b"x: y", b" z"),
    "a folded first line": b"GET / HTTP/1.1\r\n " + _HOST + b"\r\n\r\n",
    "two ranges": _lines(b"range: bytes=0-0", b"range: bytes=1-1"),
    "two equal ranges": _lines(b"range: bytes=0-0", b"Range: bytes=0-0"),
    "an empty range and a range": _lines(b"range:", b"range: bytes=0-0"),
    "a list of ranges": _lines(b"range: bytes=0-0,4-4"),
    "a range backwards": _lines(b"range: bytes=9-3"),
    "a range behind the end": _lines(b"range: bytes=4096-"),
    "a range at the last byte": _lines(b"range: bytes=4095-4095"),
    "a range past the end": _lines(b"range: bytes=4000-99999999999999999999"),
    "a range from 2^64": _lines(b"range: bytes=18446744073709551616-18446744073709551617"),
    "a range to 2^64 - 1": _lines(b"range: bytes=0-18446744073709551615"),
    "a range to 2^63": _lines(b"range: bytes=0-9223372036854775808"),
    "a range of a thousand digits": _lines(b"range: bytes=0-" + b"9" * 1000),
    "a range with leading zeros": _lines(b"range: bytes=" + b"0" * 30 + b"1-" + b"0" * 30 + b"2"),
    "a range with a plus": _lines(b"range: bytes=+0-1"),
    "a range in capitals": _lines(b"range: BYTES=0-1"),
    "a range with spaces": _lines(b"range: bytes=0 - 1"),
    "a range with a space behind the equals sign": _lines(b"range: bytes= 0-1"),
    "a range with a space before the equals sign": _lines(b"range: bytes =0-1"),
    "a range with a space before the dash": _lines(b"range: bytes=0 -1"),
    "a range with a tab behind the dash": _lines(b"range: bytes=0-\t1"),
    "a suffix with a space": _lines(b"range: bytes=- 1"),
    "a suffix": _lines(b"range: bytes=-1"),
    "a suffix of nothing": _lines(b"range: bytes=-0"),
    "a suffix longer than the object": _lines(b"range: bytes=-99999"),
    "no range at all": _lines(b"range: bytes=-"),
    "a range of another unit": _lines(b"range: items=0-1"),
    "an If-Range that holds not": _lines(b'if-range: "x"', b"range: bytes=0-0"),
    "If-None-Match *": _lines(b"if-none-match: *"),
    "If-Match of nothing": _lines(b"if-match:"),
    "two conditions": _lines(b'if-none-match: "x"', b"if-none-match: *"),
    "two hosts": _lines(b"host: other"),
    "two equal hosts": _lines(_HOST),
    "no host": b"GET /open/size-4096 HTTP/1.1\r\nx: y\r\n\r\n",
    "no header": b"GET /open/size-4096 HTTP/1.1\r\n\r\n",
    "an empty host": b"GET /open/size-4096 HTTP/1.1\r\nHost:\r\n\r\n",
    "an odd host": b"GET /open/size-4096 HTTP/1.1\r\nHost: a b\r\n\r\n",
    "a host in capitals": b"GET /open/size-4096 HTTP/1.1\r\nHOST: " + DOMAIN.upper().encode() + b"\r\n\r\n",
    "a bucket in the host": b"GET /size-4096 HTTP/1.1\r\nHost: open." + DOMAIN.encode() + b"\r\n\r\n",
    "a host with a dot at its end": _lines().replace(_HOST, _HOST + b"."),
    "a bucket in the host with a dot at its end": b"GET /size-4096 HTTP/1.1\r\nHost: open."
    + DOMAIN.encode()
    + b".\r\n\r\n",
    "a target with its host, and a dot at its end": b"GET http://"
    + DOMAIN.encode()
    + b"./open/size-4096 HTTP/1.1\r\n"
    + _HOST
    + b"\r\n\r\n",
    "a bucket in the host, in capitals": b"GET /size-4096 HTTP/1.1\r\nHost: OPEN." + DOMAIN.encode() + b"\r\n\r\n",
    "another bucket in the host": b"GET /size-4096 HTTP/1.1\r\nHost: things." + DOMAIN.encode() + b"\r\n\r\n",
    "a target with its host": b"GET http://" + DOMAIN.encode() + b"/open/size-4096 HTTP/1.1\r\n" + _HOST + b"\r\n\r\n",
    "a target with another host": b"GET http://other/open/size-4096 HTTP/1.1\r\n" + _HOST + b"\r\n\r\n",
    "HTTP/1.0": _lines().replace(b"1.1", b"1.0"),
    "HTTP/1.0, kept": _lines(b"connection: keep-alive").replace(b"1.1", b"1.0"),
    "HTTP/1.0 without host": b"GET /open/size-4096 HTTP/1.0\r\n\r\n",
    "HTTP/1.2": _lines().replace(b"HTTP/1.1", b"HTTP/1.2"),
    "HTTP/1.10": _lines().replace(b"HTTP/1.1", b"HTTP/1.10"),
    "HTTP/11": _lines().replace(b"HTTP/1.1", b"HTTP/11"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": _lines().replace(b" HTTP/1.1", b""),
    "two spaces": _lines().replace(b" HTTP", b"  HTTP"),
    "a tab for a space": _lines().replace(b" HTTP", b"\tHTTP"),
    "a space behind the version": _lines().replace(b"HTTP/1.1", b"HTTP/1.1 "),
    "a small method": _lines(method=b"get"),
    "a longer method": _lines(method=b"GETS"),
    "a method with a space": _lines(method=b"GET "),
    "HEAD in small letters": _lines(method=b"Head"),
    "OPTIONS": _lines(b"origin: x", b"access-control-request-method: GET", method=b"OPTIONS"),
    "TRACE": _lines(method=b"TRACE"),
    "a fragment": _lines().replace(b"4096 ", b"4096#x "),
    "an empty query": _lines().replace(b"4096 ", b"4096? "),
    "an ampersand as query": _lines().replace(b"4096 ", b"4096?& "),
    "a parameter of the client's own": _lines().replace(b"4096 ", b"4096?x-mine=1 "),
    "a sub-resource of buckets": _lines().replace(b"4096 ", b"4096?uploads "),
    "x-id": _lines().replace(b"4096 ", b"4096?x-id=GetObject "),
    "a NUL in the target": _lines().replace(b"4096 ", b"4096\0 "),
    "bytes past ASCII in the target": _lines().replace(b"4096 ", b"4096\xe9 "),
    "an escape in the target": _lines().replace(b"4096 ", b"409%36 "),
    "a broken escape": _lines().replace(b"4096 ", b"4096%2 "),
    "an escaped slash": _lines().replace(b"/open/", b"/open%2F"),
    "a version of a stranger": _lines().replace(b"4096 ", b"4096?versionId=null "),
    "an override of a stranger": _lines().replace(b"4096 ", b"4096?response-expires=0 "),
    "Connection: close": _lines(b"connection: close"),
    "Connection: CLOSE": _lines(b"Connection: CLOSE"),
    "Connection: keep-alive, close": _lines(b"connection: keep-alive, close"),
    "Connection twice": _lines(b"connection: keep-alive", b"connection: close"),
    "Connection: Keep-Alive": _lines(b"connection: Keep-Alive"),
    "an empty Connection": _lines(b"connection:"),
    "Connection: range": _lines(b"connection: range", b"range: bytes=0-0"),
    "an upgrade": _lines(b"connection: upgrade", b"upgrade: websocket"),
    "an upgrade to HTTP/2": _lines(
        b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABk"
    ),
    "Content-Length: 0": _lines(b"content-length: 0"),
    "Content-Length: 00": _lines(b"content-length: 00"),
    "Content-Length: +0": _lines(b"content-length: +0"),
    "Content-Length: 0, 0": _lines(b"content-length: 0, 0"),
    "two lengths": _lines(b"content-length: 0", b"content-length: 0"),
    "two lengths that differ": _lines(b"content-length: 0", b"content-length: 1") + b"x",
    "a body": _lines(b"content-length: 5") + b"hello",
    "a body that is a request": _lines(b"content-length: 18") + b"GET / HTTP/1.1\r\n\r\n",
    "a body of chunks": _lines(b"transfer-encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n",
    "both framings": _lines(b"content-length: 5", b"transfer-encoding: chunked") + b"0\r\n\r\n",
    "an unknown coding": _lines(b"transfer-encoding: gzip"),
    "identity": _lines(b"transfer-encoding: identity"),
    "Expect without a body": _lines(b"expect: 100-continue"),
    "Expect with length 0": _lines(b"expect: 100-continue", b"content-length: 0"),
    "Expect with a body": _lines(b"expect: 100-continue", b"content-length: 5") + b"hello",
    "another expectation": _lines(b"expect: 200-ok"),
    "an authorization of nothing": _lines(b"authorization:"),
    "Basic": _lines(b"authorization: Basic YTpi"),
    "an old signature": _lines(b"authorization: AWS AKID:c2ln"),
    "a signature of nothing": _lines(b"authorization: AWS4-HMAC-SHA256"),
    "an x-amz-date of a stranger": _lines(b"x-amz-date: 20200101T000000Z"),
    "a checksum mode": _lines(b"x-amz-checksum-mode: ENABLED"),
    "an unknown x-amz header": _lines(b"x-amz-unknown: x"),
    "another owner": _lines(b"x-amz-expected-bucket-owner: other"),
    "an origin": _lines(b"origin: http://elsewhere.test"),
    "127 headers": _lines(*(b"x-%d: y" % number for number in range(126))),
    "129 headers": _lines(*(b"x-%d: y" % number for number in range(128))),
    "2,000 headers": _lines(*(b"x-%d: y" % number for number in range(1999))),
    "5,000 headers": _lines(*(b"x-%d: y" % number for number in range(4999))),
    "a header of 8 KiB": _lines(b"x: " + b"y" * 8200),
    "a header of 31 KiB": _lines(b"x: " + b"y" * (31 << 10)),
    "a header of 40 KiB": _lines(b"x: " + b"y" * (40 << 10)),
    "a name of 1,000 bytes": _lines(b"x" * 1000 + b": y"),
    "a target of 20 KiB": _lines().replace(b"4096 ", b"4096?x=" + b"y" * (20 << 10) + b" "),
    "an x-amz-content-sha256 of a stranger": _lines(b"x-amz-content-sha256: UNSIGNED-PAYLOAD"),
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n",
    "another protocol": b"LAK1\x01\0\0\0\r\n\r\n",
    "gzip is accepted": _lines(b"accept-encoding: gzip"),
}
_SIGNED: Final[Mapping[str, Callable[[World], bytes]]] = {
    "signed": lambda made: made.raw(GOOD),
    "signed, and a range that is not": lambda made: made.raw(GOOD).replace(
        b"\r\nuser-agent", b"\r\nRange: bytes=0-9\r\nuser-agent"
    ),
    "signed, and the range is another": lambda made: made.raw(
        Ask(_PATH, headers=(("range", "bytes=0-9"),), signed=("range",))
    ).replace(b"bytes=0-9", b"bytes=0-8"),
    "signed, and asked for another object": lambda made: made.raw(GOOD).replace(b"/size-4096", b"/size-1"),
    "signed, and the escape is another": lambda made: made.raw(GOOD).replace(b"/size-4096", b"/size%2D4096"),
    "signed, and the query is another": lambda made: made.raw(GOOD).replace(b"4096 ", b"4096?x-id=GetObject "),
    "signed, and HEAD": lambda made: made.raw(GOOD).replace(b"GET ", b"HEAD "),
    "signed, and another host": lambda made: made.raw(GOOD).replace(DOMAIN.encode(), b"127.0.0.1:9000"),
    "signed, and a host of the bucket": lambda made: (
        made.raw(GOOD).replace(f"{THINGS}/".encode(), b"", 1).replace(b"host: ", f"host: {THINGS}.".encode())
    ),
    "signed, and the date is twice": lambda made: made.raw(GOOD).replace(b"\r\nuser", b"\r\nx-amz-date: x\r\nuser"),
    "signed, and the key is twice": lambda made: made.raw(GOOD).replace(b"\r\nuser", b"\r\nauthorization: x\r\nuser"),
    "signed, and the hash is in capitals": lambda made: made.raw(GOOD).replace(b"e3b0c442", b"E3B0C442"),
    "signed, and one more x-amz header": lambda made: made.raw(GOOD).replace(
        b"\r\nuser", b"\r\nx-amz-checksum-mode: ENABLED\r\nuser"
    ),
    "signed twice": lambda made: made.raw(Ask(_PATH, flaw=Flaw.BOTH)),
    "presigned": lambda made: made.raw(Ask(_PATH, way=Way.QUERY)),
    "presigned, and HEAD": lambda made: made.raw(Ask(_PATH, way=Way.QUERY)).replace(b"GET ", b"HEAD "),
    "presigned, and expired": lambda made: made.raw(Ask(_PATH, way=Way.QUERY, flaw=Flaw.EXPIRED)),
    "presigned, and wrong": lambda made: made.raw(Ask(_PATH, way=Way.QUERY, flaw=Flaw.BIT)),
    "a stranger": lambda made: made.raw(Ask(_PATH, way=Way.NONE)),
    "the last bytes of nothing": lambda made: made.raw(Ask(f"/{THINGS}/size-0", headers=(("range", "bytes=-5"),))),
    "the last byte of nothing, and HEAD": lambda made: made.raw(
        Ask(f"/{THINGS}/size-0", "HEAD", headers=(("range", "bytes=-1"),))
    ),
    "no last byte of nothing": lambda made: made.raw(Ask(f"/{THINGS}/size-0", headers=(("range", "bytes=-0"),))),
    "a key of another bucket": lambda made: made.raw(Ask(_PATH, caller="other")),
    "a key that is gone": lambda made: made.raw(Ask(_PATH, caller="gone")),
    "a folder": lambda made: made.raw(Ask(f"/{THINGS}/folder/")),
    "a list": lambda made: made.raw(Ask(f"/{THINGS}", query=(("list-type", "2"), ("prefix", "size")))),
    "all buckets": lambda made: made.raw(Ask("/")),
    **{f"signed with {flaw.value}": lambda made, flaw=flaw: made.raw(Ask(_PATH, flaw=flaw)) for flaw in Flaw},  # type: ignore[misc]
}
ODD: Final = (*_STRANGERS, *_SIGNED)
"""Names of the entries."""


_QUERIES: Final = (
    (),
    (("x-id", "GetObject"),),
    (("x-mine", "1"),),
    (("uploads", ""),),
    (("partNumber", "1"),),
    (("versionId", "null"),),
    (("versionId", ""),),
    (("response-content-type", "text%2Fhtml"),),
    (("response-expires", "0"), ("response-cache-control", "no-store")),
    (("x-amz-checksum-mode", "ENABLED"),),
    (("x-amz-checksum-mode", "ENABLED"), ("response-content-language", "de")),
    (("x-amz-expected-bucket-owner", "somebody"),),
    (("tagging", ""),),
)
_MODE: Final = ("x-amz-checksum-mode", "ENABLED")
_HEADERS: Final[tuple[tuple[tuple[str, str], ...], ...]] = (
    (),
    (_MODE,),
    (("range", "bytes=0-0"),),
    (("range", "bytes=100-"), _MODE),
    (("range", "bytes=0-99999999"),),
    (("range", "bytes=-5"),),
    (("range", "bytes= 0-1"),),
    (("connection", "keep-alive"), ("accept", "*/*"), ("accept-encoding", "gzip")),
    (("x-amz-user-agent", "aws-sdk-js/3"), ("amz-sdk-request", "attempt=1; max=3")),
)
_PLACES: Final = (
    *(
        (DOMAIN, f"/{THINGS}/{key}")
        for key in ("size-0", "size-4096", "attributes", "tags", "crc32", "parts", "folder/")
    ),
    (DOMAIN, f"/{THINGS}/%73ize-4096"),
    (DOMAIN, f"/{KEPT}/versions"),
    (f"{THINGS}.{DOMAIN}", "/size-4096"),
    (DOMAIN, "/size-4096"),
    (DOMAIN, f"//{THINGS}/size-4096"),
    (f"{THINGS.upper()}.{DOMAIN}:9000", "/attributes"),
)
PLAIN: Final = tuple(f"{host}{path}" for host, path in _PLACES)
"""Names of the objects that are asked for in every plain way."""


def plain_asks(name: str, chance: random.Random) -> Iterator[list[Ask]]:
    """Yield sequences of requests for one target: all ways in which clients ask for it, twice, in any order.

    An answer that is remembered from one of them must not be the answer to another.
    """
    host, path = _PLACES[PLAIN.index(name)]
    for query in _QUERIES:
        asks = [
            Ask(path, method, host=host, query=query, headers=headers, way=way)
            for method in ("GET", "HEAD")
            for headers in _HEADERS
            for way in (Way.HEADER, Way.QUERY)
        ]
        asks += [Ask(path, host=host, query=query, caller=caller) for caller in ("reader", "other", "gone")]
        asks.append(Ask(path, host=host, query=query, way=Way.NONE))
        sequence = asks * 2
        chance.shuffle(sequence)
        yield sequence


def odd_requests(made: World, name: str) -> list[list[bytes]]:
    """Return the sequences in which an entry is sent; that of a stranger also with a signature."""
    good = made.raw(GOOD)
    if name in _SIGNED:
        raw = _SIGNED[name](made)
        return [[raw] * 3, [good, good, raw, good]]
    raw, good = _STRANGERS[name], signed(made, _lines())
    sequences = [[raw] * 3, [good, good, raw, good]]
    if _FIRST_LINE.match(raw):
        with_signature = signed(made, raw)
        sequences += [[with_signature] * 3, [good, good, with_signature, good]]
    return sequences


def signed(made: World, raw: bytes) -> bytes:
    """Return a stranger's request with the lines of a signature for its method, target and host."""
    first, host = _FIRST_LINE.match(raw), _HOST_LINE.search(raw)
    assert first, raw
    pairs = first[3].decode("latin-1").split("&") if first[3] else []
    query = tuple((name, value) for name, _, value in (pair.partition("=") for pair in pairs))
    path, name = first[2].decode("latin-1"), host[1].decode("latin-1") if host else DOMAIN
    lines = made.raw(Ask(path, first[1].decode(), host=name, query=query)).split(b"\r\n")
    own = [line for line in lines if line.startswith((b"x-amz-", b"authorization"))]
    return raw.replace(b"\r\n", b"\r\n" + b"\r\n".join([*own, b""]), 1)
