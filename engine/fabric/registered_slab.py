"""A slab of the DRAM tier that clients may READ: its memory, registered once, as long as it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lakefs.transport.fabric import Region
from lakefs.wire.grants import Grant
from lakefs.wire.media import MEDIUM_FABRIC


class SlabMemory(Protocol):
    """Memory of a slab: `SealedMemory`, or plain memory in the simulator, which hands out no descriptors."""

    @property
    def view(self) -> memoryview:
        """The memory: writable, page-aligned where the disk is read into it."""
        ...

    @property
    def descriptor(self) -> int:
        """A read-only descriptor to send to clients; the memory's owner closes it."""
        ...

    @property
    def on_huge_pages(self) -> bool:
        """True if the memory is on reserved huge pages."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class RegisteredSlab:
    """Memory of a slab and its registration, which ends first: no peer reads pages that belong to others by then."""

    def __init__(self, memory: SlabMemory, region: Region, ended: Callable[[Region], None]) -> None:
        """`ended` is called once the registration has ended."""
        self._memory = memory
        self._ended = ended
        self.region = region

    @property
    def view(self) -> memoryview:
        """The memory, writable."""
        return self._memory.view

    @property
    def descriptor(self) -> int:
        """A read-only descriptor of it; `close` closes it."""
        return self._memory.descriptor

    @property
    def on_huge_pages(self) -> bool:
        """True if the memory is on reserved huge pages."""
        return self._memory.on_huge_pages

    def close(self) -> None:
        """End the registration, then release the memory."""
        self.region.close()
        self._ended(self.region)
        self._memory.close()


def remote_grant(memory: object, grant: Grant) -> Grant | None:
    """Return a grant of a place in a slab as one that a client READs; None when the slab is not registered."""
    if not isinstance(memory, RegisteredSlab):
        return None
    region = memory.region
    address = region.address + grant.offset
    length = grant.stored_bytes
    return Grant(MEDIUM_FABRIC, region.remote_key, address, length, grant.logical_bytes, grant.codec, grant.crc)
