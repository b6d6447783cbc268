"""The bytes of the store: every fixed structure on disk, as `docs/format.md` describes it.

It holds layouts, constants and the functions that pack and check them.  The packages `segments`, `journal`,
`tables`, `metadata` and `superblock` write them, and decide when and in which order.

Rules kept here:
- A structure is checked (length, magic, version, checksum) before any field of it is used.
- Files and records, except counters and notes of quarantine, have a version; StoreUnusable names an unknown one.
- A value of a table ends with a CRC32C over table id, key and value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec
from crc32c import crc32c
from msgspec.structs import astuple

from lakefs.content.verify import vector_bytes
from lakefs.errors import IndexDamaged, StoreUnusable
from lakefs.ids import Birth, BlobId, BootId, ChunkId, DomainIndex, NodeId, SegmentId
from lakefs.layout import Layout

FORMAT_VERSION: Final = 1
PAGE: Final = 4096
GRANULE: Final = 65536


class Table(IntEnum):
    """The tables of the index.  Ids are part of the format."""

    COUNTERS = 1
    CHUNKS = 2
    NODES = 3
    NAMES = 4
    BUCKETS = 5
    COORDINATOR = 6  # only the names of a cluster have records in it
    UPLOADS = 7
    VERSIONS = 8
    KEYED = 9
    ACCESS_KEYS = 10
    QUARANTINE = 11


class Op(IntEnum):
    """The change that a journal record makes to its key."""

    INSERT = 1  # the key was absent
    PUT = 2  # the key may have been present
    DELETE = 3  # no value


class SegmentKind(IntEnum):
    """The way a segment is written; see `docs/format.md`."""

    LARGE = 1
    SMALL = 2


class NodeKind(IntEnum):
    """The kind of a node; HIDDEN holds the rest of names split at 480 bytes."""

    FOLDER = 1
    OBJECT = 2
    SYMLINK = 3
    HIDDEN = 4


_NODE_KINDS: Final = {int(kind): kind for kind in NodeKind}
"""Kinds by number: a look-up costs a fifth of a call of the enumeration."""


class EtagKind(IntEnum):
    """The source of a node's ETag."""

    DERIVED = 0  # first 32 hex digits of the digest, "-", chunk count
    MD5 = 1  # attributes hold 16 bytes
    MULTIPART = 2  # attributes hold the text md5-N


_ETAG_KINDS: Final = tuple(EtagKind)

SUPERBLOCK: Final = Layout(
    "superblock",
    1164,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("granule_bytes", "I"),
        ("store_id", "16s"),
        ("engine_id", "16s"),
        ("cluster_id", "16s"),
        ("boot_id", "16s"),
        ("compat_features", "Q"),
        ("read_only_features", "Q"),
        ("incompat_features", "Q"),
        ("identity_inode", "Q"),
        ("created_ns", "Q"),
        ("clean_sequence", "Q"),
        ("domain_count", "H"),
        ("names_shard", "H"),
        ("next_space", "I"),
        ("domains", "1024s"),
        ("crc", "I"),
    ],
)
SUPERBLOCK_MAGIC: Final = b"LAKESUPR"
NOT_CLEAN: Final = (1 << 64) - 1

SEGMENT_HEADER: Final = Layout(
    "segment header",
    60,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("segment_kind", "I"),
        ("segment_id", "Q"),
        ("store_id", "16s"),
        ("boot_id", "16s"),
        ("crc", "I"),
    ],
)
SEGMENT_MAGIC: Final = b"LAKESEGM"
SEGMENT_DATA_OFFSET: Final = PAGE

JOURNAL_HEADER: Final = Layout(
    "journal header",
    64,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("reserved", "4s"),
        ("first_sequence", "Q"),
        ("store_id", "16s"),
        ("boot_id", "16s"),
        ("boot_before", "4s"),
        ("crc", "I"),
    ],
)
JOURNAL_MAGIC: Final = b"LAKEJRNL"

GROUP_HEADER: Final = Layout(
    "group header",
    48,
    [
        ("magic", "4s"),
        ("body_bytes", "I"),
        ("sequence", "Q"),
        ("time_ns", "Q"),
        ("boot_tag", "8s"),
        ("record_count", "I"),
        ("body_crc", "I"),
        ("reserved", "4s"),
        ("header_crc", "I"),
    ],
)
GROUP_MAGIC: Final = b"LGRP"

