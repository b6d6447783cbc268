"""Buckets: folders of the root node, each with a record of its settings and of facts fixed for its life.

A bucket is a name under node 1, a folder's node, and a record in the table `buckets` under the node's id.

`PlannedBuckets.ensure` decides on every bucket that does not exist yet, and checks its name against the rules for new
buckets, and their number (10,000).  A bucket that exists is found even if its name breaks those rules.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from engine.format.layouts import Node, NodeKind, Table, node_key, pack_name, unpack_name
from engine.format.records import BucketRecord, decode_record
from engine.namespace.keys import check_bucket_name, name_key, range_end
from engine.namespace.tree import NameEvent, child, has_children, new_folder
from engine.namespace.version_keys import end_of, first_key
from engine.tables.views import Transaction, View
from lakefs.errors import (
    AlreadyExists,
    BucketNotEmpty,
    BucketNotFound,
    IndexDamaged,
    InvalidArgument,
    RequestTooLarge,
    StoreUnusable,
)
from lakefs.ids import DEFAULT_DOMAIN, EMPTY_BLOB, ROOT_NODE, DomainIndex, NodeId
from lakefs.limits import BUCKETS_MAX
from lakefs.names import broken_rule, check_new_bucket_name, shown
from lakefs.wire.messages import BucketSet, BucketStat, CorsRule


class BucketRef(msgspec.Struct, frozen=True):
    """A bucket that exists in the view it was read from."""

    name: str
    node: NodeId
    domain: DomainIndex
    created_ns: int
    anonymous_read: bool = False
    versioning: str = ""


_VERSIONING: Final = ("", "enabled", "suspended")
"""Versioning states, by the number in a bucket's record."""
_ANONYMOUS_READ: Final = "anonymous_read"
_TAGS: Final = "tags"
_CORS: Final = "cors"
"""Rules of a record's policy: tags and CORS rules are JSON.  An older release keeps the rules that it does not know."""
_YES: Final = "yes"
BUCKET_SETTINGS_BYTES_MAX: Final = 32 << 10
"""Tags and CORS rules of a bucket, in its record: S3's 50 tags of ASCII take 20 KiB."""
_RECORDS_CACHED: Final = 1024
_CACHED_BYTES_MAX: Final = 1024
"""Bytes of the longest record that is cached; one with tags or CORS rules may be longer."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BucketRecord)


def is_initialised(view: View) -> bool:
    """Return True if the root node exists."""
    return view.get(Table.NODES, node_key(ROOT_NODE)) is not None


def initialise(txn: Transaction) -> None:
    """Make the root node unless it exists; called once, when a store is created."""
    if not is_initialised(txn):
        root = Node(kind=NodeKind.FOLDER, blob=EMPTY_BLOB, mode=0o755)
        txn.insert(Table.NODES, node_key(ROOT_NODE), root.pack())


def find_bucket(view: View, name: str) -> BucketRef:
    """Return the bucket of that name.  Raises InvalidName, BucketNotFound."""
    node = child(view, ROOT_NODE, check_bucket_name(name) + b"/")
    if node is None:
        rule = broken_rule(name)
        remedy = f"a new one cannot have that name: {rule}" if rule else f"create it with: lake bucket create {name}"
        raise BucketNotFound(f"bucket {shown(name)} does not exist; {remedy}", subject=name)
    return _bucket_ref(view, name, node)


def ensure_bucket(txn: Transaction, name: str, now_ns: int) -> BucketRef:
    """Return the bucket of that name; makes it if missing.  Raises InvalidName; InvalidArgument past 10,000 buckets."""
    planned = PlannedBuckets(txn, now_ns)
    bucket = planned.ensure(name)
    planned.make(name)
    return bucket


class PlannedBuckets:
    """Buckets that one transaction makes once a name is bound in them.  A refused name makes no bucket."""

    def __init__(self, txn: Transaction, now_ns: int) -> None:
        self._txn = txn
        self._now_ns = now_ns
        self._planned: dict[str, BucketRef] = {}

    def ensure(self, name: str) -> BucketRef:
        """Return the bucket, or the one that `make` will make.

        Raises InvalidName; InvalidArgument past 10,000 buckets; BucketUnassigned.
        """
        planned = self._planned.get(name)
        if planned is not None:
            return planned
        node = child(self._txn, ROOT_NODE, check_bucket_name(name) + b"/")
        if node is not None:
            return _bucket_ref(self._txn, name, node)
        check_new_bucket_name(name)
        self._txn.making_bucket(name)
        _check_count(self._txn, name, len(self._planned))
        bucket = BucketRef(name, self._txn.new_node_id(), DEFAULT_DOMAIN, self._now_ns)
        self._planned[name] = bucket
        return bucket

    def make(self, name: str) -> None:
        """Make the planned bucket of that name; does nothing if none is planned."""
        bucket = self._planned.pop(name, None)
        if bucket is not None:
            _add_bucket(self._txn, bucket)


def create_bucket(txn: Transaction, name: str, now_ns: int) -> BucketRef:
    """Make a bucket.  Raises AlreadyExists, InvalidName; InvalidArgument past 10,000 buckets."""
    if child(txn, ROOT_NODE, check_bucket_name(name) + b"/") is not None:
        raise AlreadyExists(f"bucket {shown(name)} exists already", subject=name)
    return ensure_bucket(txn, name, now_ns)


def _check_count(txn: Transaction, name: str, planned: int) -> None:
    there = sum(1 for _ in txn.scan(Table.NAMES, node_key(ROOT_NODE), range_end(ROOT_NODE, b"")))
    if there + planned >= BUCKETS_MAX:
        raise InvalidArgument(
            f"bucket {shown(name)} was not made: there are {BUCKETS_MAX} already, the most that a store has; "
            "use folders in a bucket instead",
            subject=name,
        )


def _add_bucket(txn: Transaction, bucket: BucketRef) -> None:
    assert txn.get(Table.BUCKETS, node_key(bucket.node)) is None, "a new bucket has a new node"
    record = BucketRecord(domain=bucket.domain, created_ns=bucket.created_ns)
    folder = new_folder(bucket.created_ns, EMPTY_BLOB).pack()
    txn.insert(Table.NODES, node_key(bucket.node), folder)
    key = name_key(ROOT_NODE, bucket.name.encode() + b"/")
    txn.insert(Table.NAMES, key, pack_name(NodeKind.FOLDER, bucket.node))
    txn.insert(Table.BUCKETS, node_key(bucket.node), _encoder.encode(record))


def remove_bucket(txn: Transaction, name: str) -> BucketRef:
    """Remove an empty bucket; its watchers get a `delete` of the empty key.  Raises BucketNotFound, BucketNotEmpty."""
    bucket = find_bucket(txn, name)
    if has_children(txn, bucket.node):
        raise BucketNotEmpty(
            f"bucket {shown(name)} is not empty; remove what is in it first: lake rm -r {name}/", subject=name
        )
    start, end = first_key(bucket.node), end_of(bucket.node)
    if bucket.versioning and any(True for _ in txn.scan(Table.VERSIONS, start, end)):
        raise BucketNotEmpty(
            f"bucket {shown(name)} has no names, and versions of some that were; remove those first, "
            "with an S3 client (ListObjectVersions, DeleteObjects)",
            subject=name,
        )
    assert bucket.node != ROOT_NODE, "the root is no bucket"
    txn.delete(Table.NAMES, name_key(ROOT_NODE, name.encode() + b"/"))
    txn.delete(Table.BUCKETS, node_key(bucket.node))
    txn.delete(Table.NODES, node_key(bucket.node))
    txn.note(NameEvent("delete", name, "", bucket.node))
    txn.bucket_removed(name)
    return bucket


def set_bucket(txn: Transaction, request: BucketSet) -> BucketRef:
    """Change the settings of a bucket that are given, and return it.

    Raises BucketNotFound, InvalidArgument; RequestTooLarge for tags and CORS rules that its record has no room for.
    """
    name, versioning = request.name, request.versioning
    bucket = find_bucket(txn, name)
    if versioning is not None and versioning not in _VERSIONING[1:]:
        raise InvalidArgument(
            f"versioning {shown(versioning)} of bucket {shown(name)} is not known; it is 'enabled' or 'suspended'",
            subject=name,
        )
    before = _value(txn, name, bucket.node)
    record = _to_record(name, before)
    policy = _with_settings(name, record.policy, request)
    number = record.versioning if versioning is None else _VERSIONING.index(versioning)
    after = _encoder.encode(msgspec.structs.replace(record, versioning=number, policy=policy))
    if after != before:
        txn.put(Table.BUCKETS, node_key(bucket.node), after)
    return _to_bucket_ref(name, bucket.node, after)


def _with_settings(name: str, policy: dict[str, str], request: BucketSet) -> dict[str, str]:
    """Return the policy of a bucket's record with what the request changes of it."""
    changed = dict(policy)
    if request.anonymous_read is not None:
        changed[_ANONYMOUS_READ] = _YES if request.anonymous_read else ""
    if request.tags is not None:
        changed[_TAGS] = _to_json(request.tags)
    if request.cors is not None:
        changed[_CORS] = _to_json(request.cors)
    setting_bytes = sum(len(changed.get(rule, "").encode()) for rule in (_TAGS, _CORS))
    if (request.tags or request.cors) and setting_bytes > BUCKET_SETTINGS_BYTES_MAX:
        raise RequestTooLarge(
            f"tags and CORS rules of bucket {shown(name)} take {setting_bytes} bytes; "
            f"the limit is {BUCKET_SETTINGS_BYTES_MAX}",
            subject=name,
        )
    return {rule: value for rule, value in changed.items() if value}


