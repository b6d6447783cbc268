"""RDMA through pyverbs: the `lakefs.transport.fabric` port on a real adapter, or on a software one (rxe).

Rules kept here:
- Whatever is missing (library, device, address, permission) is a reason, a text; no other module sees its exceptions.
- pyverbs checks no pointers: each call on a queue pair is made under the link's lock and only while it is open.
- rxe takes 7 retries for endless ones, so there are 6: a dead peer is found after 7 times 268 ms (adapters may take up
  to four times as long).
- A forked child has none of it: what it inherited is closed there, without freeing what is the parent's in the kernel.
- Adapters of iWARP make connections through a protocol of their own (rdma_cm), which is not spoken here.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final, cast

from lakefs.errors import FabricFailed, InvalidArgument
from lakefs.host.forks import follow_forks
from lakefs.transport.fabric import (
    SEND_WINDOW,
    Completion,
    FabricEnd,
    LocalMemory,
    Memory,
    Region,
    Remote,
    check_post,
    local_memory,
)
from lakefs.transport.rdma_port import Port, gid_text, port_of
from lakefs.transport.verbs import Verbs, close_all, leave_to_parent, load_verbs, open_channel, open_context, reason_of
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
    except (ImportError, AttributeError) as error:
        return f"pyverbs cannot be used ({error}); install python3-pyverbs"
    name, _, place = device.partition(":")
    port, _, gid_index = place.partition(":")
    if not all(part.isdecimal() for part in (port, gid_index) if part):
        return f"{device} is no name of an RDMA device: NAME, NAME:PORT or NAME:PORT:GID"
    try:
        found = [entry.name.decode() for entry in verbs.device.get_device_list() if name in ("", entry.name.decode())]
    except verbs.error:  # the kernel has no RDMA at all
        found = []
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
        context = open_context(verbs, device)
    except verbs.error as error:
        return reason_of(error)
    try:
        port = port_of(verbs, context, device, number, gid_index)
        if isinstance(port, Port):
            return RdmaFabric(verbs, context, device, port)
    except verbs.error as error:
        port = reason_of(error)
    context.close()
    return port


class RdmaFabric:
    """An opened adapter with a protection domain (`lakefs.transport.fabric.Fabric`)."""

    def __init__(self, verbs: Verbs, context: Any, device: str, port: Port) -> None:
        self.device = device
        self.kind = port.kind
        self.verbs = verbs
        self.port = port
        self._context = context
        self._domain = verbs.domain.PD(context)
        self._lock = threading.Lock()
        self._links: set[RdmaLink] = set()
        self._regions: set[RdmaRegion] = set()
        self._closed = False
        follow_forks(self)

    def register(self, memory: Memory, remote: Remote) -> RdmaRegion:
        """Make memory known to the adapter; see the port."""
        found = local_memory(memory)
        names = "IBV_ACCESS_LOCAL_WRITE" if remote != Remote.READ else ""
        names += " IBV_ACCESS_REMOTE_READ" if Remote.READ in remote else ""
        names += " IBV_ACCESS_REMOTE_WRITE" if Remote.WRITE in remote else ""
        with self._lock:
            self._check_open()
            try:
                flags = self.verbs.flags(names)
                made = self.verbs.memory.MR(self._domain, found.length_bytes, flags, address=found.address)
            except self.verbs.error as error:
                raise FabricFailed(
                    f"{found.length_bytes} bytes cannot be registered with {self.device}: {reason_of(error)}; "
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
                link = RdmaLink(self, self._context, self._domain, peer_may)
            except self.verbs.error as error:
                raise FabricFailed(f"{self.device} gives no queue pair: {reason_of(error)}") from error
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
        close_all(self.verbs, self._domain, self._context)

    def begin_anew(self) -> None:
        """In a forked child: take it, its links and its regions for closed; they are the parent's."""
        self._lock = threading.Lock()
        for link in self._links:
            link.begin_anew()
        for region in self._regions:
            region.begin_anew()
        if not self._closed:
            self._closed = True
            leave_to_parent(self._domain, self._context)

    def _check_open(self) -> None:
        if self._closed:
            raise FabricFailed(f"{self.device} was closed")


class RdmaRegion:
    """Registered memory (`lakefs.transport.fabric.Region`)."""

    def __init__(self, fabric: RdmaFabric, made: Any, memory: LocalMemory) -> None:
        self.fabric = fabric
        self._made = made
        self._memory: LocalMemory | None = memory
        self.address, self.length_bytes, _ = memory
        self.local_key = int(made.lkey)
        self.remote_key = int(made.rkey)
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
        leave_to_parent(self._made)

    def close(self) -> None:
        """Give it up; see the port."""
        with self._lock:
            if self._memory is None:
                return
            if self._uses:
                raise FabricFailed(f"a region is in use by {self._uses} operations in flight")
            self._memory = None
            close_all(self.fabric.verbs, self._made)
        self.fabric.forget(self)


