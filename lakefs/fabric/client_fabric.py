"""RDMA in a client: one queue pair to the engine of the present connection, and what to do when it fails.

    link = yield from fabric.connected()      # None: go on over TCP

Rules kept here:
- The device is opened when something is worth it, once.  A queue pair belongs to one connection (`epoch`).
- A queue pair that fails is made anew once; when that fails too, the rest of the connection goes over TCP.  That is
  logged once, and `reason` has it.
- `connected` waits for no other operation: while one makes the queue pair, others go on over TCP.
- What a thread opens or registers is noted there, by the same call: a step that is cancelled never hears of it.
- In a forked child nothing of the parent's is touched, closed or freed.

Steps run in the driver's thread; `register` and `ClientLink.bounce` are used by its worker threads.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

import structlog

from lakefs.errors import EngineUnreachable, FabricFailed, LakeError
from lakefs.fabric.counts import FabricCounts
from lakefs.fabric.devices import OpenFabric, open_device
from lakefs.fabric.landing import Landing, Landings
from lakefs.limits import BOUNCE_BYTES, CHUNK_BYTES, CLIENT_BOUNCES, STORE_REQUEST_BYTES
from lakefs.steps.steps import Steps, send, work
from lakefs.transport.fabric import ADDRESS_MAX, KEY_MAX, Fabric, Link, Piece, Region, Remote
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.media import BY_FABRIC
from lakefs.wire.messages import FEATURE_FABRIC, FabricOpen, FabricOpened, Grant, HelloReply

if TYPE_CHECKING:
    from lakefs.transport.fabric_mover import Mover

LINKS_PER_CONNECTION: Final = 2
"""Queue pairs that are made for one connection: the first, and one in place of one that failed."""
MOVE_TIMEOUT_S: Final = 10.0
_log: Final = structlog.get_logger(__name__)


@runtime_checkable
class Greeted(Protocol):
    """A client of an engine that has said Hello."""

    @property
    def hello(self) -> HelloReply:
        """The engine's answer to the last Hello."""
        ...

    @property
    def epoch(self) -> int:
        """Count of connections so far."""
        ...

    def is_connected(self) -> bool:
        """Return True if the last connection is still open."""
        ...


class Bounce:
    """A registered buffer that bytes are READ into, and checked in."""

    def __init__(self, fabric: Fabric) -> None:
        self._memory = mmap.mmap(-1, BOUNCE_BYTES)
        self.memory: Final = memoryview(self._memory)
        self.region: Final[Region] = fabric.register(self._memory, Remote.NONE)


class ClientLink:
    """A queue pair that is joined to the engine's, of the connection `epoch`."""

    def __init__(self, link: Link, epoch: int, bounces: _Bounces) -> None:
        moving = import_module("lakefs.transport.fabric_mover")  # it loads trio, which blocking clients do without
        self.mover: Final = cast("Mover", moving.Mover(link))
        self.epoch: Final = epoch
        self._bounces = bounces

    @contextmanager
    def bounce(self) -> Iterator[Bounce]:
        """Yield a registered buffer of BOUNCE_BYTES until the block ends; waits for one.  FabricFailed."""
        with self._bounces.taken() as bounce:
            yield bounce

    def may_read(self, grant: Grant) -> bool:
        """Return True if a grant belongs to this connection, and all its figures are such as can be."""
        return (
            grant.medium in BY_FABRIC
            and grant.epoch == self.epoch
            and 0 < grant.stored_bytes == grant.logical_bytes <= CHUNK_BYTES
            and 0 <= grant.segment <= KEY_MAX
            and 0 < grant.offset <= ADDRESS_MAX - BOUNCE_BYTES
        )

    def read(self, bounce: Bounce, wanted: Sequence[tuple[Grant, int, int]], meanwhile: Callable[[int], None]) -> None:
        """READ the beginning of each granted extent into [begin, end) of the buffer.  Blocks.

        The extents follow each other in the buffer.  `meanwhile`, see `Mover.move`, is called with the length of what
        has arrived in the buffer.  FabricFailed, DeadlineExceeded: the queue pair is lost.  On return nothing touches
        the buffer any more.
        """
        pieces = [Piece(bounce.region, begin, at.offset, at.segment, end - begin) for at, begin, end in wanted]
        self.mover.move(pieces, MOVE_TIMEOUT_S, meanwhile)


class _Closable(Protocol):
    """A queue pair, or its mover."""

    def close(self) -> None:
        """End it; a second call does nothing."""
        ...


