"""Hypothesis strategies: requests for objects, most of them plain, the others odd in one to three ways.

Plain ones are those that the door repeats: so an odd one meets an answer that is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final
from urllib.parse import quote

from hypothesis import HealthCheck, Phase, settings, strategies as st

from tests.door.asks import DOMAIN, HARMLESS, VERSION, Ask, Flaw, Spelling, Way
from tests.door.stored import HOT, KEPT, MOVING, OBJECTS, ODD_KEYS, OPEN, THINGS, VERSIONS, path_of

Draw = st.DrawFn
_EVERY: Final = (
    *OBJECTS,
    *((THINGS, key) for key in ("missing", "folder", "folder/inside/", "parts", "size-1/below", "")),
    *((bucket, "mine") for bucket in ("no-such-bucket", "Odd_Bucket", "other", "")),
    (KEPT, "versions"),
    (KEPT, "deleted"),
)
_NUMBERS: Final = ("0", "1", "-0", "+1", " 1", "01", "4095", "4096", "65535", "65536", "65537", "1048575", "1048576")
_SPACED: Final = ("bytes= {}-{}", "bytes =0-{}{}", "bytes={} -{}", "bytes={}- {}", "bytes=- {}{}", "bytes\t=\t{}-{}")
"""Ranges with white space: they are none."""
_HUGE: Final = ("2147483648", "4294967296", "9223372036854775808", "1" + "0" * 40, "0x10", "1e3", "\xb2", "")
_DATES: Final = (
    "Sun, 06 Nov 1994 08:49:37 GMT",
    "Thu, 01 Dec 2033 16:00:00 GMT",
    "Sunday, 06-Nov-94 08:49:37 GMT",
    "Sun Nov  6 08:49:37 1994",
    "yesterday",
)
_ETAGS: Final = tuple(stored.etag for place, stored in OBJECTS.items() if place in HOT)


def drawn(count: int, *, shrink: bool) -> settings:
    """Return the settings for so many examples; they run real servers, so time and health do not count."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
    )


@st.composite
def asks(draw: Draw) -> Ask:
    """Draw a request."""
    is_plain = draw(st.integers(0, 9)) < 5
    bucket, key = draw(st.sampled_from(HOT if is_plain or draw(st.booleans()) else _EVERY))
    ask = Ask(path_of(bucket, key) if bucket else "/", draw(st.sampled_from(("GET", "GET", "HEAD"))))
    ask = _plainly(draw, ask)
    return ask if is_plain else oddly(draw, ask)


def oddly(draw: Draw, ask: Ask) -> Ask:
    """Make a request odd in one to three ways."""
    for change in draw(st.lists(st.sampled_from(_ODDITIES), min_size=1, max_size=3)):
        ask = change(draw, ask)
    return ask


def _plainly(draw: Draw, ask: Ask) -> Ask:
    """Add what clients send."""
    headers = draw(
        st.lists(
            st.sampled_from(
                (
                    ("user-agent", "aws-sdk-go-v2/1.30 os/linux lang/go#1.22"),
                    ("accept", "*/*"),
                    ("accept-encoding", "identity"),
                    ("amz-sdk-invocation-id", "2f4b9f3a-0000-4000-8000-000000000000"),
                    ("amz-sdk-request", "attempt=1; max=3"),
                    ("connection", "keep-alive"),
                    ("x-amz-user-agent", "aws-sdk-js/3"),
                    ("x-amz-checksum-mode", "ENABLED"),
                )
            ),
            unique=True,
            max_size=4,
        )
    )
    if draw(st.integers(0, 3)) == 0:
        first = draw(st.sampled_from((0, 1, 4095, 4096, 65535, 65536)))
        last = draw(st.sampled_from(("", str(first), str(first + 999), str(first + 65535))))
        headers.append(("range", f"bytes={first}-{last}"))
    signed = draw(st.sampled_from(((), ("range", "user-agent"), ("amz-sdk-request", "connection"))))
    return replace(ask, headers=tuple(headers), signed=tuple(signed))


# --- oddities --------------------------------------------------------------------------------------------


def _flawed(draw: Draw, ask: Ask) -> Ask:
    return replace(ask, flaw=draw(st.sampled_from(Flaw)))


def _harmless(draw: Draw, ask: Ask) -> Ask:
    canonical = draw(st.booleans())
    return replace(ask, flaw=draw(st.sampled_from((None, *HARMLESS))), signs_canonical=canonical)


def _presigned(draw: Draw, ask: Ask) -> Ask:
    overrides = (
        ("response-content-type", "text%2Fhtml"),
        ("response-cache-control", "no-cache"),
        ("response-content-disposition", quote('attachment; filename="ü"')),
        ("response-content-language", "x%0d%0aEvil:%20yes"),
        ("response-expires", "0"),
        ("response-content-encoding", ""),
        ("x-amz-checksum-mode", "ENABLED"),
        ("x-amz-expected-bucket-owner", "somebody"),
        ("x-id", "GetObject"),
    )
    query = draw(st.lists(st.sampled_from(overrides), unique=True, max_size=3))
    return replace(ask, way=Way.QUERY, query=(*ask.query, *query))