def _to_json(setting: object) -> str:
    """Return a setting as text, "" for an empty one."""
    return msgspec.json.encode(setting).decode() if setting else ""


def list_buckets(view: View) -> list[BucketRef]:
    """Return all buckets, in byte order of their names; at most 10,000."""
    start, end = node_key(ROOT_NODE), range_end(ROOT_NODE, b"")
    found = [(key[8:-1].decode(), unpack_name(value)[1]) for key, value in view.scan(Table.NAMES, start, end)]
    found.sort()
    return [_bucket_ref(view, name, node) for name, node in found]


def to_bucket_stat(bucket: BucketRef) -> BucketStat:
    """Return the message that describes a bucket in a list: without tags and CORS rules."""
    return BucketStat(bucket.name, bucket.created_ns, bucket.node, bucket.anonymous_read, bucket.versioning)


def whole_bucket_stat(view: View, bucket: BucketRef) -> BucketStat:
    """Return the message that describes a bucket with all its settings."""
    policy = _to_record(bucket.name, _value(view, bucket.name, bucket.node)).policy
    stat = to_bucket_stat(bucket)
    if _TAGS not in policy and _CORS not in policy:
        return stat
    try:
        tags = msgspec.json.decode(policy.get(_TAGS, "{}"), type=dict[str, str])
        cors = msgspec.json.decode(policy.get(_CORS, "[]"), type=list[CorsRule])
    except msgspec.MsgspecError as error:
        raise StoreUnusable(
            f"the settings of bucket {shown(bucket.name)} cannot be read ({error}): they are of another release",
            subject=bucket.name,
        ) from error
    return msgspec.structs.replace(stat, tags=tags, cors=cors)


