"""A writer's hand on the S3 face: puts, uploads in parts, copies, deletes, deletes of many, on one connection.

An error that leaves it open whether the request was carried out (a lost connection, a 5xx) is raised as
EngineUnreachable.  A refusal for which only the server can be blamed fails the writer.
"""

from __future__ import annotations

import http.client
import re
from typing import Final

from lakefs.errors import EngineUnreachable
from tests.e2e.s3_raw import Signer, encoded

PARTS: Final = 3
_WAIT_S: Final = 60.0
_UPLOAD: Final = re.compile(rb"<Key>([^<]*)</Key><UploadId>([^<]*)</UploadId>")


class S3Hand:
    """Names are `bucket/key`, as everywhere."""

    actions = ("put", "put", "put", "swap", "parts", "parts", "batch", "remove", "copy", "clear")

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._connection = http.client.HTTPConnection(*signer.address, timeout=_WAIT_S)
        self._etag = ""
        self.version = ""
        """The object's version in the last answer."""

    def do(self, action: str, source: str, target: str, contents: dict[str, bytes]) -> None:
        """See `tests.crash.writer.Hand`."""
        if action == "batch":
            for name, content in contents.items():
                self.ask("PUT", _path(name), content)
        elif action == "remove":
            self.ask("DELETE", _path(source))
        elif action == "copy":
            self.ask("PUT", _path(target), headers={"x-amz-copy-source": _path(source)})
        elif action == "parts":
            self.put_in_parts(target, contents[target])
        elif action == "put":
            self.ask("PUT", _path(target), contents[target])
        elif action == "swap":
            self.ask("PUT", _path(target), contents[target], self._as_it_is(target))
        else:
            self.drop_uploads(target)
            self.ask("PUT", _path(target), contents[target])

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def get(self, name: str) -> bytes | None:
        """Return the bytes of an object; None when there is none."""
        status, body = self._send("GET", _path(name))
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        return self._good(status, body)

    def put_in_parts(self, name: str, content: bytes) -> None:
        """Begin, fill and complete one upload."""
        begun = self.ask("POST", f"{_path(name)}?uploads=")
        found = re.search(rb"<UploadId>([^<]*)</UploadId>", begun)
        assert found, begun
        upload = found[1].decode()
        size = max(64 * 1024, -(-len(content) // PARTS))
        pieces = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
        listed = ""
        for number, piece in enumerate(pieces, 1):
            etag = self._part(f"{_path(name)}?partNumber={number}&uploadId={upload}", piece)
            listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        self.ask("POST", f"{_path(name)}?uploadId={upload}", body)

    def drop_uploads(self, name: str) -> None:
        """Abort what earlier lives of this writer began and never ended."""
        bucket = name.partition("/")[0]
        writer = name.partition("/")[2].partition("/")[0]
        for key, upload in _UPLOAD.findall(self.ask("GET", f"/{bucket}?prefix={writer}%2F&uploads=")):
            self.ask("DELETE", f"{_path(f'{bucket}/{key.decode()}')}?uploadId={upload.decode()}")

    def ask(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        """Send a signed request; return the answer's body.  Raises EngineUnreachable when the outcome is not known."""
        return self._good(*self._send(method, target, body, headers))

    def _as_it_is(self, name: str) -> dict[str, str]:
        """Return the condition that nobody has changed the name since."""
        status, body = self._send("HEAD", _path(name))
        if status == http.HTTPStatus.NOT_FOUND:
            return {"if-none-match": "*"}
        self._good(status, body)
        return {"if-match": self._etag}

    def _part(self, target: str, body: bytes) -> str:
        self._good(*self._send("PUT", target, body))
        return self._etag

    def _good(self, status: int, body: bytes) -> bytes:
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise EngineUnreachable(f"the gateway answered {status}: {body!r}")
        assert status < http.HTTPStatus.MULTIPLE_CHOICES, (status, body)
        if b"<Error>" in body[:300]:
            raise EngineUnreachable(f"the gateway gave up behind 200: {body!r}")
        return body

    def _send(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        signed = self._signer.request(method, target, body, headers)
        try:
            self._connection.request(method, target, body, signed.headers)
            answer = self._connection.getresponse()
            self._etag = answer.headers.get("ETag", "")
            self.version = answer.headers.get("x-amz-version-id", "")
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise EngineUnreachable(f"{method} {target}: {error!r}") from error


def _path(name: str) -> str:
    return f"/{encoded(name)}"
