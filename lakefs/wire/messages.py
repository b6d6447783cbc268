"""The messages of the native protocol: the requests that a client sends to an engine, and the answers.

`docs/protocol.md` is normative; this module is the same list as types.  Messages are msgpack arrays (msgspec,
`array_like`): fields may be appended with defaults, never moved.  Raw payload travels in a frame's body, never
in a message.  The embedded engine takes the same messages without frames.

Most kinds of messages have modules of their own; this module exports them all.

Decoding checks shape and types only; the server of a request checks sizes, ranges and ids.
"""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import *
from lakefs.wire.bind_messages import *
from lakefs.wire.bucket_messages import *
from lakefs.wire.coordinator_messages import *
from lakefs.wire.fabric_messages import *
from lakefs.wire.grants import *
from lakefs.wire.keyed_messages import *
from lakefs.wire.media import *
from lakefs.wire.names_messages import *
from lakefs.wire.node_messages import *
from lakefs.wire.replica_messages import *
from lakefs.wire.session_messages import *
from lakefs.wire.shard_messages import *
from lakefs.wire.turn_messages import *
from lakefs.wire.upload_messages import *

# --- names -------------------------------------------------------------------------------------------


class Commit(Request, frozen=True):
    """Bind names to blobs whose chunks the session holds.  Each name is atomic.

    Durable when answered; with `durable` false only visible to all, and synced within a second (see `Sync`).
    `folders`: each result that succeeded tells what became of the name's folder.
    """

    OP = 20
    REPLY = NameResults
    session: bytes
    changes: list[NameChange]
    end_session: bool = False
    durable: bool = True
    folders: bool = False


class PutObjects(Request, frozen=True):
    """Store small objects and bind their names in one request; payloads in the body, each at most 4 MiB.

    `changes[i].blob` is empty: the engine computes it.  Chunk and name are one journal group.  `durable` and `folders`
    as in Commit.
    With `stamps` each result that succeeded has the set that OpenObjects of that name would have right after.
    """

    OP = 21
    REPLY = NameResults
    lengths: list[int]
    changes: list[NameChange]
    durable: bool = True
    stamps: bool = False
    folders: bool = False


class StatNames(Request, frozen=True):
    """Look names up: (bucket, key) pairs.  A key ending in `/`, or empty, asks for a folder.

    With `durable` false the answer may include changes that are visible and not durable yet.  `versions`, if given, has
    for each name the id of a version, also of a delete marker, or "" for the current version.  VersionNotFound.
    With `stamps` each result has the set of stamps of what it was read from: it may be repeated while they stand, see
    `lakefs.stamps.stamps`.
    """

    OP = 22
    REPLY = NameResults
    names: list[tuple[str, str]]
    durable: bool = True
    versions: list[str] = []
    stamps: bool = False


class DeleteNames(Request, frozen=True):
    """Remove names; a missing one is no failure (no `stat`).  A key `F/` is the folder's own blob; names in F stay.

    `keep_folder`: a folder that loses its last name stays, empty.  `durable` and `folders` as in Commit.  In a bucket
    that keeps versions, a delete marker becomes the newest version, also of a missing name; the result has its id.
    `versions` and `conditions` (instead of `condition`): none, or one for each name; a given version is removed for
    good, under its own condition.
    """

    OP = 23
    REPLY = NameResults
    names: list[tuple[str, str]]
    condition: Condition = NO_CONDITION
    keep_folder: bool = False
    durable: bool = True
    versions: list[str] = []
    conditions: list[Condition] = []
    folders: bool = False


class Rename(Request, frozen=True):
    """Move an object or folder, atomically, within or across buckets of one domain.

    Both keys end in `/` for a folder.  A target object is replaced unless `replace` is false (AlreadyExists); a
    target folder must be empty.  Moving a folder below itself is InvalidArgument.  `keep_folder`, `durable` and
    `folders` as in DeleteNames.  `condition` is on the old name, `to_condition` on the new one.
    """

    OP = 24
    REPLY = NameResults
    bucket: str
    key: str
    to_bucket: str
    to_key: str
    replace: bool = True
    create_bucket: bool = False
    keep_folder: bool = False
    durable: bool = True
    condition: Condition = NO_CONDITION
    to_condition: Condition = NO_CONDITION
    folders: bool = False


class Copy(Request, frozen=True):
    """Bind another name to the blob of an object; no byte is copied.  Attributes are kept unless given.

    Tags are kept unless `tags` is given; tags in `attributes` are ignored.
    `version` is the id of the version to copy, "" for the current one.  VersionNotFound, VersionIsMarker.
    """

    OP = 25
    REPLY = NameResults
    bucket: str
    key: str
    to_bucket: str
    to_key: str
    attributes: ObjectAttributes | None = None
    condition: Condition = NO_CONDITION
    create_bucket: bool = False
    tags: dict[str, str] | None = None
    version: str = ""


