"""Messages about multipart uploads; see `lakefs.wire.messages`."""

from __future__ import annotations

from lakefs.wire.base import NO_CONDITION, Condition, Done, Message, NameResults, ObjectAttributes, Request


class UploadStat(Message, frozen=True):
    """An unfinished multipart upload.  `details`: facts that the face that began it wants to have kept with it."""

    bucket: str
    key: str
    upload: bytes
    created_ns: int
    details: dict[str, str] = {}


class UploadCreate(Request, frozen=True):
    """Begin a multipart upload to a name; the answer has its id.  BucketNotFound, InvalidName, RequestTooLarge.

    The object will get these attributes; UploadComplete sets its ETag and checksums.  The name itself is not changed.
    """

    OP = 70
    REPLY = UploadStat
    bucket: str
    key: str
    attributes: ObjectAttributes
    details: dict[str, str] = {}


class PartStat(Message, frozen=True):
    """A part of an upload; `chunks` and `lengths` are its layout, if the request asked for layouts."""

    number: int
    size_bytes: int
    etag: bytes
    mtime_ns: int
    blob: bytes
    checksums: dict[str, bytes] = {}
    chunks: list[bytes] = []
    lengths: list[int] = []


class UploadPut(Request, frozen=True):
    """Bind a part number of an upload to a blob whose chunks the session holds; replaces a part with that number.

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
    """List unfinished uploads to keys with the prefix, rolled up at `delimiter` (any text, or ""), at most `limit`.

    The page begins after the upload `after_upload` of the key `after`; without `after_upload`, after all uploads of
    that key, which may be a rolled-up prefix: everything below it is skipped.
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
    """List parts of an upload with numbers above `after`, at most `limit`; `layouts`: with the blobs' chunks.

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
    """Bind the name to the concatenated parts and end the upload, in one step; parts not listed are dropped.

    `blob` is the blob of the parts' bytes in order; its chunks are in the store.  `numbers` and `etags` list the parts.
    The object's ETag is computed from the parts' ETags; `checksums` are stored as given.

    A repeated request for a completed upload gets the first answer again, as long as the name still has the node that
    it got then and the same parts are listed; session and blob may be empty then.  Else UploadNotFound.  InvalidPart,
    InvalidPartOrder, PartTooSmall, PreconditionFailed: nothing is changed, and the upload stays open.
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
    """End an upload and drop its parts; the object at the name stays.  UploadNotFound."""

    OP = 75
    REPLY = Done
    bucket: str
    key: str
    upload: bytes


class ObjectPart(Message, frozen=True):
    """A part of an object that a multipart upload made: `size_bytes` from `offset` on."""

    number: int
    offset: int
    size_bytes: int
    checksums: dict[str, bytes] = {}


class ObjectParts(Message, frozen=True):
    """A page of an object's parts by number.  `part_count` 0: no parts are known.  `next_after`: 0 on the last page."""

    part_count: int
    parts: list[ObjectPart]
    next_after: int = 0


class UploadedParts(Request, frozen=True):
    """List parts of an object that an upload made: those with numbers above `after`, at most `limit`.

    `upload` is the id in the object's stat.  The parts are known as long as the object exists.
    """

    OP = 76
    REPLY = ObjectParts
    upload: bytes
    after: int = 0
    limit: int = 1000
