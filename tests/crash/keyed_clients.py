"""Clients of keyed blobs under fire: what they do until the engine is gone.

A *writer* has a space of its own, where it knows of each key what it has, and also puts into the space that all share,
which has a quota that it goes over all the time.  A *reader* matches, gets and loads keys of all spaces.  Each takes
every value that it finds apart: a value of another key, or a byte that is wrong, ends the client.
"""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from lakefs.client.blocking.lake import Lake
from lakefs.client.blocking.spaces import Space
from lakefs.client.connect import connect
from lakefs.client.connect_trio import connect_trio
from lakefs.client.trio.lake import TrioLake
from lakefs.client.trio.spaces import TrioSpace
from lakefs.content.verify import Check
from lakefs.errors import EngineBusy, OperationalError
from lakefs.get.pools import Pool
from lakefs.limits import KEYED_QUOTA_BYTES_MIN, MIB
from lakefs.put.keyed import KeyedResult
from lakefs.put.shared_memory import SharedMemory, Slot
from tests.crash.keyed_contents import POOL, SIZE_MAX, Journal, States, key_of, label_of, read_journal, value_of

SHARED: Final = "hot"
QUOTA_BYTES: Final = KEYED_QUOTA_BYTES_MIN
OWN_KEYS: Final = 48
SHARED_KEYS: Final = 1000
"""Their values have together about twice the quota."""
BATCH: Final = 12
POOL_BYTES: Final = 48 * MIB
_MEMORY_BYTES: Final = 16 * MIB
_NOTICING: Final = (Check.BLAKE3, Check.CRC32C)
"""Checks that notice a value that was evicted while its place was read; `Check.NONE` does so only in a pool."""


def keys_in(space: str) -> int:
    """Return how many keys are used in a space."""
    return SHARED_KEYS if space == SHARED else OWN_KEYS


def read_some(space: Space, name: str, numbers: Sequence[int], pool: Pool | None) -> dict[int, str | None]:
    """Read keys of a space, into a pool or into buffers; return the labels of their values.  AssertionError."""
    keys = [key_of(name, number) for number in numbers]
    room = (POOL_BYTES if pool is not None else SIZE_MAX) // (len(keys) if pool is not None else 1)
    if pool is not None:
        lengths = space.load(keys, pool, [room * place for place in range(len(keys))])
        views = [pool.buffer[room * place : room * place + length] for place, length in enumerate(lengths)]
    else:
        buffers = [bytearray(room) for _ in keys]
        lengths = space.get_many_into(keys, buffers)
        views = [memoryview(buffer)[:length] for buffer, length in zip(buffers, lengths, strict=True)]
    return {
        number: label_of(key, bytes(view)) if len(view) else None
        for number, key, view in zip(numbers, keys, views, strict=True)
    }


class Writer:
    """A writer on the blocking client; `told` gets a byte for each answered batch."""

    def __init__(self, name: str, seed: str, folder: Path, told: int) -> None:
        self.name = name
        self.chance = random.Random(f"{name} {seed}")
        self.told = told
        self.states: States = {}
        path = folder / f"{name}.journal"
        read_journal(path, name, self.states, alone=True)
        self.journal = Journal(path)
        self.count = 0
        self._seed = seed

    def batch(self, space: str) -> tuple[list[int], list[bytes], list[str], list[bytes]]:
        """Return numbers, keys, labels and values to put."""
        count = self.chance.choice((1, 1, 4, BATCH))
        numbers = sorted(self.chance.sample(range(keys_in(space)), count))
        self.count += 1
        labels = [POOL if self.chance.random() < 0.2 else f"{self.name} {self._seed} {self.count}" for _ in numbers]
        keys = [key_of(space, number) for number in numbers]
        return numbers, keys, labels, list(map(value_of, keys, labels))

    def answered(self, outcomes: Sequence[Any]) -> None:
        """Note the outcomes of a batch."""
        self.journal.done([outcome.name for outcome in outcomes])
        os.write(self.told, b".")

    def act(self, spaces: dict[str, Space], memory: SharedMemory, pool: Pool, check: Check) -> None:
        """Do one thing."""
        space = self.name if self.chance.random() < 0.5 else SHARED
        if space == self.name and self.chance.random() < 0.25:
            numbers = self.chance.sample(range(OWN_KEYS), 6)
            self.journal.intend(space, dict.fromkeys(numbers))
            removed = spaces[space].remove([key_of(space, number) for number in numbers])
            self.journal.done(["REMOVED" if was else "ABSENT" for was in removed])
            os.write(self.told, b".")
            return
        numbers, keys, labels, values = self.batch(space)
        self.journal.intend(space, dict(zip(numbers, labels, strict=True)))
        items: Sequence[bytes | Slot] = values
        if self.chance.random() < 0.5 and sum(map(len, values)) <= _MEMORY_BYTES:
            items = _slots(memory, values)
        result = spaces[space].put_many(keys, items, depths=[self.chance.randrange(50) for _ in keys])
        check_failures(space, result)
        self.answered(result.outcomes)
        into_pool = self.chance.random() < 0.5 or check not in _NOTICING
        read_some(spaces[space], space, numbers, pool if into_pool else None)