class MakeFolder(Request, frozen=True):
    """Make an explicit folder (it stays when empty).  AlreadyExists when it exists and `exclusive` is set.

    `attributes`: mode, owner, time and xattrs of a folder made by this request.  `durable` and `folders` as in Commit;
    with `folders` the result also has the stamps that StatNames of the new folder would have right after.
    """

    OP = 26
    REPLY = NameResults
    bucket: str
    key: str
    exclusive: bool = False
    create_bucket: bool = False
    attributes: ObjectAttributes | None = None
    durable: bool = True
    condition: Condition = NO_CONDITION
    folders: bool = False


class SetAttributes(Request, frozen=True):
    """Change attributes of a folder (key ending in `/`, or empty: the bucket), object or symlink; the node stays.

    None leaves an attribute as it is.  `xattrs`: values to set, None to remove; `xattr_absent`: each one set must not
    exist (AlreadyExists), `xattr_present`: must exist (KeyNotFound); removing a missing one is KeyNotFound.
    `tags` replaces all tags; KeyNotFound for a folder or symlink without content.
    `version`: the version to change, "" for the current one; VersionNotFound, VersionIsMarker.
    Errors: KeyNotFound, PreconditionFailed, RequestTooLarge.  `durable` as in Commit.  `folders`: that of a folder
    tells what became of it.
    """

    OP = 28
    REPLY = NameResults
    bucket: str
    key: str
    condition: Condition = NO_CONDITION
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    xattrs: dict[str, bytes | None] = {}
    xattr_absent: bool = False
    xattr_present: bool = False
    durable: bool = True
    atime_ns: int | None = None
    tags: dict[str, str] | None = None
    version: str = ""
    folders: bool = False


class MakeSymlink(Request, frozen=True):
    """Make a symlink with a target of 1 to 4,095 bytes; AlreadyExists when an object, symlink or folder has the name.

    `durable` and `folders` as in Commit.
    """

    OP = 29
    REPLY = NameResults
    bucket: str
    key: str
    target: bytes
    attributes: ObjectAttributes
    durable: bool = True
    condition: Condition = NO_CONDITION
    folders: bool = False


class RemoveFolder(Request, frozen=True):
    """Remove an empty folder, whether or not it was made explicitly.  KeyNotFound, NotAFolder, FolderNotEmpty.

    `keep_folder`, `durable` and `folders` as in DeleteNames.  PreconditionFailed.
    """

    OP = 33
    REPLY = NameResults
    bucket: str
    key: str
    keep_folder: bool = False
    durable: bool = True
    condition: Condition = NO_CONDITION
    folders: bool = False


class ListEntry(Message, frozen=True):
    """One name of a page; `is_prefix` entries are rolled up at the delimiter and have no other field set.

    `checksum_names`: those under which checksums are kept with it.  `bound_ns` as in ObjectStat.
    """

    key: str
    is_prefix: bool = False
    size_bytes: int = 0
    etag: str = ""
    mtime_ns: int = 0
    kind: int = 2
    node: int = 0
    blob: bytes = b""
    mode: int = 0
    content_type: str = ""
    uid: int = 0
    gid: int = 0
    ctime_ns: int = 0
    atime_ns: int | None = None
    checksum_names: list[str] = []
    bound_ns: int = 0

    @property
    def last_modified_ns(self) -> int:
        """The time at which the name was bound to its content: S3's Last-Modified."""
        return self.bound_ns or self.mtime_ns


class Listed(Message, frozen=True):
    """A page in byte order of keys.  `next_after` is empty on the last page."""

    entries: list[ListEntry]
    next_after: str = ""


class ListNames(Request, frozen=True):
    """List names with the prefix, strictly after `after`, rolled up at `delimiter` ("" or "/"), at most `limit`.

    `after` may be a rolled-up prefix: everything below it is skipped.  `folders` lists bare folders too.  `durable` as
    in StatNames.
    """

    OP = 27
    REPLY = Listed
    bucket: str
    prefix: str = ""
    after: str = ""
    delimiter: str = ""
    limit: int = 1000
    folders: bool = False
    durable: bool = True


# --- reading -----------------------------------------------------------------------------------------