RECORD_HEADER: Final = Layout(
    "journal record header", 8, [("table", "B"), ("op", "B"), ("key_bytes", "H"), ("value_bytes", "I")]
)

CHECKPOINT_HEADER: Final = Layout(
    "checkpoint header",
    64,
    [
        ("magic", "8s"),
        ("format_version", "I"),
        ("compression", "I"),
        ("sequence", "Q"),
        ("store_id", "16s"),
        ("boot_id", "16s"),
        ("reserved", "4s"),
        ("crc", "I"),
    ],
)
CHECKPOINT_MAGIC: Final = b"LAKECKPT"
CHECKPOINT_TRAILER: Final = Layout(
    "checkpoint trailer",
    32,
    [("magic", "8s"), ("record_count", "Q"), ("stored_bytes", "Q"), ("stored_crc", "I"), ("crc", "I")],
)
CHECKPOINT_TRAILER_MAGIC: Final = b"LAKECKND"

CHUNK_KEY: Final = Layout("chunk key", 36, [("chunk_kind", "B"), ("domain", "2s"), ("digest", "32s"), ("shard", "B")])

CHUNK_RECORD: Final = Layout(
    "chunk record",
    44,
    [
        ("version", "B"),
        ("codec", "B"),
        ("cipher", "B"),
        ("checksum_kind", "B"),
        ("cipher_key_id", "I"),
        ("birth", "Q"),
        ("segment_id", "Q"),
        ("offset", "Q"),
        ("stored_bytes", "I"),
        ("logical_bytes", "I"),
        ("crc", "I"),
    ],
)
CHECKSUM_CRC32C_GRANULE: Final = 1

NODE_HEAD: Final = Layout(
    "node head",
    73,
    [
        ("version", "B"),
        ("node_kind", "B"),
        ("etag_kind", "B"),
        ("flags", "B"),
        ("mode", "I"),
        ("uid", "I"),
        ("gid", "I"),
        ("size_bytes", "Q"),
        ("mtime_ns", "q"),
        ("ctime_ns", "q"),
        ("blob", "33s"),
    ],
)

NAME_RECORD: Final = Layout("name record", 10, [("version", "B"), ("node_kind", "B"), ("node_id", "Q")])
COUNTER_RECORD: Final = Layout("counter record", 8, [("count", "Q")])
VALUE_CRC: Final = Layout("value checksum", 4, [("crc", "I")])
NO_BLOB: Final = bytes(33)


def seal_value(table: Table, key: bytes, value: bytes) -> bytes:
    """Return the value as the index stores it: followed by the CRC32C of table id, key and value."""
    return value + VALUE_CRC.pack(crc32c(value, crc32c(key, _TABLE_CRC[table])))


def open_value(table: Table, key: bytes, sealed: bytes) -> bytes:
    """Return the value without its checksum.  IndexDamaged when that does not match table, key and value."""
    value = sealed[:-4]
    if len(sealed) < 4 or crc32c(value, crc32c(key, _TABLE_CRC[table])) != int.from_bytes(sealed[-4:], "little"):
        raise IndexDamaged(
            f"a record of table {table.name.lower()} of the index does not match its checksum", subject=key.hex()
        )
    return value


_TABLE_CRC: Final = {table: crc32c(bytes([table])) for table in Table}


def chunk_key(chunk: ChunkId, domain: DomainIndex = DomainIndex(0)) -> bytes:
    """Key of a chunk in the table `chunks`: kind, domain, digest, shard (255 = not sharded)."""
    return chunk[:1] + domain.to_bytes(2, "big") + chunk[1:] + b"\xff"


def chunk_id_of_key(key: bytes) -> ChunkId:
    """The chunk's id from its key in the table `chunks`."""
    return ChunkId(key[:1] + key[3:35])


