"""Disks that lie or rot, and the promises about them: damage is found, and wrong bytes are never read.

LMDB's file does not rot here: one of its bits can end the process, and with it the simulator.
"""

from __future__ import annotations

import random

from engine.format.layouts import SegmentKind, Table, unpack_chunk_record
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import Service
from engine.store.store import Store
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import CorruptionError, LakeError
from lakefs.names import Name
from lakefs.ports import Disk
from tests.sim.judges.history import SimFailure
from tests.sim.judges.model import NO_BLOB, NO_BUCKETS, State
from tests.sim.world.contents import Contents
from tests.sim.world.disk import SimDisk

Place = tuple[str, int]
"""A file and an offset in it."""
_FOLDERS = ("segments", "segments", "journal", "checkpoints")


def live_places(store: Store) -> list[Place]:
    """Return a place in the middle of each payload that the store has."""
    places: list[Place] = []
    with store.metadata.view() as view:
        for _, value in view.scan(Table.CHUNKS, b"", b"\xff"):
            record = unpack_chunk_record(value)
            kind = SegmentKind(store.segments.register.kinds[record.segment]).name.lower()
            path = f"segments/{record.segment:016x}.{kind}"
            places.append((path, record.offset + record.stored_bytes // 2))
    return places


def flip_anywhere(disk: SimDisk, rng: random.Random) -> str:
    """Flip one bit of a file of segments, journal or checkpoints, or of the superblock; return the file."""
    folder = rng.choice(_FOLDERS)
    names = [name for name in disk.list_folder(folder) if disk.file_bytes(f"{folder}/{name}")]
    path = f"{folder}/{rng.choice(names)}" if names else "superblock"
    offset = disk.random_offset(path, rng)
    disk.flip_bit(path, offset, rng.randrange(8))
    return path


async def check_honest(store: Store, state: State, contents: Contents, *, sure: bool, first: str) -> int:
    """Check that every name gives its bytes, or an error about damage that fsck finds, too.

    `first`: which of the workloads' reads, scrub or fsck runs first; what it finds, the others know.  `sure`: fsck, and
    scrub where that runs first, must find damage.  Returns how many names cannot be read.
    """
    damaged = await _unreadable(store, state, contents) if first == "reads" else 0
    if first == "scrub":
        # From the beginning: a pass that an earlier life has not ended may be past the damage.
        is_over = await store.scrubber.advance(60.0, restart=True)
        while not is_over:
            is_over = await store.scrubber.advance(60.0)
        if sure and not store.scrubber.state.last_damaged:
            raise SimFailure("a bit of a stored payload is flipped, and scrub found nothing")
        if sure and not len(store.quarantine):
            raise SimFailure("scrub found damage, and nothing is in quarantine")
    report = await store.check(full=True)
    if sure and not report["damage"]:
        raise SimFailure("a bit of a stored payload is flipped, and fsck found nothing")
    if first != "reads":
        damaged = await _unreadable(store, state, contents)
    if damaged and not report["damage"]:
        raise SimFailure(f"{damaged} names cannot be read, and fsck found no damage")
    return damaged


async def _unreadable(store: Store, state: State, contents: Contents) -> int:
    """Count the names that cannot be read; raise SimFailure on wrong bytes."""
    lake = TrioLake(EmbeddedEngine(Service(store), descriptors=False), store.offload)
    damaged = 0
    for bucket in sorted(state.keys() - NO_BUCKETS):
        for key, bound in state[bucket].items():
            if bound.blob in (NO_BLOB, b""):
                continue
            content = contents.by_blob[bound.blob]
            damaged += not await _reads_right(lake, store.disk, str(Name(bucket, key)), content)
    return damaged


async def _reads_right(lake: TrioLake, disk: Disk, name: str, content: bytes) -> bool:
    """Return whether the whole, and all but a byte at each end, can be read; raise SimFailure on wrong bytes."""
    readable = True
    for is_range in (False, True):
        try:
            if is_range:
                async with await lake.open(name) as opened:
                    found, expected = await opened.read(1, max(0, len(content) - 2)), content[1:-1]
            else:
                found, expected = bytes(await lake.get(name)), content
        except CorruptionError:
            readable = False
            continue
        except LakeError as error:
            if isinstance(disk, SimDisk) and disk.is_dead:
                raise
            raise SimFailure(f"{name} on a damaged disk: {error!r}") from error
        if found != expected:
            raise SimFailure(f"{name} on a damaged disk: {len(found)} wrong bytes, range {is_range}")
    return readable
