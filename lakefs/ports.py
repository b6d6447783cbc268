"""The ports: what the product asks of disks, clocks, threads, networks and engines.

Each has a real and a simulated implementation, and one contract suite in `tests/contract` that all of them
pass.  The methods of `Disk` and `DiskFile` block: the engine calls them through `Offload`, which the
simulator runs inline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from lakefs.errors import LakeError
from lakefs.ids import Buffer

T = TypeVar("T")


class FileStat(NamedTuple):
    """Inode number, length, and room taken on the medium."""

    inode: int
    size_bytes: int
    allocated_bytes: int


class DiskFile(Protocol):
    """An open file of a store.

    Errors: StoreFull (ENOSPC, EDQUOT), StoreReadOnly (EROFS), SourceChanged (EFAULT: the memory is a client's, who
    shrank it), DiskFailed (any other OSError).  A write is whole or raises; after a raise any part of it may be on the
    medium.
    """

    @property
    def direct(self) -> bool:
        """Whether writes bypass the page cache and must be page-aligned in offset, length and memory."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether the file system is memory itself: nothing read waits for a medium."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; the count read, short only at the file's end."""
        ...

    def pread_cached_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill `buffer` from memory, without waiting for the medium; whether all of it was there.

        When it was not, `buffer` may hold anything.
        """
        ...

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """`pread_cached_into` of buffers that are filled one behind the other, at most 1,024 of them."""
        ...

    def pwrite(self, payload: Buffer, offset: int) -> None:
        """Write all of `payload` at `offset`; not durable until `sync_data`."""
        ...

    def pwritev(self, payloads: Sequence[Buffer], offset: int) -> None:
        """Write the payloads one behind the other, as one `pwrite` of their sum."""
        ...

    def sync_data(self) -> None:
        """fdatasync: written bytes and the file's length are durable on return.  Never retried on failure."""
        ...

    def allocate(self, offset: int, length: int) -> None:
        """Reserve blocks, extending the file; bytes read as zero.  Where the file system cannot, extends only."""
        ...

    def punch(self, offset: int, length: int) -> None:
        """Free whole pages; they read as zero.  Where the file system cannot, writes zeros."""
        ...

    def truncate(self, size: int) -> None:
        """Set the file's length."""
        ...

    def size(self) -> int:
        """Length in bytes."""
        ...

    def allocated_bytes(self) -> int:
        """Room taken on the medium, in bytes."""
        ...

    def fileno(self) -> int:
        """A descriptor to hand to a client; DiskFailed where there is none (simulation)."""
        ...

    def close(self) -> None:
        """Release the file; makes nothing durable."""
        ...


class DiskLock(Protocol):
    """A lock that is held."""

    def close(self) -> None:
        """Give it up; nothing happens the second time."""
        ...


