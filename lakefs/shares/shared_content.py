"""Shared content in use by one native table that answers without a request: a client's known names, or a door.

    standing()   is the connection open whose stamps the table uses?  if not, all is forgotten
    want(...)    segments and slabs in which content lies that was learned
    renewal()    asks for what is due: stamps, shared index, segments and slabs

Rules kept here:
- All in the table is of one connection.  When that has ended everything is forgotten, before another engine can have
  opened the store; on the next one the engine is asked for its own.
- Stamps and index are those of the client (`EngineShares`), which other readers use too.
- A descriptor is borrowed from the client's `SegmentDescriptors`, which keeps it open until it is given back here.
- Memory is mapped only if it is sealed against shrinking (`lakefs.grants.dram_slabs`); segments are read, not mapped.
- What cannot be brought is no error: its content is asked for as ever, and learning its name asks again.
- `lock` guards the table's answers against a connection that ends: its owner holds it while it learns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from lakefs.errors import EngineUnreachable, LakeError
from lakefs.get.fetch import need_segments, need_slabs
from lakefs.grants.descriptors import Held
from lakefs.ids import SegmentId
from lakefs.limits import KNOWN_SEGMENTS_MAX, KNOWN_WANTED_MAX
from lakefs.shared_index.table import SharedIndexReader
from lakefs.shares.index_in_use import IndexInUse
from lakefs.shares.share import NEVER, Connected
from lakefs.shares.stamps_in_use import StampsInUse
from lakefs.stamps.stamps import StampReader
from lakefs.steps.steps import Steps
from lakefs.wire.media import IN_FILES, MEDIUM_SEGMENT

if TYPE_CHECKING:
    from lakefs.shared_index._table import SharedTable


class NativeTable(Protocol):
    """Answers that are repeated natively, and what they are read from."""

    def use_stamps(self, reader: StampReader) -> None:
        """Check answers by these stamps; before any is learned."""

    def use_places(self, table: SharedTable) -> None:
        """Look chunks up in this table."""

    def use_segment(self, segment: int, descriptor: int, flags: int) -> int | None:
        """Read a segment by this descriptor; return the segment whose place it took."""

    def drop_segments(self) -> None:
        """Read no segment: their descriptors may be closed."""

    def use_slabs(self, generations: memoryview, slab_bytes: int, slabs: Mapping[int, memoryview]) -> None:
        """Copy cells of these slabs, checked by these generations, and of no others."""

    def forget(self) -> None:
        """Drop all answers, and all that the engine shared."""


class SharedContent:
    """The stamps, index, segments and slabs of one native table."""

    def __init__(self, client: Connected, stamps: StampsInUse, index: IndexInUse, table: NativeTable) -> None:
        self._client = client
        self._shared_stamps = stamps
        self._shared_index = index
        self._table = table
        self.lock = threading.Lock()
        self.epoch = NEVER
        """The connection whose engine's stamps are used."""
        self.stamps: StampReader | None = None
        """The stamps of `epoch`."""
        self._asked_epoch = NEVER
        """The connection whose engine was last asked for them."""
        self._index: SharedIndexReader | None = None
        self._is_index_due = False
        self._borrowed: dict[int, Held] = {}
        self._wanted: set[tuple[int, int]] = set()
        self._asked: set[tuple[int, int]] = set()
        """Requested on this connection: once is enough for what the engine does not give."""

    def standing(self) -> int:
        """Return the epoch whose answers may be repeated now, or NEVER; forget answers of one that has ended."""
        epoch = self.epoch
        if epoch == NEVER or self._client.is_held(epoch):
            return epoch
        with self.lock:
            if self.epoch == epoch:
                self._forget()
        return NEVER

    @property
    def is_open(self) -> bool:
        """True if answers can be learned: the engine of this connection has stamps."""
        return self.epoch != NEVER and self.epoch == self._client.epoch

    def want(self, places: Iterable[tuple[int, int]], is_found: bool) -> None:
        """Have segments and slabs brought, those that were not requested in vain.

        `is_found`: the index has all that was learned; else it may have been replaced.
        """
        for place in places:
            if place not in self._asked and len(self._wanted) < KNOWN_WANTED_MAX:
                self._wanted.add(place)
        self._is_index_due = not is_found and self._has_old_index()

    @property
    def is_due(self) -> bool:
        """True if `renewal` should run: on each connection, and when content lies where it was not found before."""
        return self._asked_epoch != self._client.epoch or self._is_index_due or bool(self._wanted)

    def renewal(self) -> Steps[None]:
        """Ask for what is due: stamps, the shared index, segments and slabs.  Raises no LakeError."""
        if self._asked_epoch != self._client.epoch:
            yield from self._open()
        if self.is_open:
            epoch = self.epoch
            wanted = yield from self._brought()
            with self.lock:
                if self.epoch == epoch == self._client.epoch:
                    self._use(wanted)
            if self._is_index_due:
                yield from self._use_index(epoch)

    @property
    def refusal(self) -> LakeError | None:
        """The error with which the engine answered when it was last asked for its stamps."""
        return self._shared_stamps.refusal

    def ask_again(self) -> None:
        """Let the engine be asked for its stamps once more on this connection."""
        self._asked_epoch = NEVER

    def _open(self) -> Steps[None]:
        """Use the stamps and the shared index of the present connection, if its engine has them."""
        epoch = self._asked_epoch = self._client.epoch
        try:
            if self._shared_stamps.at_hand() is None:
                yield from self._shared_stamps.renewal()
        except EngineUnreachable:  # the next connection is asked
            return
        except BaseException:  # cancelled: the next call asks
            self._asked_epoch = NEVER
            raise
        with self.lock:
            stamps = self._shared_stamps.at_hand()
            if stamps is None or epoch != self._client.epoch:
                return
            self._forget()
            self._table.use_stamps(stamps)
            self.stamps = stamps
            self.epoch = epoch
        yield from self._use_index(epoch)

    def _use_index(self, epoch: int) -> Steps[None]:
        index = self._shared_index
        if index.is_due:
            yield from index.renewal()
        with self.lock:
            reads = index.at_hand()
            if reads is not None and self.epoch == epoch == self._client.epoch:
                assert isinstance(reads.index, SharedIndexReader), "chunks are looked up in a shared index"
                self._index = reads.index
                self._table.use_places(reads.index.table)
            self._is_index_due = False

    def _has_old_index(self) -> bool:
        """Return True if the engine has replaced the index that is in use here, or the client has a newer one."""
        index = self._shared_index
        reads = index.at_hand()
        return index.is_due or (reads is not None and reads.index is not self._index)

    def _brought(self) -> Steps[list[tuple[int, int]]]:
        """Ask for what is wanted and not at hand; return what was wanted, for `_use`."""
        wanted, self._wanted = sorted(self._wanted), set()
        places = self._client.steps.offers.places
        segments = {SegmentId(number) for medium, number in wanted if medium in IN_FILES and medium in places}
        slabs = {number for medium, number in wanted if medium not in IN_FILES and medium in places}
        held = self._client.steps.descriptors
        try:
            yield from need_segments(held, held.missing(segments))
            yield from need_slabs(held.slabs, held.slabs.missing(slabs))
        except LakeError:
            return []
        return wanted

    def _use(self, wanted: list[tuple[int, int]]) -> None:
        """Use what was brought."""
        if len(self._asked) + len(wanted) > KNOWN_SEGMENTS_MAX:
            self._asked.clear()
        self._asked.update(wanted)
        for medium, number in wanted:
            if medium in IN_FILES:
                self._use_segment(number)
        if any(medium not in IN_FILES for medium, _ in wanted):
            arena = self._client.steps.descriptors.slabs.arena
            if arena is not None:
                self._table.use_slabs(arena.generations.cast("B"), arena.slab_bytes, arena.slabs)

    def _use_segment(self, number: int) -> None:
        if number in self._borrowed:
            return
        if len(self._borrowed) >= KNOWN_SEGMENTS_MAX:
            self._give_back()
        held = self._client.steps.descriptors.enter(SegmentId(number))
        if held is None:
            return
        self._borrowed[number] = held
        dropped = self._table.use_segment(number, held.descriptor, held.nowait)
        if dropped is not None and (before := self._borrowed.pop(dropped, None)) is not None:
            self._asked.discard((MEDIUM_SEGMENT, dropped))
            self._client.steps.descriptors.leave(before)

    def _give_back(self) -> None:
        self._table.drop_segments()
        borrowed, self._borrowed = self._borrowed, {}
        for held in borrowed.values():
            self._client.steps.descriptors.leave(held)
        self._asked.clear()

    def close(self) -> None:
        """Forget everything: the client was closed, or its owner ends."""
        with self.lock:
            self._forget()

    def begin_anew(self) -> None:
        """Forget everything in a child just forked: it is of the parent's connection.  Waits for no lock."""
        self.lock = threading.Lock()
        self._borrowed.clear()
        self._asked_epoch = NEVER
        self._forget()

    def _forget(self) -> None:
        """Forget everything: the connection has ended, or another begins.  The lock is held."""
        self.epoch = NEVER
        self.stamps = None
        self._index = None
        self._give_back()
        self._wanted.clear()
        self._table.forget()
