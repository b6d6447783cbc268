"""The names shards of a lake, and the one that each bucket is assigned to, as a process knows them that asks names.

    async with open_names_shards(coordinator) as shards:
        shards.known(bucket)            without a request; may be out of date
        await shards.read(bucket)       as the coordinator has it now

Names of one lake are divided by buckets: each bucket is in one shard as long as it exists.  A shard has a log, a leader
and replicas of its own.

Rules kept here:
- What is known may be out of date in either way.  A shard that does not have a bucket says so (BucketNotFound), and
  makes none that is assigned to another (`engine.coordinator.bucket_shards`); whoever hears that reads the bucket.
- While the coordinator cannot be asked, what was read last is what is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Coordinator, Entry, ReadAnew
from engine.coordinator.lake_state import pages
from engine.coordinator.records import (
    BUCKETS,
    SHARDS_KEY,
    BucketShardRecord,
    ShardsRecord,
    bucket_key,
    bucket_of_key,
    decode,
)
from engine.format.group_parts import FIRST_SHARD
from engine.host.tasks import plain_errors
from lakefs.errors import EngineBusy, EngineUnreachable, LakeError
from lakefs.ids import NamesShard, Revision
from lakefs.limits import AWAY_PAUSE_S_MIN, NAMES_PAUSE_S_MAX

_SHARDS: Final = SHARDS_KEY, SHARDS_KEY + b"\0"
_log: Final = structlog.get_logger(__name__)


@asynccontextmanager
async def open_names_shards(coordinator: Coordinator) -> AsyncIterator[NamesShards]:
    """Follow the shards and their buckets until the block ends; nothing is waited for at the beginning."""
    shards = NamesShards(coordinator)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shards.follow)
            yield shards
            nursery.cancel_scope.cancel()


async def shards_of(coordinator: Coordinator) -> int:
    """Return the number of names shards as a coordinator has it now.  Errors of `Coordinator.get`."""
    entry = (await coordinator.get(SHARDS_KEY)).entry
    return 1 if entry is None else decode(ShardsRecord, entry.value).count


class NamesShards:
    """The shards, as this process last read them.  Made by `open_names_shards`; used on the loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._count = 1
        self._of_bucket: dict[str, NamesShard] = {}
        self._changed = trio.Event()

    @property
    def count(self) -> int:
        """The number of shards; 1 before it was read."""
        return self._count

    def known(self, bucket: str) -> NamesShard | None:
        """Return the shard of a bucket, as far as it is known; None: it is assigned to none."""
        return self._of_bucket.get(bucket)

    async def read(self, bucket: str) -> NamesShard | None:
        """Return the shard that a bucket is assigned to now; None: to none.  Errors of `Coordinator.get`."""
        self._take(bucket_key(bucket), (await self._coordinator.get(bucket_key(bucket))).entry)
        return self.known(bucket)

    async def read_count(self) -> int:
        """Return the number of shards now.  Errors of `Coordinator.get`."""
        self._take(SHARDS_KEY, (await self._coordinator.get(SHARDS_KEY)).entry)
        return self._count

    async def with_buckets(self) -> list[NamesShard]:
        """Return the shards that have buckets now, and the first one; in order.  Errors of `Coordinator.range`."""
        found = {FIRST_SHARD}
        async for page in pages(self._coordinator, *BUCKETS):
            found |= {decode(BucketShardRecord, entry.value).shard for entry in page.entries}
        return sorted(found)

    def emptiest(self) -> NamesShard:
        """Return the shard with the fewest buckets, for a new one."""
        counts = Counter(self._of_bucket.values())
        return min(map(NamesShard, range(self._count)), key=lambda shard: (counts[shard], shard))

    async def wait_count(self, known: int) -> int:
        """Return the number of shards once it is another than `known`."""
        while self._count == known:
            await self._changed.wait()
        return self._count

    async def wait_changed(self) -> None:
        """Return once something else is known of shards or buckets."""
        await self._changed.wait()

    async def follow(self) -> None:
        """Follow the records until cancelled; waits while the coordinator is away."""
        async with trio.open_nursery() as nursery:
            for begin, end in (BUCKETS, _SHARDS):
                nursery.start_soon(self._follow, begin, end)

    async def _follow(self, begin: bytes, end: bytes) -> None:
        pause_s = AWAY_PAUSE_S_MIN
        while True:
            try:
                revision = await self._read_all(begin, end)
                pause_s = AWAY_PAUSE_S_MIN
                async with self._coordinator.watch(begin, end, Revision(revision + 1)) as watch:
                    async for event in watch:
                        if isinstance(event, ReadAnew):
                            break
                        for change in event.changes:
                            self._take(change.key, change.entry)
            except (EngineUnreachable, EngineBusy) as error:
                if pause_s == AWAY_PAUSE_S_MIN:  # said once, not with each attempt
                    _log.warning("coordinator_away", reason=error.message)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, NAMES_PAUSE_S_MAX)

    async def _read_all(self, begin: bytes, end: bytes) -> Revision:
        """Read a range anew; returns the revision from behind which to watch."""
        read = [page async for page in pages(self._coordinator, begin, end)]
        found = {entry.key: entry for page in read for entry in page.entries}
        if begin == BUCKETS[0]:
            self._forget(bucket for bucket in [*self._of_bucket] if bucket_key(bucket) not in found)
        for key, entry in found.items():
            self._take(key, entry)
        return read[0].revision

    def _forget(self, buckets: Iterable[str]) -> None:
        for bucket in buckets:
            del self._of_bucket[bucket]

    def _take(self, key: bytes, entry: Entry | None) -> None:
        """Take one record; None: it was removed."""
        try:
            if key != SHARDS_KEY:
                bucket = bucket_of_key(key)
                if entry is None:
                    self._of_bucket.pop(bucket, None)
                else:
                    shard = self._of_bucket[bucket] = decode(BucketShardRecord, entry.value).shard
                    self._count = max(self._count, shard + 1)  # a shard that has a bucket is there
            elif entry is not None:
                self._count = max(self._count, decode(ShardsRecord, entry.value).count)
        except LakeError as error:
            _log.error("coordinator_record_unusable", key=key.decode(errors="replace"), reason=error.message)
        self._changed.set()
        self._changed = trio.Event()
