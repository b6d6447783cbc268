"""RDMA in an engine or a head: its device, a queue pair for each connection that asks for one, and registered memory.

Rules kept here:
- A connection has one queue pair at most, FABRIC_LINKS_MAX all together.  It is closed with the connection, and when
  another one replaces it; the keys of its grants are of no use without it.
- Peers may READ slabs of the DRAM tier, and nothing else; they may WRITE nothing.
- A connection moves bytes through BOUNCES_PER_LINK buffers at most, where a head has two through one, and READs one put
  at a time, so that a client that does not answer keeps no other from its turn.  What fails or takes longer than
  MOVE_TIMEOUT_S ends the queue pair.
- Work is posted, and queue pairs are made and closed, in threads.

An engine without a device has an `EngineFabric` too, with the reason; it refuses every queue pair.  Used on the loop,
but for `registered`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
import trio

from engine.fabric.bounce_memory import Bounce, BounceMemory
from engine.fabric.registered_slab import RegisteredSlab, SlabMemory
from lakefs.errors import DeadlineExceeded, EngineBusy, FabricFailed, InvalidArgument, SessionLost, UnsupportedVersion
from lakefs.limits import BOUNCES_PER_LINK, FABRIC_LINKS_MAX, LENT_MEMORY_BYTES_MAX
from lakefs.ports import Offload
from lakefs.transport.fabric import ADDRESS_MAX, KEY_MAX, Fabric, Link, Piece, Region, Remote
from lakefs.transport.fabric_mover import TrioMover
from lakefs.wire.fabric_end import FabricEnd, check_end
from lakefs.wire.fabric_messages import FabricMemory

MOVE_TIMEOUT_S: Final = 10.0
"""Longest time that 4 MiB may take: 3 Mbit/s."""
_log: Final = structlog.get_logger(__name__)


class ServedLink:
    """The queue pair of one connection."""

    def __init__(self, link: Link, offload: Offload, bounces: BounceMemory) -> None:
        self.mover: Final = TrioMover(link, offload)
        self._offload = offload
        self._bounces = bounces
        self._turns = trio.Semaphore(BOUNCES_PER_LINK)
        if bounces.count_max == BOUNCES_PER_LINK:
            self._turns.acquire_nowait()  # for ever: one buffer stays for others
        self.put_turn: Final = trio.Lock()
        """Held by a put while its payloads are READ: puts that wait for a slow client hold no memory for payloads."""

    @asynccontextmanager
    async def bounce(self) -> AsyncIterator[Bounce]:
        """Yield a registered buffer until the block ends; waits for one.  SessionLost when none may be registered."""
        try:
            async with self._turns, self._bounces.taken(self._offload) as bounce:
                yield bounce
        except FabricFailed as error:
            raise SessionLost(f"no memory could be registered ({error.message}); go on over TCP") from error

    async def move(self, pieces: Sequence[Piece]) -> None:
        """Move pieces between a buffer and the client's memory.  SessionLost: the queue pair is lost.

        On return, also by an error or a cancellation, nothing touches the buffer or the client's memory any more.
        """
        if not pieces:
            return
        try:
            await self.mover.move(pieces, MOVE_TIMEOUT_S)
        except (FabricFailed, DeadlineExceeded) as error:
            raise SessionLost(f"the queue pair was lost ({error.message}); open another one") from error


class EngineFabric:
    """The device of one engine, or the reason why it has none."""

    def __init__(self, fabric: Fabric | None, reason: str = "", *, sharers: int = 1) -> None:
        """`reason`: see below.  `sharers`: the heads of this machine, which divide the memory to move bytes through."""
        self._fabric = fabric
        self._bounces = BounceMemory(fabric, sharers) if fabric is not None else None
        self._links: dict[object, ServedLink] = {}
        self._turns: dict[object, trio.Lock] = {}
        """Locks of the connections that have opened queue pairs: one request at a time, in the order they came."""
        self._opening = self._made = 0
        self._slabs: dict[int, Region] = {}
        """Registrations of slabs, by their keys; changed by any thread, one at a time for each key."""
        self.reason = reason
        """The reason why there is no RDMA, or why some memory is not read by it; empty if all is well."""

    @property
    def is_on(self) -> bool:
        """True if the engine has a device."""
        return self._fabric is not None

    def statistics(self) -> dict[str, Any]:
        """State and counts for `lake status`."""
        if self._fabric is None or self._bounces is None:
            return {"state": "off", "reason": self.reason}
        return {
            "state": "on",
            "device": self._fabric.device,
            "reason": self.reason,
            "queue_pairs": len(self._links),
            "queue_pairs_made": self._made,
            "registered_bytes": self._bounces.registered_bytes
            + sum(region.length_bytes for region in list(self._slabs.values())),
        }

    # --- memory ------------------------------------------------------------------------------------

    def registered(self, memory: SlabMemory) -> SlabMemory:
        """Return a slab's memory, registered for READs of peers; as it is, if that is refused.  Blocks; any thread."""
        if self._fabric is None:
            return memory
        try:
            region = self._fabric.register(memory.view, Remote.READ)
        except FabricFailed as error:
            if not self.reason:
                _log.warning("the DRAM tier is not read by RDMA", reason=error.message)
            self.reason = error.message
            return memory
        self._slabs[region.remote_key] = region
        return RegisteredSlab(memory, region, self._unregistered)

    def _unregistered(self, region: Region) -> None:
        self._slabs.pop(region.remote_key, None)

    # --- queue pairs -------------------------------------------------------------------------------

    async def open(self, client: object, peer: FabricEnd, offload: Offload) -> FabricEnd:
        """Make a queue pair for a connection, in place of the one it had, and join it to the client's end.

        UnsupportedVersion, InvalidArgument, EngineBusy.
        """
        if self._fabric is None or self._bounces is None:
            raise UnsupportedVersion(f"this engine uses no RDMA: {self.reason}")
        check_end(peer)
        async with self._turns.setdefault(client, trio.Lock()):
            await self._end(client)
            if len(self._links) + self._opening >= FABRIC_LINKS_MAX:
                raise EngineBusy(f"all {FABRIC_LINKS_MAX} queue pairs are in use; go on over TCP")
            self._opening += 1
            try:
                link = await offload.run(_joined, self._fabric, peer)
            except FabricFailed as error:
                raise EngineBusy(f"no queue pair could be made: {error.message}") from error
            finally:
                self._opening -= 1
            self._made += 1
            self._links[client] = ServedLink(link, offload, self._bounces)
        return link.end

    async def close(self, client: object) -> None:
        """End the queue pair of a connection, if it has one, when its requests have ended; not interruptible."""
        self._turns.pop(client, None)
        await self._end(client)

    async def _end(self, client: object) -> None:
        """End the queue pair of a connection; one that is being ended counts as one in use."""
        served = self._links.get(client)
        if served is not None:
            await served.mover.aclose()
            del self._links[client]

    def link_of(self, client: object) -> ServedLink | None:
        """Return the queue pair of a connection if it can be used."""
        served = self._links.get(client)
        return None if served is None or served.mover.is_broken else served

    def link_for(self, client: object, memory: FabricMemory) -> ServedLink:
        """Return the queue pair for a request about memory of the client.  SessionLost, InvalidArgument."""
        if not (
            0 < memory.address <= ADDRESS_MAX - memory.size_bytes
            and 0 < memory.size_bytes <= LENT_MEMORY_BYTES_MAX
            and 0 <= memory.key <= KEY_MAX
        ):
            raise InvalidArgument("this is no registered memory: its key, address or length cannot be")
        served = self.link_of(client)
        if served is None:
            raise SessionLost("this connection has no queue pair; open one")
        return served

    def shutdown(self) -> None:
        """Close everything, the device last.  No connection is left, and no slab.  Blocks."""
        if self._bounces is not None:
            self._bounces.close()
        if self._fabric is not None:
            self._fabric.close()


def _joined(fabric: Fabric, peer: FabricEnd) -> Link:
    """Make a link that is joined to the peer's end.  Blocks.  FabricFailed, InvalidArgument."""
    link = fabric.open_link(Remote.READ)
    try:
        link.connect(peer)
    except BaseException:
        link.close()
        raise
    return link
