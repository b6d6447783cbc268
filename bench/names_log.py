"""Names committed with their log on an etcd, and with the local journal: `python -m bench.names_log [--nodes N]`.

The names' own store and service, in this process, with a real disk; clients bind keys of empty objects by Commit.  Both
kinds are interleaved in one run, and the medians of the rounds are shown: one request at a time (its time, p50), 64 in
flight with one key each, and 16 in flight with a hundred keys each.  The etcd is Debian's, of N nodes on this machine.
CPU is this process's, for a key; etcd's is not in it.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import trio

from bench.harness.etcd import running_etcd
from bench.harness.machine import machine
from engine.coordinator.coordinator import Put
from engine.etcd.etcd_coordinator import open_etcd_coordinator
from engine.etcd.etcd_link import EtcdAccess
from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.group_log.replica import ReplicaPlace, leading
from engine.host.clock import BoottimeClock, SystemClock
from engine.host.local_disk import LocalDisk
from engine.metadata.metadata_store import Metadata
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import NamesService
from engine.store.metadata_life import Leading, always_leading
from engine.store.names_opening import open_names_store
from engine.superblock.superblock import Superblock
from lakefs.host.offload import ThreadOffload
from lakefs.ids import EMPTY_BLOB, ReplicaId, new_id16
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient

ROUNDS: Final = 5
_BUCKET: Final = "bench"


class Load(NamedTuple):
    """Requests in flight, keys of each, and how many there are."""

    in_flight: int
    keys: int
    requests: int


class Figures(NamedTuple):
    """One run: keys a second, median time of a request, CPU of this process for a key."""

    keys_per_s: float
    p50_ms: float
    cpu_us: float


LOADS: Final = {"one at a time": Load(1, 1, 300), "64 in flight": Load(64, 1, 6000), "by hundreds": Load(16, 100, 400)}


@asynccontextmanager
async def names(folder: Path, urls: Sequence[str]) -> AsyncIterator[EngineClient]:
    """Serve new names in a folder, with their log at an etcd if there are URLs."""
    lake = new_id16()
    async with AsyncExitStack() as stack:
        offload = await stack.enter_async_context(ThreadOffload(4, "names"))
        lead = await _leading(stack, lake, urls) if urls else always_leading
        opening = open_names_store(
            LocalDisk(folder), SystemClock(), offload, cluster_id=lake, create=True, verify_index=False, leading=lead
        )
        store = await stack.enter_async_context(opening)
        client = EmbeddedEngine(NamesService(store), descriptors=False)
        stack.push_async_callback(client.aclose)
        await client.call(m.BucketCreate(_BUCKET))
        yield client


async def _leading(stack: AsyncExitStack, lake: bytes, urls: Sequence[str]) -> Leading:
    coordinator = await stack.enter_async_context(open_etcd_coordinator(EtcdAccess(tuple(urls)), lake.hex()))

    @asynccontextmanager
    async def lead(metadata: Metadata, superblock: Superblock) -> AsyncIterator[None]:
        replica = ReplicaId(superblock.store_id)
        await coordinator.transact([], [Put(LogKeys(FIRST_SHARD).origin, replica)])
        place = ReplicaPlace(coordinator, BoottimeClock(), lake, replica, "bench", replica, ReplicaId)
        async with leading(metadata, place):
            yield

    return lead


async def commit_all(client: EngineClient, load: Load, prefix: str, requests: int) -> list[float]:
    """Commit so many requests; returns the time of each."""
    took: list[float] = []
    numbers = iter(range(requests))

    async def work() -> None:
        opened = (await client.call(m.SessionOpen())).message
        assert isinstance(opened, m.SessionOpened)
        for number in numbers:
            changes = [_change(f"{prefix}/{number:06d}/{key:03d}") for key in range(load.keys)]
            began = time.perf_counter()
            await client.call(m.Commit(opened.session, changes))
            took.append(time.perf_counter() - began)

    async with trio.open_nursery() as nursery:
        for _ in range(load.in_flight):
            nursery.start_soon(work)
    return took


def _change(key: str) -> m.NameChange:
    return m.NameChange(_BUCKET, key, EMPTY_BLOB, m.ObjectAttributes())


async def measured(folder: Path, urls: Sequence[str], load: Load) -> Figures:
    """Measure one kind under one load, on names that are new."""
    async with names(folder, urls) as client:
        await commit_all(client, load, "warm", load.requests // 10)
        began, cpu = time.perf_counter(), time.process_time()
        took = await commit_all(client, load, "run", load.requests)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    keys = load.requests * load.keys
    return Figures(keys / seconds, statistics.median(took) * 1e3, cpu / keys * 1e6)


def main(arguments: Sequence[str]) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(arguments)
    if shutil.which("etcd") is None:
        sys.exit("no etcd: install Debian's etcd-server")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    facts = machine(Path(tempfile.gettempdir()))
    print(f"names on a log at etcd ({given.nodes} nodes) beside the local journal; {facts}\n")
    print("| load | journal | etcd | ratio | p50 journal, etcd (ms) | CPU a key journal, etcd (us) |")
    print("|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory(prefix="names-log-") as folder,
        running_etcd(Path(folder) / "etcd", given.nodes) as etcd,
    ):
        for title, load in LOADS.items():
            found: dict[bool, list[Figures]] = {False: [], True: []}
            for turn in range(given.rounds):
                for is_etcd in (False, True):
                    place = Path(folder) / f"{title} {turn} {is_etcd}"
                    found[is_etcd].append(trio.run(measured, place, etcd.urls if is_etcd else (), load))
            print(_row(title, found[False], found[True]), flush=True)


def _row(title: str, journal: list[Figures], etcd: list[Figures]) -> str:
    here = Figures(*(statistics.median(column) for column in zip(*journal, strict=True)))
    there = Figures(*(statistics.median(column) for column in zip(*etcd, strict=True)))
    return (
        f"| {title} | {here.keys_per_s:,.0f}/s | {there.keys_per_s:,.0f}/s "
        f"| {there.keys_per_s / here.keys_per_s:.2f} | {here.p50_ms:.2f}, {there.p50_ms:.2f} "
        f"| {here.cpu_us:.0f}, {there.cpu_us:.0f} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
