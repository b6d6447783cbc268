"""S3 requests over a socket of our own, signed here, so that every byte of them can be wrong.

`Signer` signs as S3 requires; a test changes what it likes before `send`.  Nothing here is taken from the gateway.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlsplit

from tests.e2e.s3_client import KEYS_ARE_FRESH_S, url_of
from tests.e2e.served import Served
from tests.served_devices import CYCLES, DEVICES

REGION: Final = "us-east-1"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_WAIT_S: Final = 30.0


@dataclass(frozen=True)
class Answer:
    """An answer.  `closed`: the server ended the connection after it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closed: bool

    @property
    def code(self) -> str:
        """The code of an S3 error; "" when it is none."""
        found = re.search(rb"<Code>([^<]*)</Code>", self.body)
        return found[1].decode() if found else ""

    def field(self, name: str) -> str:
        """Return the text of the first element of that name; "" when there is none."""
        found = re.search(rb"<%b>([^<]*)</%b>" % (name.encode(), name.encode()), self.body)
        return found[1].decode() if found else ""


@dataclass(frozen=True)
class Signer:
    """An access key, and how it signs."""

    access_key: str
    secret_key: str
    address: tuple[str, int]
    region: str = REGION
    service: str = "s3"
    offset_s: int = 0
    """Seconds by which the signer's clock is off."""

    @property
    def host(self) -> str:
        """The Host header."""
        return f"{self.address[0]}:{self.address[1]}"

    def key(self, date: str) -> bytes:
        """Return the signing key of a day."""
        key = b"AWS4" + self.secret_key.encode()
        for part in (date, self.region, self.service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        return key

    def stamp(self) -> str:
        """Return the time that is signed, as x-amz-date has it."""
        return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + self.offset_s))

    def scope(self, stamp: str) -> str:
        """Return day, region and service of a signature."""
        return f"{stamp[:8]}/{self.region}/{self.service}/aws4_request"

    def sign(self, stamp: str, canonical: str) -> str:
        """Return the signature of a canonical request."""
        digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{self.scope(stamp)}\n{digest}"
        return hmac.new(self.key(stamp[:8]), text.encode(), "sha256").hexdigest()

    def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        payload: str | None = None,
    ) -> Signed:
        """Make a request whose target is already encoded.  `payload` None: the body's SHA-256."""
        stamp = self.stamp()
        sent = {
            "host": self.host,
            "x-amz-date": stamp,
            "x-amz-content-sha256": hashlib.sha256(body).hexdigest() if payload is None else payload,
            **{name.lower(): value for name, value in (headers or {}).items()},
        }
        names = sorted(sent)
        path, _, query = target.partition("?")
        lines = "".join(f"{name}:{sent[name]}\n" for name in names)
        canonical = "\n".join(
            [method, path, canonical_query(query), lines, ";".join(names), sent["x-amz-content-sha256"]]
        )
        signature = self.sign(stamp, canonical)
        sent["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.access_key}/{self.scope(stamp)},"
            f"SignedHeaders={';'.join(names)},Signature={signature}"
        )
        if method in ("PUT", "POST") or body:
            sent.setdefault("content-length", str(len(body)))
        return Signed(self, method, target, sent, body, signature, stamp)

    def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        payload: str | None = None,
    ) -> Answer:
        """Send such a request on a connection of its own; return the answer."""
        return self.request(method, target, body, headers, payload=payload).send()

    def presigned(self, method: str, path: str, expires_s: int = 60, *, more: Mapping[str, str] | None = None) -> str:
        """Return the target of a request that is signed in its query, which also has the parameters `more`."""
        stamp = self.stamp()
        parameters = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self.access_key}/{self.scope(stamp)}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": str(expires_s),
            "X-Amz-SignedHeaders": "host",
            **(more or {}),
        }
        query = "&".join(f"{name}={quote(value, safe='~')}" for name, value in sorted(parameters.items()))
        canonical = "\n".join([method, path, query, f"host:{self.host}\n", "host", UNSIGNED])
        return f"{path}?{query}&X-Amz-Signature={self.sign(stamp, canonical)}"

    def send(self, raw: bytes, *, end: bool = False) -> Answer:
        """Send these bytes and read one answer; with `end` the sending side of the connection is closed first."""
        with socket.create_connection(self.address, timeout=_WAIT_S) as connection:
            _send(connection, raw)
            if end:
                connection.shutdown(socket.SHUT_WR)
            return _Received(connection).answer(head_only=raw.startswith(b"HEAD "))

    def send_all(self, raw: bytes) -> list[Answer]:
        """Send these bytes, and read answers until the server ends the connection."""
        answers: list[Answer] = []
        with socket.create_connection(self.address, timeout=_WAIT_S) as connection:
            _send(connection, raw)
            received = _Received(connection)
            while not answers or not answers[-1].closed:
                answers.append(received.answer())
        return answers