class _Bounces:
    """The buffers of one client, made when they are first needed."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._turns = threading.Semaphore(CLIENT_BOUNCES)
        self._lock = threading.Lock()
        self._free: list[Bounce] = []

    @contextmanager
    def taken(self) -> Iterator[Bounce]:
        with self._turns:
            with self._lock:
                bounce = self._free.pop() if self._free else None
            bounce = bounce or Bounce(self._fabric)
            try:
                yield bounce
            finally:
                with self._lock:
                    self._free.append(bounce)


class Source:
    """Registered memory that payloads are copied to, for the engine's READs."""

    def __init__(self, fabric: Fabric) -> None:
        """Blocks.  FabricFailed."""
        self._memory = mmap.mmap(-1, STORE_REQUEST_BYTES)
        self._view = memoryview(self._memory)
        self._region = fabric.register(self._memory, Remote.READ)

    def fill(self, payloads: Sequence[memoryview]) -> list[int]:
        """Copy payloads one behind the other; return their offsets.  Blocks."""
        offsets, end = list[int](), 0
        for payload in payloads:
            self._view[end : end + len(payload)] = payload
            offsets.append(end)
            end += len(payload)
        return offsets

    @property
    def memory(self) -> FabricMemory:
        """The memory, for requests."""
        return FabricMemory(self._region.remote_key, self._region.address, STORE_REQUEST_BYTES)

    def close(self) -> None:
        """End the registration: on return no peer reads the memory."""
        self._region.close()


