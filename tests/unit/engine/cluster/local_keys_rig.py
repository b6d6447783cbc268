"""A head's key homes over members whose processes are made by hand: three on its machine, one on another."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import trio

from engine.head.key_homes import KeyHomes
from engine.head.local_keys import LocalKeys
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table import Table
from lakefs.direct.key_homes import KeyHomesReader
from lakefs.errors import EngineUnreachable, PermissionDenied, UnsupportedVersion
from lakefs.ids import Buffer, GcGeneration, MemberId
from lakefs.shared_index.key_format import PLACED
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.sim.world.clock import SimClock
from tests.store_rig import run
from tests.unit.lakefs.cluster.fleets import fleet
from tests.unit.lakefs.shared_index.homes_rig import SPACE, Home

HERE, THERE = "this machine", "another"
FLEET = [replace(member, machine=HERE if number < 3 else THERE) for number, member in enumerate(fleet(4))]
KEYS = [b"key %d" % number for number in range(60)]
SEGMENTS = 100
"""Segments of each member."""


class Processes:
    """`Members` whose processes are made by hand."""

    def __init__(self, folder: Path) -> None:
        self.tables: Sequence[Table] = [first_table(Protection(1, 1), FLEET)]
        self.generation = GcGeneration(1)
        self.homes: dict[MemberId, Home] = {}
        self.asked: list[tuple[MemberId, m.Request]] = []
        self.over_tcp: set[MemberId] = set()
        self.without: set[MemberId] = set()
        """Members that share no index yet."""
        self.before: Callable[[MemberId, m.Request], None] | None = None
        """Called before a member answers."""
        self.made: list[Home] = []
        self._file = folder / "segment"
        self._file.write_bytes(b"segment")

    def is_up(self, member: MemberId) -> bool:
        return member in self.homes

    async def call(
        self, member: MemberId, request: m.Request, body: Sequence[Buffer] = (), *, into: Sequence[memoryview] = ()
    ) -> Reply:
        self.asked.append((member, request))
        if self.before is not None:
            self.before(member, request)
        await trio.lowlevel.checkpoint()
        home = self.homes.get(member)
        if home is None:
            raise EngineUnreachable("away")
        if member in self.over_tcp:
            raise PermissionDenied("not over TCP")
        if isinstance(request, m.OpenSegments):
            found = [segment for segment in request.segments if segment < SEGMENTS]
            return Reply(m.SegmentsOpened(found), descriptors=[os.open(self._file, os.O_RDONLY) for _ in found])
        if isinstance(request, m.OpenStamps):
            return Reply(m.StampsOpened(), descriptors=[os.dup(home.descriptors[1])])
        assert isinstance(request, m.OpenKeyedIndex)
        if member in self.without:
            raise UnsupportedVersion("none yet")
        return Reply(m.KeyedIndexOpened(0), descriptors=[os.dup(home.descriptors[0])])

    def start(self, member: MemberId) -> Home:
        """Start the member's process anew."""
        if member in self.homes:
            self.homes[member].end()
        home = self.homes[member] = Home()
        self.made.append(home)
        return home


class Lake:
    """A head's key homes, and the processes that it asks."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.homes = KeyHomes(processes, SimClock(), HERE)
        self.members = [member.id for member in FLEET]

    @property
    def local(self) -> LocalKeys:
        return self.homes.local

    async def opened(self) -> KeyHomesReader:
        """Open the key homes, as a client does."""
        memory = await self.homes.shared()
        return KeyHomesReader(memory.descriptors, [index.number for index in memory.indexes])

    def keys_of(self, *members: MemberId) -> list[bytes]:
        ring = self.processes.tables[0].key_ring()
        return [key for key in KEYS if ring.home(SPACE, key) in members]

    def put_all(self) -> None:
        """Have each process hold the keys whose home its member is, and no others."""
        for member, home in self.processes.homes.items():
            own = self.keys_of(member)
            for key in KEYS:
                home.put(key, (PLACED, 5, 8, 10, 1)) if key in own else home.remove(key)

    def known(self, reader: KeyHomesReader) -> list[bytes]:
        """Return the keys that are known to be present."""
        flags = reader.finder.match(SPACE, KEYS)
        assert reader.is_current
        return [key for key, flag in zip(KEYS, flags, strict=True) if flag]


def in_lake(folder: Path, body: Callable[[Lake], Awaitable[None]]) -> None:
    """Run a test; at its end no descriptor of a segment is open."""

    async def main() -> None:
        processes = Processes(folder)
        made = Lake(processes)
        for member in made.members:
            processes.start(member)
        made.put_all()
        with closing(made.local):
            await body(made)
        for home in processes.made:
            home.end()

    with nothing_left_open():
        run(main)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    yield
    assert segments_open() == 0


def segments_open() -> int:
    """Return how many descriptors of segments are open."""
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).endswith("/segment") for link in links if link.is_symlink())
