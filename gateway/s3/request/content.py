"""Content of objects for answers: opened, read, checked, sent.

A small object arrives whole with the answer to one request.  A larger one is held by a lease and read in windows: from
the segment files of this machine where their pages are in memory, else by the steps that every client uses.  A range
of at most a granule is first tried without a lease.

Rules kept here:
- Every byte is checked by CRC32C before it is sent: the whole payload of a small object, granules of 64 KiB of others.
- No content is kept for a client that is slow to read.  There is one window for all answers: it is filled, checked and
  passed to the socket in one step.  Bytes that the socket did not take are read again when it takes bytes again (at
  most a granule more than was left).  So a thousand stalled clients cost no memory, and the window stays in the
  processor's cache: 64 MiB cost 14 ms of CPU in pieces of 128 KiB, 22 ms in pieces of 1 MiB.
- Nothing is mapped: an I/O error is an error of the read, not a signal.

Content that is not in memory is brought into the page cache, 2 MiB at a time.  Only where that does not help (memory is
short, or the engine is on another machine) a piece of 1 MiB is kept until its client has taken it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from gateway.http.messages import ResponseSender
from gateway.http.ranges import ByteRange
from lakefs.client.trio.driver import TrioDriver
from lakefs.content.verify import Check, damaged, granules_around, matches
from lakefs.errors import EngineUnreachable, LakeError, StaleGrant
from lakefs.get.objects import open_object, read_range
from lakefs.get.opened import Access, Opened, Piece, opened_at
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import cached_crcs, cached_granules
from lakefs.ids import ChunkId, SegmentId
from lakefs.limits import (
    BLOB_BYTES_MAX,
    GRANULE_BYTES,
    S3_BROUGHT_BYTES,
    S3_HELD_BYTES,
    S3_SEND_BYTES,
    SMALL_PAYLOAD_BYTES,
)
from lakefs.names import Name
from lakefs.wire.engine_port import EngineClient, Reply
from lakefs.wire.media import IN_FRAMES
from lakefs.wire.messages import CloseLeases, Grant, OpenedObject, OpenObjects, OpenResults

_log: Final = structlog.get_logger(__name__)
_TURN_BYTES: Final = 1 << 20
"""Bytes after which a client that takes everything at once lets others in."""


class Contents:
    """Opens objects of one store, and reads them."""

    def __init__(self, engine: EngineClient, driver: TrioDriver, wants_stamps: Callable[[], bool]) -> None:
        """`wants_stamps` returns True if objects are to be opened with their stamps."""
        self._engine = engine
        self._wants_stamps = wants_stamps
        self._driver = driver
        self._window = memoryview(bytearray(S3_SEND_BYTES))

    async def open(self, name: Name, wanted: ByteRange | None = None, version: str = "") -> Opened:
        """Open an object; a small one has its payload.  KeyNotFound, IsAFolder, ...; the caller closes it.

        Grants are asked for the `wanted` bytes; up to a granule may be read once without a lease: see `at_hand`.
        """
        epoch = self._engine.epoch
        reply = await self._engine.call(_request(name, wanted, version, stamps=self._wants_stamps()))
        message = reply.message
        assert isinstance(message, OpenResults)
        result = message.results[0]
        answer, failure = result.opened, result.failure
        if answer is None:
            assert failure is not None
            raise failure.as_error()
        opened = _with_payload(name, answer, reply)
        if opened is None and answer.chunks and (answer.lease or _is_short(wanted)):
            opened = opened_at(name, answer)
        if opened is None:
            # A layout too long for the answer, or a small payload that could not be read at once.
            await self._end(answer.lease)
            return await self.open_leased(name, version)
        opened.epoch, opened.stamps = epoch, result.stamps
        return opened

    async def open_leased(self, name: Name, version: str = "") -> Opened:
        """Open an object with a lease, whatever its size.  Errors as `open`."""
        access = self._driver.access()
        return await self._driver.run(open_object(access, name, inline_bytes=SMALL_PAYLOAD_BYTES, version=version))

    async def close(self, opened: Opened) -> None:
        """Release the engine's lease; also when cancelled."""
        if opened.lease:
            with trio.CancelScope(shield=True):
                await self._end(opened.lease)

    async def _end(self, lease: int) -> None:
        if not lease:
            return
        try:
            await self._engine.call(CloseLeases([lease]))
        except LakeError:
            return  # a lost connection has released it

    def at_hand(self, opened: Opened, chosen: ByteRange) -> bytes | None:
        """Return the bytes if they are in memory and few, else None.  Does not wait.

        Without a lease the place may have been reused since: then the checksum does not match, and the result is None.
        """
        if opened.inline or not opened.pieces:
            whole = b"".join(opened.inline.values())
            return whole if len(whole) == chosen.stop - chosen.first else whole[chosen.first : chosen.stop]
        if chosen.stop - chosen.first > GRANULE_BYTES:
            return None
        found = _Reading(opened).at_once(self._driver.access(), chosen.first, chosen.stop, self._window)
        return bytes(found) if len(found) == chosen.stop - chosen.first else None

    async def send(self, opened: Opened, chosen: ByteRange, sender: ResponseSender) -> None:
        """Send the bytes.  EngineUnreachable if the client is gone, or no more can be read."""
        reading = _Reading(opened)
        at, turn = chosen.first, _TURN_BYTES
        while at < chosen.stop:
            piece = reading.at_once(self._driver.access(), at, chosen.stop, self._window)
            if not piece:
                at += await self._send_fetched(opened, at, chosen.stop, sender, hold=at == reading.fetched_at)
                reading.fetched_at = at
                continue
            count = sender.send_nowait([piece])
            at += count
            turn -= count
            if count < len(piece):
                await sender.wait_writable()
                turn = _TURN_BYTES
            elif turn <= 0:
                await trio.lowlevel.checkpoint()
                turn = _TURN_BYTES

    async def _send_fetched(self, opened: Opened, at: int, stop: int, sender: ResponseSender, *, hold: bool) -> int:
        """Fetch from `at` on, and send: all if `hold`, else as much as the socket takes.  Return the byte count."""
        access = self._driver.access()
        hold = hold or not access.offers.segments
        length = min(S3_HELD_BYTES if hold else S3_BROUGHT_BYTES, stop - at)
        try:
            piece = await self._driver.run(read_range(access, opened, at, length))
        except LakeError as error:
            _log.error("an answer was cut short", name=str(opened.name), error=error.message)
            raise EngineUnreachable("an answer was cut short") from error
        if hold:
            await sender.send([piece])
            return length
        return sender.send_nowait([piece])


