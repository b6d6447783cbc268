"""Multipart uploads: begun, given parts, completed or aborted, on one view or transaction.

Pure decisions, as in `engine.namespace.names`; a function that raises has changed nothing.  Rules kept here:
- An upload is to a key as text in one bucket, not to a node.  Changes of names and folders during the upload do not
  affect it, and completing it makes the folders that the key needs.
- A part's blob is referred to from the step that records the part until the step that replaces it or ends the upload.
  Completing binds the name and removes the upload in one transaction.
- An object that came from an upload carries its id, so that a repeated completion gets the same answer.
- Uploads of a removed bucket cannot be reached any more (node ids are not used twice); upkeep removes them before gc
  marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.chunks.manifests import HeldBlob
from engine.format.layouts import EtagKind, Node, Table, node_key, unpack_node
from engine.format.records import PartRecord, UploadRecord, decode_record
from engine.namespace.binding import bind
from engine.namespace.buckets import BucketRef
from engine.namespace.keys import check_key, lookup_path
from engine.namespace.names import resolve
from engine.namespace.object_stat import bound_at, check_record_size, new_object
from engine.namespace.refusals import shown_name, subject
from engine.namespace.tree import Resolved
from engine.tables.views import Transaction, View
from engine.uploads.keys import UPLOAD_ID_BYTES, bucket_of, part_key, part_of, parts_range, upload_key
from engine.uploads.object_parts import keep_parts
from lakefs.errors import (
    InvalidArgument,
    InvalidPart,
    InvalidPartOrder,
    PartTooSmall,
    RequestTooLarge,
    StoreUnusable,
    UploadNotFound,
)
from lakefs.ids import EMPTY_BLOB, ChunkKind, kind_of
from lakefs.limits import (
    PART_BYTES_MAX,
    PART_CHECKSUMS_BYTES_MAX,
    PART_CHUNKS_MAX,
    PART_NUMBER_MAX,
    UPLOAD_DETAILS_BYTES_MAX,
)
from lakefs.wire.messages import Condition, ObjectAttributes, PartStat, UploadStat

PART_ETAG_BYTES: Final = 16
_VERSION: Final = 1
_ROOM_FOR_RESULT: Final = PART_CHECKSUMS_BYTES_MAX + 128
"""Growth of an object's attributes when its upload is completed: ETag, checksums, upload id, chunk count."""
_encoder: Final = msgspec.msgpack.Encoder()
_uploads: Final = msgspec.msgpack.Decoder(UploadRecord)
_parts: Final = msgspec.msgpack.Decoder(PartRecord)


@dataclass(frozen=True)
class UploadRef:
    """The upload that a request names: its bucket, its key, its id."""

    bucket: BucketRef
    key: str
    upload: bytes

    @property
    def shown(self) -> str:
        """The upload, as messages show it."""
        return f"upload {self.upload[:UPLOAD_ID_BYTES].hex()} to {shown_name(self.bucket, self.key)}"


def unpack_upload(value: bytes) -> UploadRecord:
    """Decode an upload's record.  Raises StoreUnusable for an unknown version."""
    record = decode_record(_uploads, value, "an upload's record")
    if record.version != _VERSION:
        raise StoreUnusable(f"upload record version {record.version} is not known")
    return record


def unpack_part(value: bytes) -> PartRecord:
    """Decode a part's record.  Raises StoreUnusable for an unknown version."""
    record = decode_record(_parts, value, "a part's record")
    if record.version != _VERSION:
        raise StoreUnusable(f"part record version {record.version} is not known")
    return record


def whole_etag(etags: Sequence[bytes]) -> bytes:
    """Return the ETag of the whole as S3 makes it: MD5 of the parts' MD5s, in hex, `-`, and their count."""
    digest = hashlib.md5(b"".join(etags), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(etags)}".encode()


# --- beginning and looking -----------------------------------------------------------------------------


def create_upload(
    txn: Transaction, ref: UploadRef, attributes: ObjectAttributes, details: Mapping[str, str], now_ns: int
) -> UploadStat:
    """Begin an upload with a new id.  Raises InvalidName, InvalidArgument, RequestTooLarge (attributes, details)."""
    path = check_key(ref.key)
    plain = msgspec.structs.replace(attributes, etag_kind=0, etag=b"", checksums={})
    node = new_object(EMPTY_BLOB, 0, 1, plain, now_ns)
    later = msgspec.structs.replace(node.attributes, bound_ns=None)  # it is bound when it is completed
    packed = msgspec.structs.replace(node, blob=None, mtime_ns=attributes.mtime_ns, attributes=later).pack()
    check_record_size(packed + bytes(_ROOM_FOR_RESULT))
    if len(_encoder.encode(details)) > UPLOAD_DETAILS_BYTES_MAX:
        raise RequestTooLarge(f"details of an upload have at most {UPLOAD_DETAILS_BYTES_MAX} bytes")
    record = UploadRecord(_VERSION, ref.key, now_ns, packed, dict(details))
    txn.insert(Table.UPLOADS, upload_key(ref.bucket.node, path, ref.upload), _encoder.encode(record))
    return to_upload_stat(ref, record)


