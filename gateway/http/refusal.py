"""A request that the rules of HTTP forbid to serve.

Raised by the pure modules beside this one while a head or a body is read.  The connection answers with the status and
closes, because the begin of the next request is unknown.
"""

from __future__ import annotations


class HttpRefusal(Exception):
    """`status` of the answer, `code` in S3's vocabulary, and a sentence for the author of the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def bad_request(message: str) -> HttpRefusal:
    """Return a refusal with status 400: the bytes are not HTTP/1.1."""
    return HttpRefusal(400, "BadRequest", message)
