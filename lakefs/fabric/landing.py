"""Landings: registered buffers of a client, to which the engine WRITEs chunks that are not in its DRAM tier.

Rules kept here:
- At most CLIENT_LANDINGS exist.  Each is made and registered when it is first needed, by a thread that also notes it,
  and kept.
- A buffer belongs to one request until it is given back.  One that the engine may still WRITE to is given up: its
  registration ends, and its memory is used for nothing else.

Steps run in the driver's thread; `_make` runs in its worker threads.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Final

from lakefs.limits import CHUNK_BYTES, CLIENT_LANDINGS
from lakefs.steps.steps import Steps, work
from lakefs.transport.fabric import Fabric, Remote
from lakefs.wire.fabric_messages import FabricMemory

if TYPE_CHECKING:
    from lakefs.transport.fabric import Region


class Landing:
    """One registered buffer of CHUNK_BYTES."""

    def __init__(self, fabric: Fabric) -> None:
        """Blocks.  FabricFailed."""
        self._memory = mmap.mmap(-1, CHUNK_BYTES)
        self.view: Final = memoryview(self._memory)
        self._region: Final[Region] = fabric.register(self._memory, Remote.WRITE)

    @property
    def memory(self) -> FabricMemory:
        """The buffer, for requests."""
        return FabricMemory(self._region.remote_key, self._region.address, CHUNK_BYTES)

    def close(self) -> None:
        """End the registration: on return no peer writes to the buffer."""
        self._region.close()


class Landings:
    """The landings of one client."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._lock = threading.Lock()
        self._free: list[Landing] = []
        self._count = 0

    def taken(self) -> Steps[Landing | None]:
        """Return a buffer that nobody else uses, to be given back; None: all are in use.  FabricFailed."""
        if not self._free and self._count < CLIENT_LANDINGS:
            yield from work(self._make)
        return self._free.pop() if self._free else None

    def _make(self) -> None:
        with self._lock:
            if not self._free and self._count < CLIENT_LANDINGS:
                self._free.append(Landing(self._fabric))
                self._count += 1

    def give_back(self, landing: Landing, *, is_quiet: bool) -> None:
        """Give a buffer back; one that the engine may still WRITE to (not `is_quiet`) is given up."""
        if is_quiet:
            self._free.append(landing)
            return
        landing.close()
        with self._lock:
            self._count -= 1
