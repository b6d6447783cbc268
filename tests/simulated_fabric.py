"""A simulated RDMA network for tests: fabrics of one process, and a wire that loses, repeats, reorders and delays.

    with SimulatedWire(seed, Weather(loss=0.1, shuffle=True)) as wire:
        one, other = wire.fabric(), wire.fabric()

Bytes move in a thread of the wire, a packet at a time, while the tests' own code runs: memory of what is in flight
changes under its hands, as with an adapter.  Each link's work is done in order; among links the seed decides.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Self

from lakefs.errors import FabricFailed, InvalidArgument
from lakefs.transport.fabric import (
    ACCESS_REFUSED,
    FLUSHED,
    LOCAL_REFUSED,
    NO_ANSWER,
    SEND_WINDOW,
    Completion,
    FabricEnd,
    LocalMemory,
    Memory,
    Piece,
    Region,
    Remote,
    check_post,
    local_memory,
)
from lakefs.wire.fabric_end import ROCE, check_end

_RETRIES: Final = 7
_READS_MAX: Final = 16


@dataclass(frozen=True)
class Weather:
    """Behaviour of the wire: the chance that a packet is lost, packets out of order, a pause before each operation."""

    loss: float = 0.0
    shuffle: bool = False
    delay_s: float = 0.0
    mtu_bytes: int = 4096
    silence_s: float = 0.05
    """Time until a peer that does not answer is given up."""


@dataclass
class _Operation:
    ticket: int
    region: SimulatedRegion
    offset: int
    remote_address: int
    remote_key: int
    length: int
    is_write: bool
    packets: Iterator[tuple[int, int]] | None = None
    """(offset, length) of what is still to be moved, in the order of its moving; None: not begun."""
    ready_at: float = 0.0
    silent_since: float | None = None


class SimulatedWire:
    """The network between simulated fabrics.  `held` stops all packets; `cut` drops them."""

    def __init__(self, seed: int = 0, weather: Weather | None = None) -> None:
        self.weather = weather or Weather()
        self.changed = threading.Condition()
        self._random = random.Random(seed)
        self._numbers = count(0x11)
        self._fabrics: list[SimulatedFabric] = []
        self._links: dict[tuple[bytes, int], SimulatedLink] = {}
        self._is_held = self._is_cut = self._ended = False
        self._thread = threading.Thread(target=self._run, name="simulated-wire", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all fabrics and end the thread."""
        for fabric in list(self._fabrics):
            fabric.close()
        with self.changed:
            self._ended = True
            self.changed.notify_all()
        self._thread.join()

    def fabric(self, *, links_max: int = 64, registered_bytes_max: int = 1 << 40) -> SimulatedFabric:
        """Open a fabric, with a protection domain of its own."""
        with self.changed:
            fabric = SimulatedFabric(self, next(self._numbers), links_max, registered_bytes_max)
            self._fabrics.append(fabric)
        return fabric

    def hold(self) -> None:
        """Stop all packets where they are, until `release`."""
        self._set(held=True)

    def release(self, operations: int | None = None) -> None:
        """Let packets move again; with a number, that many operations of each link."""
        with self.changed:
            for link in self._links.values():
                link.allowed = operations or 0
        self._set(held=operations is not None)

    def cut(self) -> None:
        """Drop all packets from now on, as a link that is down."""
        self._set(cut=True)

    def mend(self) -> None:
        """Deliver packets again."""
        self._set(cut=False)

    def kill(self, fabric: SimulatedFabric) -> None:
        """End a fabric as its process's death does: its peers hear nothing of it."""
        fabric.close()

    def _set(self, *, held: bool | None = None, cut: bool | None = None) -> None:
        with self.changed:
            self._is_held = self._is_held if held is None else held
            self._is_cut = self._is_cut if cut is None else cut
            self.changed.notify_all()

    # --- for fabrics and links, under `changed` --------------------------------------------------------

    def number(self) -> int:
        """Return a number that is not used yet, with gaps between."""
        for _ in range(self._random.randrange(1, 50)):
            found = next(self._numbers)
        return found

    def first_packet(self) -> int:
        """Return the number of a link's first packet."""
        return self._random.randrange(1 << 24)

    def add(self, link: SimulatedLink) -> None:
        """Add a link."""
        self._links[link.end.gid, link.end.queue_pair] = link

    def remove(self, link: SimulatedLink) -> None:
        """Remove a link."""
        self._links.pop((link.end.gid, link.end.queue_pair), None)

    def forget(self, fabric: SimulatedFabric) -> None:
        """Remove a fabric."""
        if fabric in self._fabrics:
            self._fabrics.remove(fabric)

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.changed:
            while not self._ended:
                now = time.monotonic()
                links = self._links.values()
                waiting = [link for link in links if link.operations and (link.allowed > 0 or not self._is_held)]
                ready = [link for link in waiting if link.operations[0].ready_at <= now]
                if ready:
                    self._advance(self._random.choice(ready))
                    self.changed.wait(0)  # lets others in
                    continue
                soonest = min((link.operations[0].ready_at for link in waiting), default=None)
                self.changed.wait(None if soonest is None else max(soonest - now, 0))

    def _advance(self, link: SimulatedLink) -> None:
        """Do one step of a link's oldest operation: begin it, or move a packet, or end it."""
        operation = link.operations[0]
        if link.has_failed:
            self._end(link, FLUSHED)
            return
        peer = self._peer_of(link)
        if peer is None:
            now = time.monotonic()
            operation.silent_since = operation.silent_since or now
            if now - operation.silent_since < self.weather.silence_s:
                operation.ready_at = now + self.weather.silence_s / (_RETRIES + 1)
            else:
                self._end(link, NO_ANSWER)
            return
        operation.silent_since = None
        if operation.packets is None:
            self._begin(link, peer, operation)
            return
        found = peer.fabric.find(operation.remote_key)
        packet = next(operation.packets, None)
        if packet is None:
            self._end(link, "")
        elif found is None:  # given up by the peer in between
            peer.has_failed = True
            self._end(link, ACCESS_REFUSED)
        else:
            _copy(operation, *packet)

    def _peer_of(self, link: SimulatedLink) -> SimulatedLink | None:
        """Return the link at the other end, if it hears this one."""
        if self._is_cut or link.peer is None:
            return None
        found = self._links.get((link.peer.gid, link.peer.queue_pair))
        if found is None or found.has_failed or found.peer != link.end:
            return None
        return found

    def _begin(self, link: SimulatedLink, peer: SimulatedLink, operation: _Operation) -> None:
        if not operation.is_write and operation.region.remote == Remote.READ:
            self._end(link, LOCAL_REFUSED)
            return
        found = peer.fabric.find(operation.remote_key)
        right = Remote.WRITE if operation.is_write else Remote.READ
        start = operation.remote_address
        if (
            found is None
            or right not in found.remote & peer.peer_may
            or start < found.address
            or start + operation.length > found.address + found.length_bytes
        ):
            peer.has_failed = True
            self._end(link, ACCESS_REFUSED)
            return
        operation.packets = iter(self._plan(operation.length))
        operation.ready_at = time.monotonic() + self._random.random() * 2 * self.weather.delay_s

    def _plan(self, length: int) -> list[tuple[int, int]]:
        """Return the packets of an operation as they arrive: behind a lost one, all from there on come again."""
        mtu = self.weather.mtu_bytes
        packets = [(start, min(mtu, length - start)) for start in range(0, length, mtu)]
        plan: list[tuple[int, int]] = []
        first, retries = 0, 0
        while first < len(packets) and retries <= _RETRIES:
            for index in range(first, len(packets)):
                if self._random.random() >= self.weather.loss:
                    plan.append(packets[index])
                    if index == first:
                        first, retries = first + 1, 0
            retries += 1
        plan += packets[first:]
        if self.weather.shuffle:
            self._random.shuffle(plan)
        return plan

    def _end(self, link: SimulatedLink, failure: str) -> None:
        operation = link.operations.popleft()
        operation.region.uses -= 1
        link.allowed -= link.allowed > 0
        link.has_failed = link.has_failed or bool(failure)
        link.complete(Completion(operation.ticket, failure))


