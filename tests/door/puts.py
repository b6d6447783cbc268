"""PUTs drawn and compared: the same bytes to a gateway with the door and to one without have the same answer, and leave
the same objects behind.

Half of them are plain: small, whole, signed in the header.  Those the door gathers.  The others are odd in their
content, or in one to three ways of `tests.door.grammar`.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from base64 import b64encode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from hypothesis import given, strategies as st

from tests.door.asks import UNSIGNED, Ask, Way
from tests.door.grammar import drawn, oddly
from tests.door.line import Line, without_own
from tests.door.pieces import pieces_of
from tests.door.stored import KEPT, KIB, OTHER, THINGS, content_of
from tests.door.world import World, difference

TIMES: Final = 2
"""Each PUT is sent so often: the second time its name exists."""
NAMES: Final = ((THINGS, "put-0"), (THINGS, "put/a b"), (THINGS, "put/"), (KEPT, "put-0"), (OTHER, "put-0"))
_SIZES: Final = (1, 2, 100, 4 * KIB, 20_000, 64 * KIB)
_ODD_SIZES: Final = (0, 64 * KIB + 1, 100_000)
_OWN: Final = re.compile(rb"(?m)^(x-amz-version-id: )[^\r\n]*|(<LastModified>)[^<]*")
_GO_ON: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""It is sent or not, as the bytes arrive."""
_TYPES: Final = ("text/plain; charset=utf-8", "application/octet-stream", "x", "")
_PLAIN_HEADERS: Final = (
    ("user-agent", "aws-sdk-go-v2/1.30 os/linux"),
    ("accept", "*/*"),
    ("accept-encoding", "identity"),
    ("amz-sdk-invocation-id", "2f4b9f3a-0000-4000-8000-000000000000"),
    ("amz-sdk-request", "attempt=1; max=3"),
    ("connection", "keep-alive"),
    ("x-amz-user-agent", "aws-sdk-js/3"),
)


@dataclass(frozen=True)
class PutStep:
    """A PUT, and the seed of the pieces that it is sent in; 0: at once."""

    ask: Ask
    pieces: int

    @property
    def is_short(self) -> bool:
        """True if the body is shorter than the head says: the client ends there."""
        said = [value for name, value in self.ask.headers if name == "content-length"]
        return any(value.strip().isdecimal() and int(value) > len(self.ask.body) for value in said)


def _md5(body: bytes) -> str:
    return b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _sums(body: bytes) -> list[list[tuple[str, str]]]:
    """Return right checksums, as header fields."""
    crc32 = b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    sha256 = b64encode(hashlib.sha256(body).digest()).decode()
    return [
        [("x-amz-checksum-crc32", crc32), ("x-amz-sdk-checksum-algorithm", "CRC32")],
        [("x-amz-checksum-sha256", sha256)],
        [("x-amz-checksum-sha1", b64encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode())],
    ]


@st.composite
def put_steps(draw: st.DrawFn) -> PutStep:
    """Draw a PUT."""
    is_plain = draw(st.booleans())
    bucket, key = draw(st.sampled_from((NAMES[0], *NAMES)))
    size = draw(st.sampled_from(_SIZES if is_plain else (*_SIZES, *_ODD_SIZES)))
    body = content_of(size, str(draw(st.integers(0, 3))))
    headers = [("content-length", str(size)), *draw(st.lists(st.sampled_from(_PLAIN_HEADERS), unique=True, max_size=3))]
    if draw(st.booleans()):
        headers.append(("content-type", draw(st.sampled_from(_TYPES))))
    if draw(st.integers(0, 3)) == 0:
        headers.append(("content-md5", _md5(body)))
    if draw(st.integers(0, 3)) == 0:
        headers += draw(st.sampled_from(_sums(body)))
    if draw(st.integers(0, 3)) == 0:
        headers.append(("expect", "100-continue"))
    signed = draw(st.sampled_from(((), ("content-length", "content-type"), ("content-md5", "user-agent"))))
    hashed = draw(st.sampled_from(("", "", UNSIGNED)))
    path = f"/{bucket}/{key.replace(' ', '%20')}"
    caller = draw(st.sampled_from(("owner", "owner", "owner", "owner", "other", "reader")))
    ask = Ask(path, "PUT", headers=tuple(headers), body=body, hashed=hashed, signed=signed, caller=caller)
    pieces = draw(st.sampled_from((0, 0, 1, 2, 3)))
    if is_plain:
        return PutStep(ask, pieces)
    return PutStep(draw(st.sampled_from((_odd_content, _framed, _odd_header, _by_another, oddly)))(draw, ask), pieces)


