"""The names of a store as S3 understands them: buckets of keys, and folders that follow from the keys.

A flat map from key to blob is the whole state.  A folder exists when a key begins with it; one that was made has a
key of its own that ends in `/`.  Everything that the engine keeps as a tree (parents that come and vanish, a
folder's rename as one record) must look like this from outside.

`apply` takes a request of the protocol and gives the next state and the answer that the engine must give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lakefs.errors import (
    AlreadyExists,
    BucketNotEmpty,
    BucketNotFound,
    FolderNotEmpty,
    InvalidArgument,
    IsAFolder,
    KeyNotFound,
    LakeError,
    PreconditionFailed,
)
from lakefs.ids import EMPTY_BLOB, BlobId
from lakefs.wire import messages as m

Keys = Mapping[str, BlobId]
State = Mapping[str, Keys]
"""Bucket to key to blob.  Never changed in place."""
EMPTY: State = {}

Answer = BlobId | None | type[LakeError]
"""What an item gives: the blob that the name has now (None: none, or it was not there), or the error."""
EtagOf = Callable[[BlobId], str]


class Model:
    """How requests change names.  `etag_of` gives the ETag of a blob."""

    def __init__(self, etag_of: EtagOf) -> None:
        self._etag_of = etag_of

    def apply(
        self, state: State, request: m.Request, blobs: Sequence[BlobId]
    ) -> tuple[State, list[Answer]] | type[LakeError]:
        """The next state and each item's answer; or the error of a request that fails as a whole.

        `blobs` are those of PutObjects, in order.
        """
        if isinstance(request, (m.PutObjects, m.Commit)):
            return self._bind_all(state, request, blobs)
        if isinstance(request, m.DeleteNames):
            return self._delete_all(state, request)
        if isinstance(request, m.Rename):
            return _rename(state, request)
        if isinstance(request, m.Copy):
            return self._copy(state, request)
        if isinstance(request, m.MakeFolder):
            return _make_folder(state, request)
        if isinstance(request, m.BucketCreate):
            return AlreadyExists if request.name in state else ({**state, request.name: {}}, [None])
        assert isinstance(request, m.BucketRemove)
        if request.name not in state:
            return BucketNotFound
        if state[request.name]:
            return BucketNotEmpty
        return {bucket: keys for bucket, keys in state.items() if bucket != request.name}, [None]

    def _bind_all(
        self, state: State, request: m.PutObjects | m.Commit, blobs: Sequence[BlobId]
    ) -> tuple[State, list[Answer]]:
        bound = blobs if isinstance(request, m.PutObjects) else [BlobId(c.blob) for c in request.changes]
        answers: list[Answer] = []
        for change, blob in zip(request.changes, bound, strict=True):
            outcome = self._bind(
                state, change.bucket, change.key, blob, change.condition, change.create_bucket
            )
            if isinstance(outcome, type):
                answers.append(outcome)
            else:
                state = outcome
                answers.append(blob)
        return state, answers

    def _bind(
        self, state: State, bucket: str, key: str, blob: BlobId, condition: m.Condition, create: bool
    ) -> State | type[LakeError]:
        if bucket not in state and not create:
            return BucketNotFound
        keys = state.get(bucket, {})
        if not self._holds(keys.get(key), condition):
            return PreconditionFailed
        return {**state, bucket: {**keys, key: blob}}

    def _holds(self, present: BlobId | None, condition: m.Condition) -> bool:
        if condition.absent and present is not None:
            return False
        if condition.etags and (present is None or self._etag_of(present) not in condition.etags):
            return False
        return not (present is not None and self._etag_of(present) in condition.not_etags)

    def _delete_all(self, state: State, request: m.DeleteNames) -> tuple[State, list[Answer]]:
        answers: list[Answer] = []
        for bucket, key in request.names:
            keys = state.get(bucket)
            if keys is None:
                answers.append(BucketNotFound)
            elif not self._holds(keys.get(key), request.condition):
                answers.append(PreconditionFailed)
            else:
                answers.append(keys.get(key))
                state = {**state, bucket: {name: blob for name, blob in keys.items() if name != key}}
        return state, answers

    def _copy(self, state: State, request: m.Copy) -> tuple[State, list[Answer]] | type[LakeError]:
        if request.bucket not in state:
            return BucketNotFound
        if request.to_bucket not in state and not request.create_bucket:
            return BucketNotFound
        blob = state[request.bucket].get(request.key)
        if blob is None:
            return KeyNotFound
        outcome = self._bind(state, request.to_bucket, request.to_key, blob, request.condition, True)
        return outcome if isinstance(outcome, type) else (outcome, [blob])


def _rename(state: State, request: m.Rename) -> tuple[State, list[Answer]] | type[LakeError]:
    source, target = request.key, request.to_key
    if request.bucket not in state:
        return BucketNotFound
    if request.to_bucket not in state and not request.create_bucket:
        return BucketNotFound
    state = {request.to_bucket: {}, **state}
    same_bucket = request.bucket == request.to_bucket
    if source.endswith("/") != target.endswith("/"):
        return InvalidArgument
    if source.endswith("/") and same_bucket and target.startswith(source) and target != source:
        return InvalidArgument
    keys = state[request.bucket]
    if not exists(keys, source):
        return KeyNotFound
    if same_bucket and source == target:
        return state, [keys.get(source)]
    if exists(state[request.to_bucket], target):
        if not request.replace:
            return AlreadyExists
        if target.endswith("/") and has_children(state[request.to_bucket], target):
            return FolderNotEmpty
    moving = {
        key: blob
        for key, blob in keys.items()
        if key == source or (source.endswith("/") and key.startswith(source))
    }
    left = {key: blob for key, blob in keys.items() if key not in moving}
    state = {**state, request.bucket: left}
    onto = {key: blob for key, blob in state[request.to_bucket].items() if key != target}
    onto.update({target + key[len(source) :]: blob for key, blob in moving.items()})
    return {**state, request.to_bucket: onto}, [moving.get(source)]


def _make_folder(state: State, request: m.MakeFolder) -> tuple[State, list[Answer]] | type[LakeError]:
    if request.bucket not in state and not request.create_bucket:
        return BucketNotFound
    keys = state.get(request.bucket, {})
    key = request.key if request.key.endswith("/") else request.key + "/"
    if request.exclusive and (exists(keys, key) or key[:-1] in keys):
        return AlreadyExists
    blob = keys.get(key, EMPTY_BLOB)
    return {**state, request.bucket: {**keys, key: blob}}, [blob]


# --- looking -----------------------------------------------------------------------------------------


def exists(keys: Keys, key: str) -> bool:
    """Whether the name is there: the key itself or, for a folder, anything below it."""
    return key in keys or (key.endswith("/") and has_children(keys, key))


def has_children(keys: Keys, folder: str) -> bool:
    """Whether a key lies below the folder."""
    return any(key.startswith(folder) and key != folder for key in keys)


def look_up(state: State, bucket: str, key: str) -> Answer:
    """What StatNames answers for a name: its blob, None for a folder that nobody made, or the error."""
    keys = state.get(bucket)
    if keys is None:
        return BucketNotFound
    if key and not exists(keys, key):
        return KeyNotFound
    return keys.get(key)


def look_open(state: State, bucket: str, key: str) -> Answer:
    """What OpenObjects answers for a name."""
    found = look_up(state, bucket, key)
    return IsAFolder if found is None else found


def page_of(state: State, request: m.ListNames) -> list[tuple[str, BlobId | None]] | type[LakeError]:
    """The elements of a page: (key, blob), or (prefix, None) where keys are rolled up."""
    keys = state.get(request.bucket)
    if keys is None:
        return BucketNotFound
    elements: dict[str, BlobId | None] = {}
    for key in sorted(keys, key=str.encode):
        if not key.startswith(request.prefix):
            continue
        cut = key.find("/", len(request.prefix)) if request.delimiter else -1
        element = key if cut < 0 else key[: cut + 1]
        elements.setdefault(element, None if cut >= 0 else keys[key])
    behind = [item for item in elements.items() if item[0].encode() > request.after.encode()]
    return behind[: request.limit]
