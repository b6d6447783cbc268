"""The nodes of a simulated etcd: who leads them, which of them are away, and what may go wrong on the way to them.

A request is done when a node has it that can reach the leader, and the leader more than half of the nodes; else the
node holds it, or refuses it, as etcd does.  Without such a leader another is elected within seconds, and all leases run
for their whole time again.  A leader that was cut off or stopped answers keep-alives for a while, of which nobody else
knows.

All nodes have one state (`tests.sim.world.etcd`), so what they answer is linearizable by itself.  What is left for
clients to do wrong: repeat, believe, give up and hope.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_link import KEEP_ALIVE, RANGE, Method
from engine.etcd.etcd_status import Status
from engine.host.tasks import plain_errors
from tests.sim.cluster.network import Network, Way
from tests.sim.world.etcd import EtcdWatching, SimEtcd
from tests.sim.world.sim_time import pause

HOSTS: Final = "etcd0", "etcd1", "etcd2"
LOOK_EVERY_S: Final = 0.25
SILENCE_S: Final = 9.0
"""A connection that is silent, by its way or because its node stands still, is lost then: pings of gRPC find out."""
PROGRESS_S: Final = 600.0
"""Watches say so often how far they have come."""
HELD_MAX_S: Final = 7.0
"""A node holds a request so long while nobody leads."""
KNOWS_S: Final = 1.5
"""A node without a leader refuses what it is asked, after so long."""
_ELECTION_S: Final = 1.0, 2.0
_OLD_S: Final = 1.0
"""A leader that has lost the others still believes in itself."""
_COMMIT_S: Final = 0.0005, 0.003
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
REFUSED: Final = Status(_UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused")
RESET: Final = Status(_UNAVAILABLE, "recvmsg: Connection reset by peer")
_NO_LEADER: Final = Status(_UNAVAILABLE, "etcdserver: no leader")
_TIMED_OUT: Final = Status(_UNAVAILABLE, "etcdserver: request timed out")


Meet = Callable[[str, Method, Any, bool], Awaitable[None]]
"""Awaited by each request when it has arrived, and by its answer when that leaves: with the sender's host, and True for
an answer."""


@dataclass
class EtcdFaults:
    """The part of messages that meets each fault, from 0 to 1; and the most seconds of those that take long."""

    loses_requests: float = 0.0
    """The connection ends before the request arrives."""
    loses_answers: float = 0.0
    """It was done, and the connection ends before the answer arrives."""
    holds_requests: float = 0.0
    """It arrives late, perhaps when its sender has given it up."""
    holds_answers: float = 0.0
    holds_watches: float = 0.0
    """A watch is silent for a while."""
    ends_watches: float = 0.0
    """The stream of a watch ends, before an event of it arrives."""
    held_s: float = 6.0
    commit_s: float = 0.0
    """Added to each request: a slow disk."""


class EtcdNodes:
    """An etcd.  Made by `etcd_nodes`."""

    def __init__(self, network: Network, rng: random.Random, hosts: Sequence[str], quota_bytes: int | None) -> None:
        self.network = network
        self.hosts: Final = tuple(hosts)
        self.rng: Final = rng
        self.state: Final = SimEtcd(quota_bytes=quota_bytes)
        self.faults = EtcdFaults()
        self.deaf: set[str] = set()
        """Hosts to which watches bring nothing."""
        self.meet: Meet | None = None
        """A point of scenes."""
        self.streams: dict[EtcdStream, None] = {}
        self.leader: str | None = hosts[0]
        self._away: dict[str, None] = {}
        self._stopped: dict[str, None] = {}
        self._changed = trio.Event()
        self._elects_at = 0.0
        self._led_at = dict.fromkeys(hosts, 0.0)
        """When each node was last in touch with a leader."""
        self._old: dict[str, tuple[int, float]] = {}
        """Nodes that believe to lead: their term, and until when."""

    # --- what may happen to nodes ------------------------------------------------------------------------

    def kill(self, host: str) -> None:
        """End the process of a node; nobody listens there."""
        self._away[host] = None
        for stream in list(self.streams):
            if stream.host == host:
                stream.break_off(RESET)
        self._notify()

    def start(self, host: str) -> None:
        """Start it again, with what it had."""
        self._away.pop(host, None)
        self._notify()

    def stop(self, host: str) -> None:
        """Let a node stand still (SIGSTOP): its connections stay."""
        self._stopped[host] = None

    def resume(self, host: str) -> None:
        """Let it go on."""
        self._stopped.pop(host, None)
        if host in self._old:
            self._old[host] = self._old[host][0], trio.current_time() + LOOK_EVERY_S
        self._notify()

    def is_away(self, host: str) -> bool:
        """Return True if nobody listens there."""
        return host in self._away

    def is_stopped(self, host: str) -> bool:
        """Return True if it stands still: it says nothing, and takes what it is sent later."""
        return host in self._stopped

    # --- who can do something ----------------------------------------------------------------------------

    def serves(self, host: str) -> bool:
        """Return True if a node can have a request done."""
        leader = self.leader
        return leader is not None and self._leads(leader) and self._runs(host) and self._reach(host, leader)

    async def run(self) -> None:
        """Elect leaders, end leases and broken streams; until cancelled."""
        progress_at = PROGRESS_S
        while True:
            await pause(LOOK_EVERY_S)
            self._look_at_leader()
            if trio.current_time() >= progress_at:
                progress_at += PROGRESS_S
                self.state.note_progress()
            if self.leader is not None:
                self.state.end_leases()
            now = trio.current_time()
            for host in self.hosts:
                if self.serves(host):
                    self._led_at[host] = now
            for stream in list(self.streams):
                stream.look(is_led=now - self._led_at[stream.host] < KNOWS_S)

    async def wait_changed(self) -> None:
        """Wait until something may be different at the nodes, for a short time."""
        with trio.move_on_after(LOOK_EVERY_S):
            await self._changed.wait()

    def _look_at_leader(self) -> None:
        now = trio.current_time()
        if self.leader is not None and not self._leads(self.leader):
            self._old[self.leader] = self.state.term, now + _OLD_S
            self.leader, self._elects_at = None, now + self.rng.uniform(*_ELECTION_S)
        if self.leader is None and now >= self._elects_at:
            able = [host for host in self.hosts if self._leads(host)]
            if able:
                self.leader = self.rng.choice(able)
                self.state.elect()
                self._notify()

    def _leads(self, host: str) -> bool:
        others = [other for other in self.hosts if self._runs(other) and self._reach(host, other)]
        return self._runs(host) and len(others) > len(self.hosts) // 2

    def _runs(self, host: str) -> bool:
        return host not in self._away and host not in self._stopped

    def _reach(self, one: str, other: str) -> bool:
        return one == other or self.network.is_open(one, other)

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    # --- requests ----------------------------------------------------------------------------------------

    async def serve(self, host: str, method: Method, request: Any) -> e.Message | Status:
        """Do a request that has arrived at a node, and return its answer.  It waits while the node stands still."""
        if self.is_away(host):
            return REFUSED
        await pause(self.rng.uniform(*_COMMIT_S) + self.faults.commit_s)
        until = trio.current_time() + HELD_MAX_S
        is_lost = method is not KEEP_ALIVE and self._sends_in_vain(host)
        while method is not KEEP_ALIVE or not self._believes(host):
            now = trio.current_time()
            if self.is_away(host):
                return RESET
            if (self.serves(host) and not is_lost) or self._answers_alone(host, method, request):
                return self.state.answer(method, request, 1 + self.hosts.index(host))
            if self._runs(host) and now > self._led_at[host] + KNOWS_S and self.rng.random() < 0.2:
                return _NO_LEADER
            if self._runs(host) and now >= until:
                return _TIMED_OUT
            await self.wait_changed()
        return self._kept_in_vain(host, request)

    def _answers_alone(self, host: str, method: Method, request: Any) -> bool:
        """Return True for a read that a node does by itself, if it is in touch with a leader as far as it knows."""
        is_alone = method is RANGE and request.serializable
        return is_alone and self._runs(host) and trio.current_time() < self._led_at[host] + KNOWS_S

    def _sends_in_vain(self, host: str) -> bool:
        """Return True if a node that follows sends a request on to a leader that is gone, and does not know it yet."""
        knows = self.leader is None and trio.current_time() > self._led_at[host] + _ELECTION_S[0]
        return self._runs(host) and not self.serves(host) and not knows

    def _believes(self, host: str) -> bool:
        """Return True if a node believes to lead, and does not."""
        believed = self._old.get(host)
        is_old = believed is not None and trio.current_time() < believed[1]
        return is_old and host != self.leader and self._runs(host)

    def _kept_in_vain(self, host: str, request: Any) -> e.Message:
        answer = e.KeepAliveResponse(id=request.id, ttl=60)
        answer.header.member_id, answer.header.raft_term = 1 + self.hosts.index(host), self._old[host][0]
        answer.header.revision = self.state.revision
        return answer


class EtcdStream:
    """The stream of a watch from a node to a host."""

    def __init__(self, nodes: EtcdNodes, near: str, host: str, create: Any) -> None:
        self.host: Final = host
        self.broken: Status | None = None
        self.woken = trio.Event()
        self._nodes = nodes
        self._near = near
        self._silent_since: float | None = None
        self.watch: EtcdWatching = nodes.state.watch(create)
        nodes.streams[self] = None

    def cancel(self) -> None:
        """End it from the near side."""
        self.break_off(Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))

    def break_off(self, status: Status) -> None:
        """End it; the reader is woken."""
        self._nodes.streams.pop(self, None)
        self._nodes.state.forget(self.watch)
        if self.broken is None:
            self.broken = status
            self.woken.set()
            self.watch.woken.set()

    def look(self, *, is_led: bool) -> None:
        """End it if its way has ended, or its node has had no leader for long."""
        network, now = self._nodes.network, trio.current_time()
        ways = network.way(self._near, self.host), network.way(self.host, self._near)
        if Way.CUT in ways:
            self.break_off(RESET)
        elif Way.SILENT in ways or self._nodes.is_stopped(self.host):
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since > SILENCE_S:
                self.break_off(RESET)
        else:
            self._silent_since = None
        says_it = self._silent_since is None and not self._nodes.serves(self.host)
        if not is_led and says_it:
            self.break_off(_NO_LEADER)

    def is_silent(self) -> bool:
        """Return True while nothing arrives."""
        is_held = self._near in self._nodes.deaf or self._nodes.network.way(self.host, self._near) is Way.SILENT
        return is_held or not self._nodes.serves(self.host)


@asynccontextmanager
async def etcd_nodes(
    network: Network, rng: random.Random, hosts: Sequence[str] = HOSTS, *, quota_bytes: int | None = None
) -> AsyncIterator[EtcdNodes]:
    """Yield an etcd whose nodes are on these hosts, with nothing in it."""
    nodes = EtcdNodes(network, rng, hosts, quota_bytes)
    with plain_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes.run)
            yield nodes
            nursery.cancel_scope.cancel()
