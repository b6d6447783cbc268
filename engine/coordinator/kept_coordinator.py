"""`KeptCoordinator`: records that were kept somewhere, as a coordinator that is only read and never changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, NoReturn

import trio

from engine.coordinator.coordinator import Entry, Found, Page, Watch
from engine.coordinator.coordinator_bounds import check_key, check_page
from engine.coordinator.reads_only_coordinator import RefusesChanges
from lakefs.ids import Revision
from lakefs.limits import COORDINATOR_PAGE_BYTES_MAX

KEPT: Final = "the lake's records are those that this machine has kept, and are only read"
_REVISION: Final = Revision(1)


class KeptCoordinator(RefusesChanges):
    """`Coordinator` over a mapping, for reads alone; all else raises EngineUnreachable."""

    def __init__(self, records: Mapping[bytes, bytes]) -> None:
        super().__init__(KEPT)
        self._records = records

    async def get(self, key: bytes) -> Found:
        """Return a key's entry; see the port."""
        check_key(key)
        await trio.lowlevel.checkpoint()
        return Found(self._entry(key) if key in self._records else None, _REVISION)

    async def range(self, begin: bytes, end: bytes, *, limit: int, after: bytes = b"") -> Page:
        """Return a page of entries; see the port."""
        check_page(begin, end, limit, after)
        await trio.lowlevel.checkpoint()
        keys = [key for key in sorted(self._records) if begin <= key < end and key > after]
        entries: list[Entry] = []
        page_bytes = 0
        for key in keys[:limit]:
            if page_bytes >= COORDINATOR_PAGE_BYTES_MAX:
                break
            entries.append(self._entry(key))
            page_bytes += len(key) + len(entries[-1].value)
        return Page(tuple(entries), _REVISION, len(entries) < len(keys))

    @asynccontextmanager
    async def watch(self, begin: bytes, end: bytes, from_revision: Revision) -> AsyncIterator[Watch]:
        """Watch a range, which does not change; see the port."""
        await trio.lowlevel.checkpoint()
        yield _Nothing(from_revision)

    def _entry(self, key: bytes) -> Entry:
        return Entry(key, self._records[key], _REVISION)


class _Nothing:
    """The events of a range that does not change."""

    def __init__(self, resumes_at: Revision) -> None:
        self.resumes_at = resumes_at

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> NoReturn:
        await trio.sleep_forever()
