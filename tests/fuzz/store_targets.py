"""The readers of the store's files, of manifests and of the heads of safetensors files.

Inputs for the store are sealed first: they get the checksums that their bytes need.  Without that the wrong checksum
would be found before a field is used, and nothing after it would be reached.  So these inputs are what no rot can make,
only a mistake of ours, a later release, or somebody who may write the store's files.  An input whose first byte is even
is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

import msgspec
from crc32c import crc32c
from isal import isal_zlib

from engine.format.layouts import (
    CHECKPOINT_HEADER,
    CHECKPOINT_MAGIC,
    CHECKPOINT_TRAILER,
    CHECKPOINT_TRAILER_MAGIC,
    CHUNK_RECORD,
    GRANULE,
    GROUP_HEADER,
    GROUP_MAGIC,
    JOURNAL_HEADER,
    JOURNAL_MAGIC,
    PAGE,
    RECORD_HEADER,
    SEGMENT_HEADER,
    SUPERBLOCK,
    Attributes,
    ChunkRecord,
    EtagKind,
    Node,
    NodeKind,
    Op,
    SegmentKind,
    StoreIdentity,
    Table,
    open_value,
    pack_name,
    seal_value,
    unpack_chunk_record,
    unpack_name,
    unpack_node,
)
from engine.format.records import AccessKeyRecord, ObjectPartsHeader, PartRecord, UploadRecord, VersionRecord
from engine.journal.reader import decode_records, find_end, journal_path, list_journal, read_groups
from engine.metadata.checkpoint import checkpoint_path, read_checkpoint
from engine.namespace.access_keys import unpack_access_key
from engine.namespace.versions import unpack_version
from engine.segments.files import check_segment_header, pack_segment_header
from engine.superblock.superblock import Superblock, parse_superblock
from engine.uploads.lifecycle import unpack_part, unpack_upload
from engine.uploads.object_parts import unpack_header as unpack_parts_header
from lakefs.content import manifest, safetensors
from lakefs.content.manifest import CutKind
from lakefs.errors import InvalidArgument, LakeError
from lakefs.ids import Birth, BlobId, BootId, ChunkId, EngineId, NodeId, SegmentId, Sequence, StoreId
from lakefs.limits import CHUNK_BYTES, GROUP_BYTES_MAX
from lakefs.ports import Disk
from tests.fuzz.target import Target

_STORE: Final = b"S" * 16
_IDENTITY: Final = StoreIdentity(_STORE, BootId(b"B" * 16))
_FIRST: Final = Sequence(1)
_SEGMENT: Final = SegmentId(7)


class _File:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        found = self._content[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def size(self) -> int:
        return len(self._content)

    def close(self) -> None:
        return


class _Folder:
    """The part of a disk that a reader of one file needs."""

    def __init__(self, path: str, content: bytes) -> None:
        self._path, self._content = path, content

    def list_folder(self, path: str) -> list[str]:
        return [self._path.removeprefix(f"{path}/")]

    def open(self, path: str, *, read_only: bool) -> _File:
        assert read_only
        assert path == self._path
        return _File(self._content)


def _sealed_at(found: bytearray, start: int, size: int) -> None:
    """Put the checksum of a header of `size` bytes into its last four."""
    if len(found) >= start + size:
        found[start + size - 4 : start + size] = crc32c(bytes(found[start : start + size - 4])).to_bytes(4, "little")


def _is_sealed(data: bytes) -> bool:
    return bool(data) and data[0] & 1 == 1


# --- files of the store --------------------------------------------------------------------------------


def read_superblock(data: bytes) -> None:
    """Read a superblock; what is understood is written again as it was."""
    page = bytearray(data[1:])
    if _is_sealed(data):
        _sealed_at(page, 0, SUPERBLOCK.size)
    superblock = parse_superblock(bytes(page))
    used = SUPERBLOCK.offset_of("domains") + 16 * len(superblock.domains)
    page[used : SUPERBLOCK.offset_of("crc")] = bytes(SUPERBLOCK.offset_of("crc") - used)
    _sealed_at(page, 0, SUPERBLOCK.size)
    assert superblock.pack()[: SUPERBLOCK.size] == page[: SUPERBLOCK.size]


def read_segment_header(data: bytes) -> None:
    """Read a segment's header: it is this segment's, it is not to be trusted, or it is refused."""
    page = bytearray(data[1:])
    if _is_sealed(data):
        _sealed_at(page, 0, SEGMENT_HEADER.size)
    if check_segment_header(bytes(page), _STORE, _SEGMENT, SegmentKind.LARGE):
        assert page[: SEGMENT_HEADER.offset_of("boot_id")] == bytes(
            pack_segment_header(_IDENTITY, _SEGMENT, SegmentKind.LARGE)[: SEGMENT_HEADER.offset_of("boot_id")]
        )


def read_journal(data: bytes) -> None:
    """Read a journal file: its groups are consecutive and hold what their records say, up to the end that was found."""
    content = _sealed_journal(data[1:]) if _is_sealed(data) else _unpacked(data[1:])
    disk = cast(Disk, _Folder(journal_path(_FIRST), content))
    files = list_journal(disk, _STORE)
    end = find_end(disk, files, Sequence(0))
    sequences = []
    for group in read_groups(disk, files, Sequence(0), end.sequence):
        sequences.append(group.sequence)
        records = decode_records(group.body, group.record_count)
        packed = b"".join(
            RECORD_HEADER.pack(table, op, len(key), len(value)) + key + value for op, table, key, value in records
        )
        assert packed == group.body
    assert sequences == list(range(1, end.sequence + 1))


def _unpacked(packed: bytes) -> bytes:
    """Return the file of an input: its pieces, each with two bytes of length before it, on pages of their own."""
    found = b""
    while len(packed) >= 2 and len(found) < 64 * PAGE:
        length = int.from_bytes(packed[:2], "little") % (4 * PAGE)
        piece, packed = packed[2 : 2 + length], packed[2 + length :]
        found += piece.ljust(-(-max(1, len(piece)) // PAGE) * PAGE, b"\0")
    return found


def _sealed_journal(packed: bytes) -> bytes:
    found = bytearray(_unpacked(packed))
    _sealed_at(found, 0, JOURNAL_HEADER.size)
    for start in range(PAGE, len(found), PAGE):
        if found[start : start + 4] != GROUP_MAGIC:
            continue
        body_bytes = GROUP_HEADER.unpack_from(found, start)[1]
        end = start + GROUP_HEADER.size + body_bytes
        if body_bytes <= GROUP_BYTES_MAX and end <= len(found):
            at = start + GROUP_HEADER.offset_of("body_crc")
            found[at : at + 4] = crc32c(bytes(found[start + GROUP_HEADER.size : end])).to_bytes(4, "little")
        _sealed_at(found, start, GROUP_HEADER.size)
    return bytes(found)


def read_checkpoint_file(data: bytes) -> None:
    """Read a checkpoint: as many records as it says.  A sealed input is header, trailer, and the stream's content."""
    content = _sealed_checkpoint(data[1:]) if _is_sealed(data) else data[1:]
    path = checkpoint_path(_FIRST)
    reader = read_checkpoint(cast(Disk, _Folder(path, content)), path, _STORE)
    assert sum(1 for _ in reader.records()) == reader.record_count