class ClientFabric:
    """The RDMA of one client.  `open_fabric` opens the device."""

    def __init__(self, engine: Greeted, open_fabric: OpenFabric = open_device) -> None:
        self._engine = engine
        self._open_fabric = open_fabric
        self._fabric: Fabric | None = None
        self._bounces: _Bounces | None = None
        self._landings: Landings | None = None
        self._link: ClientLink | None = None
        self._retired: list[_Closable] = []
        """Queue pairs that are used no more, or were not joined, and have to be ended."""
        self._epoch = -1
        self._made = 0
        """Queue pairs that were made, or tried, for the connection `_epoch`."""
        self._is_opening = False
        self._is_closed = False
        self._making = threading.Lock()
        """Held by a thread that opens the device or registers the source, of which there is one."""
        self._source: Source | None = None
        self._source_is_taken = False
        self._chunks = self._bytes = 0
        self._reason = ""

    @property
    def counts(self) -> FabricCounts:
        """Counts of what was moved by RDMA, and why no more is."""
        return FabricCounts(self._chunks, self._bytes, self._reason)

    @property
    def link(self) -> ClientLink | None:
        """The queue pair, if it can be used now."""
        link = self._link
        return link if link is not None and link.epoch == self._engine.epoch and not link.mover.is_broken else None

    def note_moved(self, chunks: int, length: int) -> None:
        """Count what was moved by RDMA."""
        self._chunks += chunks
        self._bytes += length

    def connected(self) -> Steps[ClientLink | None]:
        """Return the queue pair, made if there is none yet; None: go on over TCP."""
        link = self.link
        if link is not None or self._is_opening or self._is_closed:
            return link
        self._is_opening = True
        try:
            if self._epoch != self._engine.epoch:
                self._epoch, self._made = self._engine.epoch, 0
            yield from self.drop()
            if self._made >= LINKS_PER_CONNECTION or not self._engine.hello.features & FEATURE_FABRIC:
                return None
            return (yield from self._made_anew())
        except EngineUnreachable:
            raise
        except LakeError as error:
            if not isinstance(error, FabricFailed):  # the engine has no queue pair left, or uses no RDMA
                self._made = LINKS_PER_CONNECTION
            self._note_failure(error.message)
            yield from self.drop()
            return None
        finally:
            self._is_opening = False

    def _made_anew(self) -> Steps[ClientLink | None]:
        self._made += 1
        if self._fabric is None:
            reason = yield from work(self._open)
            if reason:
                self._made = LINKS_PER_CONNECTION
                self._note_failure(reason)
                return None
        assert self._fabric is not None, "it was opened"
        assert self._bounces is not None, "they are made with the device"
        link = yield from work(self._new_link, self._fabric)
        reply = yield from send(FabricOpen(link.end))
        assert isinstance(reply.message, FabricOpened)
        yield from work(link.connect, reply.message.end)
        self._retired.remove(link)
        self._link = ClientLink(link, reply.epoch, self._bounces)
        return self.link

    def _open(self) -> str:
        """Open the device; return the reason if there is none.  Blocks."""
        with self._making:
            if self._fabric is not None:  # by a step that was cancelled in the middle
                return ""
            found = self._open_fabric("")
            if isinstance(found, str):
                return found
            self._bounces = _Bounces(found)
            self._landings = Landings(found)
            self._fabric = found
            return ""

    def _new_link(self, fabric: Fabric) -> Link:
        """Open a queue pair, which is ended by the next `drop` unless it is joined.  Blocks.  FabricFailed."""
        link = fabric.open_link(Remote.READ | Remote.WRITE)
        self._retired.append(link)
        return link

    def lost(self, link: ClientLink, error: LakeError) -> None:
        """Note that the queue pair has failed; the next `connected` makes another one, or none any more."""
        if self._link is link and self._made >= LINKS_PER_CONNECTION:
            self._note_failure(error.message)

    def drop(self) -> Steps[None]:
        """End the queue pair: on return the engine neither reads nor writes memory of this client any more."""
        self._set_aside()
        while self._retired:
            ending = self._retired[-1]
            yield from work(ending.close)
            if ending in self._retired:  # only then: a step that is cancelled may never have begun
                self._retired.remove(ending)

    def is_held(self, link: ClientLink) -> bool:
        """Return True if a queue pair's connection is still open, so that no request of it is left unanswered."""
        return link.epoch == self._engine.epoch and self._engine.is_connected()

    def retire(self, link: ClientLink, failure: LakeError | None) -> None:
        """Use a queue pair no more, without a wait: the engine's part of it is lost.  The next `connected` ends it.

        `failure`: the reason; None when this client's own operation was cancelled, which is no failure.  Does nothing
        when another queue pair is in its place already.
        """
        if self._link is not link:
            return
        self._set_aside()
        if failure is None:
            self._made -= link.epoch == self._epoch
        elif self._made >= LINKS_PER_CONNECTION:
            self._note_failure(failure.message)

    def _set_aside(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._retired.append(link.mover)

    def register_writable(self, address: int, length: int) -> Region:
        """Register memory for the engine's WRITEs; the caller keeps it until the region is closed.  Blocks.

        FabricFailed.
        """
        return self._device().register((address, length), Remote.WRITE)

    def register_readable(self, address: int, length: int) -> Region:
        """Register memory for the engine's READs; like `register_writable`."""
        return self._device().register((address, length), Remote.READ)

    def taken_source(self) -> Steps[Source | None]:
        """Return memory for payloads to be READ from, to be given back; None while it is in use, or refused."""
        if self._source_is_taken or self._fabric is None:
            return None
        self._source_is_taken = True
        found: Source | None = None
        try:
            if self._source is None:
                yield from work(self._make_source, self._fabric)
            found = self._source
        except FabricFailed as error:
            self.note_refusal(error)
        finally:
            self._source_is_taken = found is not None  # not by a step that was cancelled
        return found

    def _make_source(self, fabric: Fabric) -> None:
        with self._making:
            self._source = self._source or Source(fabric)

    def give_back(self, source: Source, *, is_quiet: bool) -> None:
        """Give a source back; one that the engine may still READ (not `is_quiet`) is not used again."""
        self._source_is_taken = False
        if not is_quiet:
            source.close()
            self._source = None

    def taken_landing(self) -> Steps[Landing | None]:
        """Return memory for the engine to WRITE chunks to, to be given back; None while all is in use, or refused."""
        if self._landings is None:
            return None
        try:
            return (yield from self._landings.taken())
        except FabricFailed as error:
            self.note_refusal(error)
            return None

    def give_back_landing(self, landing: Landing, *, is_quiet: bool) -> None:
        """Give a landing back; one that the engine may still WRITE to (not `is_quiet`) is given up."""
        assert self._landings is not None, "it was taken"
        self._landings.give_back(landing, is_quiet=is_quiet)

    def _device(self) -> Fabric:
        if self._fabric is None:
            raise FabricFailed("no RDMA device is open")
        return self._fabric

    def note_refusal(self, error: LakeError) -> None:
        """Note that memory of this client could not be registered, so that its bytes go over TCP."""
        self._note_failure(error.message)

    def _note_failure(self, reason: str) -> None:
        if not self._reason:
            _log.info("the engine is used over TCP, not by RDMA", reason=reason)
        self._reason = reason

    def close(self) -> None:
        """End queue pair, registrations and device.  Blocks."""
        self._is_closed = True
        self._set_aside()
        while self._retired:
            self._retired.pop().close()
        fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()

    def forked(self, engine: object) -> ClientFabric:
        """In a child just forked: return the RDMA of another client of the engine, and leave this one as it is."""
        assert isinstance(engine, Greeted), "only a client over a network has RDMA"
        for left in (self._fabric, self._link, self._retired, self._bounces):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))  # never freed here: that would end the parent's
        return ClientFabric(engine, self._open_fabric)
