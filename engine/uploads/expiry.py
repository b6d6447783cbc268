"""Expiry of uploads: removes unfinished ones past their age limit, those of removed buckets, and part lists of removed
objects.

Age is measured by the wall clock, because uploads outlive the engine: a clock that is set forward by days makes them
older.  Each upload is removed by a decision of its own, which checks again.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

import trio

from engine.format.layouts import Table
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction, View
from engine.uploads.keys import OBJECT_PARTS_BEGIN, OBJECT_PARTS_END, UPLOADS_BEGIN, UPLOADS_END
from engine.uploads.lifecycle import is_orphan, remove_upload, unpack_upload
from engine.uploads.object_parts import is_left_over, remove_parts, unpack_header
from lakefs.ids import Sequence
from lakefs.limits import GC_BATCH
from lakefs.ports import Clock

_HEADER: Final = b"\0\0"


class UploadExpiry:
    """Removes expired uploads of one store.  `expiry_s` 0: no age limit."""

    def __init__(self, metadata: Metadata, clock: Clock, expiry_s: float, *, batch: int = GC_BATCH) -> None:
        self._metadata = metadata
        self._clock = clock
        self._expiry_ns = int(expiry_s * 1e9)
        self._batch = batch

    async def run(self) -> int:
        """Remove expired uploads, durably; returns how many.  Raises StoreReadOnly, IndexDamaged."""
        count = 0
        last = Sequence(0)
        after = UPLOADS_BEGIN
        while True:
            with self._metadata.view() as view:
                page = list(islice(view.scan(Table.UPLOADS, after, UPLOADS_END), self._batch))
                over = [key for key, value in page if self._is_over(view, key, value)]
            if not page:
                break
            after = page[-1][0] + b"\0"
            for key in over:
                was_there, last = await self._metadata.commit(partial(self._remove, key))
                count += was_there
            await trio.lowlevel.checkpoint()
        last = max(last, await self._forget_parts())
        await self._metadata.wait_durable(last)
        return count

    async def _forget_parts(self) -> Sequence:
        """Remove the part lists of removed objects; returns the sequence of the last removal."""
        last = Sequence(0)
        after = OBJECT_PARTS_BEGIN
        while True:
            with self._metadata.view() as view:
                page = list(islice(view.scan(Table.UPLOADS, after, OBJECT_PARTS_END), self._batch // 8 + 1))
                headers = [(key[1:-2], value) for key, value in page if key.endswith(_HEADER)]
                left = [upload for upload, value in headers if is_left_over(view, upload, unpack_header(value))]
            if not page:
                return last
            after = page[-1][0] + b"\0"
            for upload in left:
                # A left-over list stays left over: ids are never used twice.
                _, last = await self._metadata.commit(partial(_remove_parts, upload))
            await trio.lowlevel.checkpoint()

    def _remove(self, key: bytes, txn: Transaction) -> bool:
        value = txn.get(Table.UPLOADS, key)
        if value is None or not self._is_over(txn, key, value):
            return False
        remove_upload(txn, key)
        return True

    def _is_over(self, view: View, key: bytes, value: bytes) -> bool:
        if is_orphan(view, key):
            return True
        age_ns = self._clock.wall_ns() - unpack_upload(value).created_ns
        return 0 < self._expiry_ns <= age_ns


def _remove_parts(upload: bytes, txn: Transaction) -> None:
    remove_parts(txn, upload)
