"""RDMA through libibverbs: the `lakefs.transport.fabric` port on a real adapter, or on a software one (rxe).

Rules kept here:
- Whatever is missing (library, device, address, permission) is a reason, a text; no other module sees its exceptions.
- The library checks no pointers: each call on a queue pair is made under the link's lock and only while it is open.
- rxe takes 7 retries for endless ones, so there are 6: a dead peer is found after 7 times 268 ms (adapters may take up
  to four times as long).
- A forked child has none of it: what it inherited is closed there, without freeing what is the parent's in the kernel.
- Adapters of iWARP make connections through a protocol of their own (rdma_cm), which is not spoken here.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, cast

from lakefs.errors import FabricFailed, InvalidArgument
from lakefs.host.forks import follow_forks
from lakefs.transport.fabric import (
    SEND_WINDOW,
    Completion,
    FabricEnd,
    LocalMemory,
    Memory,
    Piece,
    Remote,
    check_post,
    local_memory,
)
from lakefs.transport.queue_pair import FAILURES, READ, WRITE, PairAttributes, QueuePair, Request
from lakefs.transport.rdma_port import Port, gid_text, port_of
from lakefs.transport.verbs import (
    ACCESS_LOCAL_WRITE,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
    LIBRARY,
    Context,
    Domain,
    Registered,
    Verbs,
    VerbsError,
    load_verbs,
)
from lakefs.wire.fabric_end import check_end

_ADAPTERS: Final = "/sys/class/infiniband"
_TIMEOUT: Final = 16
"""4.096 us x 2^16 = 268 ms without an answer until a packet is sent again."""
_RETRIES: Final = 6
_NOT_READY_RETRIES: Final = 7
_NOT_READY_TIMER: Final = 12
_HOPS: Final = 64
_ARMED_MAX: Final = 64
"""Calls of `arm` between two drains of the channel: so many events lie in the kernel at most."""


def adapters() -> list[str]:
    """Return the names of the adapters that the kernel knows, whether they can be used or not."""
    with suppress(OSError):
        return sorted(os.listdir(_ADAPTERS))
    return []


def open_fabric(device: str = "") -> RdmaFabric | str:
    """Open an adapter: the first that can be used, or the one named; returns the reason if there is none.

    A name may go on with the port and the index of the address (GID): `mlx5_0`, `mlx5_0:1`, `mlx5_0:1:3`.  Otherwise
    the first active port is taken; and its RoCE v2 address, of IPv4 before IPv6 before link-local.
    """
    try:
        verbs = load_verbs()
    except OSError:
        return f"{LIBRARY} is not installed; install libibverbs1 and ibverbs-providers"
    except AttributeError as error:
        return f"{LIBRARY} is too old ({error}); it has to be of rdma-core 32 or later"
    name, _, place = device.partition(":")
    port, _, gid_index = place.partition(":")
    if not all(part.isdecimal() for part in (port, gid_index) if part):
        return f"{device} is no name of an RDMA device: NAME, NAME:PORT or NAME:PORT:GID"
    found = [known for known in verbs.devices() if name in ("", known)]
    if not found:
        return f"there is no RDMA device {name}" if name else "there is no RDMA device"
    reasons = []
    for candidate in found:
        opened = _open(verbs, candidate, int(port or 0), int(gid_index) if gid_index else None)
        if isinstance(opened, RdmaFabric):
            return opened
        reasons.append(f"{candidate}: {opened}")
    return "; ".join(reasons)


def _open(verbs: Verbs, device: str, number: int, gid_index: int | None) -> RdmaFabric | str:
    """Open the adapter of that name, at that port (0: the first active one) and that address; or return why not."""
    try:
        context = verbs.open(device)
    except VerbsError as error:
        return str(error)
    try:
        port = port_of(context, number, gid_index)
        if isinstance(port, Port):
            return RdmaFabric(context, device, port)
    except VerbsError as error:
        port = str(error)
    context.close()
    return port


class RdmaFabric:
    """An opened adapter with a protection domain (`lakefs.transport.fabric.Fabric`)."""

    def __init__(self, context: Context, device: str, port: Port) -> None:
        """VerbsError."""
        self.device = device
        self.kind = port.kind
        self.port = port
        self._context = context
        self._domain = context.domain()
        self._lock = threading.Lock()
        self._links: set[RdmaLink] = set()
        self._regions: set[RdmaRegion] = set()
        self._closed = False
        follow_forks(self)

    def register(self, memory: Memory, remote: Remote) -> RdmaRegion:
        """Make memory known to the adapter; see the port."""
        found = local_memory(memory)
        access = _rights(remote) | (ACCESS_LOCAL_WRITE if remote != Remote.READ else 0)
        with self._lock:
            self._check_open()
            try:
                made = self._domain.register(found.address, found.length_bytes, access)
            except VerbsError as error:
                raise FabricFailed(
                    f"{found.length_bytes} bytes cannot be registered with {self.device}: {error}; "
                    "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)"
                ) from error
            region = RdmaRegion(self, made, found)
            self._regions.add(region)
        return region

    def open_link(self, peer_may: Remote) -> RdmaLink:
        """Make a queue pair; see the port."""
        with self._lock:
            self._check_open()
            try:
                link = RdmaLink(self, self._domain, peer_may)
            except VerbsError as error:
                raise FabricFailed(f"{self.device} gives no queue pair: {error}") from error
            self._links.add(link)
        return link

    def forget(self, part: RdmaLink | RdmaRegion) -> None:
        """Drop a link or region that was closed."""
        with self._lock:
            self._links.discard(cast(RdmaLink, part))
            self._regions.discard(cast(RdmaRegion, part))

    def close(self) -> None:
        """Close links, regions and the adapter; never raises."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for link in list(self._links):
            link.close()
        for region in list(self._regions):
            region.close()
        self._domain.close()
        self._context.close()

    def begin_anew(self) -> None:
        """In a forked child: take it, its links and its regions for closed; they are the parent's."""
        self._lock = threading.Lock()
        for link in self._links:
            link.begin_anew()
        for region in self._regions:
            region.begin_anew()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise FabricFailed(f"{self.device} was closed")


