"""The objects that requests are about: every size at which something changes, odd keys, attributes, versions."""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from tests.door.asks import Ask, Key, raw_of
from tests.door.line import Reply

KIB: Final = 1 << 10
SIZES: Final = (0, 1, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 1 << 20)
THINGS: Final = "things"
OPEN: Final = "open"
"""Strangers may read it."""
KEPT: Final = "kept"
"""It keeps versions."""
OTHER: Final = "other"
"""The only bucket of the key `other`."""
MOVING: Final = tuple(f"moving-{number}" for number in range(4))
"""Keys that tests change between requests."""
ODD_KEYS: Final = (
    "a b", "a+b", "a//b", "a/../b", "/a", "..", ".", "ü/é", "%41", "a%2Fb", "?", "#", "a;b=c&d", "~", "a\\b",
    "folder/", "folder/inside", "x" * 1024, "\u2028", "a:b@c", "'()*!$,",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Content of an object, and the headers that it was put with."""

    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        """The ETag with its quotes."""
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'


def content_of(size: int, seed: str = "") -> bytes:
    """Return content of a size, the same for the same seed."""
    return random.Random(f"{size} {seed}").randbytes(size)


def _crc32(content: bytes) -> str:
    return b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()


def _sha256(content: bytes) -> str:
    return b64encode(hashlib.sha256(content).digest()).decode()


_ATTRIBUTES: Final = {
    "cache-control": "max-age=3600, public",
    "content-disposition": 'attachment; filename="x y.bin"',
    "content-encoding": "gzip",
    "content-language": "de, en",
    "content-type": "text/plain; charset=utf-8",
    "expires": "Thu, 01 Dec 2033 16:00:00 GMT",
    "x-amz-meta-a": "value, with  spaces",
    "x-amz-meta-accents": "h\xe9",
}
OBJECTS: Final[Mapping[tuple[str, str], Stored]] = {
    **{(THINGS, f"size-{size}"): Stored(content_of(size)) for size in SIZES},
    **{(OPEN, f"size-{size}"): Stored(content_of(size, "open")) for size in (4 * KIB, 64 * KIB + 1)},
    **{(THINGS, key): Stored(key.encode() * 3) for key in ODD_KEYS},
    **{(THINGS, key): Stored(content_of(2000, key)) for key in MOVING},
    (THINGS, "attributes"): Stored(content_of(3000), _ATTRIBUTES),
    (THINGS, "tags"): Stored(content_of(3001), {"x-amz-tagging": "a=1&b=2"}),
    (THINGS, "crc32"): Stored(content_of(3002), {"x-amz-checksum-crc32": _crc32(content_of(3002))}),
    (THINGS, "sha256"): Stored(content_of(70_000), {"x-amz-checksum-sha256": _sha256(content_of(70_000))}),
    (OTHER, "mine"): Stored(content_of(3003)),
}
HOT: Final = (
    *((THINGS, f"size-{size}") for size in SIZES),
    (THINGS, "attributes"),
    (THINGS, "tags"),
    (THINGS, "crc32"),
    (THINGS, "sha256"),
    (THINGS, MOVING[0]),
    (OPEN, f"size-{4 * KIB}"),
)
"""Objects that most requests are about."""
VERSIONS: Final = ("first", "second", "third")
"""Versions of the key `versions` in KEPT; "marker" is the delete marker of its key `deleted`."""


def path_of(bucket: str, key: str) -> str:
    """Return the path of an object as S3 encodes it."""
    return f"/{bucket}/{quote(key.encode(), safe='/~')}"


Send = Callable[[bytes], Reply]


def put(send: Send, keys: Mapping[str, Key], path: str, stored: Stored, method: str = "PUT") -> Reply:
    """Put an object; it must succeed."""
    headers = (*stored.headers.items(), ("content-length", str(len(stored.content))))
    reply = send(raw_of(Ask(path, method, headers=headers, body=stored.content), keys))
    assert reply.status == 200, (path, reply)
    return reply


def store_all(send: Send, keys: Mapping[str, Key]) -> dict[str, str]:
    """Make the buckets and objects; return the ids of the versions by name."""
    for bucket in (THINGS, OPEN, KEPT, OTHER):
        put(send, keys, f"/{bucket}", Stored(b""))
    for (bucket, key), stored in OBJECTS.items():
        put(send, keys, path_of(bucket, key), stored)
    _put_in_parts(send, keys)
    versioning = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    headers = (("content-length", str(len(versioning))),)
    enabled = send(raw_of(Ask(f"/{KEPT}", "PUT", query=(("versioning", ""),), headers=headers, body=versioning), keys))
    assert enabled.status == 200, enabled
    found = {}
    for number, name in enumerate(VERSIONS):
        reply = put(send, keys, f"/{KEPT}/versions", Stored(content_of(1000 + number)))
        found[name] = reply.header("x-amz-version-id")
    put(send, keys, f"/{KEPT}/deleted", Stored(b"deleted"))
    deleted = send(raw_of(Ask(f"/{KEPT}/deleted", "DELETE"), keys))
    found["marker"] = deleted.header("x-amz-version-id")
    assert all(found.values()), found
    return found


def _put_in_parts(send: Send, keys: Mapping[str, Key]) -> None:
    """Store THINGS/parts as an upload of one part."""
    path, content = f"/{THINGS}/parts", content_of(5000)
    begun = send(raw_of(Ask(path, "POST", query=(("uploads", ""),), headers=(("content-length", "0"),)), keys))
    found = re.search(rb"<UploadId>([^<]*)</UploadId>", begun.body)
    assert found, begun
    upload = quote(found[1].decode(), safe="~")
    query = (("partNumber", "1"), ("uploadId", upload))
    part = send(
        raw_of(Ask(path, "PUT", query=query, headers=(("content-length", str(len(content))),), body=content), keys)
    )
    listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.header('etag')}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    headers = (("content-length", str(len(body))),)
    done = send(raw_of(Ask(path, "POST", query=(("uploadId", upload),), headers=headers, body=body), keys))
    assert done.status == 200, done
