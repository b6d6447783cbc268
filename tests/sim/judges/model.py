"""The names of a store as S3 understands them: buckets of keys, and folders that follow from the keys.

The whole state is a flat map from key to what it is bound to.  A folder exists when a key begins with it; a folder that
was made has a key of its own that ends in `/`.  Everything that the engine keeps as a tree (parents that are made and
vanish, a folder's rename as one record) must look like this from outside.  Nodes have no numbers here: the sign of
`keep_node`, set by the witness, says whether it is the present one.

`apply` takes a request of the protocol and returns the next state and the answer that the engine must give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from lakefs.errors import (
    AlreadyExists,
    BucketNotEmpty,
    BucketNotFound,
    FolderNotEmpty,
    InvalidArgument,
    IsAFolder,
    KeyDeleted,
    KeyNotFound,
    LakeError,
    NotAFolder,
    PreconditionFailed,
    VersionIsMarker,
)
from lakefs.ids import EMPTY_BLOB, BlobId
from lakefs.wire import messages as m
from tests.sim.judges.state import (
    EMPTY as EMPTY,
    MARK as MARK,
    NO_BLOB as NO_BLOB,
    Answer as Answer,
    Bound as Bound,
    Keys as Keys,
    State as State,
)
from tests.sim.judges.upload_model import UPLOADS, apply_upload, without_uploads
from tests.sim.judges.version_model import (
    NULL,
    SETTINGS,
    VERSIONS,
    bind,
    delete_version,
    find,
    has_old,
    is_deleted,
    is_marker,
    keeps,
    mark_deleted,
    mark_moved,
    put,
    with_setting,
)

EtagOf = Callable[[BlobId], str]


NO_BUCKETS: Final = frozenset((UPLOADS, VERSIONS, SETTINGS))
"""Names in a state that are not buckets."""
_UPLOADING: Final = (m.UploadCreate, m.UploadPut, m.UploadComplete, m.UploadAbort)


class Model:
    """Applies requests to names.  `etag_of` gives the ETag of a blob."""

    def __init__(self, etag_of: EtagOf) -> None:
        self._etag_of = etag_of

    def apply(
        self, state: State, request: m.Request, blobs: Sequence[BlobId]
    ) -> tuple[State, list[Answer]] | type[LakeError]:
        """Return the next state and each item's answer; or the error of a request that fails as a whole.

        `blobs` are those of PutObjects, in order; for UploadCreate the id of the new upload.
        """
        outcome = self._apply(state, request, blobs)
        if isinstance(outcome, type):
            return outcome
        after, answers = outcome
        return after, [answer.plain() if isinstance(answer, Bound) else answer for answer in answers]

    def _apply(
        self, state: State, request: m.Request, blobs: Sequence[BlobId]
    ) -> tuple[State, list[Answer]] | type[LakeError]:
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
        if isinstance(request, m.RemoveFolder):
            return _remove_folder(state, request)
        if isinstance(request, m.MakeSymlink):
            return _make_symlink(state, request)
        if isinstance(request, m.SetAttributes):
            return _set_attributes(state, request)
        if isinstance(request, _UPLOADING):
            return apply_upload(state, request, blobs, self._bind)
        assert isinstance(request, (m.BucketCreate, m.BucketRemove, m.BucketSet))
        return _bucket(state, request)

    def _bind_all(
        self, state: State, request: m.PutObjects | m.Commit, blobs: Sequence[BlobId]
    ) -> tuple[State, list[Answer]]:
        bound = blobs if isinstance(request, m.PutObjects) else [BlobId(c.blob) for c in request.changes]
        answers: list[Answer] = []
        for change, blob in zip(request.changes, bound, strict=True):
            present = state.get(change.bucket, {}).get(change.key)
            outcome = self._bind(state, change.bucket, change.key, Bound(blob), change.condition, change.create_bucket)
            if isinstance(outcome, type):
                answers.append(outcome)
            elif change.keep_node and not _may_keep(change, present):
                answers.append(PreconditionFailed)
            else:
                if change.keep_node and present is not None and present.blob == blob:
                    kept = Bound(blob, is_null=present.is_null, order=present.order)
                    outcome = bind(state, change.bucket, change.key, kept)
                state = outcome
                answers.append(Bound(blob))
        return state, answers

    def _bind(
        self, state: State, bucket: str, key: str, bound: Bound, condition: m.Condition, create: bool
    ) -> State | type[LakeError]:
        if bucket not in state and not create:
            return BucketNotFound
        keys = state.get(bucket, {})
        refused = self._refusal(keys.get(key), condition)
        if refused is not None:
            return refused
        return put(state, bucket, key, bound)

    def _refusal(self, present: Bound | None, condition: m.Condition) -> type[LakeError] | None:
        if present is None:
            return KeyNotFound if condition.etags else None
        return None if self._references(present, condition) else PreconditionFailed

    def _references(self, present: Bound, condition: m.Condition) -> bool:
        etag = present.etag or (self._etag_of(present.blob) if present.blob else "")
        if condition.absent or (condition.etags and etag not in condition.etags):
            return False
        return etag not in condition.not_etags

    def _delete_all(self, state: State, request: m.DeleteNames) -> tuple[State, list[Answer]]:
        answers: list[Answer] = []
        versions = request.versions or [""] * len(request.names)
        for (bucket, key), version in zip(request.names, versions, strict=True):
            keys = state.get(bucket)
            if keys is None:
                answers.append(BucketNotFound)
            elif version and (keeps(state, bucket, key) or version != NULL):
                if keeps(state, bucket, key):
                    state, gone_version = delete_version(state, bucket, key, version)
                    answers.append(gone_version)
                else:
                    answers.append(None)
                gone = key if key in keys and key not in state[bucket] else ""
                state = {**state, bucket: _kept(state[bucket], gone, request.keep_folder)}
            elif refused := self._refusal(keys.get(key), request.condition):
                answers.append(refused)
            else:
                answers.append(keys.get(key))
                if keeps(state, bucket, key):
                    state = mark_deleted(state, bucket, key)
                left = {name: bound for name, bound in keys.items() if name != key}
                gone = key if key in keys else ""
                state = {**state, bucket: _kept(left, gone, request.keep_folder)}
        return state, answers

    def _copy(self, state: State, request: m.Copy) -> tuple[State, list[Answer]] | type[LakeError]:
        if request.bucket not in state:
            return BucketNotFound
        if request.to_bucket not in state and not request.create_bucket:
            return BucketNotFound
        bound = state[request.bucket].get(request.key)
        if request.version:
            found = find(state, request.bucket, request.key, request.version)
            if isinstance(found, type):
                return found
            if is_marker(found):
                return VersionIsMarker
            bound = found
        if bound is None:
            return not_there(state, request.bucket, request.key)
        if bound.target and request.to_key.endswith("/"):
            return InvalidArgument
        outcome = self._bind(state, request.to_bucket, request.to_key, bound, request.condition, True)
        return outcome if isinstance(outcome, type) else (outcome, [bound])


def _bucket(
    state: State, request: m.BucketCreate | m.BucketRemove | m.BucketSet
) -> tuple[State, list[Answer]] | type[LakeError]:
    if isinstance(request, m.BucketCreate):
        return AlreadyExists if request.name in state else ({**state, request.name: {}}, [None])
    if request.name not in state:
        return BucketNotFound
    if isinstance(request, m.BucketSet):
        assert request.versioning is not None
        return with_setting(state, request.name, request.versioning), [None]
    if state[request.name] or has_old(state, request.name):
        return BucketNotEmpty
    left = with_setting(without_uploads(state, request.name), request.name, "")
    return {bucket: keys for bucket, keys in left.items() if bucket != request.name}, [None]


def _may_keep(change: m.NameChange, present: Bound | None) -> bool:
    is_object = present is not None and not present.target and not change.key.endswith("/")
    return is_object and change.keep_node > 0


def _kept(left: Keys, gone: str, keep_folder: bool) -> Keys:
    """Return the keys without `gone`; its folder stays when that is asked for."""
    folder = gone.removesuffix("/").rpartition("/")[0] + "/"
    if not keep_folder or "/" not in gone.removesuffix("/") or exists(left, folder):
        return left
    return {**left, folder: Bound(EMPTY_BLOB)}


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
        key: bound for key, bound in keys.items() if key == source or (source.endswith("/") and key.startswith(source))
    }
    left = {key: bound for key, bound in keys.items() if key not in moving}
    state = {**state, request.bucket: left}
    onto = {key: bound for key, bound in state[request.to_bucket].items() if key != target}
    if source.endswith("/"):
        onto.update({target + key[len(source) :]: bound for key, bound in moving.items()})
        state = {**state, request.to_bucket: onto}
    else:
        state = mark_moved(put(state, request.to_bucket, target, moving[source]), request.bucket, source)
    kept = _kept(state[request.bucket], source, request.keep_folder)
    return {**state, request.bucket: kept}, [moving.get(source)]


def _make_folder(state: State, request: m.MakeFolder) -> tuple[State, list[Answer]] | type[LakeError]:
    if request.bucket not in state and not request.create_bucket:
        return BucketNotFound
    keys = state.get(request.bucket, {})
    key = request.key if request.key.endswith("/") else request.key + "/"
    if request.exclusive and (exists(keys, key) or key[:-1] in keys):
        return AlreadyExists
    bound = keys.get(key, Bound(EMPTY_BLOB))
    return {**state, request.bucket: {**keys, key: bound}}, [bound]


def _remove_folder(state: State, request: m.RemoveFolder) -> tuple[State, list[Answer]] | type[LakeError]:
    keys = state.get(request.bucket)
    if keys is None:
        return BucketNotFound
    key = request.key if request.key.endswith("/") else request.key + "/"
    if not exists(keys, key):
        return NotAFolder if key[:-1] in keys else KeyNotFound
    if has_children(keys, key):
        return FolderNotEmpty
    left = {name: bound for name, bound in keys.items() if name != key}
    return {**state, request.bucket: _kept(left, key, request.keep_folder)}, [keys[key]]


def _make_symlink(state: State, request: m.MakeSymlink) -> tuple[State, list[Answer]] | type[LakeError]:
    keys = state.get(request.bucket)
    if keys is None:
        return BucketNotFound
    if request.key.endswith("/"):
        return InvalidArgument
    if exists(keys, request.key) or exists(keys, request.key + "/"):
        return AlreadyExists
    bound = Bound(NO_BLOB, request.target, request.attributes.xattrs.get(MARK, b""))
    return put(state, request.bucket, request.key, bound), [bound]


def _set_attributes(state: State, request: m.SetAttributes) -> tuple[State, list[Answer]] | type[LakeError]:
    keys = state.get(request.bucket)
    if keys is None:
        return BucketNotFound
    if request.key and not exists(keys, request.key):
        return not_there(state, request.bucket, request.key)
    bound = keys.get(request.key)
    if bound is None:
        return state, [None]
    bound = bound._replace(mark=request.xattrs.get(MARK, bound.mark) or b"")
    return {**state, request.bucket: {**keys, request.key: bound}}, [bound]


# --- looking -----------------------------------------------------------------------------------------


def exists(keys: Keys, key: str) -> bool:
    """Return whether the name exists: the key itself or, for a folder, anything below it."""
    return key in keys or (key.endswith("/") and has_children(keys, key))


def has_children(keys: Keys, folder: str) -> bool:
    """Return whether a key lies below the folder."""
    return any(key.startswith(folder) and key != folder for key in keys)


def look_up(state: State, bucket: str, key: str) -> Answer:
    """Return StatNames' answer for a name: what it is bound to, None for a folder that nobody made, or the error."""
    keys = state.get(bucket)
    if keys is None:
        return BucketNotFound
    if key and not exists(keys, key):
        return not_there(state, bucket, key)
    bound = keys.get(key)
    return None if bound is None else bound.plain()


