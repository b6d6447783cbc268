"""Expiry of uploads: removes unfinished ones past their age limit, those of removed buckets, and part lists of removed
objects.

Age is measured by the wall clock, because uploads outlive the engine: a clock that is set forward by days makes them
older.  Each upload is removed by a decision of its own, which checks again.
"""

from __future__ import annotations

from collections.abc import Callable
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
        parts_batch = self._batch // 8 + 1
        count, last = await self._sweep(UPLOADS_BEGIN, UPLOADS_END, self._batch, self._is_over, self._remove)
        _, parts_last = await self._sweep(OBJECT_PARTS_BEGIN, OBJECT_PARTS_END, parts_batch, _are_left, _remove_parts)
        await self._metadata.wait_durable(max(last, parts_last))
        return count

    async def _sweep(
        self,
        begin: bytes,
        end: bytes,
        batch: int,
        is_over: Callable[[View, bytes, bytes], bool],
        remove: Callable[[bytes, Transaction], bool],
    ) -> tuple[int, Sequence]:
        """Remove what is over of the records between two keys; returns how many, and the last removal's sequence."""
        count = 0
        last = Sequence(0)
        while True:
            with self._metadata.view() as view:
                page = list(islice(view.scan(Table.UPLOADS, begin, end), batch))
                over = [key for key, value in page if is_over(view, key, value)]
            if not page:
                return count, last
            begin = page[-1][0] + b"\0"
            for key in over:
                was_there, last = await self._metadata.commit(partial(remove, key))
                count += was_there
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


def _are_left(view: View, key: bytes, value: bytes) -> bool:
    """Return True for the header of a part list whose object was removed.  It stays so: ids are never used twice."""
    return key.endswith(_HEADER) and is_left_over(view, key[1:-2], unpack_header(value))


def _remove_parts(key: bytes, txn: Transaction) -> bool:
    remove_parts(txn, key[1:-2])
    return True
