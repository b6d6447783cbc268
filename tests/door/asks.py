"""Requests for objects as values, and their bytes: signed by hand, so that every part can be spelled oddly or be wrong.

An `Ask` says how a request looks; `raw_of` signs it with the present time.  So an ask can be drawn, shrunk and sent
again later.  Nothing here is taken from the gateway.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from hypothesis.vendor.pretty import RepresentationPrinter

DOMAIN: Final = "s3.lake.test"
"""The gateways know it as a suffix of hosts; both get the same Host, so they get the same bytes."""
REGION: Final = "us-east-1"
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
VERSION: Final = "$version"
"""In a query's value: stands for an id that the store gave out, `$version:NAME`."""
_PRINTED: Final = 4_000
"""Characters of a request that a report shows."""
_SKEW_S: Final = 20 * 60
_DAY_S: Final = 86_400


@dataclass(frozen=True)
class Key:
    """An access key and its secret."""

    access_key: str
    secret_key: str


class Way(enum.Enum):
    """The place of the signature."""

    HEADER = "the Authorization header"
    QUERY = "the query"
    NONE = "none"


class Flaw(enum.Enum):
    """One thing that is wrong, or at least odd, with a signature."""

    BIT = "one bit of the signature"
    UPPER = "the signature in upper case"
    SHORT = "a signature that is a digit short"
    SECRET = "the secret of another key"
    UNKNOWN = "a key that does not exist"
    DAY = "the scope of another day"
    AHEAD = "a clock that is ahead"
    BEHIND = "a clock that is behind"
    EXPIRED = "a time that has expired"
    REGION = "another region"
    SERVICE = "another service"
    METHOD = "signed for another method"
    PATH = "signed for another path"
    QUERY = "signed for another query"
    HOST = "signed for another host"
    HASH = "signed for another hash of the body"
    NO_HASH = "no hash of the body"
    ODD_HASH = "a hash of the body that is none"
    STREAMING = "a body that is said to be signed in chunks"
    NO_DATE = "no date"
    DATE = "a Date in the place of x-amz-date"
    ODD_DATE = "a date that is none"
    UNSIGNED_HEADER = "an x-amz header that is not signed"
    MISSING_HEADER = "a signed header that was not sent"
    UNSORTED = "signed headers out of order"
    TWICE = "a signed header that is named twice"
    NO_HOST = "the host is not signed"
    UPPER_NAMES = "names of signed headers in upper case"
    SPACES = "spaces around the commas"
    NO_SPACES = "no space behind the commas"
    TABS = "tabs behind the commas"
    ORDER = "Signature before SignedHeaders"
    TOKEN = "a session token"
    BOTH = "a signature in the query as well"
    SCHEME = "another scheme"


HARMLESS: Final = (Flaw.SPACES, Flaw.NO_SPACES, Flaw.TABS, Flaw.NO_HASH, Flaw.DATE)
"""Oddities with which a request is still good."""


@dataclass(frozen=True)
class Spelling:
    """The form of the header lines."""

    case: str = "lower"
    """lower, upper, title, or odd."""
    colon: str = ": "
    behind: str = ""
    """White space behind each value."""
    turn: int = 0
    """The lines are rotated by so many."""

    def name(self, name: str) -> str:
        """Spell a name."""
        match self.case:
            case "upper":
                return name.upper()
            case "title":
                return name.title()
            case "odd":
                return "".join(c.upper() if at % 2 else c for at, c in enumerate(name))
        return name

    def lines(self, headers: list[tuple[str, str]]) -> list[str]:
        """Return the header lines without their ends."""
        turn = self.turn % len(headers) if headers else 0
        turned = headers[turn:] + headers[:turn]
        return [f"{self.name(name)}{self.colon}{value}{self.behind}" for name, value in turned]


@dataclass(frozen=True)
class Ask:
    """A request for an object.  `path` and `query` are encoded as they are sent; `headers` have lower-case names."""

    path: str
    method: str = "GET"
    host: str = DOMAIN
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    way: Way = Way.HEADER
    caller: str = "owner"
    flaw: Flaw | None = None
    signed: tuple[str, ...] = ()
    """Names of `headers` that are signed; host and x-amz-* are in any case."""
    signs_canonical: bool = False
    """True if the path is signed as S3 encodes it, not as sent."""
    version: str = "HTTP/1.1"
    spelling: Spelling = field(default_factory=Spelling)
    more: tuple[bytes, ...] = ()
    """Lines behind the headers, as they are."""
    body: bytes = b""
    hashed: str = ""
    """x-amz-content-sha256, as signed; "": the SHA-256 of the body."""
    age_s: float = 0.0
    """Seconds since it was signed."""
    expires_s: int = 3600
    """Time for which a presigned request holds."""

    def _repr_pretty_(self, printer: RepresentationPrinter, _: bool) -> None:
        """Print no body or header whole: Hypothesis warns of long examples, and warnings are errors."""
        whole = repr(self)
        printer.text(whole if len(whole) <= _PRINTED else f"{whole[:_PRINTED]}... ({len(whole)} characters)")

    @property
    def target(self) -> str:
        """Path and query without a signature."""
        return self.path + ("?" + "&".join(map("=".join, self.query)) if self.query else "")


