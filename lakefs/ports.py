"""Ports: the interfaces through which the product uses disks, clocks, threads and networks.

Each has a real and a simulated implementation, and one contract suite in `tests/contract` that all of them pass.  The
methods of `Disk` and `DiskFile` block: the engine calls them through `Offload`, which the simulator runs inline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from lakefs.errors import LakeError
from lakefs.ids import Buffer

T = TypeVar("T")


class FileStat(NamedTuple):
    """Inode number, length, and space taken on the medium."""

    inode: int
    size_bytes: int
    allocated_bytes: int


class DiskFile(Protocol):
    """An open file of a store.

    Errors: StoreFull (ENOSPC, EDQUOT), StoreReadOnly (EROFS), SourceChanged (EFAULT: the memory belongs to a client
    that shrank it), DiskFailed (any other OSError).  A write writes everything or raises; after a raise any part of
    it may be on the medium.
    """

    @property
    def direct(self) -> bool:
        """True if writes bypass the page cache and must be page-aligned in offset, length and memory."""
        ...

    @property
    def in_memory(self) -> bool:
        """True if the file system is memory itself: no read waits for a medium."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; return the number of bytes read, short only at the file's end."""
        ...

    def preadv_cached_into(self, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fill the buffers, one after the other and at most 1,024 of them, from memory, without waiting for the medium;
        return True if all of it was in memory.

        If it returns False, the buffers may hold anything.
        """
        ...

    def pwrite(self, payload: Buffer, offset: int) -> None:
        """Write all of `payload` at `offset`; not durable until `sync_data`."""
        ...

    def pwritev(self, payloads: Sequence[Buffer], offset: int) -> None:
        """Write the payloads one after the other, like one `pwrite` of all of them joined."""
        ...

    def sync_data(self) -> None:
        """fdatasync: written bytes and the file's length are durable on return.  Never retried on failure."""
        ...

    def allocate(self, offset: int, length: int) -> None:
        """Reserve blocks and extend the file; the new bytes read as zero.  Where the file system cannot, only extends
        it."""
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
        """Space taken on the medium, in bytes."""
        ...

    def fileno(self) -> int:
        """Return a descriptor to hand to a client; DiskFailed if there is none (simulation)."""
        ...

    def close(self) -> None:
        """Close the file; makes nothing durable."""
        ...


class DiskLock(Protocol):
    """A held lock."""

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        ...


class Disk(Protocol):
    """The folder of a store.  Paths are relative to it, with `/`.

    FileNotFoundError and FileExistsError are raised where this says so; any other failure is a LakeError.
    """

    def open(self, path: str, *, create: bool = False, direct: bool = False, read_only: bool = False) -> DiskFile:
        """Open a file; with `create` it must be new (mode 0600).  FileNotFoundError, FileExistsError.

        `direct` requests O_DIRECT writes; if the file system refuses, the file's `direct` is False.
        """
        ...

    def list_folder(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; empty if the folder does not exist."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder (mode 0700); does nothing if it exists."""
        ...

    def exists(self, path: str) -> bool:
        """Return True if a file or folder of that name exists."""
        ...

    def is_folder(self, path: str) -> bool:
        """Return True if a folder of that name exists, False for a file, or if there is nothing."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Replace `target` by `source`, atomically; durable after `sync_folder` of the target's folder.

        FileNotFoundError if there is no `source`.
        """
        ...

    def unlink(self, path: str) -> None:
        """Remove a file; FileNotFoundError if it does not exist."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make creations, renames and removals in the folder durable."""
        ...

    def stat(self, path: str) -> FileStat:
        """Return a file's status without a descriptor; FileNotFoundError if it does not exist."""
        ...

    def free_bytes(self) -> int:
        """Return the number of bytes that can still be written."""
        ...

    def free_inodes(self) -> int | None:
        """Return how many files can still be created; None where the file system does not count them."""
        ...

    def total_bytes(self) -> int:
        """Return the size of the file system in bytes."""
        ...

    def lock(self, path: str) -> DiskLock:
        """Lock the folder itself and this file, created if missing: exclusive, held until close.  StoreLocked.

        The folder's lock stays when the file is removed.  While the lock is held, `rename`, `unlink` and creating a
        name first call `check_lock`.
        """
        ...

    def check_lock(self) -> None:
        """Raise StoreReadOnly unless folder and lock file are those that `lock` locked; without a lock do nothing."""
        ...

    def local_path(self, path: str) -> str:
        """Return the path for libraries that open files themselves (LMDB)."""
        ...


class Offload(Protocol):
    """Runs blocking or CPU-heavy calls off the loop: threads, or inline in the simulator."""

    async def run(self, call: Callable[..., T], *args: object) -> T:
        """Return the call's result or raise its exception.  Not interruptible: a cancelled caller waits for the call
        to end."""
        ...


class FileToRead(Protocol):
    """The part of a `DiskFile` that reads of many places use."""

    @property
    def direct(self) -> bool:
        """See `DiskFile.direct`."""
        ...

    def fileno(self) -> int:
        """See `DiskFile.fileno`."""
        ...

    def pread_into(self, buffer: memoryview, offset: int) -> int:
        """See `DiskFile.pread_into`."""
        ...


class FileRead(NamedTuple):
    """One read: fill `buffer` from `offset` of an open file."""

    file: FileToRead
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
        """The reason why io_uring is not used; empty if it is."""
        ...

    async def read_many(self, reads: Sequence[FileRead]) -> list[int | LakeError]:
        """Return for each read the number of bytes, short only at the file's end, or its error; a checkpoint if it
        waits.

        Until it returns, the files stay open and nothing else touches the buffers (at most 2 GiB each). It can be
        cancelled only before it begins: a caller cancelled later waits until the kernel has released all memory.
        """
        ...

    async def read_packed(self, places: Sequence[FilePlace], buffer: memoryview) -> list[bool]:
        """Read places into one buffer, one after the other; return for each whether it was read whole.

        The caller reads the others again, whatever the reason; their part of the buffer may hold anything. Each place
        has at least 1 byte, and all together fit in the buffer; otherwise like `read_many`.
        """
        ...


class Clock(Protocol):
    """Time.  Sleeping is trio's own, which the simulator's clock drives."""

    def monotonic(self) -> float:
        """Return seconds that never decrease; for intervals."""
        ...

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 UTC.  May jump either way; shown and stored, and compared only where days
        count."""
        ...


class Stream(Protocol):
    """A two-way byte stream with ordered delivery, and descriptors if the medium can carry them.

    One task sends and one receives at a time.  Errors: EngineUnreachable if the peer is gone.
    """

    @property
    def carries_descriptors(self) -> bool:
        """True if descriptors can be sent along (Unix sockets)."""
        ...

    @property
    def peer(self) -> str:
        """The peer, for people: `uid 0 pid 4711`, `127.0.0.1:50312`."""
        ...

    @property
    def uid(self) -> int | None:
        """The peer's user, as the kernel reports it; None over TCP, and on the client's side."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive bytes into `buffer`; return their number, 0 if the peer has finished.  Descriptors are kept for
        later."""
        ...

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far; the caller owns and closes them."""
        ...

    def send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """Send as much as fits without waiting; return the number of bytes, 0 if nothing fits.  Not while a `send`
        waits.

        Descriptors travel with the first byte: a result above 0 means that they were sent.
        """
        ...

    async def wait_writable(self) -> None:
        """Wait until `send_nowait` may be able to send again; a checkpoint only if it waits."""
        ...

    async def send(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
        """Send all parts; descriptors travel with the first byte.  A cancelled send leaves the stream unusable."""
        ...

    def is_at_end(self) -> bool:
        """Return True if the peer has finished and all its bytes were received; asks the kernel, does not wait."""
        ...

    def has_peer_left(self) -> bool:
        """Return True if the peer has finished, even if bytes of it were not received yet; asks the kernel, does not
        wait."""
        ...

    def send_end(self) -> None:
        """Signal to the peer that nothing more is sent; its bytes can still be received.  Never raises."""
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
        """Return the next connection.  Waits out transient failures (descriptors exhausted)."""
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