def _sealed_checkpoint(plain: bytes) -> bytes:
    header = bytearray(plain[: CHECKPOINT_HEADER.size])
    _sealed_at(header, 0, CHECKPOINT_HEADER.size)
    trailer = bytearray(plain[CHECKPOINT_HEADER.size :][: CHECKPOINT_TRAILER.size])
    deflate = isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31)
    stream = deflate.compress(plain[CHECKPOINT_HEADER.size + CHECKPOINT_TRAILER.size :]) + deflate.flush()
    if len(trailer) == CHECKPOINT_TRAILER.size:
        sizes = len(stream).to_bytes(8, "little") + crc32c(stream).to_bytes(4, "little")
        at = CHECKPOINT_TRAILER.offset_of("stored_bytes")
        trailer[at : at + len(sizes)] = sizes
        _sealed_at(trailer, 0, CHECKPOINT_TRAILER.size)
    return bytes(header + stream + trailer)


def read_record(data: bytes) -> None:
    """Read a value of a table, chosen by the first byte, or refuse it as unknown; packed again it is the same."""
    if data:
        unpack, pack = _RECORDS[data[0] % len(_RECORDS)]
        found = unpack(data[1:])
        if pack is not None:
            assert unpack(pack(found)) == found


def _unpack_sealed(value: bytes) -> bytes:
    return open_value(Table.NODES, b"key", value)


