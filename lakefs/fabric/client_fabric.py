"""RDMA in a client: one queue pair to the engine of the present connection, and what to do when it fails.

    link = yield from fabric.connected()      # None: go on over TCP

Rules kept here:
- The device is opened when something is worth it, once.  A queue pair belongs to one connection (`epoch`).
- A queue pair that fails is made anew once; when that fails too, the rest of the connection goes over TCP.  That is
  logged once, and `reason` has it.
- `connected` waits for no other operation: while one makes the queue pair, others go on over TCP.
- In a forked child nothing of the parent's is touched, closed or freed.

Steps run in the driver's thread; `register` and `ClientLink.bounce` are used by its worker threads.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

import structlog

from lakefs.errors import EngineUnreachable, FabricFailed, LakeError
from lakefs.fabric.counts import FabricCounts
from lakefs.fabric.devices import OpenFabric, open_device
from lakefs.limits import BOUNCE_BYTES, CHUNK_BYTES, CLIENT_BOUNCES, STORE_REQUEST_BYTES
from lakefs.steps.steps import Steps, send, work
from lakefs.transport.fabric import ADDRESS_MAX, KEY_MAX, Fabric, Link, Region, Remote
from lakefs.wire.fabric_messages import MEDIUM_FABRIC, FabricMemory
from lakefs.wire.messages import FEATURE_FABRIC, FabricOpen, FabricOpened, Grant, HelloReply

if TYPE_CHECKING:
    from lakefs.transport.fabric_mover import Mover, Piece

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
        self._piece = cast("type[Piece]", moving.Piece)
        self._bounces = bounces

    @contextmanager
    def bounce(self) -> Iterator[Bounce]:
        """Yield a registered buffer of BOUNCE_BYTES until the block ends; waits for one.  FabricFailed."""
        with self._bounces.taken() as bounce:
            yield bounce

    def may_read(self, grant: Grant) -> bool:
        """Return True if a grant belongs to this connection, and all its figures are such as can be."""
        return (
            grant.medium == MEDIUM_FABRIC
            and grant.epoch == self.epoch
            and 0 < grant.stored_bytes == grant.logical_bytes <= CHUNK_BYTES
            and 0 <= grant.segment <= KEY_MAX
            and 0 < grant.offset <= ADDRESS_MAX - BOUNCE_BYTES
        )

    def read(self, bounce: Bounce, wanted: Sequence[tuple[Grant, int, int]]) -> None:
        """READ the beginning of each granted extent into [begin, end) of the buffer.  Blocks.

        FabricFailed, DeadlineExceeded: the queue pair is lost.  On return nothing touches the buffer any more.
        """
        pieces = [self._piece(bounce.region, begin, at.offset, at.segment, end - begin) for at, begin, end in wanted]
        self.mover.move(pieces, MOVE_TIMEOUT_S)


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
        self._link: ClientLink | None = None
        self._retired: list[ClientLink] = []
        """Queue pairs that are used no more, and have to be ended."""
        self._epoch = -1
        self._made = 0
        """Queue pairs that were made, or tried, for the connection `_epoch`."""
        self._is_opening = False
        self._is_closed = False
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
        yield from self._begin_epoch()
        if self._made >= LINKS_PER_CONNECTION or not self._engine.hello.features & FEATURE_FABRIC:
            return None
        self._is_opening = True
        try:
            return (yield from self._made_anew())
        except FabricFailed as error:
            self._note_failure(error.message)
            return None
        except EngineUnreachable:
            raise
        except LakeError as error:  # the engine has no queue pair left, or uses no RDMA
            self._made = LINKS_PER_CONNECTION
            self._note_failure(error.message)
            return None
        finally:
            self._is_opening = False

    def _begin_epoch(self) -> Steps[None]:
        """Forget the queue pair of a connection that has ended."""
        if self._epoch != self._engine.epoch:
            self._epoch, self._made = self._engine.epoch, 0
            yield from self.drop()

    def _made_anew(self) -> Steps[ClientLink | None]:
        self._made += 1
        if self._fabric is None:
            found = yield from work(self._open_fabric, "")
            if isinstance(found, str):
                self._made = LINKS_PER_CONNECTION
                self._note_failure(found)
                return None
            self._fabric, self._bounces = found, _Bounces(found)
        assert self._bounces is not None, "it is made with the device"
        yield from self.drop()
        link: Link = yield from work(self._fabric.open_link, Remote.READ | Remote.WRITE)
        try:
            reply = yield from send(FabricOpen(link.end))
            assert isinstance(reply.message, FabricOpened)
            yield from work(link.connect, reply.message.end)
        except BaseException:
            link.close()
            raise
        self._link = ClientLink(link, reply.epoch, self._bounces)
        return self.link

    def lost(self, link: ClientLink, error: LakeError) -> None:
        """Note that the queue pair has failed; the next `connected` makes another one, or none any more."""
        if self._link is link and self._made >= LINKS_PER_CONNECTION:
            self._note_failure(error.message)

    def drop(self) -> Steps[None]:
        """End the queue pair: on return the engine neither reads nor writes memory of this client any more."""
        self._set_aside()
        while self._retired:
            yield from work(self._retired.pop().mover.close)

    def retire(self, failure: LakeError | None) -> None:
        """Use the queue pair no more, without a wait: the engine's part of it is lost.  The next `connected` ends it.

        `failure`: the reason; None when this client's own operation was cancelled, which is no failure.
        """
        link = self._set_aside()
        if link is None:
            return
        if failure is None:
            self._made -= link.epoch == self._epoch
        elif self._made >= LINKS_PER_CONNECTION:
            self._note_failure(failure.message)

    def _set_aside(self) -> ClientLink | None:
        link, self._link = self._link, None
        if link is not None:
            self._retired.append(link)
        return link

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
        try:
            if self._source is None:
                self._source = yield from work(Source, self._fabric)
        except FabricFailed as error:
            self.note_refusal(error)
        finally:
            self._source_is_taken = self._source is not None
        return self._source

    def give_back(self, source: Source, *, is_quiet: bool) -> None:
        """Give a source back; one that the engine may still READ (not `is_quiet`) is not used again."""
        self._source_is_taken = False
        if not is_quiet:
            source.close()
            self._source = None

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
            self._retired.pop().mover.close()
        fabric, self._fabric = self._fabric, None
        if fabric is not None:
            fabric.close()

    def forked(self, engine: object) -> ClientFabric:
        """In a child just forked: return the RDMA of another client of the engine, and leave this one as it is."""
        assert isinstance(engine, Greeted), "only a client over a network has RDMA"
        for left in (self._fabric, self._link, self._retired, self._bounces):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(left))  # never freed here: that would end the parent's
        return ClientFabric(engine, self._open_fabric)
