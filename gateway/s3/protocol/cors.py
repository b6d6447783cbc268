"""Cross-origin requests (CORS): which rule of a bucket matches a request, and the header lines of its answer.  Pure.

Source: the Fetch standard, "CORS protocol", and "Using cross-origin resource sharing" of the S3 manual.  The first rule
that matches decides.  A preflight matches by origin, method and each header that it names; any other request by origin
and method.  An origin or header of a rule may have one `*`, which stands for any text; headers match in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from gateway.s3.protocol.attributes import header_text
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.xml import element
from lakefs.wire.messages import CorsRule

ORIGIN: Final = b"origin"
_METHOD: Final = b"access-control-request-method"
_HEADERS: Final = b"access-control-request-headers"
RULES_MAX: Final = 100
"""S3's limit for the rules of one bucket."""
METHODS: Final = frozenset(("GET", "PUT", "HEAD", "POST", "DELETE"))
_VARY: Final = (b"Vary", b"Origin, Access-Control-Request-Headers, Access-Control-Request-Method")
Lines = list[tuple[bytes, bytes]]


class _Preflight(NamedTuple):
    """The request that a browser wants to send: its origin, method and headers, these in lower case."""

    origin: str
    method: str
    headers: tuple[str, ...]


def preflight_lines(rules: Sequence[CorsRule], headers: Mapping[bytes, bytes]) -> Lines:
    """Return the lines that allow the request which a preflight asks for.  S3Error AccessForbidden if no rule does."""
    asked = _asked(headers)
    if not rules:
        raise _forbidden(asked.method, "CORS is not enabled for this bucket.")
    for rule in rules:
        allowed = _allowed_origin(rule, asked.origin)
        if allowed and asked.method in rule.methods and all(_matches_header(rule, name) for name in asked.headers):
            return _lines(rule, allowed, asked)
    raise _forbidden(
        asked.method,
        "This CORS request is not allowed. This is usually because the evalution of Origin, request method / "
        "Access-Control-Request-Method or Access-Control-Request-Headers are not whitelisted by the resource's CORS "
        "spec.",
    )


def answer_lines(rules: Iterable[CorsRule], method: str, origin: bytes) -> Lines:
    """Return the lines of an answer to a request with this origin; none if no rule allows its page to read it."""
    text = origin.decode("latin-1")
    for rule in rules:
        allowed = _allowed_origin(rule, text)
        if allowed and method in rule.methods:
            return _lines(rule, allowed, _Preflight(text, method, ()))
    return []


def cors_xml(rules: Iterable[CorsRule]) -> str:
    """Return rules as GetBucketCors shows them."""
    return "".join(f"<CORSRule>{_rule_xml(rule)}</CORSRule>" for rule in rules)


def _rule_xml(rule: CorsRule) -> str:
    fields = [element("ID", rule.rule_id)] if rule.rule_id else []
    for name, texts in (
        ("AllowedMethod", rule.methods),
        ("AllowedOrigin", rule.origins),
        ("AllowedHeader", rule.headers),
        ("ExposeHeader", rule.exposed),
    ):
        fields += [element(name, text) for text in texts]
    if rule.max_age_s is not None:
        fields.append(element("MaxAgeSeconds", rule.max_age_s))
    return "".join(fields)


def _asked(headers: Mapping[bytes, bytes]) -> _Preflight:
    """Read a preflight.  S3Error BadRequest if it does not say what it asks for."""
    origin, method = headers.get(ORIGIN, b"").decode("latin-1"), headers.get(_METHOD, b"").decode("latin-1")
    if not origin:
        raise S3Error(400, "BadRequest", "Insufficient information. Origin request header needed.")
    if method not in METHODS:
        raise S3Error(400, "BadRequest", f"Invalid Access-Control-Request-Method: {method[:64] or 'null'}")
    listed = headers.get(_HEADERS, b"").decode("latin-1").lower().split(",")
    return _Preflight(origin, method, tuple(name.strip() for name in listed if name.strip()))


def _lines(rule: CorsRule, allowed: str, asked: _Preflight) -> Lines:
    lines = [(b"Access-Control-Allow-Origin", allowed.encode("latin-1"))]
    if allowed != "*":
        lines.append((b"Access-Control-Allow-Credentials", b"true"))
    lines.append((b"Access-Control-Allow-Methods", header_text(", ".join(rule.methods))))
    if asked.headers:
        lines.append((b"Access-Control-Allow-Headers", ", ".join(asked.headers).encode("latin-1")))
    if rule.exposed:
        lines.append((b"Access-Control-Expose-Headers", header_text(", ".join(rule.exposed))))
    if rule.max_age_s is not None:
        lines.append((b"Access-Control-Max-Age", b"%d" % rule.max_age_s))
    return [*lines, _VARY]


def _allowed_origin(rule: CorsRule, origin: str) -> str:
    """Return the origin that an answer names, `*` for a rule that allows every one; "" if the rule allows it not."""
    pattern = next((pattern for pattern in rule.origins if _matches(pattern, origin)), "")
    return "*" if pattern == "*" else origin if pattern else ""


def _matches_header(rule: CorsRule, name: str) -> bool:
    return any(_matches(pattern.lower(), name) for pattern in rule.headers)


def _matches(pattern: str, text: str) -> bool:
    before, star, after = pattern.partition("*")
    if not star:
        return text == pattern
    return len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)


def _forbidden(method: str, message: str) -> S3Error:
    details = {"Method": method, "ResourceType": "OBJECT"}
    return S3Error(403, "AccessForbidden", f"CORSResponse: {message}", details=details)