def _copy(operation: _Operation, start: int, length: int) -> None:
    here, there = operation.region.address + operation.offset + start, operation.remote_address + start
    if operation.is_write:
        ctypes.memmove(there, here, length)
    else:
        ctypes.memmove(here, there, length)


@dataclass(eq=False)
class SimulatedRegion:
    """Registered memory of a simulated fabric."""

    fabric: SimulatedFabric
    memory: LocalMemory
    remote: Remote
    local_key: int
    remote_key: int
    uses: int = 0

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self.memory.address

    @property
    def length_bytes(self) -> int:
        """Length in bytes."""
        return self.memory.length_bytes

    def close(self) -> None:
        """Give it up."""
        with self.fabric.wire.changed:
            if self.uses:
                raise FabricFailed(f"a region is in use by {self.uses} operations in flight")
            self.fabric.regions.pop(self.remote_key, None)


@dataclass(eq=False)
class SimulatedLink:
    """A queue pair of a simulated fabric."""

    fabric: SimulatedFabric
    end: FabricEnd
    peer_may: Remote
    descriptor: int
    peer: FabricEnd | None = None
    operations: deque[_Operation] = field(default_factory=deque)
    has_failed: bool = False
    """In the state of errors: all that is posted fails, the peer hears nothing."""
    allowed: int = 0
    is_broken: bool = False
    _completed: deque[Completion] = field(default_factory=deque)
    _in_flight: int = 0
    _is_armed: bool = False

    def connect(self, peer: FabricEnd) -> None:
        """Join it to the peer's end."""
        check_end(peer)
        if peer.kind != self.end.kind:
            raise InvalidArgument(f"an end of kind {peer.kind} does not go with one of kind {self.end.kind}")
        with self.fabric.wire.changed:
            if self.is_broken or self.peer is not None:
                raise FabricFailed("the link is joined or broken already")
            self.peer = peer

    def post(self, ticket: int, pieces: Sequence[Piece]) -> None:
        """Begin to move pieces."""
        check_post(pieces)
        with self.fabric.wire.changed:
            if self.is_broken or self.peer is None or self._in_flight + len(pieces) > SEND_WINDOW:
                raise FabricFailed("the link is broken, not joined, or has its window full")
            if any(self.fabric.regions.get(piece.region.remote_key) is not piece.region for piece in pieces):
                raise FabricFailed("the region is closed, or another fabric's")
            for number, (region, offset, address, key, length, is_write) in enumerate(pieces, ticket):
                self.begin(_Operation(number, _own(region), offset, address, key, length, is_write))
            self.fabric.wire.changed.notify_all()

    def begin(self, operation: _Operation) -> None:
        """Add an operation to those in flight."""
        operation.region.uses += 1
        self._in_flight += 1
        self.operations.append(operation)

    def complete(self, completion: Completion) -> None:
        """Add a completion; called by the wire."""
        self._completed.append(completion)
        if self._is_armed:
            self._is_armed = False
            os.eventfd_write(self.descriptor, 1)

    def poll(self) -> list[Completion]:
        """Return what has completed."""
        with self.fabric.wire.changed:
            found = list(self._completed)
            self._completed.clear()
            self._in_flight -= len(found)
            self.is_broken = self.is_broken or any(completion.failure for completion in found)
            return found

    def arm(self) -> None:
        """Have the next completion make the descriptor readable."""
        with self.fabric.wire.changed:
            self._is_armed = True

    def take_events(self) -> None:
        """Take what made the descriptor readable."""
        with self.fabric.wire.changed, suppress(BlockingIOError):
            if self in self.fabric.links:
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """End it."""
        with self.fabric.wire.changed:
            self.is_broken = self.has_failed = True
            for operation in self.operations:
                operation.region.uses -= 1
            self.operations.clear()
            self._completed.clear()
            self.fabric.wire.remove(self)
            if self in self.fabric.links:
                self.fabric.links.remove(self)
                os.close(self.descriptor)