def _anonymous(draw: Draw, ask: Ask) -> Ask:
    return replace(ask, way=Way.NONE)


def _by_another(draw: Draw, ask: Ask) -> Ask:
    return replace(ask, caller=draw(st.sampled_from(("reader", "other", "gone"))))


def _queried(draw: Draw, ask: Ask) -> Ask:
    parameters = (
        *((("versionId", f"{VERSION}:{name}")) for name in (*VERSIONS, "marker")),
        *(("versionId", value) for value in ("null", "", "x", "0" * 32)),
        *(("partNumber", value) for value in ("1", "2", "0", "10001", "x", "")),
        ("response-content-type", "text%2Fhtml"),
        ("response-expires", "x%00y"),
        *((name, "") for name in ("tagging", "acl", "attributes", "uploads", "uploadId", "torrent", "versions")),
        *((name, "") for name in ("location", "versioning", "delete", "policy")),
        ("x-id", "GetObject"),
        ("x-mine", "1"),
        ("x-%6dine", "a+b%20c"),
        ("X-Mine", ""),
        ("list-type", "2"),
        ("prefix", "a"),
        ("%70refix", "%7E"),
        ("", ""),
        ("x", "%zz"),
        ("x-amz-checksum-mode", "ENABLED"),
    )
    path = draw(st.sampled_from((ask.path, ask.path, f"/{KEPT}/versions", f"/{KEPT}/deleted", f"/{THINGS}/parts")))
    query = draw(st.lists(st.sampled_from(parameters), min_size=1, max_size=3))
    return replace(ask, path=path, query=(*ask.query, *query))


def _ranged(draw: Draw, ask: Ask) -> Ask:
    number = st.sampled_from((*_NUMBERS, *_HUGE))
    unit = draw(st.sampled_from(("bytes=", "bytes=", "bytes=", "Bytes=", "bytes = ", "bits=", "bytes:", "")))
    form = draw(st.sampled_from(("{}-{}", "{}-", "-{}", "{}", "{}-{},0-1", "{}-{}-{}", "-{}, {}-", "{} - {}")))
    value = unit + form.format(*draw(st.tuples(number, number, number)))
    if draw(st.integers(0, 2)) == 0:
        value = draw(st.sampled_from(_SPACED)).format(*draw(st.tuples(number, number)))
    kept = tuple(header for header in ask.headers if header[0] != "range")
    return replace(ask, headers=(*kept, ("range", value)))


def _conditional(draw: Draw, ask: Ask) -> Ask:
    names = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range")
    values = (*_DATES, *_ETAGS, "*", '"x"', 'W/"x"', ", ".join(_ETAGS), "")
    header = st.tuples(st.sampled_from(names), st.sampled_from(values))
    return replace(ask, headers=(*ask.headers, *draw(st.lists(header, min_size=1, max_size=2))))


