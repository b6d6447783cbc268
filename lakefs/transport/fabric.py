"""The port for RDMA: memory that a peer's adapter reads and writes, without this processor.

    fabric = open_fabric("")                     # lakefs.transport.rdma; or a text that says why there is none
    region = fabric.register(memory, Remote.NONE)
    link = fabric.open_link(Remote.READ)         # one queue pair
    ... tell link.end to the peer, and get its end ...
    link.connect(peer)
    Mover(link).move([Piece(region, 0, address, key, length)], timeout_s=10.0)

Rules of the port, which `tests/contract/fabric_suite.py` holds for every implementation:
- A peer reaches only regions of the fabric (its protection domain) that its link belongs to, with the rights that both
  the region and the link give; all else fails at the peer, and no byte is moved beyond the region.
- The bytes of a READ are there, and those of a WRITE are at the peer, when its completion came without a failure.
  Before, and behind a failure, the memory may hold anything.
- Completions of a link come in the order of its posts, one for each.  Behind the first failure all that is posted
  fails, and the link is broken for ever: open another one.
- An adapter may touch the memory of what was posted until its completion was polled, or `Link.close` has returned;
  and a peer that of a region until `Region.close` has returned, or all links of its fabric are closed.
- A forked child has no fabric: what it inherited is closed there, and stays what it was in its parent.
- `post` may move the bytes itself (software adapters do), while other threads run: it is called from threads.  All
  else is quick.  A link is used by one thread at a time; `lakefs.transport.fabric_mover` keeps to that.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from lakefs.errors import InvalidArgument
from lakefs.wire.fabric_end import FabricEnd

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ACCESS_REFUSED",
    "FLUSHED",
    "LOCAL_REFUSED",
    "NO_ANSWER",
    "SEND_WINDOW",
    "SLICE_BYTES",
    "Completion",
    "Fabric",
    "FabricEnd",
    "Link",
    "LocalMemory",
    "Memory",
    "Piece",
    "Region",
    "Remote",
    "check_post",
    "local_memory",
]

SLICE_BYTES: Final = 256 * 1024
"""Longest single READ or WRITE: what has arrived is checked while the next ones are moved."""
SEND_WINDOW: Final = 16
"""READs and WRITEs of one link in flight: 16 x 256 KiB = 4 MiB, enough for 300 Gbit/s over 100 us."""

# Failures of completions that every implementation names alike; others have texts of their own.
FLUSHED: Final = "given up behind an earlier failure"
ACCESS_REFUSED: Final = "the peer refused the access"
NO_ANSWER: Final = "no answer from the peer"
LOCAL_REFUSED: Final = "the region may not be written"

ADDRESS_MAX: Final = (1 << 64) - 1
KEY_MAX: Final = (1 << 32) - 1


class Remote(enum.Flag):
    """Rights of a peer: on a region, and on all that it reaches through a link."""

    NONE = 0
    READ = enum.auto()
    WRITE = enum.auto()


Memory: TypeAlias = "Buffer | tuple[int, int]"
"""Writable memory with the buffer protocol (mmap, memoryview, bytearray), or (address, length in bytes)."""


class LocalMemory(NamedTuple):
    """Address and length of memory, and what keeps it from being freed (None: its owner does)."""

    address: int
    length_bytes: int
    keeper: object


class Completion(NamedTuple):
    """The end of one READ or WRITE: `failure` is empty, or says what became of it."""

    ticket: int
    failure: str


class Region(Protocol):
    """Registered memory.  Its pages stay in memory as long as it is open."""

    @property
    def address(self) -> int:
        """Address of its first byte, here and for the peer."""
        ...

    @property
    def length_bytes(self) -> int:
        """Length in bytes."""
        ...

    @property
    def local_key(self) -> int:
        """Key for this side's own adapter, 32 bits."""
        ...

    @property
    def remote_key(self) -> int:
        """Key by which a peer reaches it, 32 bits; of no use to it with `Remote.NONE`."""
        ...

    def close(self) -> None:
        """Give it up: when this has returned, no peer reaches the memory.  A second call does nothing.

        Not while something that this side posted with it is in flight: FabricFailed, and it stays open.
        """
        ...


