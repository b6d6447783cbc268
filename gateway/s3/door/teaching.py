"""Teaching the door: what Python has proven and answered, with all that the repeated answer rests on.

    a request is authenticated   ->  learn_signature: whose signature it was
    an object is answered        ->  learn_object: header lines, checksum lines, chunk, stamps
    the access keys were read    ->  keys_were_read: for how long claims hold

`repeat.h` repeats, and decides nothing.  What is learned here is the whole of what it can answer.

Rules kept here:
- An answer is learned with the stamps of every record that it was read from, after the engine has given it: so all of
  it is durable.  It is repeated while the stamps stand.
- A claim is learned from a signature that was proven, for a key that may read the bucket, and holds as long as the
  keys that it was proven with: a second.  When a key changes or goes, all claims are dropped.
- Stamps, places and answers are those of one connection to one engine.  When it ends all is forgotten, before another
  engine can have opened the store; on the next one the engine is asked for its own.  An answer that was read on the
  connection before is not learned.
- An engine that refuses its stamps (an older one, or one on another machine) is asked as before: the door stays shut.
  Of one that offers none only PUTs are gathered: they are decided in Python, and need no stamps.
"""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import structlog
import trio

from gateway.http.door import IS_BUILT as HTTP_IS_BUILT, Door, GoOn
from gateway.http.head import RequestHead
from gateway.http.messages import ResponseSender
from gateway.http.ranges import ByteRange
from gateway.s3.door.counts import counts_of
from gateway.s3.door.gathering import Gathering
from gateway.s3.protocol.attributes import checksum_headers, object_headers
from gateway.s3.protocol.signing import AccessKey, Signature
from gateway.s3.protocol.targets import Target
from gateway.s3.telemetry.access_log import WRITE_BYTES, AccessLog
from gateway.s3.telemetry.traffic import Snapshot
from lakefs.client.trio.driver import TrioDriver
from lakefs.errors import LakeError, PermissionDenied, UnsupportedVersion
from lakefs.get.opened import Opened, Piece
from lakefs.ids import ChunkId
from lakefs.limits import READ_NOTES_EVERY, S3_ACCESS_LOG_BYTES_MAX, S3_CLOCK_SKEW_S, S3_DOOR_PIECES_MAX
from lakefs.names import Name
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.grants import Grant, PinChunks, Pinned, UnpinChunks
from lakefs.wire.media import MEDIUM_NONE
from lakefs.wire.messages import NoteReads, ObjectStat

if TYPE_CHECKING:
    from gateway.http._door import Rest as AnyRest
    from gateway.s3.door._repeater import OPERATIONS as OPERATIONS, PASSED as PASSED, Put, Repeater, Rest

    IS_BUILT: bool
else:
    try:
        from gateway.s3.door._repeater import OPERATIONS, PASSED, Repeater, Rest
    except ImportError:
        OPERATIONS, PASSED, Repeater, Rest = (), (), None, None
    IS_BUILT = Repeater is not None and HTTP_IS_BUILT

_log: Final = structlog.get_logger(__name__)
_NS: Final = 1_000_000_000
_encode: Final = msgspec.json.Encoder().encode
_NOTE_S: Final = 1.0
"""Seconds between two reports of reads to the engine's DRAM tier."""
_RETRY_S: Final = 0.25
"""Least seconds between two tries to read the access keys in the background."""
_LOOK_S: Final = 0.005
"""Seconds between two looks at the connection to the engine; another engine takes longer to open the store."""
_REOPEN_S: Final = 1.0
"""Seconds after which an engine that was busy is asked for its stamps again."""
_SIGNATURE_BYTES: Final = 64
_PIECE: Final = struct.Struct("<Q33s")
_CLOSE: Final = b"Connection: close\r\n"
_METHODS: Final = ("GET", "HEAD", "PUT")
Line = tuple[bytes, bytes]


class Leased(Protocol):
    """The part of `gateway.s3.request.content.Contents` that rests of answers need."""

    async def open_leased(self, name: Name) -> Opened:
        """Open an object with a lease."""
        ...

    async def send(self, opened: Opened, chosen: ByteRange, sender: ResponseSender) -> None:
        """Send bytes of an opened object."""
        ...

    async def close(self, opened: Opened) -> None:
        """Release the lease."""
        ...


class Seen(NamedTuple):
    """Stamps of the records that an answer about a name was read from; the engine is that of connection `epoch`."""

    stamps: bytes
    epoch: int


