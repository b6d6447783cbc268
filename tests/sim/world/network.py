"""A network in memory: bytes arrive in pieces of random size, after a delay, and connections can be cut.

Everything random comes from one `random.Random`, time is trio's, so a run is reproducible.  Both ends bound what is
in flight.  Streams carry no descriptors.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import trio

from lakefs.errors import AddressInUse, EngineUnreachable
from lakefs.host.descriptors import after
from lakefs.ids import Buffer
from lakefs.ports import Listener, Stream
from tests.sim.world.sim_time import pause


class _Pipe:
    """One direction: what was sent and not received, with a bound."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held = bytearray()
        self.finished = False  # no more bytes will be sent
        self.cut = False
        self.changed = trio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class SimulatedStream:
    """One end of a connection."""

    def __init__(self, network: SimulatedNetwork, incoming: _Pipe, outgoing: _Pipe, peer: str) -> None:
        self._network = network
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer = peer
        self._closed = False

    @property
    def carries_descriptors(self) -> bool:
        return False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def uid(self) -> int | None:
        return None

    async def receive_into(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        pipe = self._incoming
        while not pipe.held:
            self._check(pipe)
            if pipe.finished:
                return 0
            await pipe.changed.wait()
        self._check(pipe)
        await self._network.delay()
        self._check(pipe)
        count = self._network.piece(min(len(buffer), len(pipe.held)))
        buffer[:count] = pipe.held[:count]
        del pipe.held[:count]
        pipe.notify()
        return count

    def take_descriptors(self) -> list[int]:
        return []

    def send_nowait(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        assert not descriptors, "this stream carries no descriptors"
        pipe = self._outgoing
        self._check(pipe)
        if pipe.finished:
            raise EngineUnreachable(f"the connection to {self._peer} was closed")
        pieces = [memoryview(part).cast("B") for part in parts if len(part)]
        room = min(sum(map(len, pieces)), pipe.capacity_bytes - len(pipe.held))
        if room <= 0:
            return 0
        left = count = self._network.piece(room)
        for piece in pieces:
            pipe.held += piece[:left]
            left -= min(left, len(piece))
            if not left:
                break
        pipe.notify()
        return count

    async def send(self, parts: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
        await trio.lowlevel.checkpoint()
        left: list[Buffer] = list(parts)
        while left := after(left, self.send_nowait(left, descriptors)):
            await self.wait_writable()

    async def wait_writable(self) -> None:
        if len(self._outgoing.held) >= self._outgoing.capacity_bytes:
            await self._outgoing.changed.wait()

    def is_at_end(self) -> bool:
        return False  # a reader notices the end by its read

    def has_peer_left(self) -> bool:
        return self._closed or self._incoming.cut or self._incoming.finished

    def send_end(self) -> None:
        self._outgoing.finished = True
        self._outgoing.notify()

    async def aclose(self) -> None:
        self._closed = True
        for pipe in (self._incoming, self._outgoing):
            pipe.finished = True
            pipe.notify()

    def cut(self) -> None:
        """Break the connection: bytes in flight are lost, both ends get errors."""
        for pipe in (self._incoming, self._outgoing):
            pipe.cut = True
            pipe.held.clear()
            pipe.notify()

    def _check(self, pipe: _Pipe) -> None:
        if self._closed or pipe.cut:
            raise EngineUnreachable(f"the connection to {self._peer} was lost", subject=self._peer)


class SimulatedListener:
    """A bound name."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._waiting: deque[SimulatedStream] = deque()
        self._changed = trio.Event()
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    async def accept(self) -> Stream:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._closed:
                raise EngineUnreachable(f"{self._address} is closed")
            await self._changed.wait()
        return self._waiting.popleft()

    async def aclose(self) -> None:
        self._closed = True
        self._network.forget(self)
        self._notify()

    def offer(self, stream: SimulatedStream) -> None:
        """Note that a client has connected."""
        self._waiting.append(stream)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class SimulatedNetwork:
    """Streams between tasks of one trio run; `latency_s` is the most that a receive is delayed."""

    def __init__(self, rng: random.Random, *, latency_s: float = 0.0, capacity_bytes: int = 65536) -> None:
        self._rng = rng
        self._latency_s = latency_s
        self._capacity_bytes = capacity_bytes
        self._listeners: dict[str, SimulatedListener] = {}
        self._last_port = 40000
        self.streams: list[SimulatedStream] = []

    async def listen(self, address: str) -> Listener:
        await trio.lowlevel.checkpoint()
        if address.endswith(":0"):
            self._last_port += 1
            address = f"{address.removesuffix(':0')}:{self._last_port}"
        if address in self._listeners:
            raise AddressInUse(f"{address} is taken", subject=address)
        listener = SimulatedListener(self, address)
        self._listeners[address] = listener
        return listener

    async def connect(self, address: str) -> Stream:
        await trio.lowlevel.checkpoint()
        await self.delay()
        listener = self._listeners.get(address)
        if listener is None:
            raise EngineUnreachable(f"no engine answers at {address}", subject=address)
        there, back = _Pipe(self._capacity_bytes), _Pipe(self._capacity_bytes)
        self._last_port += 1
        near = SimulatedStream(self, back, there, address)
        far = SimulatedStream(self, there, back, f"simulated:{self._last_port}")
        self.streams += [near, far]
        listener.offer(far)
        return near

    def forget(self, listener: SimulatedListener) -> None:
        """Free a listener's address."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def cut_all(self) -> None:
        """Break every connection there is."""
        for stream in self.streams:
            stream.cut()
        self.streams.clear()

    async def delay(self) -> None:
        """Let a random time pass."""
        if self._latency_s:
            await pause(self._rng.uniform(0.0, self._latency_s))

    def piece(self, count: int) -> int:
        """Return a random part of `count` bytes, at least one; often all of it."""
        return count if count <= 1 or self._rng.random() < 0.5 else self._rng.randint(1, count)