class RdmaLink:
    """A reliable queue pair with its completion queue and channel (`lakefs.transport.fabric.Link`)."""

    def __init__(self, fabric: RdmaFabric, context: Any, domain: Any, peer_may: Remote) -> None:
        self._fabric = fabric
        self._verbs = verbs = fabric.verbs
        self._peer_may = peer_may
        self._lock = threading.Lock()
        self._in_flight: deque[RdmaRegion] = deque()
        self._armed = 0
        self._closed = self._connected = False
        self.is_broken = False
        self._channel, self.descriptor = open_channel(verbs, context)
        self._queue: Any = None
        self._pair: Any = None
        try:
            self._queue = verbs.queue.CQ(context, 2 * SEND_WINDOW, None, self._channel, 0)
            capacity = verbs.pair.QPCap(max_send_wr=SEND_WINDOW, max_recv_wr=1)
            wanted = verbs.pair.QPInitAttr(
                qp_type=verbs.numbers.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity
            )
            self._pair = verbs.pair.QP(domain, wanted)
        except verbs.error:
            close_all(verbs, self._queue, self._channel)
            raise
        port = fabric.port
        self.end = FabricEnd(
            kind=port.kind,
            queue_pair=int(self._pair.qp_num),
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
                self._pair.to_rts(self._attributes(peer))
            except self._verbs.error as error:
                raise FabricFailed(
                    f"{self._fabric.device} cannot reach {gid_text(peer.gid)}: {reason_of(error)}"
                ) from error
            self._connected = True

    def _attributes(self, peer: FabricEnd) -> Any:
        verbs, port = self._verbs, self._fabric.port
        found = verbs.pair.QPAttr(port_num=port.number)
        names = "IBV_ACCESS_LOCAL_WRITE"
        names += " IBV_ACCESS_REMOTE_READ" if Remote.READ in self._peer_may else ""
        names += " IBV_ACCESS_REMOTE_WRITE" if Remote.WRITE in self._peer_may else ""
        found.qp_access_flags = verbs.flags(names)
        found.dest_qp_num = peer.queue_pair
        found.path_mtu = min(port.mtu, (peer.mtu_bytes // 128).bit_length() - 1)
        found.sq_psn, found.rq_psn = self.end.first_packet, peer.first_packet
        found.max_rd_atomic = min(port.reads_max, peer.reads_max)
        found.max_dest_rd_atomic = port.reads_max
        found.timeout, found.retry_cnt = _TIMEOUT, _RETRIES
        found.rnr_retry, found.min_rnr_timer = _NOT_READY_RETRIES, _NOT_READY_TIMER
        route = verbs.address.GlobalRoute(
            dgid=verbs.address.GID(gid_text(peer.gid)), sgid_index=port.gid_index, hop_limit=_HOPS
        )
        found.ah_attr = verbs.address.AHAttr(port_num=port.number, dlid=peer.lid, is_global=1, gr=route)
        return found

    def post_read(
        self, ticket: int, region: Region, offset: int, remote_address: int, remote_key: int, length: int
    ) -> None:
        """Begin a READ; see the port."""
        self._post(self._verbs.read, ticket, region, offset, remote_address, remote_key, length)

    def post_write(
        self, ticket: int, region: Region, offset: int, remote_address: int, remote_key: int, length: int
    ) -> None:
        """Begin a WRITE; see the port."""
        self._post(self._verbs.write, ticket, region, offset, remote_address, remote_key, length)

    def _post(
        self, opcode: int, ticket: int, region: Region, offset: int, remote_address: int, remote_key: int, length: int
    ) -> None:
        check_post(region, offset, remote_address, remote_key, length)
        verbs = self._verbs
        piece = verbs.work.SGE(region.address + offset, length, region.local_key)
        work = verbs.work.SendWR(ticket, opcode, 1, 0, [piece], verbs.signaled)
        work.set_wr_rdma(remote_key, remote_address)
        own = cast(RdmaRegion, region)
        with self._lock:
            if self.is_broken or not self._connected or len(self._in_flight) >= SEND_WINDOW:
                raise FabricFailed("the link is broken, not joined, or has its window full")
            if own.fabric is not self._fabric:
                raise FabricFailed("the region is another fabric's")
            own.use()
            try:
                self._pair.post_send(work)
            except verbs.error as error:
                own.release()
                raise FabricFailed(f"{self._fabric.device} took no work: {reason_of(error)}") from error
            self._in_flight.append(own)

    def poll(self) -> list[Completion]:
        """Return the completions that came; see the port."""
        with self._lock:
            if self._closed or not self._in_flight:
                return []
            try:
                _, found = self._queue.poll(SEND_WINDOW)
            except self._verbs.error as error:
                self.is_broken = True
                raise FabricFailed(f"{self._fabric.device} gives no completions: {reason_of(error)}") from error
            completions = []
            for entry in found:
                self._in_flight.popleft().release()
                status = entry.status
                if status:
                    self.is_broken = True
                failure = self._verbs.failures.get(status, f"status {status} of ibv_wc_status") if status else ""
                completions.append(Completion(entry.wr_id, failure))
            return completions

    def arm(self) -> None:
        """Have the next completion make the descriptor readable; see the port."""
        with self._lock:
            if self._closed:
                return
            self._armed += 1
            if self._armed > _ARMED_MAX:
                self._take_events()
            self._queue.req_notify()

    def take_events(self) -> None:
        """Take what made the descriptor readable; see the port."""
        with self._lock:
            if not self._closed:
                self._take_events()

    def _take_events(self) -> None:
        self._armed = 0
        while True:
            try:
                self._channel.get_cq_event(self._queue)
            except self._verbs.error as error:
                if getattr(error, "error_code", 0) != errno.EAGAIN:
                    raise FabricFailed(f"{self._fabric.device} gives no events: {reason_of(error)}") from error
                return
            self._queue.ack_events(1)

    def begin_anew(self) -> None:
        """In a forked child: take it for closed."""
        self._lock = threading.Lock()
        self._closed = self.is_broken = True
        self._in_flight.clear()
        leave_to_parent(self._pair, self._queue, self._channel)

    def close(self) -> None:
        """End it; see the port."""
        with self._lock:
            if self._closed:
                return
            self._closed = self.is_broken = True
            close_all(self._verbs, self._pair, self._queue, self._channel)
            while self._in_flight:
                self._in_flight.popleft().release()
        self._fabric.forget(self)