def check_failures(space: str, result: KeyedResult) -> None:
    """Assert that no key failed but for want of room in the shared space, where others wait for room too."""
    for error in result.failures.values():
        assert space == SHARED, error
        assert isinstance(error, EngineBusy), error


def _slots(memory: SharedMemory, values: Sequence[bytes]) -> list[Slot]:
    """Copy values into shared memory, behind each other."""
    slots: list[Slot] = []
    at = 0
    for value in values:
        memory.buffer[at : at + len(value)] = value
        slots.append(memory.slot(at, len(value)))
        at += len(value)
    return slots


def spaces_of(lake: Lake, names: Sequence[str]) -> dict[str, Space]:
    """Open spaces; the shared one has its quota, the others one that they never reach."""
    return {name: lake.space(name, quota=QUOTA_BYTES if name == SHARED else 64 * QUOTA_BYTES) for name in names}


def _until_it_is_gone(address: str, check: Check, body: Callable[[Lake], None]) -> None:
    try:
        with connect(address, check=check) as lake:
            body(lake)
    except OperationalError:
        return


def write(address: str, name: str, seed: str, folder: Path, told: int) -> None:
    """Put, remove and read until the engine is gone."""
    writer = Writer(name, seed, folder, told)
    check = writer.chance.choice(list(Check))

    def body(lake: Lake) -> None:
        spaces = spaces_of(lake, [name, SHARED])
        with lake.shared_memory(size_bytes=_MEMORY_BYTES) as memory, lake.pool(size_bytes=POOL_BYTES) as pool:
            while True:
                writer.act(spaces, memory, pool, check)

    _until_it_is_gone(address, check, body)


def write_in_trio(address: str, name: str, seed: str, folder: Path, told: int) -> None:
    """Put and read on the trio client until the engine is gone."""
    writer = Writer(name, seed, folder, told)

    async def put(lake: TrioLake, spaces: dict[str, TrioSpace]) -> None:
        space = name if writer.chance.random() < 0.5 else SHARED
        numbers, keys, labels, values = writer.batch(space)
        writer.journal.intend(space, dict(zip(numbers, labels, strict=True)))
        result = await spaces[space].put_many(keys, values)
        check_failures(space, result)
        writer.answered(result.outcomes)
        buffers = [bytearray(SIZE_MAX) for _ in keys]
        lengths = await spaces[space].get_many_into(keys, buffers)
        for key, buffer, length in zip(keys, buffers, lengths, strict=True):
            if length:
                label_of(key, bytes(buffer[:length]))

    async def main() -> None:
        async with connect_trio(address, check=writer.chance.choice(_NOTICING)) as lake:
            spaces = {
                space: await lake.space(space, quota=QUOTA_BYTES if space == SHARED else 64 * QUOTA_BYTES)
                for space in (name, SHARED)
            }
            while True:
                await put(lake, spaces)

    try:
        trio.run(main)
    except OperationalError:
        return


def read(address: str, names: Sequence[str], seed: str, end: int, longest: Any) -> None:
    """Match, get and load keys of all spaces, over all lives of the engine, until the pipe `end` is closed.

    While the engine is away a call fails, and the next one connects anew.  `longest` gets the longest call in seconds.
    """
    chance = random.Random(f"reader {seed}")
    with connect(address, check=Check.CRC32C) as lake, lake.pool(size_bytes=POOL_BYTES) as pool:
        spaces = spaces_of(lake, [*names, SHARED])
        while not _is_closed(end):
            name = chance.choice([*names, SHARED, SHARED])
            numbers = chance.sample(range(keys_in(name)), 8)
            began = time.monotonic()
            try:
                if chance.random() < 0.5:
                    spaces[name].match([key_of(name, number) for number in numbers])
                else:
                    read_some(spaces[name], name, numbers, chance.choice((pool, None)))
            except OperationalError:
                time.sleep(0.01)
            longest.value = max(longest.value, time.monotonic() - began)


def _is_closed(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def collect(address: str) -> None:
    """Run gc cycles, every other one with compaction, until the engine is gone."""
    try:
        with connect(address) as lake:
            for turn in range(1 << 30):
                lake.gc(compact=turn % 2 == 0)
    except OperationalError:
        return