class ChunkRecord(msgspec.Struct, frozen=True, gc=False):
    """A chunk's place and checksum; `crc` is the payload's, or its vector's when it has one.

    The fields are in the order of the layout.
    """

    birth: Birth
    segment: SegmentId
    offset: int
    stored_bytes: int
    logical_bytes: int
    crc: int

    def pack(self) -> bytes:
        """Pack the record's 44 bytes."""
        return CHUNK_RECORD.pack(1, 0, 0, CHECKSUM_CRC32C_GRANULE, 0, *astuple(self))

    @property
    def vector_bytes(self) -> int:
        """Length of the vector of checksums behind the payload, 0 for a chunk of one granule."""
        return vector_bytes(self.stored_bytes)

    @property
    def extent_bytes(self) -> int:
        """Bytes of payload and vector."""
        return self.stored_bytes + vector_bytes(self.stored_bytes)


def unpack_chunk_record(value: bytes) -> ChunkRecord:
    """Unpack the record from its (already verified) value.  StoreUnusable for a later codec or version."""
    if len(value) != CHUNK_RECORD.size:
        raise StoreUnusable(f"chunk record of {len(value)} bytes, {CHUNK_RECORD.size} expected")
    version, codec, cipher, checksum, _, birth, segment, offset, stored, logical, crc = CHUNK_RECORD.unpack(value)
    if (version, codec, cipher, checksum) != (1, 0, 0, CHECKSUM_CRC32C_GRANULE):
        raise StoreUnusable(f"chunk record version {version}, codec {codec}, cipher {cipher}, checksum {checksum}")
    return ChunkRecord(Birth(birth), SegmentId(segment), offset, stored, logical, crc)


class Attributes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a node beyond its head, with their names in the record; absent from it when all are defaults.

    `chunk_count` is the number of data chunks of a blob with a manifest; 0 for a blob of one chunk.  `atime_ns` is the
    access time that somebody set, None when nobody did, or when it is the modification time.  `upload` is the multipart
    upload that the node came from; `tags` are texts under texts, beside the metadata.  `version` is the number of the
    version that the node is, of a version `null` with a minus; 0 for one that was made where no versions were kept.
    `bound_ns` is the time at which the key was bound to the content, None if that is the modification time.
    """

    etag: bytes = msgspec.field(default=b"", name="e")
    content_type: str = msgspec.field(default="", name="t")
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict, name="m")
    headers: dict[str, str] = msgspec.field(default_factory=dict, name="h")
    checksums: dict[str, bytes] = msgspec.field(default_factory=dict, name="k")
    xattrs: dict[str, bytes] = msgspec.field(default_factory=dict, name="x")
    symlink_target: bytes = msgspec.field(default=b"", name="l")
    chunk_count: int = msgspec.field(default=0, name="c")
    atime_ns: int | None = msgspec.field(default=None, name="a")
    upload: bytes = msgspec.field(default=b"", name="u")
    tags: dict[str, str] = msgspec.field(default_factory=dict, name="g")
    version: int = msgspec.field(default=0, name="v")
    bound_ns: int | None = msgspec.field(default=None, name="b")


NO_ATTRIBUTES: Final = Attributes()
_attributes_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_attributes_decoder: Final = msgspec.msgpack.Decoder(Attributes)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A folder, object or symlink.  `blob` is None for a folder without content of its own."""

    kind: NodeKind
    blob: BlobId | None = None
    size_bytes: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    etag_kind: EtagKind = EtagKind.DERIVED
    attributes: Attributes = NO_ATTRIBUTES

    @property
    def is_marker(self) -> bool:
        """True if the node is a delete marker."""
        return self.blob is None and self.kind is NodeKind.OBJECT

    def pack(self) -> bytes:
        """Pack the head, then the attributes in msgpack if there are any."""
        head = NODE_HEAD.pack(
            1,
            self.kind,
            self.etag_kind,
            0,
            self.mode,
            self.uid,
            self.gid,
            self.size_bytes,
            self.mtime_ns,
            self.ctime_ns,
            self.blob or NO_BLOB,
        )
        if self.attributes is NO_ATTRIBUTES or self.attributes == NO_ATTRIBUTES:
            return head
        return head + _attributes_encoder.encode(self.attributes)