@dataclass(frozen=True)
class Signed:
    """A signed request that was not sent yet: a test can change any part of it."""

    signer: Signer
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    signature: str
    stamp: str
    extra: Sequence[bytes] = field(default=())
    """Lines after the headers, as they are."""

    def raw(self) -> bytes:
        """Return the request's bytes."""
        lines = [f"{self.method} {self.target} HTTP/1.1".encode("latin-1")]
        lines += [f"{name}: {value}".encode("latin-1") for name, value in self.headers.items()]
        return b"\r\n".join([*lines, *self.extra, b"", b""]) + self.body

    def send(self, *, end: bool = False) -> Answer:
        """Send it; return the answer."""
        return self.signer.send(self.raw(), end=end)


def canonical_query(query: str) -> str:
    """Return a query as it is signed; its names and values are encoded already."""
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    return "&".join(f"{name}={value}" for name, _, value in sorted(pairs))


def signer_of(served: Served, *flags: str) -> Signer:
    """Make a new access key of an engine, with these flags of `lake key create`."""
    key = json.loads(served.good("key", "create", *flags, "--json").text)
    time.sleep(KEYS_ARE_FRESH_S)
    parts = urlsplit(url_of(served))
    assert parts.hostname is not None
    assert parts.port is not None
    return Signer(key["access_key"], key["secret_key"], (parts.hostname, parts.port))


def encoded(key: str) -> str:
    """Return a key as a path has it."""
    return quote(key.encode(), safe="/~")


def nothing_else_is_left(served: Served, kept: Mapping[str, bytes]) -> None:
    """Check that after gc the store has only these objects of `bucket`, each of one chunk of its own."""
    assert sorted(served.good("ls", "-r", "bucket").text.splitlines()) == sorted(kept)
    for key, content in kept.items():
        assert served.good("cat", f"bucket/{key}").out == content
    for _ in range(CYCLES):
        served.good("gc")
    report = json.loads(served.good("fsck", "--json").text)
    checked = report["checked"]
    assert report["damage"] == 0, report
    chunks = checked["named_chunks" if DEVICES else "chunks"]
    assert (chunks, checked["uploads"], checked["parts"]) == (len(kept), 0, 0), checked
    if DEVICES:
        assert checked["shards"] == sum(3 if len(content) <= 64 << 10 else 6 for content in kept.values()), checked
    clients = json.loads(served.good("status", "--json").text)["clients"]
    assert (clients["sessions"], clients["leases"]) == (0, 0), clients


class _Received:
    """The server's bytes, read answer by answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = b""

    def answer(self, *, head_only: bool = False) -> Answer:
        """Read the next answer, and whether the connection ended after it."""
        while b"\r\n\r\n" not in self._left:
            self._more()
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = 0 if head_only else int(headers.get("content-length", "0"))
        while len(self._left) < length:
            self._more()
        body, self._left = self._left[:length], self._left[length:]
        closed = headers.get("connection") == "close"
        if closed:
            assert not self._left + self._connection.recv(1), "more came behind the last answer"
        return Answer(int(status.split()[1]), headers, body, closed)

    def _more(self) -> None:
        piece = self._connection.recv(1 << 16)
        assert piece, f"the connection ended early: {self._left!r}"
        self._left += piece


def _send(connection: socket.socket, raw: bytes) -> None:
    """Send; ignore an error when the server has answered already and does not read on."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(raw)
