"""Keyed indexes of the members on this machine, as a head hands them to its clients (`lakefs.direct.key_homes`).

    head      opens index and stamps of each home over its link; one that is reached over TCP has none to give
    client    OpenKeyHomes: the ring of keys, these indexes and stamps; then OpenSegments of what the indexes name
    change    the magic of the key homes becomes zeros, and clients send OpenKeyHomes again

Rules kept here:
- Key homes are of the ring by which this head sends requests: they are withdrawn in the step in which it uses another.
- They are withdrawn too when a home answers whose index was not to be had when they were made, and now may be.
- An index is handed out while its member lives and maintains it.  Clients see by themselves when that ends; the head
  withdraws it besides when it finds the member away.
- Stamps are opened before the index, and must say afterwards that the member lives: so both are of one process.
- The number of an index is given to no other one until all numbers were given.
- Descriptors of segments are kept while their index is, LOCAL_SEGMENTS_MAX in all: the ones sent last.
- A client that does not get this sends requests.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import trio

from engine.host.tasks import run_all
from engine.members.ports import Members
from engine.memory.sealed_memory import SealedMemory
from lakefs.cluster.key_ring import HASH_KEY, KeyRing
from lakefs.cluster.table import Table
from lakefs.errors import LakeError, PermissionDenied, StaleGrant
from lakefs.host.descriptors import close_all
from lakefs.ids import MemberId
from lakefs.limits import DESCRIPTORS_PER_FRAME_MAX
from lakefs.ports import Clock
from lakefs.shared_index.homes_format import MAGIC, NOWHERE, SEGMENT_BITS, SUPERSEDED, homes_bytes, pack_homes
from lakefs.shared_index.keyed_index import KeyedIndexReader
from lakefs.stamps.stamps import StampReader
from lakefs.wire import messages as m

HOMES_SHARED_MAX: Final = (DESCRIPTORS_PER_FRAME_MAX - 1) // 2
"""Most members whose indexes are handed out: an index and stamps each, and the key homes, in one frame."""


KEYS_RETRY_S: Final = 2.0
"""Time before a head asks a member on its machine again for its keyed index: one that starts opens its store first."""
LOCAL_SEGMENTS_MAX: Final = 256
"""Descriptors of members' segments that are kept: one each, of the thousands that a process has."""
LOCAL_KEYS_DESCRIPTORS: Final = 1 + 2 * HOMES_SHARED_MAX + LOCAL_SEGMENTS_MAX
"""Most descriptors that this keeps."""


class OpenedIndex:
    """The keyed index of one member's process, with its stamps and segments.  Owns their descriptors."""

    def __init__(self, member: MemberId, number: int, index: int, stamps: int) -> None:
        """Errors of the readers, StaleGrant: it is of no use; then the descriptors stay the caller's."""
        self.member: Final = member
        self.number: Final = number
        self._index = KeyedIndexReader(index)
        self._stamps = StampReader(stamps)
        self.descriptors: Final = (index, stamps)
        if not self.is_live:
            raise StaleGrant("the member ended, or replaced its keyed index", subject=member.hex())

    @property
    def is_live(self) -> bool:
        """True while the member lives and maintains this index."""
        return self._index.is_current and self._stamps.is_live


