"""Heads over members that keep keys, and names: a small lake for tests of keyed blobs.  Each head has its own network.

The ring has three members at 1+1.  `faults` of a head's members say whom that head does not reach.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.head.head import Head, open_head
from engine.process.embedded import EmbeddedEngine
from lakefs.cluster.table import Table
from lakefs.cluster.table_format import pack
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import MemberId
from lakefs.limits import MIB
from lakefs.wire import messages as m
from tests.head_rig import HeadAndNames, head_over
from tests.store_rig import ask, read, run
from tests.unit.engine.cluster.stripe_rig import Fault, Rig, RiggedMembers, lake

HOMES = 3


@dataclass
class KeyedHead:
    """A head, a client of it, and the members as it reaches them."""

    head: Head
    client: EmbeddedEngine
    members: RiggedMembers

    def lose(self, *homes: MemberId, fault: Fault = Fault.AWAY) -> None:
        """Let homes fail for this head from now on."""
        for home in homes:
            self.members.faults[home] = fault

    async def open(self, name: str = "space", **settings: int) -> int:
        """Open a space; return its number."""
        return (await self.stat(name, **settings)).number

    async def stat(self, name: str = "space", **settings: int) -> m.SpaceStat:
        request = m.SpaceOpen(name, settings.get("quota_bytes"), settings.get("ttl_s"))
        return await ask(self.client, request, m.SpaceStat)

    async def put(self, space: int, values: Mapping[bytes, bytes], *, resize: bool = False) -> m.KeyedOutcomes:
        parts = list(values.values())
        request = m.KeyedPut(space, list(values), [1] * len(parts), [len(part) for part in parts], resize=resize)
        return await ask(self.client, request, m.KeyedOutcomes, *parts)

    async def match(self, space: int, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key if it has a value."""
        matched = await ask(self.client, m.KeyedMatch(space, list(keys)), m.KeyedMatched)
        return [count > 0 for count in matched.counts]

    async def get(self, space: int, key: bytes) -> bytes | None:
        """Return a value; None for a miss."""
        matched = await ask(self.client, m.KeyedMatch(space, [key]), m.KeyedMatched)
        return await read(self.client, matched.chunks[0]) if matched.chunks else None

    async def remove(self, space: int, *keys: bytes) -> m.KeyedOutcomes:
        return await ask(self.client, m.KeyedRemove(space, list(keys)), m.KeyedOutcomes)

    def sent(self) -> dict[str, int]:
        """Return how many requests of each kind went to members since the last call."""
        sent = dict(self.members.calls)
        self.members.calls.clear()
        return sent


@dataclass
class KeyedLake:
    """Members, names, and two heads."""

    rig: Rig
    names: HeadAndNames
    heads: tuple[KeyedHead, KeyedHead]

    @property
    def table(self) -> Table:
        return self.heads[0].members.tables[0]

    def home(self, space: int, key: bytes) -> MemberId:
        return self.table.key_ring().home(space, key)

    def keys_of(self, space: int, home: MemberId, count: int) -> list[bytes]:
        """Return keys whose home this is."""
        ring, found, number = self.table.key_ring(), list[bytes](), 0
        while len(found) < count:
            key = b"key %d" % number
            number += 1
            if ring.home(space, key) == home:
                found.append(key)
        return found

    async def spaces_at(self, home: MemberId) -> list[m.SpaceStat]:
        """Return the spaces that a member has."""
        return (await ask(self.rig.members.clients[home], m.SpaceList(), m.Spaces)).spaces

    async def set_table(self, table: Table, *heads: KeyedHead) -> None:
        """Let heads, and the members, know another table."""
        for head in self.heads:
            head.members.newer = [table, *head.members.tables]
        for head in heads or self.heads:
            head.members.tables = head.members.newer
        for client in self.rig.members.clients.values():
            (await client.call(m.SetEpoch(table.ring_epoch, pack(table)))).body.release()


@asynccontextmanager
async def keyed_lake(count: int = HOMES) -> AsyncIterator[KeyedLake]:
    """A lake of members that keep keys, with two heads; at the end nothing is held at members."""
    async with lake("1+1", count) as rig, head_over(rig.stripes, rig.members, clients=rig.members.clients) as names:
        others = RiggedMembers(rig.members.clients, [rig.table])
        buffers, store = BufferPool(64 * MIB), names.names.store
        other = open_head(
            names.names.connect, rig.stripes, others, offload=InlineOffload(), clock=store.clock, buffers=buffers
        )
        async with other as second:
            heads = (
                KeyedHead(names.head, names.client(), rig.members),
                KeyedHead(second, EmbeddedEngine(second, descriptors=False), others),
            )
            yield KeyedLake(rig, names, heads)
            rig.heal()
            for head in heads:
                head.members.faults.clear()
                await head.client.aclose()
            assert buffers.in_use == 0, "a request's memory was not given back"
        for store in rig.stores.values():
            held = store.references.statistics()
            assert (held["sessions"], held["leases"]) == (0, 0), "a head ends its sessions and leases at members"


def in_keyed_lake(body: Callable[[KeyedLake], Awaitable[None]], count: int = HOMES) -> None:
    """Run a test with a lake, in simulated time."""

    async def main() -> None:
        async with keyed_lake(count) as made:
            await body(made)

    run(main)
