"""Counts the parts of the values of spaces whose records have no count, as those of an earlier release.

Rules kept here:
- Run at the opening of a store, before anything changes its values.
- A store whose disk takes no more writes is opened all the same: until the next opening each value of such a space
  counts as one part (`engine.keyed.spaces.charge_of_space`).
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Final

import msgspec
import structlog
import trio

from engine.format.keyed import KEYED_HEAD, NOT_COUNTED, space_key, values_range
from engine.format.layouts import Table
from engine.keyed.spaces import iter_spaces
from engine.metadata.metadata_store import Metadata
from engine.tables.views import Transaction
from lakefs.errors import LakeError
from lakefs.limits import GC_BATCH

_log: Final = structlog.get_logger(__name__)


async def count_missing_parts(metadata: Metadata) -> None:
    """Count the parts of spaces that have no count, and record them; not yet durable on return."""
    try:
        with metadata.view() as view:
            missing = [number for number, space in iter_spaces(view) if space.parts == NOT_COUNTED]
        if missing:
            counts = {number: await _parts_of(metadata, number) for number in missing}
            await metadata.commit(partial(_record, counts), durable=False)
    except LakeError as error:  # also a record that cannot be read: fsck names it
        _log.warning("keyed_parts_not_counted", reason=error.message)


def _record(counts: dict[int, int], txn: Transaction) -> None:
    for number, space in list(iter_spaces(txn)):
        if number in counts:
            txn.put(Table.KEYED, space_key(number), msgspec.structs.replace(space, parts=counts[number]).pack())


async def _parts_of(metadata: Metadata, number: int) -> int:
    """Return the number of parts of all values of a space."""
    start, end = values_range(number)
    count = 0
    while True:
        with metadata.view() as view:
            page = list(islice(view.scan(Table.KEYED, start, end), GC_BATCH))
        count += sum(int(KEYED_HEAD.unpack_from(value)[3]) for _, value in page if len(value) >= KEYED_HEAD.size)
        if len(page) < GC_BATCH:
            return count
        start = page[-1][0] + b"\0"
        await trio.lowlevel.checkpoint()
