"""A request that HTTP itself forbids us to serve.

Raised by the pure modules beside this one while a head or a body is read.  The connection answers with the status and
closes, because nobody can tell where the next request begins.
"""

from __future__ import annotations


class HttpRefusal(Exception):
    """`status` of the answer, `code` in S3's vocabulary, and a sentence for whoever wrote the client."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def bad_request(message: str) -> HttpRefusal:
    """400: the bytes are not HTTP/1.1 as we read it."""
    return HttpRefusal(400, "BadRequest", message)
