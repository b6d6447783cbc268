"""Authorization: checks access keys and public buckets.  Keys are read from the store at most once a second.

So a revoked key works for a second at the most, and a new one may take as long to work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.operation import Operation
from gateway.s3.protocol.signing import AccessKey
from gateway.s3.protocol.targets import READING, Target
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import AccessKeyList, AccessKeys, BucketList, Buckets

FRESH_S: Final = 1.0
"""Seconds for which keys that were read are used."""
_OPEN_TO_STRANGERS: Final = (
    Operation.GET_OBJECT,
    Operation.HEAD_OBJECT,
    Operation.HEAD_BUCKET,
    Operation.LIST_OBJECTS,
    Operation.LIST_OBJECTS_V2,
)
"""Operations that a caller without a key may do in a public bucket."""


class KnownKeys:
    """The access keys of one store."""

    def __init__(self, engine: EngineClient, was_read: Callable[[float, bool], None]) -> None:
        """`was_read` is called with the time from which the keys are a second fresh, and whether they have changed."""
        self._engine = engine
        self._was_read = was_read
        self._keys: dict[str, AccessKey] = {}
        self._read_at = -FRESH_S
        self._reading = trio.Lock()

    @property
    def are_old(self) -> bool:
        """True if the keys were read a second ago or earlier."""
        return time.monotonic() - self._read_at >= FRESH_S

    async def refresh(self, older_than_s: float = FRESH_S) -> None:
        """Read the keys again, if they were read that long ago."""
        async with self._reading:
            if time.monotonic() - self._read_at < older_than_s:
                return
            began = time.monotonic()
            keys = await self._read()
            have_changed, self._keys, self._read_at = keys != self._keys, keys, began
            self._was_read(began, have_changed)

    def find(self, access_key: str) -> AccessKey | None:
        """Return the key pair of an access key, or None."""
        return self._keys.get(access_key)

    async def _read(self) -> dict[str, AccessKey]:
        found: dict[str, AccessKey] = {}
        after = ""
        while True:
            page = (await self._engine.call(AccessKeyList(secrets=True, after=after))).message
            assert isinstance(page, AccessKeys)
            for key in page.keys:
                found[key.access_key] = AccessKey(key.access_key, key.secret_key, tuple(key.buckets), key.read_only)
            after = page.next_after
            if not after:
                return found


async def check_stranger(engine: EngineClient, target: Target) -> None:
    """Raise S3Error AccessDenied unless a caller without a key may do this.  Old versions always need a key."""
    is_open = target.operation in _OPEN_TO_STRANGERS and "versionId" not in target.parameters
    if not is_open or not await _is_public(engine, target.bucket):
        raise _denied()


def check_key(key: AccessKey, target: Target) -> None:
    """Raise S3Error AccessDenied unless the key may do this."""
    if key.read_only and target.operation not in READING:
        raise _denied()
    check_bucket(key, target.bucket)


def check_bucket(key: AccessKey, bucket: str) -> None:
    """Raise S3Error AccessDenied if the key is limited to other buckets; lists of buckets are filtered instead."""
    if bucket and key.buckets and bucket not in key.buckets:
        raise _denied()


async def _is_public(engine: EngineClient, bucket: str) -> bool:
    message = (await engine.call(BucketList(bucket))).message
    assert isinstance(message, Buckets)
    return any(found.anonymous_read for found in message.buckets)


def _denied() -> S3Error:
    return S3Error(403, "AccessDenied", "Access Denied")
