"""Messages about multipart uploads; see `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request
from lakefs.wire.object_messages import NO_CONDITION, Condition, NameResults, ObjectAttributes


class UploadStat(Message, frozen=True):
    """A multipart upload that is not finished.  `details`: what the face that began it wants to remember of it."""

    bucket: str
    key: str
    upload: bytes
    created_ns: int
    details: dict[str, str] = {}


class UploadCreate(Request, frozen=True):
    """Begin a multipart upload to a name; the answer has its id.  BucketNotFound, InvalidName, RequestTooLarge.

    The object gets these attributes; ETag and checksums come with UploadComplete.  Nothing is changed at the name.
    """

    OP = 70
    REPLY = UploadStat
    bucket: str
    key: str
    attributes: ObjectAttributes
    details: dict[str, str] = {}


class PartStat(Message, frozen=True):
    """A part of an upload; `chunks` and `lengths` are its layout where that was asked for."""

    number: int
    size_bytes: int
    etag: bytes
    mtime_ns: int
    blob: bytes
    checksums: dict[str, bytes] = {}
    chunks: list[bytes] = []
    lengths: list[int] = []


class UploadPut(Request, frozen=True):
    """Make a blob whose chunks the session holds a part of an upload, in place of the one that had its number.

    `etag` has 16 bytes: the MD5 of the part.  UploadNotFound, InvalidPart, ChunkNotFound, SessionLost.
    """

    OP = 71
    REPLY = PartStat
    session: bytes
    bucket: str
    key: str
    upload: bytes
    number: int
    blob: bytes
    etag: bytes
    checksums: dict[str, bytes] = {}
    end_session: bool = False


class UploadEntry(Message, frozen=True):
    """One upload of a page; `is_prefix` entries are rolled up at the delimiter and have no other field set."""

    key: str
    is_prefix: bool = False
    upload: bytes = b""
    created_ns: int = 0
    details: dict[str, str] = {}


class Uploads(Message, frozen=True):
    """A page in byte order of (key, upload id).  `next_after` is empty on the last page."""

    entries: list[UploadEntry]
    next_after: str = ""
    next_upload: bytes = b""


class UploadList(Request, frozen=True):
    """Unfinished uploads to keys with the prefix, rolled up at `delimiter` (any text, or ""), at most `limit`.

    Behind the upload `after_upload` of the key `after`, or without it behind all of that key, which may be a
    rolled-up prefix: everything below it is skipped.
    """

    OP = 72
    REPLY = Uploads
    bucket: str
    prefix: str = ""
    after: str = ""
    after_upload: bytes = b""
    delimiter: str = ""
    limit: int = 1000


class Parts(Message, frozen=True):
    """A page of an upload's parts by number.  `next_after` is 0 on the last page."""

    upload: UploadStat
    parts: list[PartStat]
    next_after: int = 0


class UploadParts(Request, frozen=True):
    """Parts of an upload with numbers above `after`, at most `limit`; with `layouts` what their blobs consist of.

    A page with layouts ends before it has more than 4,096 chunks.  UploadNotFound.
    """

    OP = 73
    REPLY = Parts
    bucket: str
    key: str
    upload: bytes
    after: int = 0
    limit: int = 1000
    layouts: bool = False


class UploadComplete(Request, frozen=True):
    """Bind the name to the whole of the listed parts and end the upload, in one step; parts not listed are dropped.

    `blob` is the blob of the parts' bytes one behind the other, its chunks in the store.  `numbers` and `etags` say
    which parts are meant.  The whole's ETag is made from theirs; `checksums` are stored as given.

    An upload that is over is answered as when it was completed, while the name has the node that it got then and the
    same parts are listed; session and blob may be empty then.  Else UploadNotFound.  InvalidPart, InvalidPartOrder,
    PartTooSmall, PreconditionFailed: nothing is changed, the upload goes on.
    """

    OP = 74
    REPLY = NameResults
    session: bytes
    bucket: str
    key: str
    upload: bytes
    blob: bytes
    numbers: list[int]
    etags: list[bytes]
    checksums: dict[str, bytes] = {}
    condition: Condition = NO_CONDITION
    end_session: bool = False


class UploadAbort(Request, frozen=True):
    """End an upload and drop its parts; what has the name stays.  UploadNotFound."""

    OP = 75
    REPLY = Done
    bucket: str
    key: str
    upload: bytes


class ObjectPart(Message, frozen=True):
    """A part of an object that came from a multipart upload: `size_bytes` from `offset` on."""

    number: int
    offset: int
    size_bytes: int
    checksums: dict[str, bytes] = {}


class ObjectParts(Message, frozen=True):
    """A page of an object's parts by number.  `part_count` 0: none are known.  `next_after` is 0 on the last page."""

    part_count: int
    parts: list[ObjectPart]
    next_after: int = 0


class UploadedParts(Request, frozen=True):
    """The parts, with numbers above `after` and at most `limit`, of the object that came from an upload.

    `upload` is the object's, from its stat.  They are known while the object is there.
    """

    OP = 76
    REPLY = ObjectParts
    upload: bytes
    after: int = 0
    limit: int = 1000