def _own(region: Region) -> SimulatedRegion:
    assert isinstance(region, SimulatedRegion)
    return region


class SimulatedFabric:
    """An adapter of a simulated wire."""

    device = "simulated"
    kind = ROCE

    def __init__(self, wire: SimulatedWire, number: int, links_max: int, registered_bytes_max: int) -> None:
        self.wire = wire
        self.regions: dict[int, SimulatedRegion] = {}
        self.links: list[SimulatedLink] = []
        self._gid = b"\xfe\x80" + bytes(6) + number.to_bytes(8, "big")
        self._links_max = links_max
        self._registered_bytes_max = registered_bytes_max
        self._closed = False

    @property
    def registered_bytes(self) -> int:
        """Bytes of all regions that are open."""
        return sum(region.length_bytes for region in self.regions.values())

    def register(self, memory: Memory, remote: Remote) -> SimulatedRegion:
        """Register memory."""
        found = local_memory(memory)
        with self.wire.changed:
            if self._closed or self.registered_bytes + found.length_bytes > self._registered_bytes_max:
                raise FabricFailed(f"{found.length_bytes} bytes cannot be registered: no more memory may be locked")
            key = self.wire.number() << 8 | 0x5A
            region = self.regions[key] = SimulatedRegion(self, found, remote, key, key)
        return region

    def open_link(self, peer_may: Remote) -> SimulatedLink:
        """Make a queue pair."""
        with self.wire.changed:
            if self._closed or len(self.links) >= self._links_max:
                raise FabricFailed("the adapter has no more queue pairs")
            number, mtu = self.wire.number(), self.wire.weather.mtu_bytes
            end = FabricEnd(self.kind, number, self._gid, 0, mtu, self.wire.first_packet(), _READS_MAX)
            link = SimulatedLink(self, end, peer_may, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self.links.append(link)
            self.wire.add(link)
        return link

    def find(self, remote_key: int) -> SimulatedRegion | None:
        """Return the region of that key."""
        return self.regions.get(remote_key)

    def close(self) -> None:
        """Close its links and regions."""
        with self.wire.changed:
            self._closed = True
            for link in list(self.links):
                link.close()
            self.regions.clear()
            self.wire.forget(self)