def _seal(value: object) -> bytes:
    assert isinstance(value, bytes)
    return seal_value(Table.NODES, b"key", value)


_pack_array: Final = msgspec.msgpack.Encoder().encode
_RECORDS: Final[tuple[tuple[Callable[[bytes], object], Callable[[object], bytes] | None], ...]] = (
    (unpack_node, lambda found: cast(Node, found).pack()),
    (unpack_chunk_record, lambda found: cast(ChunkRecord, found).pack()),
    (unpack_name, lambda found: pack_name(*cast(tuple[NodeKind, NodeId], found))),
    (unpack_access_key, _pack_array),
    (unpack_upload, _pack_array),
    (unpack_part, _pack_array),
    (unpack_parts_header, _pack_array),
    (unpack_version, _pack_array),
    (_unpack_sealed, _seal),
)


# --- manifests and safetensors -------------------------------------------------------------------------


def read_manifest(data: bytes) -> None:
    """Read a manifest; what is understood is encoded to the same bytes, and its entries are as long as it says."""
    found = manifest.parse(data)
    assert manifest.encode(found) == data
    assert sum(entry.size_bytes for entry in found.entries) == found.size_bytes, "a manifest does not add up"
    manifest.check_top(found)
    for entry in found.entries[:4]:
        try:
            manifest.check_child(entry, found, found)
        except InvalidArgument:
            continue
        raise AssertionError("a manifest was taken for its own child")


def read_safetensors(data: bytes) -> None:
    """Read a file that may be a safetensors file: its tensors tile it, or it is no such file; never an error.

    Where the header tells of more than the input holds, the file is taken to be as long as that.
    """
    if len(data) < safetensors.SMALLEST_FILE_BYTES:
        return
    needed = safetensors.header_bytes(data, len(data))
    if needed is None:
        assert safetensors.parse_header(data, len(data)) is None
        return
    told = safetensors.file_bytes(data)
    for length in {len(data), told or len(data)}:
        header = safetensors.parse_header(data, length)
        if header is not None:
            assert header.header_bytes == needed
            assert header.header_bytes + sum(header.tensor_lengths) == length


# --- good inputs ---------------------------------------------------------------------------------------


_NODE: Final = Node(
    kind=NodeKind.OBJECT,
    blob=BlobId(b"\x01" * 33),
    size_bytes=5,
    etag_kind=EtagKind.MD5,
    attributes=Attributes(etag=b"e" * 16, tags={"a": "b"}, xattrs={"user.a": b"c"}, version=-3),
)
_SUPERBLOCK: Final = Superblock(
    StoreId(_STORE), EngineId(b"E" * 16), BootId(b"B" * 16), 5, 6, None, (b"D" * 16,), read_only_features=3
).pack()


def _records(last: Op = Op.DELETE) -> bytes:
    rows = ((Op.INSERT, Table.NAMES, b"key", b"value"), (last, Table.VERSIONS, b"gone", b""))
    return b"".join(RECORD_HEADER.pack(table, op, len(key), len(value)) + key + value for op, table, key, value in rows)


def _piece(content: bytes) -> bytes:
    return len(content).to_bytes(2, "little") + content


def _group(sequence: int, body: bytes, count: int) -> bytes:
    tag = _IDENTITY.boot_tag
    return _piece(GROUP_HEADER.pack(GROUP_MAGIC, len(body), sequence, 9, tag, count, 0, bytes(4), 0) + body)


def _journal() -> bytes:
    head = JOURNAL_HEADER.pack(JOURNAL_MAGIC, 1, bytes(4), _FIRST, _STORE, _IDENTITY.boot_id, bytes(4), 0)
    return _piece(head) + _group(1, _records(), 2) + _group(2, b"", 0) + _group(3, _records() * 3, 6)


def _checkpoint(records: bytes, count: int) -> bytes:
    head = CHECKPOINT_HEADER.pack(CHECKPOINT_MAGIC, 1, 1, _FIRST, _STORE, _IDENTITY.boot_id, bytes(4), 0)
    return head + CHECKPOINT_TRAILER.pack(CHECKPOINT_TRAILER_MAGIC, count, 0, 0, 0) + records


