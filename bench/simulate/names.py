"""Names committed a second in several names shards, beside one: by the CPU of those that lead and of those that follow.

A name costs its leader the decision, and each of its followers the taking of the group; both are measured here, in one
process each, with the product's store of names on a real disk and its journal as the log (an etcd adds gRPC to both).
Modelled is that a machine has one process for all of its replicas, which is the product's, and one processor for it.
What the clients, and etcd's own nodes, take is not in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from bench.names_log import LOADS, Load, commit_all
from bench.simulate.rows import table, three
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.metadata.group_log import ClosedGroup, GroupLog, PayloadBatch
from engine.metadata.metadata_store import Metadata
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import NamesService
from engine.store.names_opening import open_names_store
from engine.superblock.superblock import Superblock
from lakefs.host.offload import ThreadOffload
from lakefs.ids import Sequence, new_id16
from lakefs.wire import messages as m

SHARDS: Final = 3
_ROUNDS: Final = 5
_APPLIED_S: Final = 4.0
"""The index has everything by then; its CPU counts."""


class Price(NamedTuple):
    """CPU of one name, in us: at the leader, and at each of its followers."""

    leader_us: float
    follower_us: float

    def gain(self, machines: int) -> float:
        """Return how many names SHARDS shards commit for each name of one, on so many machines for their replicas.

        Replicas and leads are spread evenly, as `engine.lake.shard_replicas` and `engine.group_log.spread_leads` do.
        """
        leads, replicas = SHARDS / machines, 3 * SHARDS / machines
        busiest = max(1.0, leads) * self.leader_us + max(0.0, replicas - max(1.0, leads)) * self.follower_us
        return SHARDS * self.leader_us / busiest


class _Noted:
    """A log whose groups are noted."""

    def __init__(self, log: GroupLog, groups: list[tuple[bytes, int]]) -> None:
        self._log = log
        self._groups = groups

    @property
    def kept(self) -> Sequence:
        """See `GroupLog`."""
        return self._log.kept

    async def append(self, group: ClosedGroup | None, payload: PayloadBatch | None) -> None:
        """See `GroupLog`."""
        assert group is not None, "names have no payload"
        self._groups.append((group.body(), group.record_count))
        await self._log.append(group, payload)

    async def wait_kept(self, sequence: Sequence) -> None:
        """See `GroupLog`."""
        await self._log.wait_kept(sequence)


def measure(load: Load) -> Price:
    """Return the CPU of one name under a load, measured here."""
    with tempfile.TemporaryDirectory(prefix="simulate-names-") as folder:
        return trio.run(_measure, Path(folder), load)


async def _measure(folder: Path, load: Load) -> Price:
    lake, names = new_id16(), load.requests * load.keys
    groups: list[tuple[bytes, int]] = []
    spent: dict[str, float] = {}

    @asynccontextmanager
    async def following(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        begun, first = time.process_time(), metadata.durable_sequence + 1
        for number, (body, count) in enumerate(groups):
            await metadata.take(Sequence(first + number), body, count)
        await metadata.sync()
        await trio.sleep(_APPLIED_S)
        spent["follower"] = time.process_time() - begun
        yield

    async with ThreadOffload(4, "names") as offload:
        opened: dict[str, Any] = {"cluster_id": lake, "create": True, "verify_index": False}
        async with open_names_store(LocalDisk(folder / "leader"), SystemClock(), offload, **opened) as store:
            committer = store.metadata._committer
            committer.log = _Noted(committer.log, groups)
            client = EmbeddedEngine(NamesService(store), descriptors=False)
            await client.call(m.BucketCreate("bench"))
            begun = time.process_time()
            await commit_all(client, load, "run", load.requests)
            await trio.sleep(_APPLIED_S)
            spent["leader"] = time.process_time() - begun
            await client.aclose()
        opening = open_names_store(LocalDisk(folder / "follower"), SystemClock(), offload, leading=following, **opened)
        async with opening:
            pass
    return Price(spent["leader"] / names * 1e6, spent["follower"] / names * 1e6)


def report() -> str:
    """Measure, and return the table."""
    rows = []
    for title in ("64 in flight", "by hundreds"):
        prices = [measure(LOADS[title]) for _ in range(_ROUNDS)]
        price = Price(*(statistics.median(column) for column in zip(*prices, strict=True)))
        gains = [f"{price.gain(machines):.2f}x" for machines in (3, 9)]
        rows.append([title, f"{three(price.leader_us)} us", f"{three(price.follower_us)} us", *gains])
    head = "load", "CPU of a name where it is decided", "where it is followed", "three shards on 3 machines", "on 9"
    return table(head, rows)
