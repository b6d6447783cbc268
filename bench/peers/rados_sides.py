"""A lake of six members and a RADOS cluster of six OSDs as the same port: put, get, lose a member, replace it.

`bench.rados` says what is compared.  A side's serving processes run as long as its block.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from bench.harness.cpu import cpu_s, process_tree
from bench.harness.machines import LakeMachine
from bench.harness.process import allocated_bytes
from bench.peers.rados_cluster import RadosCluster
from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.blocking.link import Ticket
from lakefs.wire import messages as m

KIB: Final = 1 << 10
MIB: Final = 1 << 20
LONG: Final = 4 * MIB
MIDDLE: Final = 64 * KIB
SHORT: Final = 4 * KIB
IN_FLIGHT: Final = {LONG: 4, MIDDLE: 64, SHORT: 64}
LOST: Final = 2
"""Number of the member, and OSD, that is lost."""
SHARE_MIN: Final = 0.8
"""A member that was made anew has at least so much of the room that another one takes."""
WAIT_S: Final = 600.0
SETTLED_CPU_S: Final = 0.1
"""CPU in a second of a side that nobody asks and that has nothing left to do."""
LAKE: Final = "lake"
RADOS: Final = "RADOS"

T = TypeVar("T", bound="LakeSide")


class Side(ABC):
    """A store under test; `put_all` and `get_all` return when all is answered."""

    name: str

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the serving processes."""

    @abstractmethod
    def hop_pids(self) -> list[int]:
        """Return processes between client and serving ones."""

    @abstractmethod
    def put_all(self, contents: Sequence[bytes], in_flight: int) -> list[str]:
        """Store contents; return what finds them again."""

    @abstractmethod
    def get_all(self, names: Sequence[str], target: memoryview) -> None:
        """Read contents as long as the target, one after the other into it."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """Return the room on disk."""

    @abstractmethod
    def lose(self) -> None:
        """Kill one member, with all that it has."""

    @abstractmethod
    def replace(self) -> None:
        """Put an empty one in its place."""

    @abstractmethod
    def wait_whole(self) -> None:
        """Return when every chunk has all its shards."""

    @contextmanager
    def reader(self) -> Iterator[Side]:
        """Context manager: a second client, for another thread."""
        yield self


class LakeSide(Side):
    """A lake of six members on this machine."""

    name = LAKE

    def __init__(self, served: LakeMachine) -> None:
        self._machine = served
        self._numbers = itertools.count()
        self._lost = ""
        self._connect()

    def _connect(self) -> None:
        self._lake = self._machine.connect()
        self._client = connect_blocking(self._machine.address)

    @property
    def address(self) -> str:
        """The address of the lake's head."""
        return self._machine.address

    def close(self) -> None:
        """End the clients."""
        self._client.close()
        self._lake.close()

    def pids(self) -> list[int]:
        """Return parent and members."""
        return process_tree(self._machine.pid)

    def hop_pids(self) -> list[int]:
        """Return none: the head is in the parent."""
        return []

    def put_all(self, contents: Sequence[bytes], in_flight: int) -> list[str]:
        """Put each by a request of its own."""
        names: list[str] = []
        tickets: list[Ticket] = []
        for sent, content in enumerate(contents):
            if sent >= in_flight:
                self._finish_put(tickets[sent - in_flight])
            names.append(f"data/k{next(self._numbers):012}")
            change = m.NameChange("bench", names[-1], b"", m.ObjectAttributes())
            tickets.append(self._client.start(m.PutObjects([len(content)], [change]), [content]))
        for ticket in tickets[max(0, len(contents) - in_flight) :]:
            self._finish_put(ticket)
        return names

    def _finish_put(self, ticket: Ticket) -> None:
        message = self._client.finish(ticket).message
        assert isinstance(message, m.NameResults)
        assert message.results[0].failure is None, message.results[0].failure

    def get_all(self, names: Sequence[str], target: memoryview) -> None:
        """Get: what is sent with the answer many in flight, other content through the client."""
        if len(target) >= MIDDLE:
            for name in names:
                self._lake.get_into(f"bench/{name}", target)
            return
        tickets = [self._open(name) for name in names[: IN_FLIGHT[SHORT]]]
        for number in range(len(names)):
            reply = self._client.finish(tickets[number])
            assert reply.body.nbytes == len(target), "the payload is in the answer"
            target[:] = reply.body.joined()
            reply.body.release()
            if len(tickets) < len(names):
                tickets.append(self._open(names[len(tickets)]))

    def _open(self, name: str) -> Ticket:
        return self._client.start(m.OpenObjects([("bench", name)], lease_inline=False))

    def stored_bytes(self) -> int:
        """Return the room of all folders of a lake that is stopped, and start it again."""
        self.close()
        self._machine.stop()
        found = sum(allocated_bytes(device, leave_out="reserve") for device in self._machine.devices)
        self._machine.start()
        self._connect()
        return found

    def lose(self) -> None:
        """Kill a member."""
        self._lost = self._machine.lose(self._machine.devices[LOST])

    def replace(self) -> None:
        """Run `lake cluster replace`."""
        self._machine.lake("cluster", "replace", self._lost, str(self._machine.devices[LOST]))

    def wait_whole(self) -> None:
        """Return when all six have places, none is away, and no partition is dirty."""
        _wait(self._is_whole)

    def _is_whole(self) -> bool:
        found = self._lake.status()["lake"]
        up = [each for each in found["members"] if each["up"] and each["places"]]
        settled = found["ring_epochs"] == 1 and not found["walker"]["dirty_partitions"]
        whole = settled and len(up) == len(found["members"]) == len(self._machine.devices)
        return whole and (not self._lost or self._has_its_share())

    def _has_its_share(self) -> bool:
        rooms = [allocated_bytes(device, leave_out="reserve") for device in self._machine.devices]
        return rooms[LOST] >= SHARE_MIN * min(rooms)

    @contextmanager
    def reader(self) -> Iterator[Side]:
        """Context manager: a side with connections of its own."""
        other = LakeSide(self._machine)
        try:
            yield other
        finally:
            other.close()