def _odd_content(draw: st.DrawFn, ask: Ask) -> Ask:
    """Send another body than the head says, or say something odd of it."""
    other = ask.body[:-1] + b"?"
    length = str(len(ask.body))
    changes = (
        replace(ask, hashed=hashlib.sha256(other).hexdigest()),
        replace(ask, hashed=hashlib.sha256(ask.body).hexdigest().upper()),
        replace(ask, hashed="STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
        replace(ask, hashed=""),
        replace(ask, headers=(*ask.headers, ("content-md5", _md5(other)))),
        replace(ask, headers=(*ask.headers, ("content-md5", "x"))),
        *(
            replace(ask, headers=(("content-length", spelled), *ask.headers[1:]))
            for spelled in (f"0{length}", f"+{length}", f"{length},{length}", f" {length}", "0", "99999", "4294967297")
        ),
        replace(ask, headers=(*ask.headers[1:], ("transfer-encoding", "chunked"))),
        replace(ask, headers=ask.headers[1:]),
        replace(ask, body=b"", hashed=hashlib.sha256(ask.body).hexdigest()),
    )
    return changes[draw(st.integers(0, len(changes) - 1))]


def _framed(draw: st.DrawFn, ask: Ask) -> Ask:
    """Send a body in chunks, or say so of one that is not; under a hash or none."""
    body = b"%x\r\n%b\r\n0\r\n" % (len(ask.body), ask.body) if ask.body else b"0\r\n"
    sums = [header for header in _sums(ask.body)[0] if header[0].startswith("x-amz-checksum")]
    trailers = draw(st.sampled_from(((), sums, [("x-amz-checksum-crc32", "AAAAAA==")], [("x-amz-meta-a", "b")])))
    body += b"".join(f"{name}:{value}\r\n".encode() for name, value in trailers) + b"\r\n"
    body = draw(st.sampled_from((body, body, body, ask.body, body[:-2], b"")))
    headers = [header for header in ask.headers[1:] if header[0] not in ("content-encoding", "x-amz-trailer")]
    headers.append(("content-length", str(len(body))))
    if draw(st.integers(0, 3)):
        headers.append(("content-encoding", draw(st.sampled_from(("aws-chunked", "gzip, aws-chunked", "AWS-CHUNKED")))))
    if draw(st.integers(0, 3)):
        length = len(ask.body) + draw(st.sampled_from((0, 0, 0, 1, -1, len(body) - len(ask.body))))
        headers.append(("x-amz-decoded-content-length", str(length)))
    if trailers or draw(st.integers(0, 3)) == 0:
        headers.append(("x-amz-trailer", ",".join(name for name, _ in trailers)))
    hashed = draw(st.sampled_from(("", "", UNSIGNED, "STREAMING-UNSIGNED-PAYLOAD-TRAILER")))
    way = draw(st.sampled_from((Way.HEADER, Way.HEADER, Way.QUERY)))
    query = draw(st.sampled_from(((), (), (("x-mine", "1"),))))
    return replace(ask, body=body, headers=tuple(headers), hashed=hashed, way=way, query=query)


def _odd_header(draw: st.DrawFn, ask: Ask) -> Ask:
    headers = (
        ("x-amz-checksum-crc32", "AAAAAA=="),
        ("x-amz-checksum-sha256", b64encode(hashlib.sha256(ask.body).digest()).decode()),
        ("x-amz-sdk-checksum-algorithm", "CRC32"),
        ("x-amz-sdk-checksum-algorithm", "x"),
        ("x-amz-checksum-crc32c", "AAAAAA=="),
        ("x-amz-checksum-crc64nvme", "x"),
        ("x-amz-checksum-type", "COMPOSITE"),
        ("expect", "something"),
        ("x-amz-meta-a", "b"),
        ("x-amz-tagging", "a=1"),
        ("x-amz-acl", "private"),
        ("x-amz-acl", "public-read"),
        ("x-amz-storage-class", "STANDARD"),
        ("x-amz-checksum-mode", "ENABLED"),
        ("x-amz-copy-source", f"/{THINGS}/size-1"),
        ("x-amz-write-offset-bytes", "1"),
        ("if-none-match", "*"),
        ("if-match", "*"),
        ("cache-control", "no-cache"),
        ("content-encoding", "aws-chunked"),
        ("range", "bytes=0-0"),
        ("content-range", "bytes 0-0/1"),
        ("expect", "100-continue"),
        ("content-type", "twice"),
    )
    return replace(ask, headers=(*ask.headers, draw(st.sampled_from(headers))))


def _by_another(draw: st.DrawFn, ask: Ask) -> Ask:
    path = draw(st.sampled_from((ask.path, "/no-such-bucket/x", "/Odd_Bucket/x", f"/{OTHER}/put-0", f"/{THINGS}")))
    way = draw(st.sampled_from((Way.HEADER, Way.HEADER, Way.QUERY, Way.NONE)))
    return replace(ask, path=path, way=way, caller=draw(st.sampled_from(("reader", "other", "gone", "owner"))))


# --- comparing -------------------------------------------------------------------------------------------


def exchange(made: World, address: tuple[str, int], raws: Sequence[bytes], step: PutStep) -> list[bytes]:
    """Send PUTs one after the other; return the answers, masked, and what comes behind them."""
    found: list[bytes] = []
    made.sent += len(raws) if address == made.door_address else 0
    chance = random.Random(step.pieces)
    with ExitStack() as stack:
        line: Line | None = None
        for raw in raws:
            line = line or stack.enter_context(Line(address))
            if step.pieces:
                for piece in pieces_of(raw, chance):
                    line.send_and_wait_until_read(piece)
            else:
                line.send(raw)
            if step.is_short:
                line.end_sending()
            reply = line.reply(is_head=raw.startswith(b"HEAD "))
            found.append(masked(reply.masked()))
            if reply.is_last or step.is_short:
                line = None
        if line is not None:
            line.end_sending()
            found.append(masked(without_own(line.rest())))
    return found


def masked(answer: bytes) -> bytes:
    """Return an answer without the id of a version, the time of a copy, and the request to send the body."""
    return _OWN.sub(lambda found: (found[1] or found[2]) + b"-", answer.removeprefix(_GO_ON))


def left_behind(made: World) -> list[bytes]:
    """Return what is stored under the names that are put, without times."""
    reads = [made.raw(Ask(f"/{bucket}/{key.replace(' ', '%20')}")) for bucket, key in NAMES]
    sent = made.sent
    try:
        return [masked(without_own(answer)) for answer in made.agree(reads)]
    finally:
        made.sent = sent


def forget(made: World) -> None:
    """Remove what was put."""
    for bucket, key in NAMES:
        made.lake.remove(f"{bucket}/{key}")


def agree_on(made: World, step: PutStep) -> None:
    """Send one PUT several times to both gateways; answers, and what is left behind, must be equal."""
    raws = [made.raw(step.ask)] * TIMES
    forget(made)
    expected = exchange(made, made.plain_address, raws, step) + left_behind(made)
    forget(made)
    with Line(made.door_address) as line:
        line.ask(made.raw(Ask(f"/{OTHER}/mine", caller=step.ask.caller)))  # now the door may know whose signature it is
    given_ = exchange(made, made.door_address, raws, step) + left_behind(made)
    for number, (one, other) in enumerate(zip(expected, given_, strict=False)):
        if one != other:
            raise AssertionError(difference(raws[0], number, one, other))
    assert len(expected) == len(given_), (raws[0], expected, given_)


def compare_puts(made: World, count: int, *, shrink: bool = True) -> None:
    """Draw so many PUTs, and compare each."""

    @drawn(count, shrink=shrink)
    @given(put_steps())
    def one(step: PutStep) -> None:
        agree_on(made, step)

    one()