def find_upload(view: View, ref: UploadRef) -> tuple[bytes, UploadRecord] | None:
    """Return the upload's key in the table and its record; None if it has ended or never existed."""
    if len(ref.upload) != UPLOAD_ID_BYTES:
        return None
    key = upload_key(ref.bucket.node, lookup_path(ref.key), ref.upload)
    value = view.get(Table.UPLOADS, key)
    if value is None:
        return None
    record = unpack_upload(value)
    return (key, record) if record.key == ref.key else None


def require_upload(view: View, ref: UploadRef) -> tuple[bytes, UploadRecord]:
    """Return the same as `find_upload`.  Raises UploadNotFound if it has ended or never existed."""
    found = find_upload(view, ref)
    if found is None:
        raise upload_not_found(ref)
    return found


def upload_not_found(ref: UploadRef) -> UploadNotFound:
    """The upload has ended, or never existed."""
    return UploadNotFound(
        f"{ref.shown} does not exist: it was completed or aborted, has expired, or never was; begin another",
        subject=subject(ref.bucket, ref.key),
    )


def parts_of(view: View, upload: bytes, after: int, limit: int) -> list[tuple[int, PartRecord]]:
    """Return at most `limit` parts with numbers above `after`, ascending."""
    page: list[tuple[int, PartRecord]] = []
    for key, value in view.scan(Table.UPLOADS, *parts_range(upload, after)):
        if len(page) == limit:
            break
        page.append((part_of(key)[1], unpack_part(value)))
    return page


# --- parts ---------------------------------------------------------------------------------------------


def put_part(
    txn: Transaction,
    ref: UploadRef,
    number: int,
    held: HeldBlob,
    etag: bytes,
    checksums: Mapping[str, bytes],
    now_ns: int,
) -> PartStat:
    """Record a part, replacing the one with its number, whose blob is then unreferenced.

    Raises UploadNotFound, InvalidArgument, InvalidPart (too many chunks), RequestTooLarge (over 5 GiB; checksums).
    """
    if not 1 <= number <= PART_NUMBER_MAX:
        raise InvalidArgument(f"part number {number}; parts have numbers from 1 to {PART_NUMBER_MAX}")
    if len(etag) != PART_ETAG_BYTES:
        raise InvalidArgument(f"a part's ETag has {PART_ETAG_BYTES} bytes, an MD5, not {len(etag)}")
    if held.size_bytes > PART_BYTES_MAX:
        raise RequestTooLarge(f"part {number} has {held.size_bytes} bytes; the limit is {PART_BYTES_MAX}")
    if held.chunk_count > PART_CHUNKS_MAX:
        raise InvalidPart(
            f"part {number} has {held.chunk_count} chunks; the limit is {PART_CHUNKS_MAX}: store its bytes anew"
        )
    check_checksums(checksums)
    key, _ = require_upload(txn, ref)
    assert len(ref.upload) == UPLOAD_ID_BYTES, "an upload that exists has a whole id"
    record = PartRecord(_VERSION, key, held.blob, held.size_bytes, etag, now_ns, dict(checksums))
    txn.put(Table.UPLOADS, part_key(ref.upload, number), _encoder.encode(record))
    return to_part_stat(number, record)


def check_checksums(checksums: Mapping[str, bytes]) -> None:
    """Raise RequestTooLarge if the checksums take more room than five do."""
    if len(_encoder.encode(checksums)) > PART_CHECKSUMS_BYTES_MAX:
        raise RequestTooLarge(f"checksums have at most {PART_CHECKSUMS_BYTES_MAX} bytes in all")


# --- ending --------------------------------------------------------------------------------------------


def complete_upload(
    txn: Transaction,
    ref: UploadRef,
    listed: Sequence[tuple[int, bytes]],
    held: HeldBlob,
    checksums: Mapping[str, bytes],
    condition: Condition,
    part_bytes_min: int,
    now_ns: int,
) -> Resolved:
    """Bind the name to the whole and remove the upload with all its parts; returns the node as bound.

    The list of its parts (numbers, sizes, checksums) is kept.

    `listed` are (number, ETag).  Raises UploadNotFound, InvalidPart, InvalidPartOrder, PartTooSmall, InvalidArgument
    (the blob is not as long as its parts), and the errors of `bind`.
    """
    key, record = require_upload(txn, ref)
    parts = {part_of(key)[1]: unpack_part(value) for key, value in txn.scan(Table.UPLOADS, *parts_range(ref.upload))}
    size_bytes = check_listed(ref, listed, parts, part_bytes_min)
    if size_bytes != held.size_bytes:
        raise InvalidArgument(
            f"{ref.shown}: its parts have {size_bytes} bytes, the blob {held.size_bytes}",
            subject=subject(ref.bucket, ref.key),
        )
    check_checksums(checksums)
    etag = whole_etag([etag for _, etag in listed])
    node = _whole_node(unpack_node(record.node), ref, etag, held, checksums, now_ns)
    bound = bind(txn, ref.bucket, ref.key, node, condition, now_ns)
    keep_parts(txn, ref.upload, bound.node_id, [(number, parts[number]) for number, _ in listed])
    _remove(txn, key, ref.upload, parts)
    return bound


