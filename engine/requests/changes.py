"""Changes of names as clients send them, bound to blobs that are stored: one by one, or runs of plain ones as columns.

Rules kept here:
- Every change has its result, and fails by itself.
- Buckets are found, or planned, for all changes before any name is bound; a planned bucket is made after, and only
  if a name was bound in it.
- A run ends where a change is not plain: with another bucket, folder or attributes, a condition, a name that came
  before.  Each change is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from engine.chunks.manifests import HeldBlob
from engine.format.columns import ObjectColumns
from engine.format.layouts import EtagKind
from engine.namespace.binding import Binder, Binding
from engine.namespace.buckets import BucketRef, PlannedBuckets, find_bucket
from engine.namespace.new_names import RUN_MIN, Run, bind_run
from engine.namespace.object_stat import check_record_size, new_object, to_object_stat
from engine.namespace.versions import shown_version
from engine.requests.answers import failed
from engine.tables.views import Transaction
from lakefs.errors import ChunkNotFound, LakeError, UserError
from lakefs.limits import COMPONENT_SPLIT_BYTES, KEY_BYTES_MAX
from lakefs.wire.messages import NO_CONDITION, NameChange, NameResult, ObjectAttributes, ObjectStat

_MD5_BYTES: Final = 16
_TIME_LIMIT_NS: Final = 1 << 63
_COLUMNS: Final = ("mtime_ns", "etag", "checksums")
"""Attributes in which the objects of a run differ."""
_shared_of_change: Final = attrgetter(
    "bucket", "create_bucket", "keep_node", "named_ns", "condition", "keep_attributes"
)
_shared_of_attributes: Final = attrgetter(
    *(name for name in ObjectAttributes.__struct_fields__ if name not in _COLUMNS)
)
_NONE: Final[dict[str, int]] = {}
Blobs = Sequence[HeldBlob | LakeError]
"""A blob for each change, or the error that the change ends with."""


def bind_changes(txn: Transaction, changes: Sequence[NameChange], blobs: Blobs, now_ns: int) -> list[NameResult]:
    """Bind the changes that can be bound; returns a result for each."""
    return _Changes(txn, changes, blobs, now_ns).bind_all()


class _Changes:
    """The changes of one request, on one transaction."""

    def __init__(self, txn: Transaction, changes: Sequence[NameChange], blobs: Blobs, now_ns: int) -> None:
        assert len(changes) == len(blobs), "each change has its blob"
        self._changes = changes
        self._blobs = blobs
        self._now_ns = now_ns
        self._binder = Binder(txn, now_ns)
        self._buckets = _Buckets(txn, PlannedBuckets(txn, now_ns))
        self._results: list[NameResult | None] = [None] * len(changes)

    def bind_all(self) -> list[NameResult]:
        """Bind all; see `bind_changes`."""
        bound = [(at, self._bind(step)) for at, step in self._steps()]
        for at, outcomes in bound:
            self._results[at : at + len(outcomes)] = [
                NameResult(outcome) if isinstance(outcome, ObjectStat) else failed(outcome) for outcome in outcomes
            ]
            change = self._changes[at]  # all of a run may create their bucket, or none
            if change.create_bucket and any(isinstance(outcome, ObjectStat) for outcome in outcomes):
                self._buckets.planned.make(change.bucket)
        results = [result for result in self._results if result is not None]
        assert len(results) == len(self._changes), "each change has a result"
        return results

    def _bind(self, step: Binding | Run) -> list[ObjectStat | UserError]:
        if isinstance(step, Run):
            return bind_run(self._binder, step)
        outcome = self._binder.try_bind(step)
        if isinstance(outcome, UserError):
            return [outcome]
        bucket, node = step.bucket, outcome.node
        version = shown_version(node) if bucket.versioning else ""
        return [to_object_stat(bucket.name, step.key, outcome.node_id, node, version)]

    # --- steps -------------------------------------------------------------------------------------

    def _steps(self) -> list[tuple[int, Binding | Run]]:
        """Return the bindings and runs of the changes, with the indexes of their first; notes the failures."""
        steps: list[tuple[int, Binding | Run]] = []
        at, count = 0, len(self._changes)
        if count < RUN_MIN:
            return list(self._bindings(0, count))
        while at < count:
            folder, names = plain_run(self._changes, self._blobs, at)
            run = self._run(at, folder, names) if len(names) >= RUN_MIN else None
            end = at + max(1, len(names))
            if run is not None:
                steps.append((at, run))
            else:
                steps += self._bindings(at, end)
            at = end
        return steps

    def _bindings(self, start: int, stop: int) -> Iterator[tuple[int, Binding]]:
        """Yield the bindings of some changes, with their indexes; notes the failures."""
        for index in range(start, stop):
            try:
                yield index, self._binding(index)
            except (UserError, ChunkNotFound) as error:
                self._results[index] = failed(error)

    def _binding(self, index: int) -> Binding:
        change, blob = self._changes[index], self._blobs[index]
        if isinstance(blob, LakeError):
            raise blob
        node = new_object(blob.blob, blob.size_bytes, blob.chunk_count, change.attributes, self._now_ns)
        bucket = self._buckets.of(change)
        keep = bool(change.keep_node) and change.keep_attributes
        return Binding(bucket, change.key, node, change.condition, change.keep_node, change.named_ns, keep)

    def _run(self, at: int, folder: bytes, names: list[bytes]) -> Run | None:
        """Return the run of these names; None if they are to be bound one by one, as all fail or make versions."""
        try:
            first = self._binding(at)
            check_record_size(first.node.pack())
        except UserError:
            return None
        if first.bucket.versioning:
            return None
        changes, blobs = self._changes[at : at + len(names)], self._blobs[at : at + len(names)]
        attributes = [change.attributes for change in changes]
        objects = ObjectColumns(
            blobs=[blob.blob for blob in blobs if isinstance(blob, HeldBlob)],
            sizes_bytes=[blob.size_bytes for blob in blobs if isinstance(blob, HeldBlob)],
            mtimes_ns=[each.mtime_ns or self._now_ns for each in attributes],
            etags=[each.etag for each in attributes] if first.node.attributes.etag else [],
            sums=[value for each in attributes for value in each.checksums.values()],
        )
        if len({each.mtime_ns in (0, self._now_ns) for each in attributes}) > 1:
            return None  # some have a time of binding beside the modification time, and some not
        keys = [change.key for change in changes]
        return Run(first.bucket, folder, names, keys, objects, lambda index: self._binding(at + index))


class _Buckets:
    """The buckets of one transaction's changes, each looked up once."""

    def __init__(self, txn: Transaction, planned: PlannedBuckets) -> None:
        self._txn = txn
        self.planned = planned
        self._found: dict[tuple[str, bool], BucketRef] = {}

    def of(self, change: NameChange) -> BucketRef:
        """Return the change's bucket; the planned one if it is missing and the change may create it."""
        wanted = (change.bucket, change.create_bucket)
        bucket = self._found.get(wanted)
        if bucket is None:
            planned = change.create_bucket
            bucket = self.planned.ensure(wanted[0]) if planned else find_bucket(self._txn, wanted[0])
            self._found[wanted] = bucket
        return bucket