def _with_headers(draw: Draw, ask: Ask) -> Ask:
    odd = (
        ("x-amz-expected-bucket-owner", "somebody"),
        ("x-amz-expected-bucket-owner", "lake"),
        ("x-amz-request-payer", "requester"),
        ("x-amz-checksum-mode", "enabled"),
        ("x-amz-checksum-mode", "x"),
        ("x-amz-unknown", "x"),
        ("x-amz-server-side-encryption-customer-algorithm", "AES256"),
        ("x-amz-copy-source", "/things/size-1"),
        ("x-amz-te", "append-md5"),
        ("origin", "http://elsewhere.test"),
        ("cache-control", "no-cache"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("x-forwarded-for", "10.0.0.1"),
        ("accept-encoding", "gzip, br"),
        ("x-\xe9", "\xff"),
        ("x-long", "y" * 9000),
        ("expect", "100-continue"),
        ("expect", "nothing"),
        ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("user-agent", ""),
        ("user-agent", "two  spaces\tand a tab"),
    )
    return replace(ask, headers=(*ask.headers, *draw(st.lists(st.sampled_from(odd), min_size=1, max_size=2))))


def _many_headers(draw: Draw, ask: Ask) -> Ask:
    """Send more headers than a fast reader has room for; sometimes more bytes than any head has."""
    count = draw(st.sampled_from((10, 30, 127, 128, 129, 1000, 5000)))
    return replace(ask, more=(*ask.more, *(b"h%d: v" % number for number in range(count))))


def _tail_of_nothing(draw: Draw, ask: Ask) -> Ask:
    """Ask for the last bytes of an empty object."""
    value = f"bytes=-{draw(st.sampled_from((*_NUMBERS, '5', *_HUGE)))}"
    kept = tuple(header for header in ask.headers if header[0] != "range")
    return replace(ask, path=path_of(THINGS, "size-0"), headers=(*kept, ("range", value)))


def _repeated(draw: Draw, ask: Ask) -> Ask:
    """Send one header twice: one of its own, or one with another value."""
    value = draw(st.sampled_from(("", "x", "keep-alive", "bytes=0-0")))
    names = ("range", "host", "connection", "accept", "user-agent", "x-amz-date", "authorization", "if-none-match")
    name = draw(st.sampled_from((*names, *(name for name, _ in ask.headers))))
    return replace(ask, more=(*ask.more, f"{name}: {value}".encode("latin-1")))


def _odd_lines(draw: Draw, ask: Ask) -> Ask:
    lines = (
        b" folded", b"\tfolded", b"x: y\r\n z", b"x : y", b"x", b": y", b"", b"x: \x00", b"x: \x7f", b"x\xff: y",
        b"x: y\nz: w", b"x: y\rz: w", b"Range: bytes=0-0\r\n ", b"content-length: 0", b"Content-Length: 00",
        b"content-length: +0", b"content-length: 5", b"content-length: 0, 0", b"content-length:",
        b"transfer-encoding: identity", b"transfer-encoding: chunked", b"x-amz-meta-a: b", b"host: elsewhere",
    )  # fmt: skip
    return replace(ask, more=(*ask.more, draw(st.sampled_from(lines))))


def _with_body(draw: Draw, ask: Ask) -> Ask:
    body = draw(st.sampled_from((b"x", b"GET / HTTP/1.1\r\n\r\n", b"x" * 10_000)))
    return replace(ask, body=body, headers=(*ask.headers, ("content-length", str(len(body)))))


def _spelled(draw: Draw, ask: Ask) -> Ask:
    spelling = Spelling(
        draw(st.sampled_from(("lower", "upper", "title", "odd"))),
        draw(st.sampled_from((": ", ":", ":   ", ":\t", ": \t "))),
        draw(st.sampled_from(("", " ", "\t  "))),
        draw(st.integers(0, 12)),
    )
    return replace(ask, spelling=spelling)


def _versioned(draw: Draw, ask: Ask) -> Ask:
    version = draw(st.sampled_from(("HTTP/1.0", "HTTP/1.0", "HTTP/1.1", "HTTP/1.2", "HTTP/2.0", "http/1.1")))
    options = ("close", "Close", "keep-alive", "Keep-Alive", "keep-alive, close", "upgrade", "te", "")
    connection = draw(st.sampled_from(options))
    kept = tuple(header for header in ask.headers if header[0] != "connection")
    return replace(ask, version=version, headers=(*kept, ("connection", connection)))


def _hosted(draw: Draw, ask: Ask) -> Ask:
    bucket, _, rest = ask.path[1:].partition("/")
    virtual = draw(st.booleans())
    names = (DOMAIN, DOMAIN.upper(), f"{DOMAIN}.", f"{DOMAIN}..", "127.0.0.1", "[::1]", "")
    domain = draw(st.sampled_from(names)) + draw(st.sampled_from(("", "", ":9000")))
    return replace(ask, path=f"/{rest}" if virtual else ask.path, host=f"{bucket}.{domain}" if virtual else domain)


def _pathed(draw: Draw, ask: Ask) -> Ask:
    """Spell the path in another way, or name another."""
    key = draw(st.sampled_from((*ODD_KEYS, *MOVING, "size-4096")))
    raw = key.encode()
    spellings = (
        f"/{THINGS}/" + "".join(f"%{byte:02X}" for byte in raw),
        f"/{THINGS}/" + "".join(f"%{byte:02x}" for byte in raw),
        f"/{THINGS}/" + quote(raw, safe="/~!$&'()*+,;=:@"),
        f"/%74hings/{quote(raw, safe='')}",
        f"//{THINGS}/{quote(raw)}",
        f"/{THINGS}/./{quote(raw)}",
        f"/{OPEN}/../{THINGS}/{quote(raw)}",
        f"http://{ask.host}{path_of(THINGS, key)}",
        f"HTTP://{ask.host}:80{path_of(THINGS, key)}",
        f"{path_of(THINGS, key)}%",
        f"{path_of(THINGS, key)}%zz",
        f"{path_of(THINGS, key)}%00",
        f"{path_of(THINGS, key)}%ff",
        f"{path_of(THINGS, key)}#x",
        f"{path_of(THINGS, key)}?",
        path_of(THINGS, key).replace("%20", "+"),
        "*",
    )
    return replace(ask, path=draw(st.sampled_from(spellings)))


def _methods(draw: Draw, ask: Ask) -> Ask:
    return replace(ask, method=draw(st.sampled_from(("get", "Head", "OPTIONS", "FETCH", "GETT"))))


_ODDITIES: Final[tuple[Callable[[Draw, Ask], Ask], ...]] = (
    _flawed,
    _flawed,
    _harmless,
    _presigned,
    _anonymous,
    _by_another,
    _queried,
    _ranged,
    _conditional,
    _with_headers,
    _many_headers,
    _tail_of_nothing,
    _repeated,
    _odd_lines,
    _with_body,
    _spelled,
    _versioned,
    _hosted,
    _pathed,
    _methods,
)