def completed_before(view: View, ref: UploadRef, listed: Sequence[tuple[int, bytes]]) -> Resolved | None:
    """Return the node that an earlier completion from these parts bound to the name, if it is still bound."""
    found = resolve(view, ref.bucket, ref.key) if ref.key else None
    if found is None or len(ref.upload) != UPLOAD_ID_BYTES:
        return None
    attributes = found.node.attributes
    etag = whole_etag([etag for _, etag in listed])
    return found if attributes.upload == ref.upload and attributes.etag == etag else None


def check_listed(
    ref: UploadRef, listed: Sequence[tuple[int, bytes]], parts: Mapping[int, PartRecord], part_bytes_min: int
) -> int:
    """Return the total length of the listed parts.  Raises InvalidPart, InvalidPartOrder, PartTooSmall."""
    where = subject(ref.bucket, ref.key)
    if not listed:
        raise InvalidPart(f"{ref.shown} cannot be completed from no parts; list at least one", subject=where)
    previous = 0
    for number, _ in listed:
        if number <= previous:
            raise InvalidPartOrder(
                f"{ref.shown}: part {number} is listed behind part {previous}; list parts in ascending order",
                subject=where,
            )
        previous = number
    sizes: list[int] = []
    for number, etag in listed:
        part = parts.get(number)
        if part is None or part.etag != etag:
            reason = "was not uploaded" if part is None else f"has the ETag {part.etag.hex()}, not {etag[:16].hex()}"
            raise InvalidPart(f"{ref.shown}: part {number} {reason}", subject=where)
        sizes.append(part.size_bytes)
    for (number, _), size_bytes in zip(listed[:-1], sizes[:-1], strict=True):
        if size_bytes < part_bytes_min:
            raise PartTooSmall(
                f"{ref.shown}: part {number} has {size_bytes} bytes; all but the last have at least {part_bytes_min}",
                subject=where,
            )
    return sum(sizes)


def _whole_node(
    node: Node, ref: UploadRef, etag: bytes, held: HeldBlob, checksums: Mapping[str, bytes], now_ns: int
) -> Node:
    chunk_count = held.chunk_count if kind_of(held.blob) is ChunkKind.MANIFEST else 0
    attributes = msgspec.structs.replace(
        node.attributes, etag=etag, checksums=dict(checksums), chunk_count=chunk_count, upload=ref.upload
    )
    whole = msgspec.structs.replace(
        node,
        blob=held.blob,
        size_bytes=held.size_bytes,
        mtime_ns=node.mtime_ns or now_ns,
        ctime_ns=now_ns,
        etag_kind=EtagKind.MULTIPART,
        attributes=attributes,
    )
    return bound_at(whole, now_ns)


def abort_upload(txn: Transaction, ref: UploadRef) -> None:
    """Remove an upload and its parts; the name stays as it is.  Raises UploadNotFound."""
    key, _ = require_upload(txn, ref)
    remove_upload(txn, key)


def remove_upload(txn: Transaction, key: bytes) -> None:
    """Remove the upload with this key in the table, and its parts.  The caller has seen that it exists."""
    upload = key[-UPLOAD_ID_BYTES:]
    parts = [part_of(found)[1] for found, _ in txn.scan(Table.UPLOADS, *parts_range(upload))]
    _remove(txn, key, upload, parts)


def _remove(txn: Transaction, key: bytes, upload: bytes, parts: Sequence[int] | Mapping[int, PartRecord]) -> None:
    txn.delete(Table.UPLOADS, key)
    for number in parts:
        txn.delete(Table.UPLOADS, part_key(upload, number))


def is_orphan(view: View, key: bytes) -> bool:
    """Return True if the bucket of an upload, given by its key in the table, was removed."""
    return view.get(Table.BUCKETS, node_key(bucket_of(key))) is None


# --- messages ------------------------------------------------------------------------------------------


def to_upload_stat(ref: UploadRef, record: UploadRecord) -> UploadStat:
    """The message that describes an upload."""
    return UploadStat(ref.bucket.name, ref.key, ref.upload, record.created_ns, record.details)


def to_part_stat(number: int, record: PartRecord) -> PartStat:
    """The message that describes a part, without its layout."""
    return PartStat(number, record.size_bytes, record.etag, record.mtime_ns, record.blob, record.checksums)