def raw_of(ask: Ask, keys: Mapping[str, Key], versions: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a request, signed now."""
    query = [(name, _resolved(value, versions or {})) for name, value in ask.query]
    headers = [("host", ask.host), *ask.headers]
    match ask.way:
        case Way.HEADER:
            headers = _signed_headers(ask, query, headers, keys)
            if ask.flaw is Flaw.BOTH:
                query = _signed_query(ask, query, headers, keys)
        case Way.QUERY:
            query = _signed_query(ask, query, headers, keys)
    target = ask.path + ("?" + "&".join(f"{name}={value}" for name, value in query) if query else "")
    lines = [f"{ask.method} {target} {ask.version}", *ask.spelling.lines(headers)]
    return b"\r\n".join([*(line.encode("latin-1") for line in lines), *ask.more, b"", b""]) + ask.body


def _resolved(value: str, versions: Mapping[str, str]) -> str:
    return versions[value.partition(":")[2]] if value.startswith(VERSION) else value


# --- signatures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scope:
    """The time, place and key that a signature is made for."""

    key: Key
    stamp: str
    day: str
    region: str
    service: str

    @property
    def date(self) -> str:
        """The time as a Date header has it."""
        return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.strptime(self.stamp, "%Y%m%dT%H%M%SZ"))

    @property
    def text(self) -> str:
        return f"{self.day}/{self.region}/{self.service}/aws4_request"

    def signature(self, canonical: str) -> str:
        key = b"AWS4" + self.key.secret_key.encode()
        for part in self.text.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
        return hmac.digest(key, f"AWS4-HMAC-SHA256\n{self.stamp}\n{self.text}\n{digest}".encode(), "sha256").hex()


def _scope(ask: Ask, keys: Mapping[str, Key]) -> _Scope:
    key = keys[ask.caller]
    flaw, now_s = ask.flaw, time.time() - ask.age_s
    if flaw is Flaw.SECRET:
        key = Key(key.access_key, key.secret_key[::-1])
    elif flaw is Flaw.UNKNOWN:
        key = Key("A" * 20, key.secret_key)
    if flaw is Flaw.AHEAD:
        now_s += _SKEW_S
    elif flaw in (Flaw.BEHIND, Flaw.EXPIRED):
        now_s -= _SKEW_S
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    day = time.strftime("%Y%m%d", time.gmtime(now_s - _DAY_S)) if flaw is Flaw.DAY else stamp[:8]
    if flaw is Flaw.ODD_DATE:
        stamp = stamp.replace("T", " ")
    return _Scope(
        key, stamp, day, "eu-west-9" if flaw is Flaw.REGION else REGION, "s4" if flaw is Flaw.SERVICE else "s3"
    )


def _spoilt(signature: str, flaw: Flaw | None) -> str:
    match flaw:
        case Flaw.BIT:
            return f"{int(signature, 16) ^ 1 << 77:064x}"
        case Flaw.UPPER:
            return signature.upper()
        case Flaw.SHORT:
            return signature[:-1]
    return signature


def _canonical(ask: Ask, query: list[tuple[str, str]], headers: dict[str, str], names: list[str], hashed: str) -> str:
    flaw = ask.flaw
    path = quote(_unquoted(ask.path), safe="/~") if ask.signs_canonical else ask.path
    pairs = "&".join(f"{name}={value}" for name, value in sorted(query))
    lines = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names)
    if flaw is Flaw.HOST:
        lines = lines.replace(f"host:{ask.host}\n", "host:elsewhere\n")
    return "\n".join(
        [
            "PUT" if flaw is Flaw.METHOD else ask.method,
            path + "x" if flaw is Flaw.PATH else path,
            pairs + "x=" if flaw is Flaw.QUERY else pairs,
            lines,
            ";".join(names),
            hashlib.sha256(b"x").hexdigest() if flaw is Flaw.HASH else hashed,
        ]
    )


def _unquoted(path: str) -> bytes:
    raw = path.encode("latin-1")
    pieces = raw.split(b"%")
    found = [pieces[0]]
    for piece in pieces[1:]:
        try:
            found.append(bytes([int(piece[:2], 16)]) + piece[2:])
        except ValueError:  # a % that begins no escape
            found.append(b"%" + piece)
    return b"".join(found)


def _names(ask: Ask, headers: dict[str, str]) -> list[str]:
    """Return the names that are signed, in their order."""
    names = sorted({"host", *(name for name in headers if name.startswith("x-amz-")), *ask.signed} & headers.keys())
    match ask.flaw:
        case Flaw.UNSIGNED_HEADER:
            names = [name for name in names if name != "x-amz-user-agent"]
        case Flaw.MISSING_HEADER:
            names = sorted([*names, "if-match"])
        case Flaw.UNSORTED:
            names.reverse()
        case Flaw.TWICE:
            names.insert(0, names[0])
        case Flaw.NO_HOST:
            names.remove("host")
    return names


def _signed_headers(
    ask: Ask, query: list[tuple[str, str]], headers: list[tuple[str, str]], keys: Mapping[str, Key]
) -> list[tuple[str, str]]:
    """Return the headers with those of a signature."""
    flaw, scope = ask.flaw, _scope(ask, keys)
    hashed = {Flaw.ODD_HASH: "abc", Flaw.STREAMING: "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}.get(
        flaw or Flaw.BIT, ask.hashed or hashlib.sha256(ask.body).hexdigest()
    )
    sent = [*headers]
    if flaw is Flaw.DATE:
        sent.append(("date", scope.date))
    elif flaw is not Flaw.NO_DATE:
        sent.append(("x-amz-date", scope.stamp))
    if flaw is not Flaw.NO_HASH:
        sent.append(("x-amz-content-sha256", hashed))
    if flaw is Flaw.UNSIGNED_HEADER:
        sent.append(("x-amz-user-agent", "lake-test"))
    if flaw is Flaw.TOKEN:
        sent.append(("x-amz-security-token", "abc"))
    values: dict[str, str] = {}
    for name, value in sent:
        values[name] = f"{values[name]},{value}" if name in values else value
    names = _names(ask, values)
    signature = _spoilt(scope.signature(_canonical(ask, query, values, names, hashed)), flaw)
    signed = ";".join(names)
    return [*sent, ("authorization", _authorization(flaw, scope, signed, signature))]


def _authorization(flaw: Flaw | None, scope: _Scope, signed: str, signature: str) -> str:
    if flaw is Flaw.UPPER_NAMES:
        signed = signed.upper()
    scheme = "AWS4-HMAC-SHA512" if flaw is Flaw.SCHEME else "AWS4-HMAC-SHA256"
    comma = {Flaw.SPACES: "  ,  ", Flaw.NO_SPACES: ",", Flaw.TABS: ",\t"}.get(flaw or Flaw.BIT, ", ")
    parts = [f"Credential={scope.key.access_key}/{scope.text}", f"SignedHeaders={signed}", f"Signature={signature}"]
    if flaw is Flaw.ORDER:
        parts[1], parts[2] = parts[2], parts[1]
    return f"{scheme} {comma.join(parts)}"


def _signed_query(
    ask: Ask, query: list[tuple[str, str]], headers: list[tuple[str, str]], keys: Mapping[str, Key]
) -> list[tuple[str, str]]:
    """Return the query of a presigned request."""
    flaw, scope = ask.flaw, _scope(ask, keys)
    values = dict(headers)
    names = [name for name in _names(ask, values) if name == "host" or name in ask.signed]
    added = {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA512" if flaw is Flaw.SCHEME else "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{scope.key.access_key}/{scope.text}",
        "X-Amz-Date": scope.stamp,
        "X-Amz-Expires": "60" if flaw is Flaw.EXPIRED else str(ask.expires_s),
        "X-Amz-SignedHeaders": ";".join(names),
    }
    if flaw is Flaw.NO_DATE:
        del added["X-Amz-Date"]
    if flaw is Flaw.TOKEN:
        added["X-Amz-Security-Token"] = "abc"
    whole = [*query, *((name, quote(value, safe="~")) for name, value in added.items())]
    signature = _spoilt(scope.signature(_canonical(ask, whole, values, names, UNSIGNED)), flaw)
    return [*whole, ("X-Amz-Signature", signature)]