class KeyHomesMemory:
    """Key homes that are in use, and the indexes that they name."""

    def __init__(self, ring: KeyRing, ring_epoch: int, indexes: Sequence[OpenedIndex]) -> None:
        """EngineBusy: memory is short."""
        self.indexes: Final = tuple(indexes)
        vnodes = ring.vnodes
        at = {index.member: place for place, index in enumerate(indexes)}
        homes = [at.get(member, NOWHERE) for _, member in vnodes]
        self._sealed = SealedMemory("key-homes", homes_bytes(len(vnodes)), huge=False)
        self._sealed.view[:] = pack_homes(ring_epoch, HASH_KEY, [position for position, _ in vnodes], homes)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the answer to OpenKeyHomes."""
        return [self._sealed.descriptor, *(each for index in self.indexes for each in index.descriptors)]

    def withdraw(self) -> None:
        """Send the readers to the head, and release the memory."""
        self._sealed.view[: len(MAGIC)] = SUPERSEDED
        self._sealed.close()


class LocalKeys:
    """The key homes of one head.  Used on the loop; `close` it."""

    def __init__(self, members: Members, clock: Clock, machine: str = "") -> None:
        """`machine`: the id of this one, "" if it is not known."""
        self._members = members
        self._clock = clock
        self._machine = machine
        self._opened: dict[MemberId, OpenedIndex] = {}
        self._by_number: dict[int, OpenedIndex] = {}
        self._segments = OrderedDict[tuple[int, int], int]()
        """Descriptors by the number of the index and the segment's id, those sent last at the end."""
        self._last_number = -1
        self._absent: dict[MemberId, float] = {}
        """Homes without an index, each with the time from which on it may be asked again when it answers."""
        self._memory: KeyHomesMemory | None = None
        self._opening = trio.Lock()
        self._rings = 0
        """Count of rings that were used."""

    # --- shared ------------------------------------------------------------------------------------

    async def key_homes(self, ring: KeyRing, table: Table) -> KeyHomesMemory | None:
        """Return key homes of this ring and its table, which are the head's; None when it uses others by now.

        EngineBusy: memory is short.
        """
        rings = self._rings
        async with self._opening:
            if rings != self._rings:
                return None
            if self._memory is not None and all(index.is_live for index in self._memory.indexes):
                return self._memory
            self._drop_dead()
            here = set(self._here(table))
            local = [home for home in ring.members if home in here][:HOMES_SHARED_MAX]
            await run_all(self._open, [home for home in local if self._may_open(home)])
            if rings != self._rings:
                return None
            self.withdraw()
            indexes = [self._opened[home] for home in local if home in self._opened]
            self._memory = KeyHomesMemory(ring, table.ring_epoch, indexes)
            return self._memory

    def _here(self, table: Table) -> Iterator[MemberId]:
        """Yield the members that are not known to be on another machine."""
        for member in table.members:
            if not (self._machine and member.machine) or self._machine == member.machine:
                yield member.id

    def _may_open(self, home: MemberId) -> bool:
        return home not in self._opened and self._absent.get(home, 0) < math.inf

    def withdraw(self) -> None:
        """Have clients use the present key homes no more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.withdraw()

    def use_ring(self) -> None:
        """Note that the head uses another ring from this step on."""
        self._rings += 1
        self._absent.clear()
        self.withdraw()

    def answered(self, home: MemberId) -> None:
        """Note that a home has answered: it may have an index now."""
        retry_at = self._absent.get(home)
        if retry_at is not None and self._clock.monotonic() >= retry_at:
            del self._absent[home]
            self.withdraw()

    def away(self, home: MemberId) -> None:
        """Note that a home cannot be reached: its process may have ended."""
        if home in self._opened:
            self.withdraw()
            self._drop(self._opened[home])
            self._absent[home] = -math.inf

    def close(self) -> None:
        """Withdraw the key homes, and close all descriptors."""
        self.withdraw()
        for index in list(self._opened.values()):
            self._drop(index)

    # --- indexes -----------------------------------------------------------------------------------

    async def _open(self, home: MemberId) -> None:
        """Open a home's index and stamps, if it shares them with this process."""
        descriptors: list[int] = []
        self._absent[home] = self._clock.monotonic() + KEYS_RETRY_S
        try:
            for request in (m.OpenStamps(), m.OpenKeyedIndex()):
                reply = await self._members.call(home, request)
                reply.body.release()
                descriptors += reply.descriptors
            stamps, index = descriptors
            opened = OpenedIndex(home, self._next_number(), index, stamps)
        except BaseException as error:
            close_all(descriptors)
            if not isinstance(error, LakeError):
                raise
            if isinstance(error, PermissionDenied):  # it is reached over TCP
                self._absent[home] = math.inf
            return
        self._absent.pop(home, None)
        self._opened[home] = self._by_number[opened.number] = opened

    def _next_number(self) -> int:
        number = (self._last_number + 1) % NOWHERE
        while number in self._by_number:
            number = (number + 1) % NOWHERE
        self._last_number = number
        return number

    def _drop_dead(self) -> None:
        for index in list(self._opened.values()):
            if not index.is_live:
                self._drop(index)

    def _drop(self, index: OpenedIndex) -> None:
        del self._opened[index.member], self._by_number[index.number]
        for number, segment in [each for each in self._segments if each[0] == index.number]:
            os.close(self._segments.pop((number, segment)))
        close_all(index.descriptors)

    # --- segments ----------------------------------------------------------------------------------

    async def segments(self, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return which of these segments of places were opened, and their descriptors, which stay this object's."""
        by_index: dict[int, list[int]] = {}
        for place in wanted:
            number, segment = place >> SEGMENT_BITS, place & (1 << SEGMENT_BITS) - 1
            if (number, segment) in self._segments:
                self._segments.move_to_end((number, segment))
            elif number in self._by_number:
                by_index.setdefault(number, []).append(segment)
        await run_all(lambda number: self._open_segments(number, by_index[number]), list(by_index))
        found = [
            (place, descriptor)
            for place in wanted
            if (descriptor := self._segments.get((place >> SEGMENT_BITS, place & (1 << SEGMENT_BITS) - 1))) is not None
        ]
        return [place for place, _ in found], [descriptor for _, descriptor in found]

    async def _open_segments(self, number: int, segments: Sequence[int]) -> None:
        index = self._by_number[number]
        with suppress(LakeError):  # the client asks for what lies there
            reply = await self._members.call(index.member, m.OpenSegments(list(segments)))
            reply.body.release()
            descriptors = list(reply.descriptors)
            assert isinstance(reply.message, m.SegmentsOpened), "the answer to OpenSegments"
            # A member that has started anew since may have other segments of these numbers.
            if self._by_number.get(number) is not index or not index.is_live:
                close_all(descriptors)
                return
            for segment, descriptor in zip(reply.message.segments, descriptors, strict=True):
                before = self._segments.pop((number, segment), None)
                if before is not None:
                    os.close(before)
                self._segments[number, segment] = descriptor
            while len(self._segments) > LOCAL_SEGMENTS_MAX:
                os.close(self._segments.popitem(last=False)[1])