def _bucket_ref(view: View, name: str, node: NodeId) -> BucketRef:
    value = _value(view, name, node)
    return (_cached_ref if len(value) <= _CACHED_BYTES_MAX else _to_bucket_ref)(name, node, value)


def _to_bucket_ref(name: str, node: NodeId, value: bytes) -> BucketRef:
    record = _to_record(name, value)
    return BucketRef(
        name,
        node,
        DomainIndex(record.domain),
        record.created_ns,
        record.policy.get(_ANONYMOUS_READ) == _YES,
        _VERSIONING[record.versioning],
    )


_cached_ref: Final = lru_cache(maxsize=_RECORDS_CACHED)(_to_bucket_ref)
"""Cached, because the same few buckets are looked up all the time."""


def _value(view: View, name: str, node: NodeId) -> bytes:
    value = view.get(Table.BUCKETS, node_key(node))
    if value is None:
        raise IndexDamaged(f"bucket {shown(name)} has no record", subject=name)
    return value


def _to_record(name: str, value: bytes) -> BucketRecord:
    record = decode_record(_decoder, value, f"the record of bucket {shown(name)}")
    if record.version != 1 or not 0 <= record.versioning < len(_VERSIONING):
        raise StoreUnusable(
            f"bucket record version {record.version}, versioning {record.versioning} of {shown(name)} is not known",
            subject=name,
        )
    return record
