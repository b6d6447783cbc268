"""Room that one gc cycle gives back: blocks of the store's files, also on disks that are full."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.errors import StoreFull
from lakefs.limits import SMALL_FILL_BYTES
from lakefs.names import parse_object_name
from tests.crash.small_engine import SmallEngine
from tests.e2e.served import Served, serving
from tests.e2e.small_disk import MIB, ext4, tmpfs

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
TORTURE = bool(os.environ.get("LAKE_TORTURE"))
KIB = 1024
Contents = dict[str, bytes]
MakeDisk = Callable[[Path, int], AbstractContextManager[Path]]
Choice = Callable[[random.Random, int], bool]


def segment_blocks(engine: Served) -> int:
    """Return the bytes of disk that payload takes."""
    return sum(path.stat().st_blocks * 512 for path in (engine.data / "segments").iterdir())


def put_all(client: Lake, contents: Contents) -> None:
    """Put in order; small ones many at a time."""
    batch: Contents = {}
    for name, content in contents.items():
        if len(content) <= MIB:
            batch[name] = content
            continue
        client.put_many(list(batch.items()), create_bucket=True)
        client.put(name, content, create_bucket=True)
        batch.clear()
    client.put_many(list(batch.items()), create_bucket=True)


def remove_all(client: Lake, names: list[str]) -> None:
    """Remove many names at once."""
    parsed = [parse_object_name(name) for name in names]
    driver = driver_of(client)
    for start in range(0, len(parsed), 1000):
        driver.run(driver.steps.remove_many(parsed[start : start + 1000]))


def mixed(generator: random.Random) -> Contents:
    """Make objects of about 4 KiB, about 60 KiB, 1 MiB and 64 MiB, in an order that mixes them."""
    counts = {4 * KIB: 1500, 60 * KIB: 200, MIB: 20, 64 * MIB: 1}
    lengths = [
        generator.randrange(length // 2, length) if length < MIB else length
        for length, count in counts.items()
        for _ in range(count * (16 if TORTURE else 1))
    ]
    generator.shuffle(lengths)
    return {f"bkt/{number}": generator.randbytes(length) for number, length in enumerate(lengths)}


def random_share(share: float) -> Choice:
    return lambda generator, _: generator.random() < share


CHOICES: dict[str, Choice] = {"nine of ten": random_share(0.9), "every other": lambda _, number: number % 2 == 0}
MORE_CHOICES: dict[str, Choice] = {"a random half": random_share(0.5), "one of ten": random_share(0.1)}


@pytest.mark.parametrize("choice", [*CHOICES, *(MORE_CHOICES if TORTURE else ())])
def test_one_cycle_gives_back_0_95_of_what_is_dead(folder: Path, choice: str) -> None:
    is_removed = {**CHOICES, **MORE_CHOICES}[choice]
    generator = random.Random(7)
    stored = mixed(generator)
    engine = SmallEngine(folder)
    try:
        with connect(engine.server) as client:
            put_all(client, stored)
        engine.stop()  # a stop removes what is filled ahead of the next payload, here and at the end
        before = segment_blocks(engine)
        engine.start()
        gone = [name for number, name in enumerate(stored) if is_removed(generator, number)]
        with connect(engine.server) as client:
            remove_all(client, gone)
        dead = sum(len(stored.pop(name)) for name in gone)
        engine.good("gc", "--compact")
        engine.stop()
        reclaimed = before - segment_blocks(engine)
        assert reclaimed >= 0.95 * dead, (reclaimed / dead, dead)
        engine.start()
        with connect(engine.server) as client:
            assert client.get_many(list(stored)) == list(stored.values())
            assert client.fsck(full=True)["damage"] == 0
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("make", "disk_mib", "object_bytes"),
    [
        (tmpfs, 64, 1_500),
        (ext4, 32, 60_000),
        *([(tmpfs, 64, 100), (ext4, 256, 6_000), (tmpfs, 64, 2_500_000)] if TORTURE else ()),
    ],
)
def test_rm_and_one_cycle_on_a_full_disk_give_the_room_back(
    folder: Path, make: MakeDisk, disk_mib: int, object_bytes: int
) -> None:
    generator = random.Random(11)
    stored: Contents = {}
    with make(folder, disk_mib * MIB) as disk, serving(disk) as engine, connect(engine.server) as client:
        while True:
            batch = {
                f"bkt/{len(stored) + number}": generator.randbytes(object_bytes)
                for number in range(max(1, 500_000 // object_bytes))
            }
            try:
                client.put_many(list(batch.items()), create_bucket=True)
            except StoreFull:
                break
            stored |= batch
        gone = [name for name in stored if generator.random() < 0.5]
        before = segment_blocks(engine)  # before the removal: the engine's own gc cycle may run after it
        remove_all(client, gone)
        dead = sum(len(stored.pop(name)) for name in gone)
        report = engine.good("gc", "--compact")
        ahead = SMALL_FILL_BYTES  # zeros written ahead of the next payload
        assert before - segment_blocks(engine) >= 0.95 * dead - ahead, report.text
        assert client.get_many(list(stored)) == list(stored.values())
        client.put("bkt/afterwards", generator.randbytes(dead // 2), create_bucket=True)
        assert client.fsck(full=True)["damage"] == 0
