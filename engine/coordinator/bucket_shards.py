"""The buckets that are assigned to a names shard: kept by its leader, the only one that assigns buckets to it.

    begin      the term begins: what is assigned is read, and made to match the buckets that the shard has
    making     in the step of a decision that makes a bucket: it is assigned to this shard, or BucketUnassigned
    assign     --  in the coordinator, unless it is assigned to another shard: BucketElsewhere
    removed    in the step of a decision that removes a bucket: to be made again, it is to be assigned anew
    release    --  the removal is durable: the bucket may be made in any shard

So a bucket is in one shard at most: the record is there before the bucket is, and goes behind it.

Rules kept here:
- A bucket that is made is assigned in that very step, as this process knows, which is the only one that changes it.
- Changes of one bucket's record are one after the other.  Each compares the leader's key (`TermCoordinator`), so a
  leader of an earlier term changes none.
- A record without a bucket does no harm: the bucket can be made here.  `begin` removes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, Delete, HasValue, IsAbsent, Put
from engine.coordinator.lake_state import pages
from engine.coordinator.records import BUCKETS, BucketShardRecord, bucket_key, bucket_of_key, decode, encode
from engine.tables.views import BucketUnassigned
from lakefs.errors import BucketElsewhere, LakeError
from lakefs.ids import NamesShard

_AT_ONCE: Final = 50
"""Records that one transaction changes."""
_log: Final = structlog.get_logger(__name__)


class BucketShards:
    """The buckets of one names shard during one term.  Used on the loop."""

    def __init__(self, coordinator: Coordinator, shard: NamesShard) -> None:
        """`coordinator`: that of the term."""
        self._coordinator = coordinator
        self._shard = shard
        self._value: Final = encode(BucketShardRecord(shard))
        self._assigned: set[str] = set()
        self._locks: dict[str, trio.Lock] = {}

    async def begin(self, buckets: Iterable[str]) -> None:
        """Read what is assigned, assign those of `buckets` that are not, and release all others.

        `buckets`: those that the shard has; nothing is decided meanwhile.  Errors of `Coordinator`.
        """
        wanted, found = set(buckets), set[str]()
        async for page in pages(self._coordinator, *BUCKETS):
            for entry in page.entries:
                if decode(BucketShardRecord, entry.value).shard == self._shard:
                    found.add(bucket_of_key(entry.key))
        self._assigned = found & wanted
        for some in _batches(wanted - found):
            await self._assign_all(some)
        for some in _batches(found - wanted):
            await self._remove(*some)

    async def _assign_all(self, buckets: Sequence[str]) -> None:
        """Assign buckets that the shard has; one that another shard has, too, is logged."""
        keys = [bucket_key(bucket) for bucket in buckets]
        puts = [Put(key, self._value) for key in keys]
        if (await self._coordinator.transact([IsAbsent(key) for key in keys], puts)).succeeded:
            self._assigned.update(buckets)
            return
        for bucket in buckets:
            try:
                await self.assign(bucket)
            except BucketElsewhere as error:  # heads go by the record: nobody finds the one that is here
                _log.error("two names shards have one bucket", bucket=bucket, reason=error.message)

    def making(self, bucket: str) -> None:
        """Raise BucketUnassigned unless a bucket may be made in this shard now."""
        if bucket not in self._assigned:
            raise BucketUnassigned(bucket)

    def removed(self, bucket: str) -> None:
        """Note that a bucket is removed; `release` it once that is durable."""
        self._assigned.discard(bucket)

    async def assign(self, bucket: str) -> None:
        """Assign a bucket to this shard.  BucketElsewhere; errors of `Coordinator.transact`: it may be assigned."""
        async with self._changing(bucket):
            if bucket in self._assigned:
                return
            key = bucket_key(bucket)
            done = await self._coordinator.transact([IsAbsent(key)], [Put(key, self._value)])
            entry = done.seen[0]
            if entry is not None and entry.value != self._value:
                shard = decode(BucketShardRecord, entry.value).shard
                raise BucketElsewhere(f"bucket {bucket} is assigned to names shard {shard}", subject=bucket)
            self._assigned.add(bucket)

    async def release(self, bucket: str) -> None:
        """Let a bucket be made in any shard, unless it was assigned again; an error is logged, and does no harm."""
        try:
            async with self._changing(bucket):
                if bucket not in self._assigned:
                    await self._remove(bucket)
        except LakeError as error:
            _log.warning("a removed bucket stays assigned to its names shard", bucket=bucket, reason=error.message)

    async def _remove(self, *buckets: str) -> None:
        """Remove the records of buckets that this shard does not have."""
        keys = [bucket_key(bucket) for bucket in buckets]
        await self._coordinator.transact([HasValue(key, self._value) for key in keys], [Delete(key) for key in keys])

    @asynccontextmanager
    async def _changing(self, bucket: str) -> AsyncIterator[None]:
        """Hold the right to change a bucket's record."""
        lock = self._locks.setdefault(bucket, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._locks.pop(bucket, None)


def _batches(buckets: Iterable[str]) -> Iterator[list[str]]:
    listed = sorted(buckets)
    for first in range(0, len(listed), _AT_ONCE):
        yield listed[first : first + _AT_ONCE]