class Link(Protocol):
    """One reliable queue pair, with a completion queue of its own."""

    @property
    def end(self) -> FabricEnd:
        """This end, for the peer."""
        ...

    @property
    def descriptor(self) -> int:
        """Readable when a completion came after `arm`; for poll(2) and `trio.lowlevel.wait_readable`."""
        ...

    @property
    def is_broken(self) -> bool:
        """True behind the first failure that was polled, and after `close`."""
        ...

    def connect(self, peer: FabricEnd) -> None:
        """Join it to the peer's end, once.  Waits for nothing: the peer may not have joined yet.

        InvalidArgument: the end is none, or of another kind.  FabricFailed: the adapter refused.
        """
        ...

    def post(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """Begin to move pieces of at most SLICE_BYTES, in their order; their completions have the tickets from
        `ticket` on, 64 bits of the caller's.

        At most SEND_WINDOW are in flight, which the caller counts.  InvalidArgument: a range is not in its region, or
        a number is no address, key or length; FabricFailed: the link or a region cannot be used.  Neither has posted
        anything, unless the link is broken then: it has to be closed.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return the completions that came, at most SEND_WINDOW of them, without waiting."""
        ...

    def arm(self) -> None:
        """Have the next completion make the descriptor readable.  Poll once more before waiting: what came before
        does not."""
        ...

    def take_events(self) -> None:
        """Take what made the descriptor readable, without waiting; poll and arm afterwards."""
        ...

    def close(self) -> None:
        """End it: when this has returned, nothing that was posted touches memory any more.  Never raises; may take
        milliseconds.  A second call does nothing."""
        ...


class Piece(NamedTuple):
    """One range to move: by READ from the peer into the region, or with `is_write` by WRITE from there to the peer."""

    region: Region
    offset: int
    remote_address: int
    remote_key: int
    length: int
    is_write: bool = False


class Fabric(Protocol):
    """An opened adapter, and one protection domain: regions and links of one fabric belong together."""

    @property
    def device(self) -> str:
        """Name of the adapter, for people."""
        ...

    @property
    def kind(self) -> str:
        """Kind of the network, as in `FabricEnd`."""
        ...

    def register(self, memory: Memory, remote: Remote) -> Region:
        """Make memory known to the adapter, page by page.  Blocks.

        With Remote.READ alone the adapter only reads it; READs into it fail.  The memory stays the caller's, who keeps
        it until the region is closed (a buffer is kept by the region).  FabricFailed says why it was refused;
        InvalidArgument: no memory, or read-only.
        """
        ...

    def open_link(self, peer_may: Remote) -> Link:
        """Make a queue pair, through which the peer may do so much.  FabricFailed: the adapter has no more of them."""
        ...

    def close(self) -> None:
        """Close its links, then its regions, then the adapter.  Never raises; a second call does nothing."""
        ...


def local_memory(memory: Memory) -> LocalMemory:
    """Return where memory is.  InvalidArgument: it is none, read-only, not contiguous, or empty."""
    if isinstance(memory, tuple):
        address, length = memory
        if not 0 < address <= ADDRESS_MAX or not 0 < length <= ADDRESS_MAX - address:
            raise InvalidArgument(f"{length} bytes at {address:#x} are no memory")
        return LocalMemory(address, length, None)
    try:
        view = memoryview(memory)
        held = (ctypes.c_ubyte * view.nbytes).from_buffer(view)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"a {type(memory).__name__} cannot be registered: {error}") from None
    if not view.nbytes:
        raise InvalidArgument("memory without bytes cannot be registered")
    return LocalMemory(ctypes.addressof(held), view.nbytes, held)


def check_post(pieces: Sequence[Piece]) -> None:
    """Raise InvalidArgument unless each READ or WRITE stays in its region, and its numbers are what they should be."""
    for region, offset, remote_address, remote_key, length, _ in pieces:
        size = region.length_bytes
        if not 0 < length <= SLICE_BYTES or not 0 <= offset <= size - length:
            raise InvalidArgument(f"{length} bytes at {offset} are not a slice of a region of {size} bytes")
        if not 0 <= remote_address <= ADDRESS_MAX - length or not 0 <= remote_key <= KEY_MAX:
            raise InvalidArgument(f"{remote_address:#x} with key {remote_key:#x} is no place of a peer")