# --- runs ----------------------------------------------------------------------------------------------


def plain_run(changes: Sequence[NameChange], blobs: Blobs, start: int) -> tuple[bytes, list[bytes]]:
    """Return the folder of the changes from `start` on that can be bound as a run, and their names in it; maybe none.

    The folder's path is empty or ends with `/`.
    """
    first = changes[start]
    folder = first.key[: first.key.rfind("/") + 1].encode("utf-8", "replace")
    names: dict[bytes, None] = {}
    if not _may_lead(first) or b"\0" in folder:
        return folder, []
    shared, shared_attributes = _shared_of_change(first), _shared_of_attributes(first.attributes)
    etag_bytes, sums = _etag_bytes(first.attributes), _lengths(first.attributes.checksums)
    has_time = bool(first.attributes.mtime_ns)
    for index in range(start, len(changes)):
        change, blob = changes[index], blobs[index]
        attributes = change.attributes
        if _shared_of_change(change) != shared or _shared_of_attributes(attributes) != shared_attributes:
            break
        if _etag_bytes(attributes) != etag_bytes or _lengths(attributes.checksums) != sums:
            break
        if bool(attributes.mtime_ns) != has_time:
            break
        if not isinstance(blob, HeldBlob) or blob.chunk_count != 1:
            break
        name = _name_below(folder, change.key)
        if name is None or name in names or not -_TIME_LIMIT_NS <= attributes.mtime_ns < _TIME_LIMIT_NS:
            break
        names[name] = None
    return folder, list(names)


def _may_lead(change: NameChange) -> bool:
    """Return True if a run may begin with the change, as far as all changes of a run are alike."""
    attributes = change.attributes
    return (
        not (change.keep_node or change.named_ns)
        and change.condition == NO_CONDITION
        and attributes.etag_kind in (EtagKind.DERIVED, EtagKind.MD5)
        and len(attributes.checksums) <= 1
    )


def _etag_bytes(attributes: ObjectAttributes) -> int:
    return len(attributes.etag) if attributes.etag_kind else 0


def _lengths(checksums: dict[str, bytes]) -> dict[str, int]:
    return {name: len(value) for name, value in checksums.items()} if checksums else _NONE


def _name_below(folder: bytes, key: str) -> bytes | None:
    """Return the name of a key in the folder; None if the key is in another, or is not plain."""
    try:
        path = key.encode()
    except UnicodeEncodeError:
        return None
    name = path[len(folder) :]
    if not path.startswith(folder) or not name or b"/" in name or b"\0" in name:
        return None
    return name if len(name) < COMPONENT_SPLIT_BYTES and len(path) <= KEY_BYTES_MAX else None