class Disk(Protocol):
    """The folder of a store.  Paths are relative to it, with `/`."""

    def open(
        self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> DiskFile:
        """Open a file; with `create` it must be new (mode 0600).  FileNotFoundError, FileExistsError.

        `direct` asks for O_DIRECT writes; where it is refused the file's `direct` is false.
        """
        ...

    def list_folder(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder does not exist."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder (mode 0700); nothing happens when it exists."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or folder of that name exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source`, atomically; durable after `sync_folder` of the target's folder."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError when there is none."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make creations, renames and removals in the folder durable."""
        ...

    def stat(self, path: str) -> FileStat:
        """What is known of a file without a descriptor; FileNotFoundError when there is none."""
        ...

    def free_bytes(self) -> int:
        """Bytes that can still be written."""
        ...

    def total_bytes(self) -> int:
        """Size of the file system."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Lock the folder itself and this file, made if needed: exclusive, held until close.  StoreLocked.

        The folder's lock stays when the file is removed.  While the lock is held, creating, renaming and removing
        names first do what `check_lock` does.
        """
        ...

    def check_lock(self) -> None:
        """StoreReadOnly unless folder and lock file are those that `lock` locked; without a lock nothing happens."""
        ...

    def local_path(self, path: str) -> str:
        """The path for libraries that open files themselves (LMDB)."""
        ...


class Offload(Protocol):
    """Runs blocking or CPU-heavy calls off the loop: threads, or inline in the simulator."""

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """The call's result or exception.  Not interruptible: a cancelled caller waits for the call to end."""
        ...


class FileRead(NamedTuple):
    """One read: fill `buffer` from `offset` of an open file."""

    file: DiskFile
    buffer: memoryview
    offset: int


FilePlace = tuple[DiskFile, int, int]
"""(an open file, offset, length in bytes)"""


class IoQueue(Protocol):
    """Reads many places of files at once: io_uring, or calls through `Offload`."""

    @property
    def kind(self) -> str:
        """`io_uring` or `threads`, for people."""
        ...

    @property
    def reason(self) -> str:
        """Why it is not io_uring; empty when it is."""
        ...

    async def read_many(self, reads: Sequence[FileRead]) -> list[int | LakeError]:
        """For each read the count of bytes, short only at the file's end, or its error; a checkpoint when it waits.

        The files stay open, and the buffers (at most 2 GiB each) are touched by nobody else, until it returns.
        Cancelled only before it begins: a caller cancelled meanwhile waits until the kernel gave all memory back.
        """
        ...

    async def read_packed(self, places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
        """Read places into one buffer, one behind the other; whether each was read whole.

        What was not, for whatever reason, is for the caller to read again; its part of the buffer may hold anything.
        Places are of 1 byte and more, and no longer in all than the buffer; else as `read_many`.
        """
        ...


class Clock(Protocol):
    """Time.  Sleeping is trio's own, which the simulator's clock drives."""

    def monotonic(self) -> float:
        """Seconds that never go back; for intervals."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 UTC; may jump either way; shown and stored, and compared only where days count."""
        ...


class Stream(Protocol):
    """A two-way byte stream with ordered delivery, and descriptors where the medium can carry them.

    One task sends and one receives at a time.  Errors: EngineUnreachable when the peer is gone.
    """

    @property
    def carries_descriptors(self) -> bool:
        """Whether descriptors can be sent along (Unix sockets)."""
        ...

    @property
    def peer(self) -> str:
        """Who is at the other end, for people: `uid 0 pid 4711`, `127.0.0.1:50312`."""
        ...

    @property
    def uid(self) -> int | None:
        """The user at the other end, by the kernel's word; None where there is none: over TCP, and of a server."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Bytes received into `buffer`, 0 when the peer has finished.  Descriptors are kept aside."""
        ...

    def take_descriptors(self) -> list[int]:
        """Descriptors received so far; the caller owns and closes them."""
        ...

    def send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """Send what fits without waiting: the count of bytes, 0 when nothing does.  Not while a `send` waits.

        Descriptors go with the first byte: a count above 0 means that they were sent.
        """
        ...

    async def wait_writable(self) -> None:
        """Wait until `send_nowait` may take something again; a checkpoint only when it waits."""
        ...

    async def send(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
        """Send all parts; descriptors go with the first byte.  A cancelled send leaves the stream unusable."""
        ...

    def is_at_end(self) -> bool:
        """Whether the peer has finished and all that it sent was received; asks the system, and does not wait."""
        ...

    def send_end(self) -> None:
        """Tell the peer that nothing more is sent; what it sends can still be received.  Never raises."""
        ...

    async def aclose(self) -> None:
        """Close at once; never raises."""
        ...


class Listener(Protocol):
    """A bound address."""

    @property
    def address(self) -> str:
        """`unix:PATH` or `tcp://HOST:PORT`, with the real port."""
        ...

    async def accept(self) -> Stream:
        """The next connection.  Transient failures (descriptors exhausted) are waited out."""
        ...

    async def aclose(self) -> None:
        """Stop listening; a Unix socket's file is removed."""
        ...


class Network(Protocol):
    """Makes streams."""

    async def listen(self, address: str) -> Listener:
        """Bind `unix:PATH` or `tcp://HOST:PORT`; AddressInUse, PermissionDenied."""
        ...

    async def connect(self, address: str) -> Stream:
        """Connect; EngineUnreachable, PermissionDenied."""
        ...
