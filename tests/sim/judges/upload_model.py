"""Multipart uploads in the model: names of a bucket that no client can make, beside the real ones.

    bucket, key, upload id             an upload
    bucket, key, upload id, number     a part of it: its blob, marked with its ETag

So the promises about names over crashes (only the last changes are lost, acknowledged ones survive) hold for uploads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from engine.format.columns import singly
from engine.format.layouts import Op, Table
from engine.tables.merged_tables import TableTransaction
from engine.tables.views import Transaction
from engine.uploads.keys import UPLOADS_BEGIN, UPLOADS_END, upload_of
from engine.uploads.lifecycle import whole_etag
from lakefs.errors import BucketNotFound, InvalidPart, InvalidPartOrder, LakeError, UploadNotFound
from lakefs.ids import BlobId
from lakefs.wire import messages as m
from tests.sim.judges.state import NO_BLOB, Answer, Bound, State

UPLOADS: Final = "\0uploads"
Request = m.UploadCreate | m.UploadPut | m.UploadComplete | m.UploadAbort
Bind = Callable[[State, str, str, Bound, m.Condition, bool], State | type[LakeError]]
NO_PART: Final = Bound(NO_BLOB)


def upload_name(bucket: str, key: str, upload: bytes) -> str:
    """Return the name of an upload in the model."""
    return f"{bucket}\0{key}\0{upload.hex()}"


def part_name(bucket: str, key: str, upload: bytes, number: int) -> str:
    """Return the name of a part in the model."""
    return f"{upload_name(bucket, key, upload)}\0{number:05}"


def part_bound(blob: bytes, etag: bytes) -> Bound:
    """Return the value of a part's name."""
    return Bound(BlobId(blob), mark=etag)


def without_uploads(state: State, bucket: str) -> State:
    """Return the state without a bucket's uploads."""
    return _with(state, {name: b for name, b in _uploads(state).items() if not name.startswith(bucket + "\0")})


def find_upload(state: State, upload: bytes) -> str | None:
    """Return the name of an unfinished upload, by its id."""
    ending = "\0" + upload.hex()
    return next((name for name in _uploads(state) if name.endswith(ending)), None)


def without_upload(state: State, name: str) -> State:
    """Return the state without an upload and its parts."""
    return _with(state, {other: b for other, b in _uploads(state).items() if not other.startswith(name)})


def unfinished(state: State) -> list[bytes]:
    """Return the ids of all uploads."""
    return [bytes.fromhex(name.split("\0")[2]) for name in _uploads(state) if name.count("\0") == 2]


def removed_uploads(transaction: Transaction) -> list[bytes]:
    """Return the ids of the uploads that a transaction removes."""
    assert isinstance(transaction, TableTransaction)
    return [
        upload_of(key)
        for op, table, key, _ in singly(transaction.mutations)
        if op is Op.DELETE and table is Table.UPLOADS and UPLOADS_BEGIN <= key < UPLOADS_END
    ]


def parts_of(state: State, request: m.UploadParts) -> dict[int, tuple[bytes, bytes]] | type[LakeError]:
    """Return UploadParts' answer when all parts are asked for: blob and ETag by number."""
    if request.bucket not in state:
        return BucketNotFound
    name = upload_name(request.bucket, request.key, request.upload)
    if name not in _uploads(state):
        return UploadNotFound
    return {number: (bound.blob, bound.mark) for number, bound in _parts(state, name).items() if number > request.after}


def apply_upload(
    state: State, request: Request, blobs: Sequence[BlobId], bind: Bind
) -> tuple[State, list[Answer]] | type[LakeError]:
    """Return the next state and the answer; `blobs` holds the id of an upload that was begun."""
    if request.bucket not in state:
        return BucketNotFound
    uploads = _uploads(state)
    if isinstance(request, m.UploadCreate):
        if not blobs:
            return state, [None]  # refused before it had an id: the model knows no reason if the bucket exists
        name = upload_name(request.bucket, request.key, bytes(blobs[0]))
        return _with(state, {**uploads, name: NO_PART}), [None]
    name = upload_name(request.bucket, request.key, request.upload)
    if name not in uploads:
        return UploadNotFound
    if isinstance(request, m.UploadPut):
        part = f"{name}\0{request.number:05}"
        return _with(state, {**uploads, part: part_bound(request.blob, request.etag)}), [None]
    ended = without_upload(state, name)
    if isinstance(request, m.UploadAbort):
        return ended, [None]
    parts = _parts(state, name)
    if request.numbers != sorted(set(request.numbers)):
        return InvalidPartOrder
    for number, etag in zip(request.numbers, request.etags, strict=True):
        if number not in parts or parts[number].mark != etag:
            return InvalidPart
    whole = Bound(BlobId(request.blob), etag=whole_etag(request.etags).decode())
    outcome = bind(ended, request.bucket, request.key, whole, request.condition, False)
    return outcome if isinstance(outcome, type) else (outcome, [whole])


def _uploads(state: State) -> Mapping[str, Bound]:
    return state.get(UPLOADS, {})


def _parts(state: State, name: str) -> dict[int, Bound]:
    begin = name + "\0"
    return {int(other[len(begin) :]): bound for other, bound in _uploads(state).items() if other.startswith(begin)}


def _with(state: State, uploads: Mapping[str, Bound]) -> State:
    others = {bucket: keys for bucket, keys in state.items() if bucket != UPLOADS}
    return {**others, UPLOADS: uploads} if uploads else others
