"""`SharedDeadline`: a time up to which something holds, written by one process and read by others on its machine.

It is eight bytes of a memfd that children inherit: seconds of CLOCK_BOOTTIME, which all processes of a machine share,
and which goes on while the machine is suspended.  A reader asks nobody, so it is right also while the writer is stopped
or gone: the time passes, and it does not hold any more.

The double lies at the beginning of a page, and is read and written by one aligned instruction, so no reader finds half
of one.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Final

from engine.host.clock import BoottimeClock
from lakefs.errors import ConfigError
from lakefs.limits import PAGE_BYTES
from lakefs.ports import Clock


class SharedDeadline:
    """The deadline in a memfd; the object owns the descriptor.  At first it has passed.  OSError without memory."""

    def __init__(self, descriptor: int | None = None, clock: Clock | None = None) -> None:
        """`descriptor`: of a deadline that another process writes; None makes one."""
        self._clock: Clock = clock or BoottimeClock()
        if descriptor is None:
            descriptor = os.memfd_create("lake-deadline", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, PAGE_BYTES)
        self.descriptor: Final = descriptor
        self.close: Final = weakref.finalize(self, os.close, descriptor)
        """Closes the descriptor; the memory stays until nobody refers to it."""
        if os.fstat(descriptor).st_size != PAGE_BYTES:
            raise ConfigError(f"descriptor {descriptor} is no deadline of the process that serves the lake")
        self._seconds = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("d")

    def set(self, at: float) -> None:
        """Let it hold until `at`, on CLOCK_BOOTTIME."""
        self._seconds[0] = at

    def end(self) -> None:
        """Let it hold no more from now on."""
        self.set(0.0)

    def holds(self) -> bool:
        """Return True before the deadline."""
        return self._clock.monotonic() < self._seconds[0]
