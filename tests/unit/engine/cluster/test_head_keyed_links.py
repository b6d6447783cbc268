"""Keys at a head over a network: real links to members, and the trio client as hosts use it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import pytest
import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberRecord
from engine.members.member_link import MemberClient
from engine.members.member_links import connect_member, open_member_links
from engine.requests.table import Service
from engine.server.listener import Server
from engine.store.store import Store
from engine.stripes.stripes import LakeStripes
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.spaces import TrioSpace
from lakefs.cluster.key_ring import KeyRing
from lakefs.cluster.members import Member
from lakefs.cluster.placing import first_table
from lakefs.cluster.protection import Protection
from lakefs.cluster.table_format import pack
from lakefs.errors import ClusterDegraded
from lakefs.host.buffers import BufferPool
from lakefs.host.offload import InlineOffload
from lakefs.ids import MemberId, RingEpoch
from lakefs.limits import CHUNK_BYTES, GIB, MIB
from lakefs.put.keyed import Outcome
from tests.head_rig import head_over
from tests.memory_coordinator import memory_coordinator
from tests.sim.world.network import SimulatedNetwork
from tests.store_rig import run, simulated_store
from tests.unit.engine.cluster.stripe_rig import LAKE, payload_of


@dataclass
class Networked:
    """A space at a head whose members are reached over a network."""

    space: TrioSpace
    homes: dict[bytes, MemberId]
    servers: dict[MemberId, Server]
    stores: dict[MemberId, Store]

    @property
    def keys(self) -> list[bytes]:
        """Keys, each of another home than the one before."""
        return list(self.homes)


KEYS_OF_EACH_HOME = 4


def over_network(body: Callable[[Networked], Awaitable[None]]) -> None:
    """Run a test with a space of a lake of three members."""

    async def main() -> None:
        network = SimulatedNetwork(random.Random(3))
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(memory_coordinator())
            nursery = await stack.enter_async_context(trio.open_nursery())
            stores, servers, state = dict[MemberId, Store](), dict[MemberId, Server](), LakeState(coordinator)
            addresses: dict[MemberId, str] = {}
            for number in range(3):
                store = await stack.enter_async_context(simulated_store(cluster_id=LAKE))
                member = MemberId(store.superblock.store_id)
                stores[member], servers[member] = store, Server(Service(store), network, token="secret")
                listen = servers[member].listen_and_serve
                addresses[member] = await nursery.start(listen, f"tcp://sim:{number + 1}")
            table = first_table(Protection(1, 1), [Member(member, GIB, member.hex()) for member in stores])
            assert await state.next_epoch(RingEpoch(0), pack(table))
            for member, address in addresses.items():
                await state.register(MemberRecord(member, (address,), GIB, ()))

            def connect(record: MemberRecord) -> AbstractAsyncContextManager[MemberClient]:
                return connect_member(record, token="secret", network=network)

            offload = InlineOffload()
            async with open_member_links(coordinator, connect) as links:
                stripes = LakeStripes(links, state, offload, BufferPool(64 * MIB))
                async with head_over(stripes, links) as lake:
                    client = lake.client()
                    trio_lake = TrioLake(client, offload, network=True)
                    space = await trio_lake.space("llama", quota="10G")
                    ring = table.key_ring()
                    homes = homes_of_keys(ring, space.number)
                    await body(Networked(space, homes, servers, stores))
                    await trio_lake.aclose()
            for server in servers.values():
                await server.drain(5)
            nursery.cancel_scope.cancel()
            for store in stores.values():
                assert store.buffers.in_use == 0

    run(main)


def homes_of_keys(ring: KeyRing, space: int) -> dict[bytes, MemberId]:
    """Return keys in turn of each home, which is random, with their homes."""
    found: dict[MemberId, list[bytes]] = {member: [] for member in ring.members}
    for number in itertools.count():
        key = b"key %d" % number
        found[ring.home(space, key)].append(key)
        if min(map(len, found.values())) == KEYS_OF_EACH_HOME:
            break
    turns = zip(*[keys[:KEYS_OF_EACH_HOME] for keys in found.values()], strict=True)
    return {key: home for turn in turns for key, home in zip(turn, found, strict=True)}


def value_of(number: int) -> bytes:
    return payload_of([1, 70_000, CHUNK_BYTES + 9][number % 3], number)


async def got(space: TrioSpace, keys: list[bytes]) -> list[bytes]:
    buffers = [bytearray(5 * MIB) for _ in keys]
    lengths = await space.get_many_into(keys, buffers)
    return [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]


def test_values_are_put_matched_read_pinned_and_removed() -> None:
    async def body(lake: Networked) -> None:
        values = [value_of(number) for number in range(len(lake.keys))]
        result = await lake.space.put_many(lake.keys, values)
        assert result.outcomes == [Outcome.STORED] * len(lake.keys)
        assert len(set(lake.homes.values())) == 3
        for home, store in lake.stores.items():
            assert store.keyed.statistics()["entries"] == sum(home == each for each in lake.homes.values())
        assert await lake.space.match([*lake.keys, b"none"]) == (len(lake.keys), [True] * len(lake.keys) + [False])
        assert await got(lake.space, lake.keys) == values
        pinned = await lake.space.pin(lake.keys)
        assert await lake.space.remove([*lake.keys[:5], b"none"]) == [True] * 5 + [False]
        await lake.space.unpin(pinned)
        assert (await lake.space.match(lake.keys)).present == [False] * 5 + [True] * 7

    over_network(body)


def test_values_of_a_member_that_ends_are_misses_and_the_others_are_used_as_before() -> None:
    async def body(lake: Networked) -> None:
        values = [value_of(number) for number in range(len(lake.keys))]
        await lake.space.put_many(lake.keys[:8], values[:8])
        gone = lake.homes[lake.keys[0]]
        await lake.servers[gone].drain(0)
        here = [lake.homes[key] != gone for key in lake.keys]
        assert (await lake.space.match(lake.keys)).present == [is_here and at < 8 for at, is_here in enumerate(here)]
        expected = [value if is_here else b"" for value, is_here in zip(values, here, strict=True)]
        assert await got(lake.space, lake.keys[:8]) == expected[:8]
        result = await lake.space.put_many(lake.keys, values)
        assert [outcome is not Outcome.FAILED for outcome in result.outcomes] == here
        assert all(isinstance(error, ClusterDegraded) for error in result.failures.values())
        assert await got(lake.space, lake.keys) == expected
        with pytest.raises(ClusterDegraded, match="member that keeps this key"):
            await lake.space.remove(lake.keys)
        assert (await lake.space.match(lake.keys)).prefix == 0

    over_network(body)
