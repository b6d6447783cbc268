"""Records of many objects at once, as columns: lists of keys and of values, made from what the objects have in common.

    Insertions      many new entries of one table: one mutation of a transaction, a record each in the journal
    patched         copies of one record that differ in some fields
    pack_nodes      records of objects that differ in nothing but content, times, ETags and checksums

The bytes are those of `engine.format.layouts`, which packs such records one by one.  The loops over the objects are
calls of the standard library that run in C: a loop in Python would cost several times as much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Final, NamedTuple

import msgspec

from engine.format.layouts import (
    CHUNK_RECORD,
    NAME_RECORD,
    NODE_HEAD,
    RECORD_HEADER,
    Attributes,
    ChunkRecord,
    Mutation,
    Node,
    NodeKind,
    Op,
    Table,
    pack_name,
)
from lakefs.ids import Birth, BlobId, NodeId, SegmentId

_KEY_BYTES_MAX: Final = 511
_SIZE_AT: Final = NODE_HEAD.offset_of("size_bytes")
_MTIME_AT: Final = NODE_HEAD.offset_of("mtime_ns")
_BLOB_AT: Final = NODE_HEAD.offset_of("blob")
_NODE_ID_AT: Final = NAME_RECORD.offset_of("node_id")
_struct_of: Final = lru_cache(maxsize=256)(struct.Struct)


class Insertions:
    """New entries of one table, each key once, which the caller has seen to be absent."""

    __slots__ = ("key_bytes", "keys", "table", "value_bytes", "values")

    def __init__(self, table: Table, keys: list[bytes], values: list[bytes]) -> None:
        assert len(keys) == len(values) > 0, "each key has a value"
        lengths = list(map(len, keys))
        assert min(lengths) > 0, "the index takes keys of 1 to 511 bytes"
        assert max(lengths) <= _KEY_BYTES_MAX, "the index takes keys of 1 to 511 bytes"
        self.table: Final = table
        self.keys: Final = keys
        self.values: Final = values
        self.key_bytes: Final = sum(lengths)
        self.value_bytes: Final = sum(map(len, values))

    @property
    def body_bytes(self) -> int:
        """Length of their records in the body of a journal group."""
        return RECORD_HEADER.size * len(self.keys) + self.key_bytes + self.value_bytes

    def parts(self) -> Iterable[bytes]:
        """Return their records in the body of a journal group, in parts."""
        keys, values = self.keys, self.values
        headers = map(RECORD_HEADER.pack, repeat(self.table), repeat(Op.INSERT), map(len, keys), map(len, values))
        return chain.from_iterable(zip(headers, keys, values, strict=True))

    def mutations(self) -> Iterator[Mutation]:
        """Yield a mutation for each entry."""
        return zip(repeat(Op.INSERT), repeat(self.table), self.keys, self.values)


def singly(mutations: Iterable[Mutation | Insertions]) -> Iterator[Mutation]:
    """Yield mutations of one record each, in order."""
    for mutation in mutations:
        if isinstance(mutation, Insertions):
            yield from mutation.mutations()
        else:
            yield mutation


class Column(NamedTuple):
    """A field of fixed size in which copies of a record differ: its place, its struct code, and a value for each."""

    offset: int
    code: str
    values: Sequence[int] | Sequence[bytes]


def patched(record: bytes, columns: Sequence[Column]) -> list[bytes]:
    """Return copies of a record, one for each row of the columns, which stand in the order of their offsets.

    The first copy must be the record itself: so a wrong offset is noticed.
    """
    code = ["<"]
    arguments: list[Iterable[int] | Iterable[bytes]] = []
    at = 0
    for column in columns:
        code.append(f"{column.offset - at}s{column.code}")
        arguments += (repeat(record[at : column.offset]), column.values)
        at = column.offset + struct.calcsize("<" + column.code)
    code.append(f"{len(record) - at}s")
    arguments.append(repeat(record[at:]))
    copies: list[bytes] = list(map(_struct_of("".join(code)).pack, *arguments))
    assert copies[0] == record, "a field is not where its column says"
    assert all(len(column.values) == len(copies) for column in columns), "each copy has a value of each column"
    return copies


class ObjectColumns(msgspec.Struct):
    """The values in which objects of a run differ, of each object in order."""

    blobs: list[BlobId]
    sizes_bytes: list[int]
    mtimes_ns: list[int]
    etags: list[bytes]
    """Empty, or of one length."""
    sums: list[bytes]
    """The only checksum of each, under the same name and of the same length; empty if they have none."""

    def part(self, start: int, stop: int) -> ObjectColumns:
        """Return the columns of some of the objects."""
        cut = slice(start, stop)
        return ObjectColumns(
            self.blobs[cut], self.sizes_bytes[cut], self.mtimes_ns[cut], self.etags[cut], self.sums[cut]
        )


def pack_nodes(node: Node, objects: ObjectColumns) -> list[bytes]:
    """Return the packed records of objects, of which `node` is the first; others have its other fields."""
    columns = [
        Column(_SIZE_AT, "Q", objects.sizes_bytes),
        Column(_MTIME_AT, "q", objects.mtimes_ns),
        Column(_BLOB_AT, "33s", objects.blobs),
    ]
    attributes = node.attributes
    if attributes.etag:
        end = len(_only(node, Attributes(etag=attributes.etag)))  # the first field: it ends where it alone would end
        columns.append(_bytes_column(end, attributes.etag, objects.etags))
    if attributes.checksums:
        (value,) = attributes.checksums.values()
        end = len(_only(node, _up_to_checksums(attributes)))
        columns.append(_bytes_column(end, value, objects.sums))
    return patched(node.pack(), columns)


def _bytes_column(end: int, value: bytes, values: list[bytes]) -> Column:
    assert len(value) * len(values) == sum(map(len, values)), "the values of a column have one length"
    return Column(end - len(value), f"{len(value)}s", values)


def _only(node: Node, attributes: Attributes) -> bytes:
    """Return the node's record with other attributes."""
    return msgspec.structs.replace(node, attributes=attributes).pack()


def _up_to_checksums(attributes: Attributes) -> Attributes:
    """Return the attributes without those that are packed behind the checksums."""
    return Attributes(
        etag=attributes.etag,
        content_type=attributes.content_type,
        user_metadata=attributes.user_metadata,
        headers=attributes.headers,
        checksums=attributes.checksums,
    )


def pack_names(kind: NodeKind, first: NodeId, count: int) -> list[bytes]:
    """Return the values of names of nodes with consecutive ids."""
    return patched(pack_name(kind, first), [Column(_NODE_ID_AT, "Q", range(first, first + count))])


class ChunkColumns(msgspec.Struct):
    """The values in which records of chunks differ, of each chunk in order."""

    segments: list[SegmentId]
    offsets: list[int]
    lengths: list[int]
    crcs: list[int]


def pack_chunks(first: Birth, chunks: ChunkColumns) -> list[bytes]:
    """Return the packed records of chunks with consecutive births."""
    length = chunks.lengths[0]
    record = ChunkRecord(first, chunks.segments[0], chunks.offsets[0], length, length, chunks.crcs[0])
    columns = {
        "birth": range(first, first + len(chunks.crcs)),
        "segment_id": chunks.segments,
        "offset": chunks.offsets,
        "stored_bytes": chunks.lengths,
        "logical_bytes": chunks.lengths,
        "crc": chunks.crcs,
    }
    fields = [field for field in CHUNK_RECORD.fields if field.name in columns]
    return patched(record.pack(), [Column(field.offset, field.code, columns[field.name]) for field in fields])
