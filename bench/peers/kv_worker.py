"""`python -m bench.peers.kv_worker`: one side's client in its own process, driven by lines on its standard input.

The first line is the `Spec`, every other an `Order`; each is answered by one line, an `Answer`.  All sides run this
same loop, so its cost is the same for all (the side `nothing` shows it).  Output of a client's library is redirected
to standard error.  Only calls of `get` and `put` are counted: the time of each, and the CPU time of this process's
threads during it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from bench.peers.kv_blocks import is_block, write_block
from bench.peers.kv_clients import CLIENTS, KvClient, Spec
from bench.peers.kv_hosts import HOSTS


class Order(msgspec.Struct, frozen=True):
    """`count` calls of `batch` blocks; keys start at `key` and cycle through `keys` of them."""

    what: Literal["fill", "check", "get", "put", "drop"]
    key: int
    keys: int
    batch: int = 1
    count: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """Nanoseconds of each call, and the CPU time of all calls."""

    calls_ns: list[int] = []
    cpu_s: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """The answer to a line: an outcome or a failure."""

    outcome: Outcome | None = None
    failed: str = ""


def main() -> int:
    """Serve orders until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = sys.stdin.buffer
    client: KvClient | None = None
    try:
        for line in lines:
            try:
                if client is None:
                    spec = msgspec.json.decode(line, type=Spec)
                    client = (CLIENTS | HOSTS)[spec.client](spec)
                    answer = Answer(Outcome())
                else:
                    answer = Answer(_done(client, msgspec.json.decode(line, type=Order)))
            except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it
                answer = Answer(failed=f"{type(error).__name__}: {error}")
            answers.write(msgspec.json.encode(answer) + b"\n")
    finally:
        if client is not None:
            client.close()
    return 0


def _done(client: KvClient, order: Order) -> Outcome:
    if order.what == "fill":
        _fill(client, order)
    elif order.what == "check":
        _check(client, order)
    elif order.what == "drop":
        client.drop(range(order.key, order.key + order.keys))
    elif order.what == "get":
        return _get(client, order)
    else:
        return _put(client, order)
    return Outcome()


def _fill(client: KvClient, order: Order) -> None:
    for begin in range(order.key, order.key + order.keys, order.batch):
        keys = range(begin, min(begin + order.batch, order.key + order.keys))
        for index, key in enumerate(keys):
            write_block(key, client.slot(index))
        client.put(keys, 0)


def _check(client: KvClient, order: Order) -> None:
    """Check that every block is what was stored."""
    for begin in range(order.key, order.key + order.keys, order.batch):
        keys = range(begin, min(begin + order.batch, order.key + order.keys))
        for index in range(len(keys)):
            client.slot(index)[:] = bytes(client.block_bytes)
        client.get(keys, 0)
        wrong = [key for index, key in enumerate(keys) if not is_block(key, client.slot(index))]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(keys)} blocks are not what was stored")


def _get(client: KvClient, order: Order) -> Outcome:
    calls: list[int] = []
    cpu_ns = 0
    for first, keys in _windows(client, order):
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        client.get(keys, first)
        calls.append(time.perf_counter_ns() - begin)
        cpu_ns += time.process_time_ns() - cpu
    return Outcome(calls, cpu_ns / 1e9)


def _put(client: KvClient, order: Order) -> Outcome:
    calls: list[int] = []
    cpu_ns = 0
    for number in range(order.count):
        first = number * order.batch % (client.slots - order.batch + 1)
        keys = range(order.key + number * order.batch, order.key + (number + 1) * order.batch)
        for index, key in enumerate(keys):
            write_block(key, client.slot(first + index))
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        client.put(keys, first)
        calls.append(time.perf_counter_ns() - begin)
        cpu_ns += time.process_time_ns() - cpu
    return Outcome(calls, cpu_ns / 1e9)


def _windows(client: KvClient, order: Order) -> Iterator[tuple[int, range]]:
    """Yield slots and keys of each call: both in turn, so that neither is in the nearest cache unless all of them
    are."""
    for number in range(order.count):
        begin = number * order.batch
        key = order.key + begin % (order.keys - order.batch + 1)
        yield begin % (client.slots - order.batch + 1), range(key, key + order.batch)


if __name__ == "__main__":
    sys.exit(main())
