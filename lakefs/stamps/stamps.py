"""Stamps: counters by which a client on the engine's machine knows that an answer about names still stands.

    reply = OpenObjects(..., stamps=True)         # each result has a set of stamps: those of the records it rests on
    keep the result with its set
    reader.stand(set)                             # True: the engine would give the same answer now

Each record of the tables of names shares one of the stamps with some others.  The engine turns (increments) the stamps
of the records that a decision changes, in the step in which the change becomes visible and before any client can learn
of it.  So an answer is the present one for as long as none of its stamps has turned and the engine lives.

A set is 12 bytes for each stamp, in any order, no slot twice; b"" is the set of an answer that may not be repeated.

Rules of the reader:
- The mapping is read-only, and of memory that cannot be shrunk under it: a memfd sealed against shrinking.
- A look at stamps takes no lock and makes no system call.
- A set stands or does not; no other use is made of the counters.  A set of one engine says nothing of another's
  stamps.
- A client forgets its answers when its connection to the engine ends, and does not rely on the mutex alone: a kernel
  that kills an engine for want of memory may take the list of its mutexes away before it has marked them (the OOM
  reaper; since Linux 5.18 only if the engine has not ended within two seconds).

A client without the native module asks the engine each time.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

from lakefs.errors import PermissionDenied, StoreDamaged
from lakefs.host.aligned_mapping import map_aligned
from lakefs.host.descriptors import is_cuttable

if TYPE_CHECKING:
    from lakefs.stamps._stamps import StampMemory as StampMemory

    IS_BUILT: bool
else:
    try:
        from lakefs.stamps._stamps import StampMemory
    except ImportError:
        StampMemory = None
    IS_BUILT = StampMemory is not None

STAMP: Final = struct.Struct("<IQ")
"""A stamp of a set: slot, value of its counter."""
HEADER_BYTES: Final = 4096
_COUNTER_BYTES: Final = 8


def memory_bytes(stamp_count: int) -> int:
    """Return the length of memory with that many stamps, a power of two."""
    return HEADER_BYTES + _COUNTER_BYTES * stamp_count


class StampReader:
    """A read-only mapping of the stamps of one engine; used from any thread of the process."""

    def __init__(self, descriptor: int) -> None:
        """Map the stamps by the engine's descriptor, which stays the caller's and may be closed after the call.

        PermissionDenied: they could be cut under the mapping.  StoreDamaged: these are no stamps of this version.
        """
        if is_cuttable(descriptor):
            raise PermissionDenied("the stamps lie in a file that could be cut under their readers")
        try:
            length = os.fstat(descriptor).st_size
            memory, begin = map_aligned(descriptor, length)
            stamps = StampMemory(memoryview(memory).toreadonly()[begin : begin + length])
        except (OSError, ValueError) as error:
            raise StoreDamaged(f"the stamps cannot be mapped: {error}", subject="stamps") from error
        self._stamps: Final = stamps
        self.stand: Final = stamps.stand
        """Return True if the engine lives and every stamp of the set stands; False for b""."""

    @property
    def is_live(self) -> bool:
        """True while the engine lives and has not stopped; once False, it stays so."""
        return self._stamps.is_live

    @property
    def native(self) -> object:
        """The stamps for other native modules; see `StampMemory.native`."""
        return self._stamps.native