def unpack_node(value: bytes) -> Node:
    """Unpack the node from its (already verified) value.  StoreUnusable for a later version."""
    if len(value) < NODE_HEAD.size:
        raise StoreUnusable(f"node record of {len(value)} bytes, at least {NODE_HEAD.size} expected")
    version, kind, etag_kind, _, mode, uid, gid, size, mtime, ctime, blob = NODE_HEAD.unpack_from(value)
    if version != 1:
        raise StoreUnusable(f"node record version {version} is not known")
    if kind not in _NODE_KINDS or etag_kind >= len(_ETAG_KINDS):
        raise StoreUnusable(f"node record of kind {kind}, with an ETag of kind {etag_kind}, is not known")
    return Node(
        kind=_NODE_KINDS[kind],
        blob=None if blob == NO_BLOB else BlobId(blob),
        size_bytes=size,
        mode=mode,
        uid=uid,
        gid=gid,
        mtime_ns=mtime,
        ctime_ns=ctime,
        etag_kind=_ETAG_KINDS[etag_kind],
        attributes=_unpack_attributes(value[NODE_HEAD.size :]) if len(value) > NODE_HEAD.size else NO_ATTRIBUTES,
    )


def _unpack_attributes(tail: bytes) -> Attributes:
    try:
        return _attributes_decoder.decode(tail)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StoreUnusable(f"a node's attributes cannot be read ({error}): they are of another release") from error


_CHANGE_TIMES: Final = struct.Struct("<qq")
_CHANGE_TIMES_OFFSET: Final = NODE_HEAD.offset_of("mtime_ns")
assert NODE_HEAD.offset_of("ctime_ns") == _CHANGE_TIMES_OFFSET + 8


def changed_at(record: bytes) -> int:
    """Return the change time of a node's record, in ns."""
    changed_ns: int = _CHANGE_TIMES.unpack_from(record, _CHANGE_TIMES_OFFSET)[1]
    return changed_ns


def with_names_changed(record: bytes, now_ns: int) -> bytes:
    """Return a folder's record with the times of a change of its names; no other byte is read or changed."""
    end = _CHANGE_TIMES_OFFSET + _CHANGE_TIMES.size
    return record[:_CHANGE_TIMES_OFFSET] + _CHANGE_TIMES.pack(now_ns, now_ns) + record[end:]


def with_change_time(record: bytes, changed_ns: int, mtime_ns: int | None = None) -> bytes:
    """Return a node's record with another change time, and modification time if given; no other byte is changed."""
    if mtime_ns is None:
        mtime_ns = _CHANGE_TIMES.unpack_from(record, _CHANGE_TIMES_OFFSET)[0]
    end = _CHANGE_TIMES_OFFSET + _CHANGE_TIMES.size
    return record[:_CHANGE_TIMES_OFFSET] + _CHANGE_TIMES.pack(mtime_ns, changed_ns) + record[end:]


node_key: Final[Callable[[NodeId], bytes]] = struct.Struct(">Q").pack
"""Key of a node, and prefix of its children's names: 8 bytes, big-endian."""


def pack_name(kind: NodeKind, node: NodeId) -> bytes:
    """Value of a name: version, kind, node id."""
    return NAME_RECORD.pack(1, kind, node)


def unpack_name(value: bytes) -> tuple[NodeKind, NodeId]:
    """Kind and node id from the (already verified) value of a name."""
    if len(value) != NAME_RECORD.size:
        raise StoreUnusable(f"name record of {len(value)} bytes, {NAME_RECORD.size} expected")
    version, kind, node = NAME_RECORD.unpack(value)
    if version != 1 or kind not in _NODE_KINDS:
        raise StoreUnusable(f"name record version {version}, kind {kind}, is not known")
    return _NODE_KINDS[kind], NodeId(node)


@dataclass(frozen=True)
class StoreIdentity:
    """The ids that tie the files of one store together; written into every header."""

    store_id: bytes
    boot_id: BootId
    boot_before: bytes = bytes(16)
    """Boot id in the superblock when this boot opened the store; its own in a new store, zeros when unknown."""

    @property
    def boot_tag(self) -> bytes:
        """First 8 bytes of the boot id, in every group header."""
        return self.boot_id[:8]


Mutation = tuple[Op, Table, bytes, bytes]
"""One journal record: op, table, key, value (without its index checksum; empty for DELETE)."""
