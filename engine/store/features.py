"""The features that the superblock of an open store names, with which an earlier release does not open it.

Rules kept here:
- A feature's bit is durable before the first record of it is decided.  That of shards is never cleared.
- What is refused sets no bit: a decision that needs one is made on trial first (`deciding`).
- Only the bit of keyed blobs is cleared again: when the tables have no record of them, and no journal file and no
  checkpoint has one either.  `_unused_since` is the group from which on the tables have none; what is kept of it and
  earlier groups goes with the next journal file and the next checkpoint, so mostly with the next start.
- Nothing is cleared while a request is under way that may record a space (`using`).
- The number of the next space moves from its record to the superblock before the record is removed, so that no number
  is handed out twice: a client may still hold one.
- One change of the superblock at a time.  After a crash at any step the bit is set, or no file has a record of its
  feature.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, TypeVar

import structlog
import trio

from engine.format.features import FEATURE_NOTES, Feature, ReadOnlyFeature
from engine.format.keyed import EXPIRIES_END, NAMES_BEGIN, NEXT_KEY
from engine.format.layouts import COUNTER_RECORD, Table
from engine.metadata.metadata_store import Metadata
from engine.superblock.reserve import Reserve
from engine.superblock.superblock import Superblock, write_superblock
from engine.tables.views import Transaction, View
from lakefs.errors import LakeError
from lakefs.ids import Sequence
from lakefs.ports import Disk, Offload

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)


class FeatureNeeded(Exception):
    """A decision would make the first record of a feature: record that it is used, and decide again."""

    def __init__(self, feature: ReadOnlyFeature) -> None:
        super().__init__(feature)
        self.feature = feature


class Features:
    """The superblock of an open store, and what changes in it while the store is open.  Used on the loop."""

    def __init__(
        self, superblock: Superblock, disk: Disk, offload: Offload, reserve: Reserve, metadata: Metadata
    ) -> None:
        self.superblock = superblock
        """The superblock on the disk."""
        self._disk = disk
        self._offload = offload
        self._reserve = reserve
        self._metadata = metadata
        self._lock = trio.Lock()
        self._users = 0
        """Requests under way that may record a space."""
        self._uses = 0
        """Such requests since the start."""
        self._unused_since: Sequence | None = None
        with suppress(LakeError), metadata.view() as view:  # a damaged index is rebuilt, and not asked before that
            if not _has_records(view):
                self._unused_since = metadata.durable_sequence

    @property
    def next_space(self) -> int:
        """The lowest number of a space that was not handed out, where no record says so."""
        return max(1, self.superblock.next_space)

    def names(self) -> list[str]:
        """Names of the features that are in use, for people."""
        return [FEATURE_NOTES[feature].name for feature in ReadOnlyFeature if self.has(feature)]

    def has(self, feature: ReadOnlyFeature) -> bool:
        """Return True if the store uses a feature."""
        return bool(self.superblock.read_only_features & feature)

    def need(self, feature: ReadOnlyFeature) -> None:
        """Say at the end of a decision that its records are of a feature.  FeatureNeeded if that is not recorded."""
        if not self.has(feature):
            raise FeatureNeeded(feature)

    async def deciding(self, change: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a change whose decision may `need` a feature; it is made anew behind the record of it.

        Errors of the change; StoreFull, DiskFailed.
        """
        try:
            return await change()
        except FeatureNeeded as needed:
            await self.begin_to_use(needed.feature)
        return await change()

    async def begin_to_use(self, feature: ReadOnlyFeature) -> bool:
        """Record that the store uses a feature; durable on return.  Returns True if it did not before.

        StoreFull, DiskFailed.
        """
        if self.has(feature):
            return False
        async with self._lock:
            if self.has(feature):
                return False
            changed = replace(self.superblock, read_only_features=self.superblock.read_only_features | feature)
            await self._write(changed)
            self.superblock = changed
        note = FEATURE_NOTES[feature]
        _log.warning(
            f"the store has {note.name} from now on: releases before {note.release} do not open it", feature=note.name
        )
        return True

    async def begin_to_keep_shards(self) -> None:
        """Record that the store has shards; durable on return.  StoreFull, DiskFailed."""
        if self.superblock.incompat_features & Feature.ERASURE_SHARDS:
            return
        async with self._lock:
            changed = replace(
                self.superblock, incompat_features=self.superblock.incompat_features | Feature.ERASURE_SHARDS
            )
            await self._write(changed)
            self.superblock = changed

    async def mend(self) -> None:
        """Set the bit of keyed blobs if there are records of them: another superblock may have been put in place."""
        try:
            with self._metadata.view() as view:
                has_records = _has_records(view)
            if has_records:
                await self.begin_to_use(ReadOnlyFeature.KEYED)
        except LakeError as error:  # fsck names it
            _log.warning("keyed_feature_not_looked_at", reason=error.message)

    @asynccontextmanager
    async def using_spaces(self) -> AsyncIterator[bool]:
        """Context in which a space may be recorded; the value says if the store has its first one.

        StoreFull, DiskFailed.
        """
        self._users += 1
        self._uses += 1
        self._unused_since = None
        try:
            yield await self.begin_to_use(ReadOnlyFeature.KEYED)
        finally:
            self._users -= 1

    async def end_unused_spaces(self) -> None:
        """Clear the bit of keyed blobs, if nothing has a record of them; else do as much of that as can be done now.

        StoreFull, DiskFailed, StoreReadOnly.
        """
        uses = self._uses
        if not self.has(ReadOnlyFeature.KEYED) or self._users:
            return
        if self._unused_since is None:
            since = await self._forget_numbers(uses)
            if since is None or self._uses != uses:
                return
            self._unused_since = since
        if not await self._metadata.forget_upto(self._unused_since):
            return
        async with self._lock:
            if self._uses != uses:  # a space has been opened
                return
            # First here: whatever becomes of the write, the next space sets the bit again before it is recorded.
            without = self.superblock.read_only_features & ~ReadOnlyFeature.KEYED
            self.superblock = replace(self.superblock, read_only_features=without)
            await self._write(self.superblock)
        note = FEATURE_NOTES[ReadOnlyFeature.KEYED]
        _log.info(f"nothing of the store's {note.name} is left: releases before {note.release} open it again")

    async def _forget_numbers(self, uses: int) -> Sequence | None:
        """Remove the last record of keyed blobs, the next number; returns the group from which on there is none.

        None: there are others, or a request has been under way since `uses` were counted.
        """
        with self._metadata.view() as view:
            value = view.get(Table.KEYED, NEXT_KEY)
            if not _is_unused(view):
                return None
        if value is None:
            await self._metadata.sync()
            return self._metadata.durable_sequence
        number = int(COUNTER_RECORD.unpack(value)[0])
        async with self._lock:
            if number > self.superblock.next_space:
                changed = replace(self.superblock, next_space=number)
                await self._write(changed)
                self.superblock = changed

        def forget(txn: Transaction) -> bool:
            if self._uses != uses or not _is_unused(txn):
                return False
            txn.delete(Table.KEYED, NEXT_KEY)
            return True

        is_done, sequence = await self._metadata.commit(forget)
        await self._metadata.wait_durable(sequence)
        return sequence if is_done else None

    async def _write(self, superblock: Superblock) -> None:
        """Write a superblock; the lock is held.  After an error the disk has the old or the new one."""
        assert superblock.clean_sequence is None, "the superblock of an open store is not clean"
        with trio.CancelScope(shield=True):
            await self._offload.run(write_superblock, self._disk, superblock, self._reserve)


def _has_records(view: View) -> bool:
    """Return True if there is any record of keyed blobs."""
    return next(iter(view.scan(Table.KEYED, NEXT_KEY, EXPIRIES_END)), None) is not None


def _is_unused(view: View) -> bool:
    """Return True if there is no space, and no record of one beside the next number."""
    return next(iter(view.scan(Table.KEYED, NAMES_BEGIN, EXPIRIES_END)), None) is None
