"""Types of the native module `_io_uring`; its rules are in `_io_uring.pyx`."""

from collections.abc import Iterable
from typing import Final

import trio

from lakefs.ids import Buffer
from lakefs.ports import FilePlace

NOP: Final = 0
READ: Final = 22

class Batch:
    """Operations that are submitted together.  Filled, then submitted to one ring, then read for its results."""

    room: int
    """Operations that it has room for."""
    count: int
    """Operations that were added."""
    submitted: int
    """Of those, the first so many were handed over, or given up."""
    pending: int
    """Operations that have not ended."""
    task: trio.lowlevel.Task | None
    """Who waits for its end; the caller's to use."""

    def __init__(self, room: int) -> None: ...
    def add(self, opcode: int, descriptor: int, buffer: Buffer | None, offset: int) -> None:
        """One read, or NOP; a read has memory of its own, which is held until the batch has ended.

        BufferError, TypeError, OverflowError, or ValueError for what is no operation, or has no room: it is not added.
        """

    def add_reads(self, places: Iterable[FilePlace], buffer: Buffer) -> None:
        """Reads that fill one memory, one behind the other; once.  Errors as of `add`; then the batch is of no use."""

    def give_up(self) -> bool:
        """What was not handed over will not be; whether nothing is pending any more."""

    def results(self) -> list[int]:
        """Of each operation the count of bytes or the negated errno; of what was given up, -ECANCELED."""

    def are_whole(self) -> list[bool]:
        """Of each operation whether it read as much as it should."""

class Ring:
    """One io_uring instance.  Used by one thread; RuntimeError when two meet in it, ValueError once it is closed."""

    entries: int
    """Operations that may be in flight; the kernel rounds what was asked for up to a power of two."""
    in_flight: int
    """Operations submitted and not reaped."""

    def __init__(self, entries: int, *, plain: bool = False) -> None:
        """OSError as the kernel, or what filters system calls, refuses it.

        `plain`: with nothing that came after Linux 5.6, as there.
        """

    def eventfd(self) -> int:
        """A descriptor that becomes readable when something completes outside `submit`; the ring's own."""

    def submit(self, batch: Batch) -> int:
        """Hand over what the batch has left, as far as there is room; how many operations were.

        `reap` next: what completes during the call makes the eventfd readable only by luck.  OSError when the kernel
        takes none and none is in flight.
        """

    def reap(self) -> list[Batch]:
        """Take what has completed since; the batches that have ended by it."""

    def wait(self, count: int) -> None:
        """Block until so many can be reaped (at most what is in flight), with the interpreter's lock released."""

    def close(self) -> None:
        """Wait for what is in flight, then give everything back; a second one does nothing."""
