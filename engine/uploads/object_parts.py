"""Part lists of objects: kept when an upload is completed, for requests that ask for one part of the object.

    header   3, upload id (16), 0 (2)          node, number of parts
    page     3, upload id (16), page (2)       the parts at positions (page - 1) * 128 and behind

Rules kept here:
- The list is beside the object's node, not in it: reading an object does not pay for it.
- It belongs to the node that the header names, while that node carries the upload's id.  Replacing or removing an
  object leaves the list; ids of uploads and nodes are not used twice, so upkeep can find and remove it before gc marks.
- Nothing here refers to chunks: losing a list loses only the boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from engine.format.layouts import Table, node_key, unpack_node
from engine.format.records import ObjectPartsHeader, ObjectPartsPage, PartRecord, decode_record
from engine.tables.views import Transaction, View
from engine.uploads.keys import UPLOAD_ID_BYTES, object_parts_key
from lakefs.errors import StoreUnusable
from lakefs.ids import NodeId
from lakefs.limits import PART_NUMBER_MAX
from lakefs.wire.messages import ObjectPart, ObjectParts

PAGE_PARTS: Final = 128
PAGES_MAX: Final = -(-PART_NUMBER_MAX // PAGE_PARTS)
_VERSION: Final = 1
_encoder: Final = msgspec.msgpack.Encoder()
_headers: Final = msgspec.msgpack.Decoder(ObjectPartsHeader)
_pages: Final = msgspec.msgpack.Decoder(ObjectPartsPage)


def keep_parts(txn: Transaction, upload: bytes, node: NodeId, parts: Sequence[tuple[int, PartRecord]]) -> None:
    """Record the parts, in ascending order of numbers, of the node that came from an upload."""
    assert all(first[0] < second[0] for first, second in pairwise(parts)), "numbers rise"
    header = ObjectPartsHeader(_VERSION, node, len(parts))
    txn.put(Table.UPLOADS, object_parts_key(upload, 0), _encoder.encode(header))
    offset = 0
    for number, first in enumerate(range(0, len(parts), PAGE_PARTS), 1):
        assert number <= PAGES_MAX, "an object has a bounded number of parts"
        page = parts[first : first + PAGE_PARTS]
        listed = [(part_number, part.size_bytes, part.checksums) for part_number, part in page]
        record = ObjectPartsPage(_VERSION, offset, listed)
        txn.put(Table.UPLOADS, object_parts_key(upload, number), _encoder.encode(record))
        offset += sum(part.size_bytes for _, part in page)


def find_parts(view: View, upload: bytes, after: int, limit: int) -> ObjectParts:
    """Return at most `limit` parts with numbers above `after`, and the count of all; 0 if none are kept."""
    header = _header(view, upload)
    if header is None:
        return ObjectParts(0, [])
    found: list[ObjectPart] = []
    for part in _parts_behind(view, upload, header.part_count, after):
        if len(found) == limit:
            return ObjectParts(header.part_count, found, found[-1].number)
        found.append(part)
    return ObjectParts(header.part_count, found)


def unpack_header(value: bytes) -> ObjectPartsHeader:
    """Decode a header's record.  Raises StoreUnusable for an unknown version."""
    header = decode_record(_headers, value, "the header of an object's parts")
    if header.version != _VERSION:
        raise StoreUnusable(f"header of an object's parts, version {header.version}, is not known")
    return header


def is_left_over(view: View, upload: bytes, header: ObjectPartsHeader) -> bool:
    """Return True if the object of these parts was removed, or has other content now."""
    value = view.get(Table.NODES, node_key(NodeId(header.node)))
    return value is None or unpack_node(value).attributes.upload != upload


def remove_parts(txn: Transaction, upload: bytes) -> None:
    """Remove the part list of an object."""
    for key in [key for key, _ in txn.scan(Table.UPLOADS, *_range(upload))]:
        txn.delete(Table.UPLOADS, key)


def problem_of(view: View, upload: bytes) -> str:
    """Return the problem with the kept parts of an existing object; empty if there is none."""
    header = _header(view, upload)
    if header is None or is_left_over(view, upload, header):
        return ""
    value = view.get(Table.NODES, node_key(NodeId(header.node)))
    assert value is not None, "it is not left over"
    parts = list(_parts_behind(view, upload, header.part_count, 0))
    ends = list(accumulate((part.size_bytes for part in parts), initial=0))
    if len(parts) != header.part_count or ends[-1] != unpack_node(value).size_bytes:
        return f"{len(parts)} parts of {ends[-1]} bytes are kept, which are not those of the object"
    return "" if [part.offset for part in parts] == ends[:-1] else "its parts are not in order"


def _header(view: View, upload: bytes) -> ObjectPartsHeader | None:
    if len(upload) != UPLOAD_ID_BYTES:
        return None
    value = view.get(Table.UPLOADS, object_parts_key(upload, 0))
    return None if value is None else unpack_header(value)


def _parts_behind(view: View, upload: bytes, part_count: int, after: int) -> Iterator[ObjectPart]:
    """Yield parts with numbers above `after`.  Numbers rise, so a part is at the position of its number or before."""
    pages = -(-part_count // PAGE_PARTS)
    first = min(after // PAGE_PARTS + 1, pages)
    while first > 1 and _page(view, upload, first).parts[0][0] > after + 1:
        first -= 1
    for number in range(first, pages + 1):
        page = _page(view, upload, number)
        offset = page.offset_bytes
        for part_number, size_bytes, checksums in page.parts:
            if part_number > after:
                yield ObjectPart(part_number, offset, size_bytes, checksums)
            offset += size_bytes


def _page(view: View, upload: bytes, number: int) -> ObjectPartsPage:
    value = view.get(Table.UPLOADS, object_parts_key(upload, number))
    page = None if value is None else decode_record(_pages, value, "a page of parts")
    if page is None or page.version != _VERSION or not page.parts:
        raise StoreUnusable(f"page {number} of the parts of upload {upload.hex()} is not there or not known")
    return page


def _range(upload: bytes) -> tuple[bytes, bytes]:
    return object_parts_key(upload, 0), object_parts_key(upload, PAGES_MAX) + b"\0"