class OpenedObject(Message, frozen=True):
    """An object opened for reading.

    `chunks` and `lengths` are the layout if it has at most `layout_max` chunks; else they are empty, and the client
    reads the manifest (the chunk of `stat.blob`) like any chunk.  `grants` has one grant for each of `chunks`.  The
    lease keeps the content until it is closed or the connection ends.
    """

    stat: ObjectStat
    lease: int
    chunks: list[bytes]
    lengths: list[int]
    grants: list[Grant]


class OpenResult(Message, frozen=True):
    """Result of one item of OpenObjects.

    `stamps`: the set of stamps, if it was asked for, under which name, stat and content, or the failure, may be
    repeated; b"": they may not.  Lease and grants are those of this answer.
    """

    opened: OpenedObject | None = None
    failure: Failure | None = None
    stamps: bytes = b""


class OpenResults(Message, frozen=True):
    """One result for each name; inline payloads are in the body at their grants' offsets."""

    results: list[OpenResult]


class OpenObjects(Request, frozen=True):
    """Open objects for reading.

    Payloads under 64 KiB are sent inline, up to `inline_bytes` in all.  `lease` false: no lease is taken (lease 0), for
    readers that finish with this answer or retry.  `lease_inline` false: no lease for objects to be sent inline (if the
    payload is then not sent inline after all, there is no lease either: open the object again).  `lease_from`: no lease
    for content shorter than this many bytes; its reader opens the object again if gc has freed a chunk before it was
    read.  `grants_bytes` above 0: grants only for chunks with bytes in [grants_from, grants_from + grants_bytes),
    MEDIUM_NONE for others.  `durable` and `versions` as in StatNames; VersionIsMarker.
    `media`: bits MEDIA_DRAM, MEDIA_FABRIC.
    `stamps` as in StatNames.
    """

    OP = 40
    REPLY = OpenResults
    names: list[tuple[str, str]]
    layout_max: int = 1024
    inline_bytes: int = 1 << 20
    lease: bool = True
    durable: bool = True
    lease_inline: bool = True
    grants_from: int = 0
    grants_bytes: int = 0
    versions: list[str] = []
    media: int = 0
    lease_from: int = 0
    stamps: bool = False


class CloseLeases(Request, frozen=True):
    """Close leases of opened objects."""

    OP = 41
    REPLY = Done
    leases: list[int]


class Located(Message, frozen=True):
    """A grant for each chunk, in order."""

    grants: list[Grant]


class Locate(Request, frozen=True):
    """Ask where chunks are now.  `media` as in OpenObjects."""

    OP = 42
    REPLY = Located
    chunks: list[bytes]
    media: int = 0


class SegmentsOpened(Message, frozen=True):
    """Segments whose read-only descriptors arrive with this frame, in order; missing ones are left out."""

    segments: list[int]


class OpenSegments(Request, frozen=True):
    """Get descriptors of segments, at most 64 a request; only over connections that carry descriptors."""

    OP = 43
    REPLY = SegmentsOpened
    segments: list[int]


class ReadChunksReply(Message, frozen=True):
    """Pieces in the order of the request; their bytes follow each other in the body.

    `chunk_lengths`, if shards were asked for: of each the length of its whole chunk, 0 if the member has no such shard
    or knows that it is damaged.
    """

    pieces: list[ReadPiece]
    chunk_lengths: list[int] = []


class ReadChunks(Request, frozen=True):
    """Read payload through the socket: for each chunk a range (length 0 = to the end), widened to granules.

    The engine checks CRC32C before it sends; the sum of the pieces is at most `body_bytes_max`.
    `shards`, if given, has the number of a shard for each chunk, 255 for the whole chunk; the range is the shard's.  Of
    a member; a shard that is missing or known to be damaged is the failure of its piece.  Of a range that is not in the
    shard, which fails too, the answer has the chunk's length all the same.
    With `targets`, one for each range of a shard, a member writes the pieces to these offsets of lent `memory`, and the
    answer has no body.  The memory is sealed against shrinking.  SessionLost, InvalidArgument.
    """

    OP = 44
    REPLY = ReadChunksReply
    chunks: list[bytes]
    offsets: list[int]
    lengths: list[int]
    shards: list[int] = []
    memory: int = 0
    targets: list[int] = []


def _requests(base: type[Request]) -> list[type[Request]]:
    children = base.__subclasses__()
    return children + [request for child in children for request in _requests(child)]


REQUESTS: Final[dict[int, type[Request]]] = {request.OP: request for request in _requests(Request)}
"""All requests by op number."""
assert len(REQUESTS) == len(_requests(Request)), "no two requests have one number"
assert all(0 < op < 1 << 16 for op in REQUESTS), "op numbers fit their field"
