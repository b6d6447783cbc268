"""Answers to cross-origin requests: rules that another face of the store has set end no line of an answer."""

from __future__ import annotations

from gateway.s3.protocol.cors import answer_lines, preflight_lines
from lakefs.wire.messages import CorsRule


def test_no_rule_adds_a_line_to_an_answer() -> None:
    rule = CorsRule(["*"], ["GET", "PUT\r\nSet-Cookie: a=b"], ["*"], ["etag\r\n\r\nbody", "\u0141"])
    asked = {b"origin": b"http://a", b"access-control-request-method": b"GET"}
    for lines in (answer_lines([rule], "GET", b"http://a"), preflight_lines([rule], asked)):
        assert b"Access-Control-Expose-Headers" in dict(lines)
        assert not any(set(value) & set(b"\r\n") for _, value in lines)