class RadosSide(Side):
    """A RADOS cluster, and the gateway in front of it."""

    name = RADOS

    def __init__(self, cluster: RadosCluster) -> None:
        self._cluster = cluster

    def pids(self) -> list[int]:
        """Return monitor and OSDs."""
        return self._cluster.pids

    def hop_pids(self) -> list[int]:
        """Return the gateway."""
        return [self._cluster.gateway_pid]

    def put_all(self, contents: Sequence[bytes], in_flight: int) -> list[str]:
        """Put each as one object."""
        return [name.hex() for name in self._cluster.gateway.put_all(contents, in_flight)]

    def get_all(self, names: Sequence[str], target: memoryview) -> None:
        """Get each as one object."""
        self._cluster.gateway.get_all([bytes.fromhex(name) for name in names], target, IN_FLIGHT[len(target)])

    def stored_bytes(self) -> int:
        """Return the room of all objects."""
        return self._cluster.stored_bytes()

    def lose(self) -> None:
        """Kill an OSD."""
        self._cluster.lose(LOST)

    def replace(self) -> None:
        """Make an OSD of the same number."""
        self._cluster.replace(LOST)

    def wait_whole(self) -> None:
        """Return when all placement groups are active and clean on six OSDs."""
        self._cluster.wait_whole()


@contextmanager
def lake_as(kind: Callable[[LakeMachine], T], folder: Path) -> Iterator[T]:
    """Context manager: a new lake of six members, that has nothing left to do, as this kind of side."""
    served = LakeMachine(folder / "lake", "127.0.0.1", 6, "--protect=4+2", "--accept-loss")
    with served:
        side = kind(served)
        try:
            side.wait_whole()
            wait_settled(side)
            yield side
        finally:
            side.close()


lake_side: Final = partial(lake_as, LakeSide)


@contextmanager
def rados_side(folder: Path) -> Iterator[Side]:
    """Context manager: a new cluster that is clean."""
    with RadosCluster(folder / "ceph") as cluster:
        side = RadosSide(cluster)
        wait_settled(side)
        yield side


SIDES: Final = (lake_side, rados_side)


def wait_settled(side: Side, patience_s: float = 60.0) -> None:
    """Wait until the serving processes spend hardly any CPU, at most so long."""
    until, spent = time.monotonic() + patience_s, SETTLED_CPU_S
    while spent >= SETTLED_CPU_S and time.monotonic() < until:
        before = cpu_s(side.pids())
        time.sleep(1)
        spent = cpu_s(side.pids()) - before


def _wait(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not happens():
        if time.monotonic() > end:
            raise RuntimeError(f"not whole within {WAIT_S:g} s")
        time.sleep(0.5)
