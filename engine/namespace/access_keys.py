"""Access keys: the credentials of clients whose protocol has users of its own (S3), and their permissions.

Pure decisions on one view or transaction.  The store keeps secrets in clear, because a signature is checked with the
secret itself.  A secret is in no log, and in no message except the reply that was asked for it.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.format.layouts import Table
from engine.format.records import AccessKeyRecord, decode_record
from engine.namespace.keys import behind, check_bucket_name, lookup_path
from engine.tables.views import Transaction, View
from lakefs.errors import AccessKeyNotFound, InvalidArgument, StoreUnusable
from lakefs.limits import ACCESS_KEY_BUCKETS_MAX, ACCESS_KEYS_MAX, LIST_PAGE_MAX
from lakefs.names import shown
from lakefs.wire.messages import AccessKeyStat

ACCESS_KEY_CHARACTERS: Final = 20
_RECORD_VERSION: Final = 1
_KEYS_END: Final = b"\xff"
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(AccessKeyRecord)


def new_key_pair() -> tuple[str, str]:
    """Return a random access key (20 of A-Z2-7, 100 bits) and secret key (40 URL-safe characters, 240 bits)."""
    access_key = base64.b32encode(secrets.token_bytes(15))[:ACCESS_KEY_CHARACTERS].decode()
    return access_key, secrets.token_urlsafe(30)


def create_access_key(
    txn: Transaction, key_pair: tuple[str, str], buckets: Sequence[str], read_only: bool, now_ns: int
) -> AccessKeyStat:
    """Record a new pair; returns its permissions and its secret.  Raises InvalidName; InvalidArgument past a bound.

    `buckets` (empty: all) need not exist; duplicates are dropped.
    """
    limited_to = list(dict.fromkeys(buckets))
    for bucket in limited_to[: ACCESS_KEY_BUCKETS_MAX + 1]:
        check_bucket_name(bucket)
    if len(limited_to) > ACCESS_KEY_BUCKETS_MAX:
        raise InvalidArgument(
            f"an access key for {len(limited_to)} buckets; name at most {ACCESS_KEY_BUCKETS_MAX}, or none for all"
        )
    if sum(1 for _ in txn.scan(Table.ACCESS_KEYS, b"", _KEYS_END)) >= ACCESS_KEYS_MAX:
        raise InvalidArgument(
            f"there are {ACCESS_KEYS_MAX} access keys, the most that a store has; remove some: lake key rm"
        )
    access_key, secret_key = key_pair
    record = AccessKeyRecord(_RECORD_VERSION, secret_key, limited_to, read_only, now_ns)
    key = access_key.encode()
    assert txn.get(Table.ACCESS_KEYS, key) is None, "100 random bits came twice"
    txn.insert(Table.ACCESS_KEYS, key, _encoder.encode(record))
    return _stat(access_key, record, with_secret=True)


def find_access_key(view: View, access_key: str, *, with_secret: bool) -> AccessKeyStat | None:
    """Return the permissions of an access key, or None if it does not exist."""
    key = lookup_path(access_key)
    if len(key) != ACCESS_KEY_CHARACTERS:
        return None
    value = view.get(Table.ACCESS_KEYS, key)
    return None if value is None else _stat(access_key, unpack_access_key(value), with_secret=with_secret)


def list_access_keys(view: View, after: str, limit: int, *, with_secret: bool) -> tuple[list[AccessKeyStat], str]:
    """Return at most `limit` (never over 1,000) behind `after` in byte order, and where to continue: "" at the end."""
    if limit < 1:
        raise InvalidArgument(f"a page of {limit} access keys was asked for; ask for 1 to {LIST_PAGE_MAX}")
    page: list[AccessKeyStat] = []
    start = behind(lookup_path(after)[: ACCESS_KEY_CHARACTERS + 1]) if after else b""
    for key, value in view.scan(Table.ACCESS_KEYS, start, _KEYS_END):
        if len(page) == min(limit, LIST_PAGE_MAX):
            return page, page[-1].access_key
        page.append(_stat(key.decode(), unpack_access_key(value), with_secret=with_secret))
    return page, ""


def remove_access_key(txn: Transaction, access_key: str) -> None:
    """Revoke an access key.  Raises AccessKeyNotFound."""
    if find_access_key(txn, access_key, with_secret=False) is None:
        raise AccessKeyNotFound(
            f"access key {shown(access_key)} does not exist; see what does with: lake key ls", subject=shown(access_key)
        )
    txn.delete(Table.ACCESS_KEYS, access_key.encode())


def unpack_access_key(value: bytes) -> AccessKeyRecord:
    """Decode an access key's record.  Raises StoreUnusable for an unknown version."""
    record = decode_record(_decoder, value, "an access key's record")
    if record.version != _RECORD_VERSION:
        raise StoreUnusable(f"access key record version {record.version} is not known")
    return record


def _stat(access_key: str, record: AccessKeyRecord, *, with_secret: bool) -> AccessKeyStat:
    secret_key = record.secret_key if with_secret else ""
    return AccessKeyStat(access_key, record.buckets, record.read_only, record.created_ns, secret_key)