class RdmaRegion:
    """Registered memory (`lakefs.transport.fabric.Region`)."""

    def __init__(self, fabric: RdmaFabric, made: Registered, memory: LocalMemory) -> None:
        self.fabric = fabric
        self._made = made
        self._memory: LocalMemory | None = memory
        self.address, self.length_bytes, _ = memory
        self.local_key = made.local_key
        self.remote_key = made.remote_key
        self._lock = threading.Lock()
        self._uses = 0

    def use(self) -> None:
        """Count an operation of this side that is in flight.  FabricFailed if the region was closed."""
        with self._lock:
            if self._memory is None:
                raise FabricFailed("the region was closed")
            self._uses += 1

    def release(self) -> None:
        """Count the end of an operation."""
        with self._lock:
            self._uses -= 1

    def begin_anew(self) -> None:
        """In a forked child: take it for closed."""
        self._lock = threading.Lock()
        self._memory = None

    def close(self) -> None:
        """Give it up; see the port."""
        with self._lock:
            if self._memory is None:
                return
            if self._uses:
                raise FabricFailed(f"a region is in use by {self._uses} operations in flight")
            self._memory = None
            self._made.close()
        self.fabric.forget(self)


class RdmaLink:
    """A reliable queue pair with its completion queue and channel (`lakefs.transport.fabric.Link`)."""

    def __init__(self, fabric: RdmaFabric, domain: Domain, peer_may: Remote) -> None:
        """VerbsError."""
        self._fabric = fabric
        self._peer_may = peer_may
        self._lock = threading.Lock()
        self._in_flight: deque[RdmaRegion] = deque()
        self._armed = 0
        self._closed = self._connected = False
        self.is_broken = False
        self._pair = QueuePair(domain, SEND_WINDOW)
        self.descriptor = self._pair.descriptor
        port = fabric.port
        self.end = FabricEnd(
            kind=port.kind,
            queue_pair=self._pair.number,
            gid=port.gid,
            lid=port.lid,
            mtu_bytes=128 << port.mtu,
            first_packet=secrets.randbelow(1 << 24),
            reads_max=port.reads_max,
        )

    def connect(self, peer: FabricEnd) -> None:
        """Join it to the peer's end; see the port."""
        check_end(peer)
        if peer.kind != self.end.kind:
            raise InvalidArgument(f"an end of kind {peer.kind} does not go with one of kind {self.end.kind}")
        with self._lock:
            if self._closed or self._connected:
                raise FabricFailed("the link is joined or closed already")
            try:
                self._pair.connect(self._attributes(peer))
            except VerbsError as error:
                raise FabricFailed(f"{self._fabric.device} cannot reach {gid_text(peer.gid)}: {error}") from error
            self._connected = True

    def _attributes(self, peer: FabricEnd) -> PairAttributes:
        port = self._fabric.port
        found = PairAttributes(
            port_num=port.number,
            qp_access_flags=ACCESS_LOCAL_WRITE | _rights(self._peer_may),
            dest_qp_num=peer.queue_pair,
            path_mtu=min(port.mtu, (peer.mtu_bytes // 128).bit_length() - 1),
            sq_psn=self.end.first_packet,
            rq_psn=peer.first_packet,
            max_rd_atomic=min(port.reads_max, peer.reads_max),
            max_dest_rd_atomic=port.reads_max,
            timeout=_TIMEOUT,
            retry_cnt=_RETRIES,
            rnr_retry=_NOT_READY_RETRIES,
            min_rnr_timer=_NOT_READY_TIMER,
            path_port_num=port.number,
            dlid=peer.lid,
            is_global=1,
            sgid_index=port.gid_index,
            hop_limit=_HOPS,
        )
        found.dgid[:] = struct.unpack("=QQ", peer.gid)
        return found

    def post(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """Begin to move pieces; see the port."""
        check_post(pieces)
        regions = [cast(RdmaRegion, piece.region) for piece in pieces]
        requests = [
            Request(
                ticket + index,
                WRITE if is_write else READ,
                region.address + offset,
                length,
                region.local_key,
                remote_address,
                remote_key,
            )
            for index, (region, offset, remote_address, remote_key, length, is_write) in enumerate(pieces)
        ]
        with self._lock:
            if self.is_broken or not self._connected or len(self._in_flight) + len(pieces) > SEND_WINDOW:
                raise FabricFailed("the link is broken, not joined, or has its window full")
            if any(region.fabric is not self._fabric for region in regions):
                raise FabricFailed("the region is another fabric's")
            used = _used(regions)
            posted, reason = self._pair.post(requests)
            self._in_flight.extend(used[:posted])
            for region in used[posted:]:
                region.release()
            if reason:
                self.is_broken = True
                raise FabricFailed(f"{self._fabric.device} took no work: {reason}")

    def poll(self) -> list[Completion]:
        """Return the completions that came; see the port."""
        with self._lock:
            if self._closed or not self._in_flight:
                return []
            try:
                found = self._pair.poll()
            except VerbsError as error:
                self.is_broken = True
                raise FabricFailed(f"{self._fabric.device} gives no completions: {error}") from error
            completions = []
            for ticket, status in found:
                self._in_flight.popleft().release()
                if status:
                    self.is_broken = True
                failure = FAILURES.get(status, f"status {status} of ibv_wc_status") if status else ""
                completions.append(Completion(ticket, failure))
            return completions

    def arm(self) -> None:
        """Have the next completion make the descriptor readable; see the port."""
        with self._lock:
            if self._closed:
                return
            self._armed += 1
            if self._armed > _ARMED_MAX:
                self._take_events()
            try:
                self._pair.arm()
            except VerbsError as error:
                raise FabricFailed(f"{self._fabric.device} gives no events: {error}") from error

    def take_events(self) -> None:
        """Take what made the descriptor readable; see the port."""
        with self._lock:
            if not self._closed:
                self._take_events()

    def _take_events(self) -> None:
        self._armed = 0
        try:
            self._pair.take_events()
        except VerbsError as error:
            raise FabricFailed(f"{self._fabric.device} gives no events: {error}") from error

    def begin_anew(self) -> None:
        """In a forked child: take it for closed."""
        self._lock = threading.Lock()
        self._closed = self.is_broken = True
        self._in_flight.clear()

    def close(self) -> None:
        """End it; see the port."""
        with self._lock:
            if self._closed:
                return
            self._closed = self.is_broken = True
            self._pair.close()
            while self._in_flight:
                self._in_flight.popleft().release()
        self._fabric.forget(self)


def _used(regions: Sequence[RdmaRegion]) -> list[RdmaRegion]:
    """Count an operation with each region.  FabricFailed if one was closed; then none is counted."""
    used: list[RdmaRegion] = []
    try:
        for region in regions:
            region.use()
            used.append(region)
    except FabricFailed:
        for region in used:
            region.release()
        raise
    return used


def _rights(remote: Remote) -> int:
    """Return the rights of a peer as the library has them."""
    return (ACCESS_REMOTE_READ if Remote.READ in remote else 0) | (ACCESS_REMOTE_WRITE if Remote.WRITE in remote else 0)
