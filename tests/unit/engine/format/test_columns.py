"""Columns of records: the bytes are those that the records have when they are packed one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from engine.format.columns import (
    ChunkColumns,
    Column,
    Insertions,
    ObjectColumns,
    pack_chunks,
    pack_names,
    pack_nodes,
    patched,
    singly,
)
from engine.format.layouts import (
    NO_ATTRIBUTES,
    Attributes,
    ChunkRecord,
    EtagKind,
    Mutation,
    Node,
    NodeKind,
    Op,
    Table,
    pack_name,
)
from engine.journal.reader import decode_records
from lakefs.ids import Birth, BlobId, NodeId, SegmentId

texts = st.dictionaries(st.text(max_size=3), st.text(max_size=40), max_size=3)
u64 = st.integers(0, (1 << 64) - 1)
shared = st.builds(
    Attributes,
    content_type=st.text(max_size=20),
    user_metadata=texts,
    headers=texts,
    xattrs=st.dictionaries(st.text(max_size=3), st.binary(max_size=300), max_size=2),
    atime_ns=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    tags=texts,
)


@st.composite
def runs(draw: st.DrawFn) -> list[Node]:
    """Nodes of a run."""
    count = draw(st.integers(1, 5))
    etag_bytes, sum_bytes = draw(st.sampled_from((0, 16))), draw(st.sampled_from((0, 1, 4, 32)))
    common, is_plain = draw(shared), draw(st.booleans())
    name = draw(st.text(max_size=12))

    def one() -> Node:
        attributes = NO_ATTRIBUTES if is_plain else common
        if etag_bytes:
            etag = draw(st.binary(min_size=etag_bytes, max_size=etag_bytes))
            attributes = msgspec.structs.replace(attributes, etag=etag)
        if sum_bytes:
            value = draw(st.binary(min_size=sum_bytes, max_size=sum_bytes))
            attributes = msgspec.structs.replace(attributes, checksums={name: value})
        return Node(
            kind=NodeKind.OBJECT,
            blob=BlobId(draw(st.binary(min_size=33, max_size=33))),
            size_bytes=draw(u64),
            mode=0o644,
            mtime_ns=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
            ctime_ns=7,
            etag_kind=EtagKind.MD5 if etag_bytes else EtagKind.DERIVED,
            attributes=attributes,
        )

    return [one() for _ in range(count)]


@given(runs())
def test_nodes_are_packed_as_one_by_one(nodes: list[Node]) -> None:
    objects = ObjectColumns(
        blobs=[node.blob for node in nodes if node.blob is not None],
        sizes_bytes=[node.size_bytes for node in nodes],
        mtimes_ns=[node.mtime_ns for node in nodes],
        etags=[node.attributes.etag for node in nodes if node.attributes.etag],
        sums=[value for node in nodes for value in node.attributes.checksums.values()],
    )
    assert pack_nodes(nodes[0], objects) == [node.pack() for node in nodes]
    assert pack_nodes(nodes[-1], objects.part(len(nodes) - 1, len(nodes))) == [nodes[-1].pack()]


@given(st.integers(1, 1 << 60), st.integers(1, 9))
def test_names_are_packed_as_one_by_one(first: int, count: int) -> None:
    expected = [pack_name(NodeKind.OBJECT, NodeId(first + index)) for index in range(count)]
    assert pack_names(NodeKind.OBJECT, NodeId(first), count) == expected


@given(
    st.integers(1, 1 << 60),
    st.lists(st.tuples(u64, u64, st.integers(1, 1 << 20), st.integers(0, (1 << 32) - 1)), min_size=1, max_size=6),
)
def test_chunks_are_packed_as_one_by_one(first: int, chunks: list[tuple[int, int, int, int]]) -> None:
    columns = ChunkColumns(*(list(column) for column in zip(*chunks, strict=True)))
    expected = [
        ChunkRecord(Birth(first + index), SegmentId(segment), offset, length, length, crc).pack()
        for index, (segment, offset, length, crc) in enumerate(chunks)
    ]
    assert pack_chunks(Birth(first), columns) == expected


@given(st.dictionaries(st.binary(min_size=1, max_size=511), st.binary(max_size=80), min_size=1, max_size=8))
def test_insertions_are_the_records_of_a_groups_body(entries: dict[bytes, bytes]) -> None:
    insertions = Insertions(Table.NAMES, list(entries), list(entries.values()))
    body = b"".join(insertions.parts())
    assert len(body) == insertions.body_bytes
    expected = [(Op.INSERT, Table.NAMES, key, value) for key, value in entries.items()]
    assert decode_records(body, len(entries)) == expected == list(insertions.mutations())
    single: Mutation = (Op.DELETE, Table.NODES, b"k", b"")
    assert list(singly([single, insertions, single])) == [single, *expected, single]


@pytest.mark.parametrize(("keys", "values"), [([], []), ([b""], [b""]), ([b"k" * 512], [b""]), ([b"a", b"b"], [b""])])
def test_insertions_that_the_index_cannot_take_are_a_bug(keys: list[bytes], values: list[bytes]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        Insertions(Table.NAMES, keys, values)


@pytest.mark.parametrize(
    "column", [Column(1, "Q", [2, 3]), Column(0, "Q", [3, 2]), Column(0, "8s", [b"2", b"3"])], ids=str
)
def test_a_column_at_the_wrong_place_is_a_bug(column: Any) -> None:
    record = (2).to_bytes(8, "little") + b"tail"
    assert patched(record, [Column(0, "Q", [2, 3])])[1] == (3).to_bytes(8, "little") + b"tail"
    with pytest.raises(AssertionError):
        patched(record, [column])
