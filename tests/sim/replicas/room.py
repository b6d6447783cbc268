"""Room that names take at an etcd, on simulated time: `python -m tests.sim.replicas.room --hours 24`.

Three replicas on a simulated etcd, with the product's client, log, trimming and forgetting.  The leader decides once a
second, as many bytes as 1,000 new names have in a group (NAME_BYTES each), so a day is 86,400 groups and 16 GB.  The
records are always the same ones: what the names themselves take is on the replicas' disks, not at the etcd.

Once both other replicas are away, for a sixteenth of the time: 90 minutes of a day, in which the log keeps 1 GiB for
them, which is its bound.  `file_bytes` is etcd's file, which does not shrink by compaction.
"""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio

from engine.coordinator.coordinator import Put
from engine.format.layouts import Table
from engine.group_log.log_bounds import COMPACT_EVERY_S
from engine.tables.views import Transaction
from tests.replica_rig import KEYS, Replica, place_of
from tests.sim.__main__ import say
from tests.sim.etcd_world import World, play
from tests.sim.world.sim_time import pause

NAME_BYTES: Final = 190
"""Bytes of one new name in a group, as `bench.names_replica` binds them."""
NAMES_PER_S: Final = 1000
GOAL_BYTES: Final = 2 << 30
AWAY_SHARE: Final = 16
_RECORDS: Final = 40
_VALUE: Final = bytes(NAME_BYTES * NAMES_PER_S // _RECORDS)


@dataclass
class Room:
    """The most that etcd took, and what it takes at the end."""

    seconds: int = 0
    file_bytes: int = 0
    left_bytes: int = 0
    before_bytes: int = 0
    """The file's length before replicas were away."""

    def __str__(self) -> str:
        sizes = (f"{size / 2**20:,.1f} MiB" for size in (self.before_bytes, self.file_bytes, self.left_bytes))
        before, most, left = sizes
        return (
            f"{self.seconds} s at {NAMES_PER_S} names/s: etcd's file {before}, {most} after both other replicas were "
            f"away for {self.seconds // AWAY_SHARE} s; {left} of it used at the end"
        )


def _decide(txn: Transaction) -> None:
    for number in range(_RECORDS):
        txn.put(Table.UPLOADS, b"record %03d" % number, _VALUE)


def room_of(seconds: int) -> Room:
    """Return the room that names took in so much simulated time."""
    room = Room(seconds)
    play(partial(_use, room=room))
    return room


async def _use(world: World, room: Room) -> None:
    away = room.seconds // 2, room.seconds // 2 + room.seconds // AWAY_SHARE
    etcd = world.nodes.state
    async with AsyncExitStack() as stack:
        hosts = ("one", "two", "three")
        coordinators = [await stack.enter_async_context(world.process(host)) for host in hosts]
        nursery = await stack.enter_async_context(trio.open_nursery())
        await coordinators[0].transact([], [Put(KEYS.origin, place_of(coordinators[0], 1).replica)])
        replicas = [Replica(coordinator, number) for number, coordinator in enumerate(coordinators, 1)]
        for replica in replicas:
            nursery.start_soon(replica.run)
            await pause(1)
        await replicas[0].leads.wait()
        metadata = replicas[0].led
        for second in range(room.seconds):
            if second == away[0]:
                room.before_bytes = etcd.file_bytes
                for replica in replicas[1:]:
                    await replica.kill()
            if second == away[1]:
                replicas[1:] = [replica.again() for replica in replicas[1:]]
                for replica in replicas[1:]:
                    nursery.start_soon(replica.run)
            _, sequence = await metadata.commit(_decide)
            await metadata.wait_durable(sequence)
            await pause(1)
            room.file_bytes = max(room.file_bytes, etcd.file_bytes)
        await pause(2 * COMPACT_EVERY_S + 1)
        kept = [replica.metadata and replica.metadata.kept_sequence for replica in replicas]
        assert kept == [metadata.durable_sequence] * len(replicas), "all have everything, and the first leads"
        room.left_bytes = etcd.size_bytes
        nursery.cancel_scope.cancel()


def main() -> int:
    """Run it; return 0 if etcd took no more than the goal."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replicas.room")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of other parts of make torture; nothing is drawn here")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began = time.process_time()
    room = room_of(asked.hours * 3600)
    say(f"{room} ({time.process_time() - began:.0f} s of CPU)")
    return 0 if room.file_bytes <= GOAL_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
