"""Reads by RDMA: chunks of the engine's DRAM tier are READ into registered memory of the client, and checked there.

Rules kept here:
- Payload and vector are one READ.  What was READ is checked before a byte of it is delivered, by CRC32C if the client
  checks nothing else: the engine may give the place to another chunk at any moment.
- What has arrived is checked while the rest is being moved.
- A grant is used with the queue pair of the connection that it arrived on, and with no other.
- A chunk whose check fails is located anew and READ once more, then streamed; so is all of a group whose READ failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from lakefs.content.verify import Check, GranuleCrcs, matches, vector_bytes
from lakefs.errors import DeadlineExceeded, FabricFailed
from lakefs.get.opened import Access
from lakefs.get.places import Wanted, ask_for_places, length_of
from lakefs.limits import BOUNCE_BYTES, MIB
from lakefs.steps.steps import Pipeline, Steps, Work, work
from lakefs.wire.messages import Grant

if TYPE_CHECKING:
    from lakefs.fabric.client_fabric import ClientLink

CONNECT_FROM_BYTES: Final = 1 * MIB
"""Least bytes to be streamed for which a queue pair is made; for less, its round trips cost more than it gains."""
Split: TypeAlias = "tuple[ClientLink | None, list[Wanted], list[Wanted]]"
"""A queue pair, the chunks to READ over it, and those to stream."""


def split_remote(access: Access, wanted: Sequence[Wanted]) -> Steps[Split]:
    """Split chunks into those that are READ and those that are streamed; makes a queue pair if that is worth it."""
    fabric = access.fabric
    if fabric is None or not wanted:
        return None, [], list(wanted)
    link = fabric.link
    if link is None:
        if length_of(wanted) < CONNECT_FROM_BYTES:
            return None, [], list(wanted)
        link = yield from fabric.connected()
        if link is None:
            return None, [], list(wanted)
        yield from _locate(access, wanted)  # these were located before there was a queue pair
    remote = [want for want in wanted if _is_readable(link, want)]
    return link, remote, [want for want in wanted if not _is_readable(link, want)]


def submit_remote(
    access: Access,
    link: ClientLink,
    group: Sequence[Wanted],
    pipeline: Pipeline,
    again: Callable[[Sequence[Wanted]], Steps[None]],
) -> Steps[None]:
    """READ a group of chunks in a thread; `again` fetches those that were not right, or all behind a failure."""

    def done(stale: list[Wanted]) -> Steps[None]:
        _note(access, group, stale)
        access.progress(length_of(group) - length_of(stale), 0)
        if stale:
            yield from again(stale)

    def failed(error: Exception) -> Steps[None]:
        if not isinstance(error, FabricFailed | DeadlineExceeded):
            raise error
        assert access.fabric is not None, "it made the queue pair"
        access.fabric.lost(link, error)
        yield from again(group)

    yield from pipeline.submit(Work(_read_group, (link, group, access.check)), done, failed)


def fetched_remotely(access: Access, wanted: Sequence[Wanted]) -> Steps[Sequence[Wanted]]:
    """Locate chunks anew and READ them once more; return those that are left to stream."""
    fabric = access.fabric
    assert fabric is not None, "it was used before"
    link = yield from fabric.connected()
    if link is None:
        return wanted
    yield from _locate(access, wanted)
    remote = [want for want in wanted if _is_readable(link, want)]
    try:
        stale = yield from work(_read_group, link, remote, access.check)
    except (FabricFailed, DeadlineExceeded) as error:
        fabric.lost(link, error)
        return wanted
    _note(access, remote, stale)
    read = {id(want) for want in remote} - {id(want) for want in stale}
    return [want for want in wanted if id(want) not in read]


def _note(access: Access, group: Sequence[Wanted], stale: Sequence[Wanted]) -> None:
    if access.fabric is not None:
        access.fabric.note_moved(len(group) - len(stale), length_of(group) - length_of(stale))


def _locate(access: Access, wanted: Sequence[Wanted]) -> Steps[None]:
    found = yield from ask_for_places({want.piece.chunk: want.opened for want in wanted}, access.media_now)
    for want in wanted:
        want.opened.grants[want.piece.chunk] = found[want.piece.chunk]


def _is_readable(link: ClientLink, want: Wanted) -> bool:
    """Return True if a chunk's grant can be used with the queue pair."""
    grant = want.opened.grants.get(want.piece.chunk)
    return grant is not None and grant.logical_bytes == want.piece.length and link.may_read(grant)


def _read_group(link: ClientLink, group: Sequence[Wanted], check: Check) -> list[Wanted]:
    """READ and check chunks, and deliver those that are right; return the others.  Blocks.

    FabricFailed, DeadlineExceeded: the queue pair is lost; some chunks may have been delivered.
    """
    checked = Check.CRC32C if check is Check.NONE else check
    stale: list[Wanted] = []
    for batch in _batches(group, checked):
        with link.bounce() as bounce:
            arriving = _Arriving(bounce.memory, batch, checked)
            link.read(bounce, [(grant, begin, end) for _, grant, begin, end in batch], arriving.look)
            arriving.look(batch[-1][3])
            stale += arriving.stale
    return stale


class _Arriving:
    """Chunks that arrive one behind the other in a buffer; each is delivered as soon as it was checked."""

    def __init__(self, memory: memoryview, batch: Sequence[_Placed], check: Check) -> None:
        self._memory = memory
        self._waiting = deque(batch)
        self._check = check
        self._crcs = GranuleCrcs()
        """The CRCs of the first chunk that waits."""
        self.stale: list[Wanted] = []

    def look(self, arrived: int) -> None:
        """Check what is in the first `arrived` bytes of the buffer, and was not when this was called before."""
        while self._waiting:
            want, grant, begin, end = self._waiting[0]
            behind = begin + grant.stored_bytes
            if self._check is Check.CRC32C:
                self._crcs.take(self._memory[begin:behind], arrived - begin)
            if arrived < end:
                return
            self._waiting.popleft()
            payload, vector = self._memory[begin:behind], self._memory[behind:end]
            crcs, self._crcs = self._crcs, GranuleCrcs()
            if self._check is Check.CRC32C:
                is_right = crcs.match(grant.crc, vector)
            else:
                is_right = matches(want.piece.chunk, payload, self._check, grant.crc)
            if is_right:
                memory = want.sink.memory_for(want.piece)
                memory[:] = payload
                want.sink.deliver(want.piece, memory)
            else:
                self.stale.append(want)


_Placed = tuple[Wanted, Grant, int, int]
"""A chunk, its grant, and where its payload begins and its vector ends in the buffer."""


def _batches(group: Sequence[Wanted], check: Check) -> Iterator[list[_Placed]]:
    """Lay chunks out one behind the other, as many as fit into a buffer."""
    batch: list[_Placed] = []
    end = 0
    for want in group:
        grant = want.opened.grants[want.piece.chunk]
        extent = grant.stored_bytes + (vector_bytes(grant.stored_bytes) if check is Check.CRC32C else 0)
        assert extent <= BOUNCE_BYTES, "a chunk fits into a buffer"
        if end + extent > BOUNCE_BYTES:
            yield batch
            batch, end = [], 0
        batch.append((want, grant, end, end + extent))
        end += extent
    if batch:
        yield batch
