"""ETags of imported objects: compared with the bytes while these are read.

An ETag of 32 hex digits is the MD5 of the content, unless the store encrypts with other keys than its own (SSE-KMS,
SSE-C).  One of the form `HEX-N` is the MD5 of the MD5s of N parts, and can be computed where the parts' length is
known.  Any other ETag says nothing about the content.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from cli.moving.s3_source import Body, Fetched, Found
from lakefs.errors import SourceChanged

_MD5: Final = re.compile(r"[0-9a-f]{32}")
_PARTS: Final = re.compile(r"[0-9a-f]{32}-([1-9][0-9]{0,4})")
_ETAG_MD5: Final = 1
_ETAG_MULTIPART: Final = 2
"""Values of `ObjectAttributes.etag_kind`."""


def part_count(etag: str) -> int:
    """Return the number of parts that an ETag speaks of; 0 if it speaks of none."""
    found = _PARTS.fullmatch(etag)
    return int(found.group(1)) if found else 0


def kept_etag(etag: str) -> tuple[int, bytes]:
    """Return kind and value under which a lake keeps an ETag; (0, b"") for one that it has no kind for."""
    if _MD5.fullmatch(etag):
        return _ETAG_MD5, bytes.fromhex(etag)
    return (_ETAG_MULTIPART, etag.encode()) if part_count(etag) else (0, b"")


def is_of_content(fetched: Fetched, etag: str) -> bool:
    """Return True if an ETag of that form is computed from the content by the store that sent it."""
    encryption = fetched.fields.get("ServerSideEncryption", "")
    has_other_keys = encryption.startswith("aws:kms") or fetched.fields.get("SSECustomerAlgorithm")
    return bool(_MD5.fullmatch(etag) or part_count(etag)) and not has_other_keys


class BrokenOff(Exception):
    """The bytes of an object stopped before their end."""


class CheckedBody:
    """The bytes of an object, hashed as they are read.  The last read raises SourceChanged if they are not the
    object's."""

    def __init__(self, body: Body, found: Found, part_bytes: int | None) -> None:
        """`part_bytes`: the length of each part but the last; the object's own, if it has no parts; None: the ETag
        says nothing."""
        self._body = body
        self._found = found
        self._part_bytes = part_bytes
        self._read_bytes = 0
        self._parts: list[bytes] = []
        self._hash = hashlib.md5(usedforsecurity=False)
        self._in_part = 0
        self._has_ended = False

    def read(self, length: int = -1, /) -> bytes:
        """Return `length` bytes, fewer only at the end.  SourceChanged, BrokenOff."""
        pieces: list[bytes] = []
        wanted = length if length >= 0 else self._found.size_bytes + 1
        while wanted:
            piece = self._piece(wanted)
            if not piece:
                break
            pieces.append(piece)
            wanted -= len(piece)
        return b"".join(pieces)

    def _piece(self, length: int) -> bytes:
        if self._has_ended:
            return b""
        try:
            piece = self._body.read(length)
        except Exception as error:  # those of botocore, urllib3, http.client and sockets
            raise BrokenOff(f"{self._found.key}: the answer broke off: {error}") from error
        self._note(piece)
        if not piece or self._read_bytes >= self._found.size_bytes:
            self._has_ended = True
            self._check()
        return piece

    def _note(self, piece: bytes) -> None:
        self._read_bytes += len(piece)
        view = memoryview(piece)
        while view and self._part_bytes:
            taken = view[: self._part_bytes - self._in_part]
            self._hash.update(taken)
            self._in_part += len(taken)
            view = view[len(taken) :]
            if self._in_part == self._part_bytes:
                self._end_part()

    def _end_part(self) -> None:
        self._parts.append(self._hash.digest())
        self._hash = hashlib.md5(usedforsecurity=False)
        self._in_part = 0

    def _check(self) -> None:
        found = self._found
        if self._read_bytes != found.size_bytes:
            raise SourceChanged(f"{found.key} has {self._read_bytes} bytes, and was listed with {found.size_bytes}")
        if self._part_bytes is None:
            return
        if self._in_part or not self._parts:
            self._end_part()
        count = part_count(found.etag)
        joined = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        etag = f"{joined}-{len(self._parts)}" if count else self._parts[0].hex()
        if etag != found.etag:
            raise SourceChanged(f"{found.key}: its bytes have the ETag {etag}, and it was listed with {found.etag}")
