"""Types of the native module `_ring`; its rules are in `_ring.pyx`."""

from collections.abc import Sequence
from typing import Final

from lakefs.ids import Buffer

NOP: Final = 0
SYNC_DATA: Final = 3
READ: Final = 22
WRITE: Final = 23

Operation = tuple[int, int, Buffer | None, int]
"""(opcode, descriptor, buffer or None, offset in the file)"""

class Ring:
    """One io_uring instance.  Used by one thread; RuntimeError when two meet in it, ValueError once it is closed."""

    entries: int
    """Operations that may be in flight; the kernel rounds what was asked for up to a power of two."""
    in_flight: int
    """Operations submitted and not reaped."""

    def __init__(self, entries: int) -> None:
        """OSError as the kernel, or what filters system calls, refuses it."""

    def eventfd(self) -> int:
        """A descriptor that becomes readable when something completes outside `submit`; the ring's own."""

    def submit(self, token: object, operations: Sequence[Operation], first: int = 0) -> int:
        """Hand over operations[first:] as far as there is room; how many were.  Their buffers are held until reaped.

        `reap` next: what completes during the call makes the eventfd readable only by luck.  OSError when the kernel
        takes none and none is in flight; BufferError, TypeError or ValueError for what is no operation: then none was
        handed over.
        """

    def reap(self) -> list[tuple[object, int, int]]:
        """What has completed since: (token, index in its operations, count of bytes or the negated errno)."""

    def wait(self, count: int) -> None:
        """Block until so many can be reaped (at most what is in flight), with the interpreter's lock released."""

    def close(self) -> None:
        """Wait for what is in flight, then give everything back; a second one does nothing."""
