"""Write-behind: the first chunks of a file are stored while the rest is still being written.

When a long file that was written from its beginning is closed, all but its last chunks are in the store: the commit
(`fuse.staging.commit`) finds their ids here and only has the engine hold them.

Rules kept here:
- No client sees anything of it before the commit, and the commit does not depend on it: all bytes stay in the staging
  file, and a chunk that the store lost since (a restarted engine) is stored again from there.
- The cuts are those of a put of the finished file, as far as they are known: a safetensors file's are in its header.
- A chunk is stored once all its bytes, and later ones, are written.  When its bytes are written again, or cut off,
  its id is dropped; the commit stores the bytes present then.
- Only content without stored bytes below it: an edit's cuts depend on later edits.
- A failure is no error: the commit meets it again, and reports it to the process that closes the file.
- Pages of stored bytes are given up once they are clean, never written out for it: of a long file that a mount gets
  faster than the disk takes it, the page cache has what waits to be written, and not all of it.
- Memory: about 100 bytes for each stored chunk; where the engine cannot read the staging file (over a network), also
  two requests of two chunks of 4 MiB.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from fuse.staging.staged_file import Kind, StagedFile
from lakefs.content.chunking import iter_extents, plan_growing
from lakefs.errors import InvalidArgument
from lakefs.get.opened import Piece
from lakefs.host.page_cache import is_written_out
from lakefs.ids import ChunkId, ChunkKind, SessionId, data_chunk_id
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import BLOB_BYTES_MAX, CHUNK_BYTES, STORE_REQUEST_CHUNKS, WRITE_BEHIND_WINDOW
from lakefs.put.upload import forget
from lakefs.steps.steps import Completion, Effect, Pipeline, Send, Steps, Work, send, work
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import (
    Offer,
    Offered,
    SessionEnd,
    SessionOpen,
    SessionOpened,
    SourceClose,
    SourceOpen,
    SourceOpened,
    StoreChunks,
    Stored,
    StoreFromSource,
)

BEGIN_BYTES: Final = 2 * CHUNK_BYTES
"""Files that stay shorter are stored when they are closed."""

LET_GO_CHUNKS: Final = 32
"""Most chunks whose pages are looked at for one request: 0.1 ms of the loop's time."""

Extent = tuple[int, int]
"""Offset and length in bytes."""
_NEVER: Final = (BLOB_BYTES_MAX, BLOB_BYTES_MAX)


class StagedSource:
    """The descriptor of a staging file, sent to the engine when it is first needed, so that the engine reads it."""

    def __init__(self, lake: LakeSteps, staged: StagedFile) -> None:
        self.can_be_sent = lake.offers.sources
        """False once the engine is known not to take it: it cannot read from that file system."""
        self.id: int | None = None
        """The engine's number of it, while it is open."""
        self._staged = staged

    def opened(self) -> Steps[int | None]:
        """Return the engine's number of it; None if the engine does not take it."""
        if self.id is None and self.can_be_sent:
            try:
                reply = yield from send(SourceOpen(), descriptors=[self._staged.descriptor])
            except InvalidArgument:
                self.can_be_sent = False
                return None
            assert isinstance(reply.message, SourceOpened)
            self.id = reply.message.source
        return self.id

    def forget(self) -> Steps[None]:
        """Close it at the engine, if it is open; a failure is no error."""
        if self.id is not None:
            yield from forget(SourceClose(self.id))


