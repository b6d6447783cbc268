"""Reads of one head while a rack fails: discrete events, with the product's own choice of members and hedging.

    engine.stripes.chunk_read      which shards are asked for, at which members, and what comes next
    engine.stripes.answer_times    from when on an answer is late
    MEMBER_SILENCE_S               from when on a member that answers nothing is not asked any more

An answer takes a round trip, a random read of the disk, and the time of its bytes on the disk and on both links, with
the waits that a use of BUSY by others makes there (exponential, of M/M/1 queues).  Answers to this head share its link.
A head's processor is not modelled, nor are disks that pause.  All times are of one seed.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple

from bench.simulate.balance import spread
from bench.simulate.hardware import (
    CORES,
    DISK_READ_BYTES_PER_S,
    DISK_READ_S,
    KIB,
    LINK_BYTES_PER_S,
    MIB,
    ROUND_TRIP_S,
    Shape,
    members_of,
    table_of,
)
from bench.simulate.rows import rate, seconds, table
from engine.stripes.answer_times import AnswerTimes
from engine.stripes.chunk_read import Ask, ChunkRead
from lakefs.cluster.erasure import ErasureCode
from lakefs.ids import ChunkId, MemberId, data_chunk_id
from lakefs.limits import CHUNK_BYTES, MEMBER_SILENCE_S

BUSY: Final = 0.5
"""Use of each disk and link by others."""
OTHERS_BYTES: Final = MIB
"""Bytes of one of their requests: a shard of 4 MiB."""
READS_PER_S: Final = 2_000
COUNT: Final = 15_000
"""Reads of a row."""
WARM_UP: Final = 30_000
CPU_S_PER_64_MIB: Final = 0.236
"""CPU of all processes for a first read of 64 MiB, as 4 MiB: `python -m bench.rados`."""
_ID: Final = data_chunk_id(b"")


def chunk_of(partition: int, bits: int) -> ChunkId:
    """Return the id of a chunk in a partition."""
    return ChunkId(_ID[:1] + (partition << 16 - bits).to_bytes(2, "big") + _ID[3:])


class _Event(NamedTuple):
    """An ask is answered, or late."""

    at: float
    number: int
    is_late: bool
    read: int
    ask: Ask


class Head:
    """One head: its reads, and what it knows of its members."""

    def __init__(self, shape: Shape, length: int, seed: int) -> None:
        self._table = table_of(shape)
        self._random = random.Random(seed)
        self._length = length
        self._code = ErasureCode(self._table.protection.data, self._table.protection.parity)
        self._memory = memoryview(bytearray(length))
        self.times = AnswerTimes()
        self.silent: frozenset[MemberId] = frozenset()
        self.away: frozenset[MemberId] = frozenset()
        self._link_free_at = 0.0

    def is_up(self, member: MemberId) -> bool:
        """Return True unless the member was found away."""
        return member not in self.away

    def planned(self, partition: int) -> ChunkRead:
        """Return a read of a chunk of that partition."""
        chunk = chunk_of(partition, self._table.partition_bits)
        return ChunkRead(
            self._code, (self._table,), chunk, self._length, self._memory, take=lambda size: self._memory[:size]
        )

    def answer_at(self, now: float, size: int) -> float:
        """Return when an answer of so many bytes is here."""
        at = now + ROUND_TRIP_S + DISK_READ_S
        for bytes_per_s in (DISK_READ_BYTES_PER_S, LINK_BYTES_PER_S):
            at += self._wait(OTHERS_BYTES / bytes_per_s) + size / bytes_per_s
        begun = max(at, self._link_free_at)
        self._link_free_at = begun + size / LINK_BYTES_PER_S
        return begun + self._wait(OTHERS_BYTES / LINK_BYTES_PER_S)

    def _wait(self, service_s: float) -> float:
        if self._random.random() >= BUSY:
            return 0.0
        return self._random.expovariate((1 - BUSY) / service_s)

    def run(self, reads: int) -> list[float]:
        """Return the times of so many reads, which begin at random."""
        self._link_free_at = 0.0
        now, arrivals = 0.0, []
        for _ in range(reads):
            now += self._random.expovariate(READS_PER_S)
            arrivals.append(now)
        return self._events(arrivals, len(self._table.rows))

    def _events(self, arrivals: Sequence[float], rows: int) -> list[float]:
        reading = _Reading(self, arrivals)
        for number, at in enumerate(arrivals):
            reading.until(at)
            reading.begin(number, self.planned(self._random.randrange(rows)))
        reading.until(math.inf)
        return reading.took


class _Reading:
    """The reads of one run, and the events that are to come."""

    def __init__(self, head: Head, arrivals: Sequence[float]) -> None:
        self.took: list[float] = []
        self._head = head
        self._arrivals = arrivals
        self._reads: dict[int, ChunkRead] = {}
        self._sent: dict[int, dict[Ask, float]] = {}
        self._events: list[_Event] = []
        self._numbers = count()

    def begin(self, number: int, read: ChunkRead) -> None:
        """Begin a read at its time."""
        self._reads[number], self._sent[number] = read, {}
        self._send(number, self._arrivals[number])

    def until(self, at: float) -> None:
        """Let everything happen that is to happen by that time."""
        while self._events and self._events[0].at <= at:
            event = heapq.heappop(self._events)
            read = self._reads.get(event.read)
            if read is not None and event.ask in read.pending:
                self._happens(event, read)

    def _send(self, number: int, now: float) -> None:
        head = self._head
        for ask in self._reads[number].next_asks(head.is_up):
            self._sent[number][ask] = now
            late_at = now + head.times.late_after_s(ask.member)
            heapq.heappush(self._events, _Event(late_at, next(self._numbers), True, number, ask))
            if ask.member not in head.silent:
                at = head.answer_at(now, len(ask.target))
                heapq.heappush(self._events, _Event(at, next(self._numbers), False, number, ask))

    def _happens(self, event: _Event, read: ChunkRead) -> None:
        if event.is_late:
            event.ask.is_late = True
            self._send(event.read, event.at)
            return
        sent = self._sent[event.read]
        self._head.times.note(event.ask.member, event.at - sent[event.ask])
        read.answered(event.ask, event.ask.target, b"")
        if not read.is_ready:
            self._send(event.read, event.at)
            return
        self.took.append(event.at - self._arrivals[event.read])
        for ask in read.pending:  # these are given up, and noted as one does
            self._head.times.note(ask.member, event.at - sent[ask])
        del self._reads[event.read], self._sent[event.read]


def percentiles(times: Sequence[float]) -> list[str]:
    """Return p50, p99, p99.9 and the longest."""
    cuts = statistics.quantiles(times, n=1000)
    return [seconds(each) for each in (cuts[499], cuts[989], cuts[998], max(times))]


def tails(shapes: Sequence[Shape]) -> str:
    """Return the table of the times of reads: healthy, a rack silent, a rack away."""
    rows = []
    for shape in shapes:
        rack = frozenset(member.id for member in members_of(shape) if member.rack == "rack 0")
        for length, name in ((64 * KIB, "64 KiB"), (CHUNK_BYTES, "4 MiB")):
            head = Head(shape, length, seed=1)
            head.run(WARM_UP)
            states = [("healthy", head.run(COUNT))]
            head.silent = rack
            silent = f"a rack silent, first {MEMBER_SILENCE_S:g} s"
            states.append((silent, head.run(int(READS_PER_S * MEMBER_SILENCE_S))))
            head.away = rack
            states.append(("the rack found away", head.run(COUNT)))
            fresh = Head(shape, length, seed=1)
            fresh.silent = rack
            states.append((f"{silent}, at a head that has just started", fresh.run(1000)))
            rows += [[f"{shape}: {name}", what, *percentiles(times)] for what, times in states]
    return table(("read", "state", "p50", "p99", "p99.9", "longest"), rows)


def asked(shape: Shape, is_up: Callable[[MemberId], bool]) -> Counter[MemberId]:
    """Return how often each member is asked when one chunk of each partition is read."""
    head = Head(shape, CHUNK_BYTES, seed=1)
    reads = map(head.planned, range(len(table_of(shape).rows)))
    return Counter(ask.member for read in reads for ask in read.next_asks(is_up))


def bandwidth(shapes: Sequence[Shape]) -> str:
    """Return the table of what a lake's clients may read, by what bounds it."""
    rows = []
    for shape in shapes:
        members = members_of(shape)
        rack = {member.id for member in members if member.rack == "rack 0"}
        for what, lost in (("healthy", set[MemberId]()), ("a rack away", rack)):
            up = [member for member in members if member.id not in lost]
            counts = asked(shape, lambda member, lost=lost: member not in lost)  # type: ignore[misc]
            machines = Counter[str]()
            for member in up:
                machines[member.machine] += counts[member.id]
            uneven = spread([counts[member.id] for member in up]), spread([*machines.values()])
            bounds = (
                len(up) * DISK_READ_BYTES_PER_S / uneven[0],
                len(machines) * LINK_BYTES_PER_S / uneven[1],
                len(machines) * CORES * 64 * MIB / CPU_S_PER_64_MIB,
            )
            each = rate(min(bounds) / len(machines))
            rows.append([f"{shape}: {what}", *(f"{one:.3f}" for one in uneven), *map(rate, bounds), each])
    head = ("lake", "most / mean asked, devices", "machines", "disks", "links", "processors", "a machine's clients")
    return table(head, rows)