class S3Door:
    """The door of one S3 port, and its teacher.  `run` serves it, in a task of its owner."""

    def __init__(
        self, engine: EngineClient, driver: TrioDriver, bounds_s: tuple[float, ...], memory_bytes: int
    ) -> None:
        """`bounds_s`: upper bounds of the buckets of `repeater.times`.  At most `memory_bytes` of answers are kept."""
        self.repeater: Final = Repeater([round(bound * _NS) for bound in bounds_s], memory_bytes, READ_NOTES_EVERY)
        self.gathering: Final = Gathering(self.repeater)
        self.door: Final = Door(self.repeater, self._before_turn, self.gathering.after_turn, self._send_rest)
        self.refresh_keys: Callable[[], Awaitable[None]] | None = None
        """Reads the access keys again before claims end; set by the keys' owner."""
        self.find_key: Callable[[str], AccessKey | None] = lambda access_key: None
        """Returns the present key pair of an access key; set by the keys' owner."""
        self.contents: Leased
        """Opens, sends and closes content; set by its owner."""
        self._log: AccessLog | None = None
        self._engine = engine
        self._driver = driver
        self._content: Final = driver.shares.content_for(self.repeater)
        self._ageing_at = self._noted_at = self._open_at = self._looked_at = 0.0
        self._wanted = trio.Event()
        self._is_refreshing = False
        self._nursery: trio.Nursery | None = None

    def use_log(self, log: AccessLog, one_of: int) -> None:
        """Write one in so many repeated answers to the access log."""
        self.repeater.log(one_of, S3_ACCESS_LOG_BYTES_MAX)
        log.take_more = self.repeater.take_log
        self._log = log

    def counts(self) -> Snapshot:
        """Return the counts of the answers that were repeated, and of the requests that were passed on."""
        return counts_of(self.repeater, OPERATIONS, PASSED)

    @property
    def is_open(self) -> bool:
        """True if the engine of this connection has stamps, so that its answers can be learned."""
        return self._content.is_open

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve parked connections, and get what the engine shares, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self.door.run)
                nursery.start_soon(self.gathering.run)
                task_status.started()
                try:
                    await self._keep_whole()
                finally:
                    self._nursery = None  # a turn may come before the door ends
        finally:
            self._content.close()

    async def _keep_whole(self) -> None:
        """Get what the engine shares, whenever something of it is wanted, until cancelled."""
        while True:
            await self._renew()
            await self._wanted.wait()
            self._wanted = trio.Event()

    async def _renew(self) -> None:
        """Get what is due of what the engine shares: at first, and behind answers that need it."""
        await self._driver.run(self._content.renewal())
        if self.is_open:
            return
        if self._content.is_due:  # connected anew meanwhile
            self._wanted.set()
            return
        refusal = self._content.refusal
        if isinstance(refusal, PermissionDenied | UnsupportedVersion):
            _log.debug("s3_door_shut", reason=refusal.message)
        else:  # the engine is busy, or away
            self._content.ask_again()
            self._open_at = time.monotonic() + _REOPEN_S

    # --- learning ------------------------------------------------------------------------------------------------

    def learn_signature(self, head: RequestHead, signature: Signature) -> None:
        """Learn whose signature a request of GET, HEAD or PUT has, if the key that it was proven with is a present one.

        The keys may have been read again since the proof.
        """
        if not signature.signed_headers:
            return  # of version 2: the door knows none
        is_present = self.find_key(signature.key.access_key) == signature.key
        if not (is_present and head.method in _METHODS and (self._may_learn() or self._gathers(head.method))):
            return
        buckets = b"".join(bucket.encode() + b"\0" for bucket in signature.key.buckets)
        authorization = head.headers.get(b"authorization")
        if authorization is None:
            if head.method != "PUT":
                self._learn_presigned(head, signature, buckets)
            return
        text = authorization[:-_SIGNATURE_BYTES]
        if not self.repeater.knows_signer(text):
            key, scope = signature.signing_key.key, signature.scope.encode()
            self.repeater.learn_signer(text, signature.signed_headers, scope, key, buckets, _logged(signature))

    def _learn_presigned(self, head: RequestHead, signature: Signature, buckets: bytes) -> None:
        if signature.signed_headers != (b"host",) or any(name.startswith(b"x-amz-") for name in head.headers):
            return
        begin = signature.signed_s - S3_CLOCK_SKEW_S
        end = signature.signed_s + signature.expires_s
        self.repeater.learn_presigned(
            head.method.encode(), head.authority, head.target, buckets, _logged(signature), begin, end
        )

    def learn_object(
        self,
        head: RequestHead,
        target: Target,
        signature: Signature,
        stat: ObjectStat,
        lines: list[Line],
        pieces: Sequence[Piece],
        seen: Seen,
    ) -> None:
        """Learn the answer to a GET or HEAD of a whole object, or of a range of it.

        `lines`: the headers of a 200 but for length and checksums.  `pieces`: of the content; none: they are not known.
        """
        if not self._may_learn() or not seen.stamps or seen.epoch != self._content.epoch:
            return
        if len(pieces) > S3_DOOR_PIECES_MAX:
            pieces = []
        self.repeater.learn_answer(
            head.headers.get(b"host", b""),
            head.target,
            of_get=head.method == "GET",
            canonical_target=b"" if signature.expires_s else signature.canonical_target,
            bucket=target.bucket.encode(),
            lines=joined_lines(lines),
            sums=joined_lines(checksum_headers(stat.checksums)),
            layout=_layout(pieces),
            size_bytes=stat.size_bytes,
            stamps=seen.stamps,
            logged=logged_name(target.bucket, target.key),
        )
        self._want([piece.chunk for piece in pieces])

    def _may_learn(self) -> bool:
        """Return True if the engine of this connection has stamps; ask soon for what is due."""
        if self._content.is_due and time.monotonic() >= self._open_at:
            self._wanted.set()
        return self.is_open

    def _gathers(self, method: str) -> bool:
        """Return True for a PUT to an engine that offers no stamps: the door repeats nothing, and gathers.

        A claim outlives the connection then: like the keys that Python proves signatures with, for a second at most.
        """
        return method == "PUT" and not self._driver.steps.offers.stamps

    def _want(self, chunks: list[ChunkId]) -> None:
        """Have the segments and slabs brought in which chunks lie, if they are not at hand."""
        self._content.want(*self.repeater.missing(chunks))
        if self._content.is_due:
            self._wanted.set()

    def keys_were_read(self, began: float, fresh_s: float, *, have_changed: bool) -> None:
        """Let claims hold for `fresh_s` from `began`, when the access keys were read; forget them if keys changed."""
        if have_changed:
            self.repeater.forget_claims()
        self.repeater.hold_until(began + fresh_s)
        self._ageing_at = began + fresh_s / 2

    async def _send_rest(self, rest: AnyRest, go_on: GoOn, sender: ResponseSender) -> None:
        """Send the rest of an answer that takes long; its content is kept meanwhile: gc leaves it to a slow client.

        What is not at hand natively is sent as any content.  EngineUnreachable if the client is gone, or no more can be
        read: the answer is cut short then.
        """
        assert isinstance(rest, Rest)
        async with self._kept(rest) as opened:
            left = await go_on(rest)
            if left is None:
                return
            assert isinstance(left, Rest)
            try:
                await self.contents.send(opened, ByteRange(*left.span), sender)
            finally:
                left.end(sender.sent_bytes)

    @asynccontextmanager
    async def _kept(self, rest: Rest) -> AsyncIterator[Opened]:
        """Keep the content of an answer: by a lease, or by pins if its name has other content by now.

        Without room for them in the engine, or without the engine, it is not kept.
        """
        pieces, name, stop = _pieces_of(rest), _name_of(rest), rest.span[1]
        leased = await self._leased(name, pieces)
        if leased is not None:
            try:
                yield leased
            finally:
                await self.contents.close(leased)
            return
        async with self._pinned([piece.chunk for piece in pieces]) as grants:
            stat = ObjectStat(name.bucket, name.key, kind=2, node=0, size_bytes=stop, etag="", mtime_ns=0)
            yield Opened(name, stat, 0, pieces, grants, {})

    async def _leased(self, name: Name, pieces: list[Piece]) -> Opened | None:
        """Open an object with a lease; None if it cannot be opened, or has other content than these pieces by now.

        The same chunks at other offsets are other content: the rest of the answer is read by this object's layout.
        """
        try:
            opened = await self.contents.open_leased(name)
        except LakeError:
            return None
        if set(pieces) <= set(opened.pieces):
            return opened
        await self.contents.close(opened)
        return None

    @asynccontextmanager
    async def _pinned(self, chunks: list[ChunkId]) -> AsyncIterator[dict[ChunkId, Grant]]:
        """Keep chunks at their places; yields their grants, none where the engine cannot keep more."""
        epoch = self._engine.epoch
        try:
            pinned = (await self._engine.call(PinChunks(list(chunks)))).message
        except LakeError as error:
            _log.warning("s3_answer_not_kept", reason=error.message)
            yield {}
            return
        assert isinstance(pinned, Pinned)
        try:
            found = zip(chunks, pinned.grants, strict=True)
            yield {chunk: grant for chunk, grant in found if grant.medium != MEDIUM_NONE}
        finally:
            if self._engine.epoch == epoch:  # pins end with their connection
                with trio.CancelScope(shield=True), suppress(LakeError):
                    await self._engine.call(UnpinChunks(list(chunks)))

    # --- puts ----------------------------------------------------------------------------------------------------

    @property
    def is_logging(self) -> bool:
        """True if answers are written to the access log."""
        return self._log is not None

    def answer(self, put: Put, lines: bytes, name: bytes) -> None:
        """Answer a PUT that is durable with these header lines; `name`: as of `logged_name`."""
        if self.door.is_finishing(put.descriptor):
            lines += _CLOSE
        self.door.answer(put, put.answer(lines, name))

    def learn_puts(self, written: Sequence[tuple[Put, ObjectStat, bytes]], epoch: int) -> None:
        """Learn the answers to GET of objects of one chunk that were just written; with the stamps of each."""
        if not self.is_open or epoch != self._content.epoch:
            return
        for put, stat, stamps in written:
            self.repeater.learn_answer(
                put.host,
                put.target,
                of_get=True,
                canonical_target=put.target + b"\n",
                bucket=stat.bucket.encode(),
                lines=joined_lines(object_headers(stat)),
                sums=joined_lines(checksum_headers(stat.checksums)),
                layout=_PIECE.pack(stat.size_bytes, stat.blob),
                size_bytes=stat.size_bytes,
                stamps=stamps,
                logged=logged_name(stat.bucket, stat.key),
            )
        self._want([ChunkId(stat.blob) for _, stat, _ in written])

    def give_back(self, put: Put, failure: LakeError | None = None) -> None:
        """Leave a PUT to its connection's task; with a `failure` it was tried, and is answered with that."""
        self.door.give_back(put, put.request, failure)

    # --- turns ---------------------------------------------------------------------------------------------------

    def _before_turn(self) -> None:
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._content.standing()
        if self._log is not None and self.repeater.logged_bytes >= WRITE_BYTES:
            self._log.write_soon()
        if now >= self._ageing_at and not self._is_refreshing and self._nursery is not None:
            self._is_refreshing = True
            self._nursery.start_soon(self._refresh)
        if now >= self._noted_at:
            self._noted_at = now + _NOTE_S
            noted = self.repeater.take_notes()
            if noted:
                self._driver.tell(NoteReads(noted))

    async def _refresh(self) -> None:
        try:
            if self.refresh_keys is not None:
                await self.refresh_keys()
        except LakeError:  # claims end; the next request finds out
            self._ageing_at = time.monotonic() + _RETRY_S
        finally:
            self._is_refreshing = False


def _logged(signature: Signature) -> bytes:
    return _encode(signature.key.access_key)


def _pieces_of(rest: Rest) -> list[Piece]:
    """Return the pieces of what is left of an answer."""
    (at, _), begin, found = rest.span, 0, []
    for end, chunk in _PIECE.iter_unpack(rest.layout):
        if end > at:
            found.append(Piece(ChunkId(chunk), begin, end - begin))
        begin = end
    return found


def _name_of(rest: Rest) -> Name:
    name = msgspec.json.decode(b"{%b}" % rest.name, type=dict[str, str])
    return Name(name["bucket"], name["key"])


def _layout(pieces: Sequence[Piece]) -> bytes:
    return b"".join([_PIECE.pack(piece.offset + piece.length, piece.chunk) for piece in pieces])


def joined_lines(lines: list[Line]) -> bytes:
    """Return header lines as they are sent."""
    return b"".join([b"%b: %b\r\n" % line for line in lines])


def logged_name(bucket: str, key: str) -> bytes:
    """Return bucket and key as members in JSON, for the access log."""
    return _encode({"bucket": bucket, "key": key})[1:-1]
