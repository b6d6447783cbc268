"""Full disks, for real: loop devices and tmpfs of a few MiB.

Full means full, not stuck: a put says so, what was acknowledged is there, `rm` and `gc` work, and the store goes on
when there is room.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from engine.superblock.reserve import SPARE_FILES
from lakefs.client.connect import connect
from lakefs.client.facade import driver_of
from lakefs.errors import StoreFull, StoreReadOnly
from lakefs.names import parse_object_name
from lakefs.put.keyed import KeyedResult, Outcome
from tests.e2e.mount_rig import mount_rig
from tests.e2e.served import Finished, Served, lake
from tests.e2e.small_disk import ext4, fill, tmpfs

pytestmark = pytest.mark.thorough

MIB = 1 << 20
Contents = dict[str, bytes]
MakeDisk = Callable[[Path, int], AbstractContextManager[Path]]


@contextmanager
def engine_on(disk: Path) -> Iterator[Served]:
    """Run an engine whose store is on the small disk, and its socket too."""
    engine = Served(disk)
    try:
        yield engine
    finally:
        assert engine.process is not None
        if engine.process.poll() is None:
            engine.stop()


def put_until_full(engine: Served, prefix: str, size_bytes: int) -> Contents:
    """Put objects until one is refused; return those that were acknowledged."""
    generator = random.Random(prefix)
    stored: Contents = {}
    with connect(engine.server) as client:
        while True:
            name, content = f"bkt/{prefix}{len(stored)}", generator.randbytes(size_bytes)
            try:
                client.put(name, content, create_bucket=True)
            except StoreFull:
                return stored
            stored[name] = content


def check_all(engine: Served, stored: Contents) -> None:
    """Check that exactly these names are there, with their bytes, and that nothing is damaged."""
    with connect(engine.server) as client:
        assert sorted(f"bkt/{entry.key}" for entry in client.ls("bkt/")) == sorted(stored)
        for name, content in stored.items():
            assert client.get(name) == content
        assert client.fsck(full=True)["damage"] == 0


def remove_half(engine: Served, stored: Contents) -> None:
    with connect(engine.server) as client:
        for name in list(stored)[::2]:
            assert client.remove(name)
            del stored[name]


@pytest.mark.parametrize(
    ("make", "disk_mib", "object_bytes"),
    [(ext4, 192, 10_000_000), (ext4, 64, 3_000_000), (tmpfs, 64, 60_000)],
    ids=["large objects on ext4", "a small ext4", "packed objects on tmpfs"],
)
def test_a_store_that_fills_its_disk_loses_nothing_and_goes_on(
    folder: Path, make: MakeDisk, disk_mib: int, object_bytes: int
) -> None:
    with make(folder, disk_mib * MIB) as disk, engine_on(disk) as engine:
        stored = put_until_full(engine, "first", object_bytes)
        assert len(stored) > 4
        check_all(engine, stored)
        refused = engine("put", "-", "bkt/refused", stdin=os.urandom(8 * MIB))
        assert refused.code == 74, refused
        assert "no room" in refused.err
        assert "lake gc" in refused.err

        remove_half(engine, stored)
        engine.good("gc")
        again = put_until_full(engine, "again", object_bytes)
        assert len(again) >= len(stored) // 2
        stored |= again
        check_all(engine, stored)

        assert engine.stop() == 0
        engine.start()
        check_all(engine, stored)


@pytest.mark.parametrize("way", ["buffers and slots", "a long value"])
def test_keyed_puts_on_a_full_disk_fail_key_by_key_and_lose_nothing(folder: Path, way: str) -> None:
    size, count = (17 * MIB, 1) if way == "a long value" else (900_000, 16)
    generator = random.Random(way)
    stored: dict[bytes, bytes] = {}
    with ext4(folder, 64 * MIB) as disk, engine_on(disk) as engine:
        with connect(engine.server) as client, client.shared_memory(32 * MIB) as memory:
            space = client.space("cache", quota="10G")

            def put(keys: list[bytes], values: list[bytes]) -> KeyedResult:
                if len(stored) % (2 * count) == 0:
                    return space.put_many(keys, values)
                slots = [memory.slot(index * size, len(value)) for index, value in enumerate(values)]
                for slot, value in zip(slots, values, strict=True):
                    slot.buffer[:] = value
                return space.put_many(keys, slots)

            def put_until_full(prefix: str) -> None:
                for turn in range(200):
                    keys = [b"%s %d %d" % (prefix.encode(), turn, index) for index in range(count)]
                    values = [generator.randbytes(size) for _ in keys]
                    result = put(keys, values)
                    for index, outcome in enumerate(result.outcomes):
                        if outcome is Outcome.STORED:
                            stored[keys[index]] = values[index]
                        else:
                            assert outcome is Outcome.FAILED
                            assert isinstance(result.failures[index], StoreFull), result.failures
                            assert "lake gc" in result.failures[index].message
                    if result.failures:
                        assert not any(space.match(keys[index : index + 1]).prefix for index in result.failures)
                        return
                raise AssertionError("the disk was never full")

            def check() -> None:
                assert client.space("cache").match(list(stored)).prefix == len(stored)
                for key, value in stored.items():
                    buffer = bytearray(size)
                    assert client.space("cache").get_many_into([key], [buffer]) == [size]
                    assert buffer == value
                assert client.fsck(full=True)["damage"] == 0

            put_until_full("first")
            assert len(stored) * size > 15 * MIB
            gone = list(stored)[::2]
            assert space.remove(gone) == [True] * len(gone)
            for key in gone:
                del stored[key]
            engine.good("gc")
            before = len(stored)
            put_until_full("again")
            assert len(stored) - before >= len(gone) // 2
            engine.kill()
            engine.start()
            check()
            engine.good("kv", "purge", "cache")
            assert client.space("cache").match(list(stored)).prefix == 0


def test_a_disk_that_others_filled_takes_rm_and_gc_and_serves_reads(folder: Path) -> None:
    with ext4(folder, 128 * MIB) as disk, engine_on(disk) as engine:
        stored: Contents = {f"bkt/{i}": os.urandom(3 * MIB) for i in range(16)}
        with connect(engine.server) as client:
            for name, content in stored.items():
                client.put(name, content, create_bucket=True)
        fill(disk / "others")
        refused = engine("put", "-", "bkt/refused", stdin=os.urandom(40 * MIB))
        assert refused.code == 74, refused
        assert "no room" in refused.err

        for name in list(stored)[::2]:
            engine.good("rm", name)
            del stored[name]
        before = os.statvfs(disk).f_bavail
        engine.good("gc")
        assert os.statvfs(disk).f_bavail > before
        check_all(engine, stored)
        engine.good("put", "-", "bkt/later", stdin=b"there is room again")
        stored["bkt/later"] = b"there is room again"

        fill(disk / "others")
        engine.kill()
        engine.start()
        check_all(engine, stored)
        engine.good("rm", next(iter(stored)))


def test_a_file_system_without_inodes_is_named_and_the_store_starts_and_is_read(folder: Path) -> None:
    with tmpfs(folder, 64 * MIB, inodes=200) as disk, engine_on(disk) as engine:
        stored: Contents = {f"bkt/{i}": os.urandom(100_000) for i in range(8)}
        with connect(engine.server) as client:
            for name, content in stored.items():
                client.put(name, content, create_bucket=True)
        for _ in range(2):  # each start begins a journal file
            take_all_inodes(disk / "others")
            engine.kill()
            engine.start()
            check_all(engine, stored)
        engine.good("rm", "bkt/0")
        del stored["bkt/0"]
        engine.stop()
        take_all_inodes(disk / "others")
        engine.start()
        check_all(engine, stored)
        refused = engine("put", "-", "bkt/large", stdin=os.urandom(12 * MIB))  # which begins a segment
        assert refused.code == 74, refused
        assert "no inode left" in refused.err
        shutil.rmtree(disk / "others")
        engine.good("put", "-", "bkt/large", stdin=b"there are inodes again")
        stored["bkt/large"] = b"there are inodes again"
        engine.stop()
        engine.start()
        assert len(list((engine.data / "spares").iterdir())) == SPARE_FILES
        check_all(engine, stored)


def test_a_first_start_without_inodes_says_so(folder: Path) -> None:
    with tmpfs(folder, 64 * MIB, inodes=30) as disk:
        take_all_inodes(disk)
        done = lake("serve", "--data", disk / "data", "--socket", folder / "socket", "--admin", "off", "--s3", "off")
        assert done.code == 74, done
        assert "no inode left" in done.err


def take_all_inodes(place: Path) -> None:
    """Create files until the file system holds no more."""
    place.mkdir(exist_ok=True)
    number = len(list(place.iterdir()))
    with suppress(OSError):
        while True:
            (place / f"other{number}").touch()
            number += 1
    assert os.statvfs(place).f_favail == 0


def test_names_without_content_are_refused_on_a_full_disk_and_removing_goes_on(folder: Path) -> None:
    with tmpfs(folder, 16 * MIB) as disk, engine_on(disk) as engine:
        stored: Contents = {}
        with connect(engine.server) as client, pytest.raises(StoreFull, match=r"lake.gc"):
            while len(stored) < 100_000:
                batch = {f"bkt/{len(stored) + number}": b"" for number in range(100)}
                client.put_many(list(batch.items()), create_bucket=True)
                stored |= batch
        assert len(stored) > 1000
        with connect(engine.server) as client:
            names = list(stored)
            for name in names[:500]:
                client.remove(name)
            driver = driver_of(client)
            for begin in range(500, len(names) - 100, 1000):
                gone = names[begin : min(begin + 1000, len(names) - 100)]
                driver.run(driver.steps.remove_many([parse_object_name(name) for name in gone]))
            assert sorted(f"bkt/{entry.key}" for entry in client.ls("bkt/")) == sorted(names[-100:])
            until_there_is_room(engine)


def until_there_is_room(engine: Served) -> None:
    """Put again and again until the index has taken in what was removed."""
    for _ in range(60):
        done = engine("put", "-", "bkt/later", stdin=b"there is room again")
        if done.code == 0:
            return
        assert "lake gc" in done.err, done
        engine.good("gc")
    raise AssertionError(done)


def test_a_reserve_that_is_used_up_makes_the_store_read_only_until_there_is_room(folder: Path) -> None:
    with tmpfs(folder, 24 * MIB) as disk, engine_on(disk) as engine:
        stored: Contents = {f"bkt/{i}": os.urandom(100) for i in range(3)}
        with connect(engine.server) as client:
            client.put_many([*stored.items(), ("bkt/at0", b"moved to and fro")], create_bucket=True)
        fill(disk / "others")
        refused = rename_until_refused(engine)
        assert refused.code == 74
        assert "make room on the disk" in refused.err
        with connect(engine.server) as client:
            assert all(client.get(name) == content for name, content in stored.items())
        status = engine("status")
        assert status.code == 74, status
        assert "read-only" in status.text
        assert "make room on the disk" in status.text

        engine.stop()
        fill(disk / "others")
        stuck = lake("serve", "--data", engine.data, "--socket", engine.socket, "--admin", "off", "--s3", "off")
        if stuck.code:  # it may start: the stop has given back a little room
            assert "make a few MiB of room" in stuck.err, stuck
        (disk / "others").unlink()
        engine.start()
        with connect(engine.server) as client:
            [moved] = [entry.key for entry in client.ls("bkt/") if entry.key.startswith("at")]
            stored[f"bkt/{moved}"] = b"moved to and fro"
        check_all(engine, stored)
        engine.good("put", "-", "bkt/later", stdin=b"there is room again")


def rename_until_refused(engine: Served) -> Finished:
    """Rename until the reserve is used up: a full disk refuses no renames, and each is a group of the journal."""
    with connect(engine.server) as client:
        for number in range(100_000):
            try:
                client.move(f"bkt/at{number}", f"bkt/at{number + 1}")
            except StoreReadOnly:
                return engine("put", "-", "bkt/one-more", stdin=b"")
    raise AssertionError("a full disk took changes for ever")


def test_a_first_start_on_a_full_disk_says_so_and_succeeds_later(folder: Path) -> None:
    with ext4(folder, 16 * MIB) as disk:
        fill(disk / "others")
        refused = lake("serve", "--data", disk / "store", "--socket", folder / "s", "--admin", "off", "--s3", "off")
        assert refused.code == 74, refused
        assert "No space left" in refused.err or "no room" in refused.err
        (disk / "others").unlink()
        with engine_on(disk) as engine:
            engine.good("put", "-", "bkt/x", stdin=b"content")
            assert engine.good("cat", "bkt/x").out == b"content"


@pytest.mark.fuse
def test_a_file_system_that_does_not_say_how_large_it_is_is_refused_in_words() -> None:
    """Some that a process serves are like this: their statfs(2) says 0 blocks, which is not the same as a full disk."""
    with mount_rig() as rig:
        rig.tiny()
        options = ("--socket", rig.folder / "s", "--admin", "off", "--s3", "off")
        refused = lake("serve", "--data", rig.place, *options)
        assert refused.code == 78, refused
        assert f"the file system of {rig.place} does not say how large it is" in refused.err
        assert "full" not in refused.err
        looked_at = lake("doctor", "--data", rig.place)
        assert [line for line in looked_at.lines if line.startswith("fail  room") and "does not say" in line]