def _is_short(wanted: ByteRange | None) -> bool:
    return wanted is not None and wanted.stop - wanted.first <= GRANULE_BYTES


def _request(name: Name, wanted: ByteRange | None, version: str, *, stamps: bool) -> OpenObjects:
    versions = [version] if version else []
    if wanted is None or wanted.first >= BLOB_BYTES_MAX:
        return OpenObjects(
            [name], inline_bytes=SMALL_PAYLOAD_BYTES, lease_inline=False, versions=versions, stamps=stamps
        )
    return OpenObjects(
        [name],
        inline_bytes=SMALL_PAYLOAD_BYTES,
        lease=not _is_short(wanted),
        lease_inline=False,
        grants_from=wanted.first,
        grants_bytes=min(wanted.stop, BLOB_BYTES_MAX) - wanted.first,
        versions=versions,
        stamps=stamps,
    )


class _Reading:
    """Position of one answer: the present chunk, and that chunk's checksums."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._piece = Piece(ChunkId(b""), 0, 0)
        self._grant: Grant | None = None
        self._crcs: bytes | None = None
        self.fetched_at = -1
        """End of the last fetched piece that was sent; content not in memory there does not stay in memory."""

    def at_once(self, access: Access, at: int, stop: int, window: memoryview) -> memoryview:
        """Return some of the bytes [at, stop), checked, in `window`; none if that needs a wait."""
        piece = self._piece
        if self._grant is None or not piece.offset <= at < piece.offset + piece.length:
            piece = self._enter(access, at)
        if self._grant is None:
            return window[:0]
        begin = (at - piece.offset) // GRANULE_BYTES * GRANULE_BYTES
        end = granules_around(begin, min(stop - piece.offset - begin, len(window)), piece.length)[1]
        target = window[: min(end - begin, len(window))]
        if not self._read(access.descriptors, self._grant, begin, target):
            return window[:0]
        skipped = at - piece.offset - begin
        return target[skipped : skipped + stop - at]

    def _read(self, descriptors: SegmentDescriptors, grant: Grant, begin: int, target: memoryview) -> bool:
        """Fill with whole granules; True if they were in memory and match.  If not, the steps decide."""
        chunk, segment = self._piece.chunk, SegmentId(grant.segment)
        if not descriptors.may_be_cached(segment, grant.offset + begin, len(target)):
            return False
        try:
            if self._crcs is None:
                self._crcs = cached_crcs(descriptors, chunk, grant)
            return self._crcs is not None and cached_granules(descriptors, chunk, grant, self._crcs, begin, target)
        except StaleGrant:  # moved, or damaged
            return False

    def _enter(self, access: Access, at: int) -> Piece:
        (self._piece,) = self._opened.overlapping(at, 1)
        self._grant = self._opened.grants.get(self._piece.chunk) if access.offers.segments else None
        self._crcs = None
        return self._piece


def _with_payload(name: Name, answer: OpenedObject, reply: Reply) -> Opened | None:
    """Return an object whose payload was in the answer, checked; None if it was not.  ChunkDamaged."""
    if not answer.stat.size_bytes:
        return Opened(name, answer.stat, answer.lease, [], {}, {})
    if len(answer.grants) != 1 or answer.grants[0].medium not in IN_FRAMES:
        return None
    chunk, grant = ChunkId(answer.chunks[0]), answer.grants[0]
    payload = reply.body.joined()
    reply.body.release()
    if len(payload) != answer.stat.size_bytes or not matches(chunk, payload, Check.CRC32C, grant.crc):
        raise damaged(chunk, str(name))
    return Opened(name, answer.stat, answer.lease, [Piece(chunk, 0, len(payload))], {}, {chunk: payload})