class WriteBehind:
    """The chunks of one staged file that are in the store already, held by a session of their own."""

    def __init__(self, lake: LakeSteps, staged: StagedFile) -> None:
        assert not staged.base_bytes, "cuts over stored content are not known before its end"
        self._lake = lake
        self._staged = staged
        self._stored: list[Piece] = []  # by offset
        self._in_flight: set[Extent] = set()  # without those written again since
        self._extents: Iterator[Extent] | None = None
        self._next: Extent = (0, CHUNK_BYTES)
        self._session: SessionId | None = None
        self._source = StagedSource(lake, staged)
        self._has_ended = False
        self._let_go_end = 0  # of the bytes whose pages were given up

    def has_work(self) -> bool:
        """Return True if `run` would store something now."""
        offset, length = self._next
        return (
            self._staged.size > max(offset + length, BEGIN_BYTES - 1)
            and not self._has_ended
            and self._staged.is_all(Kind.STAGED, offset, length)
        )

    def chunk(self, offset: int, length: int) -> ChunkId | None:
        """Return the id of these bytes if they were stored as one chunk."""
        at = bisect_left(self._stored, offset, key=_offset)
        if at < len(self._stored) and self._stored[at][1:] == (offset, length):
            return self._stored[at].chunk
        return None

    def changed(self, offset: int, end: int) -> None:
        """Drop the chunks that have some of the bytes [offset, end), which were written or cut off."""
        behind = bisect_left(self._stored, end, key=_offset)
        first = behind
        while first and self._stored[first - 1].offset + self._stored[first - 1].length > offset:
            first -= 1
        del self._stored[first:behind]
        if self._in_flight:
            self._in_flight = {at for at in self._in_flight if at[0] >= end or sum(at) <= offset}

    def run(self) -> Steps[None]:
        """Store all that can be stored by now.  One run at a time; an error ends the write-behind of this file."""
        try:
            if self._session is None:
                reply = yield from send(SessionOpen())
                assert isinstance(reply.message, SessionOpened)
                self._session = SessionId(reply.message.session)
            if self._extents is None and not (yield from self._plan()):
                return
            yield from self._store()
        except BaseException:
            self._has_ended = True
            raise

    def stop(self) -> None:
        """Start no more requests."""
        self._has_ended = True

    def end(self) -> Steps[None]:
        """Close session and source, when no run is under way; chunks that no commit has taken are then garbage."""
        self._has_ended = True
        yield from self._source.forget()
        if self._session is not None:
            yield from forget(SessionEnd(self._session))

    def _plan(self) -> Steps[bool]:
        """Plan the cuts; False if they cannot be known yet."""
        plan = yield from work(plan_growing, self._staged.read, self._staged.size)
        if plan is None:
            self._next = (0, 2 * sum(self._next))  # the header is not complete
            return False
        self._extents = iter_extents(plan.lengths())
        self._advance()
        return True

    def _advance(self) -> None:
        assert self._extents is not None
        self._next = next(self._extents, _NEVER)

    def _store(self) -> Steps[None]:
        pipeline = Pipeline(WRITE_BEHIND_WINDOW)
        while self.has_work():
            batch: list[Extent] = []
            while len(batch) < STORE_REQUEST_CHUNKS and self.has_work():
                batch.append(self._next)
                self._advance()
            self._in_flight.update(batch)
            effect, done = yield from self._effect(batch)
            yield from pipeline.submit(effect, done)
            yield from self._let_go()
            if not self.has_work():
                yield from pipeline.drain()

    def _let_go(self) -> Steps[None]:
        """Give up the page cache of stored bytes that the kernel has written to the staging file's disk by now.

        The bytes stay in the staging file.  The next writes then get these pages.  Pages that were not used for a while
        can be slow to write to: a hypervisor has to give the machine that memory back.
        """
        at = bisect_left(self._stored, self._let_go_end, key=_offset)
        clean: list[Extent] = []
        for _, offset, length in self._stored[at : at + LET_GO_CHUNKS]:
            follows = not clean or offset == sum(clean[-1])
            if not follows or not is_written_out(self._staged.descriptor, offset, length):
                break
            clean.append((offset, length))
        if clean:
            begin, self._let_go_end = clean[0][0], sum(clean[-1])
            yield from work(_drop_pages, self._staged.descriptor, begin, self._let_go_end - begin)

    def _effect(self, batch: list[Extent]) -> Steps[tuple[Effect, Completion]]:
        assert self._session is not None
        source = yield from self._source.opened()
        if source is not None:
            offsets, lengths = [offset for offset, _ in batch], [length for _, length in batch]
            request = StoreFromSource(self._session, source, offsets, lengths)

            def stored(reply: Reply) -> None:
                assert isinstance(reply.message, Stored)
                self._note(batch, [ChunkId(chunk) for chunk in reply.message.chunks])

            return Send(request), stored

        def read(found: list[tuple[ChunkId, bytes]]) -> Steps[None]:
            yield from self._offer(found)
            self._note(batch, [chunk for chunk, _ in found])

        return Work(self._read, (batch,)), read

    def _read(self, batch: list[Extent]) -> list[tuple[ChunkId, bytes]]:
        contents = [self._staged.read(offset, length) for offset, length in batch]
        return [(data_chunk_id(content), content) for content in contents]

    def _offer(self, found: list[tuple[ChunkId, bytes]]) -> Steps[None]:
        """Send the chunks that the engine lacks."""
        assert self._session is not None
        reply = yield from send(Offer(self._session, [bytes(chunk) for chunk, _ in found]))
        assert isinstance(reply.message, Offered)
        present = reply.message.present
        lacking = [memoryview(content) for (_, content), there in zip(found, present, strict=True) if not there]
        if lacking:
            kinds, lengths = [int(ChunkKind.DATA)] * len(lacking), [len(payload) for payload in lacking]
            yield from send(StoreChunks(self._session, kinds, lengths), body=lacking)

    def _note(self, batch: list[Extent], chunks: list[ChunkId]) -> None:
        for extent, chunk in zip(batch, chunks, strict=True):
            if extent in self._in_flight:
                self._in_flight.remove(extent)
                self._stored.append(Piece(chunk, *extent))


def _drop_pages(descriptor: int, offset: int, length: int) -> None:
    with suppress(OSError):  # the file may be given up meanwhile
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def _offset(piece: Piece) -> int:
    return piece.offset