def _good_records() -> list[bytes]:
    upload = UploadRecord(1, "key", 5, _NODE.pack(), {"a": "b"})
    part = PartRecord(1, b"key", b"\x01" * 33, 5, b"e" * 16, 7, {"crc32": b"abcd"})
    values = (
        _NODE.pack(),
        ChunkRecord(Birth(1), _SEGMENT, PAGE, 3 * GRANULE, 3 * GRANULE, 9).pack(),
        pack_name(NodeKind.FOLDER, NodeId(9)),
        _pack_array(AccessKeyRecord(1, "secret", ["bucket"], True, 5)),
        _pack_array(upload),
        _pack_array(part),
        _pack_array(ObjectPartsHeader(1, 9, 3)),
        _pack_array(VersionRecord(1, 9, 8, b"key")),
        _seal(b"a value"),
    )
    return [bytes([number]) + value for number, value in enumerate(values)]


def _good_manifests() -> list[bytes]:
    few = [(ChunkId(b"\x01" + bytes([number]) * 32), CHUNK_BYTES) for number in range(3)]
    found = [payload for _, payload in manifest.build(CutKind.FIXED, few).manifests]
    parts = [(few[0][0], 5), (few[1][0], 7)]
    found += [payload for _, payload in manifest.build(CutKind.PARTS, parts).manifests]
    return found


def _safetensors(header: bytes, tail: int) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(tail)


_SAFETENSORS: Final = (
    _safetensors(b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}', 24),
    _safetensors(
        b'{"__metadata__":{"format":"pt"},"\\u00e9":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},'
        b'"b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}  ',
        10,
    ),
    _safetensors(b"{}", 0),
)
_BINARY_TOKENS: Final = (
    *(
        b"\0" * 4,
        b"\0" * 8,
        b"\xff" * 4,
        b"\xff" * 8,
        b"\x01\0\0\0",
        b"\x02\0\0\0",
        b"\0\0\0\x80",
        b"\x01\0\0\0\0\0\0\0",
    ),
    *(
        GROUP_MAGIC,
        JOURNAL_MAGIC,
        b"\x04\x01\x03\0\x05\0\0\0",
        b"\x80",
        b"\x81\xa1e",
        b"\xc4\x01",
        b"\xdf\xff\xff\xff\xff",
    ),
    *(b"\x00" * 32, b"\x01" * 40, b"LMAN\x01\x01\x01\x00", (4 << 20).to_bytes(8, "little"), b"\xcf" + b"\xff" * 8),
)
_JSON_TOKENS: Final = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'\\"', b"\\ud800", b"\\u0000", b" ", b"\n", b"-0", b"1e9"),
    *(b'"dtype":"F4",', b'"shape":[],', b'"data_offsets":[0,0]', b'"__metadata__":{', b'"a":"b"', b"\xed\xa0\x80"),
    *(b"true", b"null", b"\xef\xbb\xbf", b"1" * 5000, b"0.5", b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'),
)
_CHUNK_TOKENS: Final = (*_BINARY_TOKENS, b"\x01\0\0\x01", bytes(CHUNK_RECORD.size), b"\x93\x01", b"\x94\x01")
_REFUSED: Final = (LakeError,)
_SEALED: Final = b"\x01"
STORE_TARGETS: Final = (
    Target("manifest", read_manifest, _good_manifests(), _BINARY_TOKENS, _REFUSED),
    Target("superblock", read_superblock, [_SEALED + _SUPERBLOCK], _BINARY_TOKENS, _REFUSED),
    Target(
        "segment-header",
        read_segment_header,
        [_SEALED + bytes(pack_segment_header(_IDENTITY, _SEGMENT, SegmentKind.LARGE)[: SEGMENT_HEADER.size])],
        _BINARY_TOKENS,
        _REFUSED,
    ),
    Target("journal", read_journal, [_SEALED + _journal()], _BINARY_TOKENS, _REFUSED),
    Target(
        "checkpoint",
        read_checkpoint_file,
        [_SEALED + _checkpoint(_records(Op.INSERT), 2), _SEALED + _checkpoint(b"", 0)],
        _BINARY_TOKENS,
        _REFUSED,
    ),
    Target("records", read_record, _good_records(), _CHUNK_TOKENS, _REFUSED),
    Target("safetensors", read_safetensors, _SAFETENSORS, _JSON_TOKENS, _REFUSED),
)