def look_up_version(state: State, bucket: str, key: str, version: str) -> Answer:
    """Return StatNames' answer for a version: None for a delete marker."""
    if bucket not in state:
        return BucketNotFound
    found = find(state, bucket, key, version)
    if isinstance(found, type):
        return found
    return None if is_marker(found) else found.plain()


def not_there(state: State, bucket: str, key: str) -> type[LakeError]:
    """Return the error that says why a key does not exist."""
    return KeyDeleted if is_deleted(state, bucket, key) else KeyNotFound


def look_open(state: State, bucket: str, key: str) -> Answer:
    """Return OpenObjects' answer for a name."""
    found = look_up(state, bucket, key)
    if isinstance(found, Bound) and found.target:
        return InvalidArgument
    return IsAFolder if found is None else found


def page_of(state: State, request: m.ListNames) -> list[tuple[str, BlobId | None]] | type[LakeError]:
    """Return the elements of a page: (key, blob), no blob for a symlink, or (prefix, None) for keys rolled up."""
    keys = state.get(request.bucket)
    if keys is None:
        return BucketNotFound
    elements: dict[str, BlobId | None] = {}
    for key in sorted(keys, key=str.encode):
        if not key.startswith(request.prefix):
            continue
        cut = key.find("/", len(request.prefix)) if request.delimiter else -1
        element = key if cut < 0 else key[: cut + 1]
        elements.setdefault(element, None if cut >= 0 else keys[key].blob)
    behind = [item for item in elements.items() if item[0].encode() > request.after.encode()]
    return behind[: request.limit]
