"""Small real stores, ways to damage each kind of their files, and everything that a user sees of a store."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import trio

from engine.format.layouts import ChunkRecord
from lakefs.client.trio.lake import TrioLake
from tests.flips.answers import Answers, ask_everything, names_of
from tests.flips.places import spans_of
from tests.flips.samples import BUCKETS, opened
from tests.store_rig import records
from tests.unit.support.metadata_rig import wait_applied

HARMS = ("missing", "truncated", "one flipped bit", "zeros", "another store's")
Life = Callable[[TrioLake, random.Random], Awaitable[None]]
_PAGE = 4096
_SIZES = (0, 700, 40_000, 200_000)


def make_stopped(data: Path, seed: int = 1) -> None:
    """Make a store after a clean stop, with everything that a store can hold."""
    trio.run(_life, data, _fill, seed)
    trio.run(_life, data, _change, seed)


def make_killed(data: Path, seed: int = 1) -> None:
    """Make a store that was killed after acknowledged writes that only its last journal file has."""
    _killed_in(data, _change_more, seed)


def make_indexed(data: Path, seed: int = 1) -> None:
    """Make a store like that of `make_killed`, but its index has those writes, too."""
    _killed_in(data, _change_and_wait, seed)


def _killed_in(data: Path, live: Life, seed: int) -> None:
    make_stopped(data, seed)
    if not (child := os.fork()):
        if live is _change_more:  # on a slow machine the applier would have time to apply the change
            with mock.patch("engine.metadata.applier.OVERLAY_APPLY_INTERVAL_S", math.inf):
                trio.run(_life, data, live, seed)
        trio.run(_life, data, live, seed)
    os.waitpid(child, 0)


@dataclass(frozen=True)
class Seen:
    """The contents of a store: names, everything that it answers about them, and the places of its payloads."""

    names: list[str]
    answers: Answers
    records: list[ChunkRecord]


def seen_in(data: Path, names: list[str] | None = None) -> Seen:
    """Return all that a store answers about `names`, or about those that it lists."""
    found: list[Seen] = []

    async def look() -> None:
        async with opened(data) as (store, client, lake):
            asked = await names_of(lake) if names is None else names
            answers = await ask_everything(client, lake, asked)
            found.append(Seen(asked, answers, list(records(store).values())))

    trio.run(look)
    return found[0]


def copy_store(source: Path, target: Path) -> None:
    """Copy a store without the reserve, which is room and nothing else."""
    shutil.copytree(source, target, copy_function=shutil.copyfile, ignore=lambda *_: ["reserve"], dirs_exist_ok=True)
    (target / "reserve").write_bytes(bytes(_PAGE))


def file_of(data: Path, kind: str) -> Path:
    """Return the file of a kind; of several, the one that matters most."""
    match kind:
        case "journal":
            return max((data / "journal").glob("*.journal"))
        case "checkpoint":
            return max((data / "checkpoints").glob("*.checkpoint"))
        case "index":
            return data / "index" / "data.mdb"
        case "index's lock":
            return data / "index" / "lock.mdb"
        case "small segment" | "large segment":
            suffix = kind.partition(" ")[0]
            return max((data / "segments").glob(f"*.{suffix}"), key=lambda path: path.stat().st_size)
    return data / kind


def harm(data: Path, kind: str, how: str, other: Path, payloads: list[ChunkRecord]) -> None:
    """Damage a file of a closed store; `other` is a store of the same shape, `payloads` where this one has its own."""
    path = file_of(data, kind)
    size = path.stat().st_size
    match how:
        case "missing":
            path.unlink()
        case "truncated":
            os.truncate(path, _truncated_size(path, kind, payloads))
        case "one flipped bit":
            if size:
                _flip(path, _live_offset(data, path, payloads))
        case "zeros":
            path.write_bytes(bytes(size))
        case _:
            shutil.copyfile(file_of(other, kind), path)


def _truncated_size(path: Path, kind: str, payloads: list[ChunkRecord]) -> int:
    """Return a size that cuts into what is written, not into the zeros after it."""
    if kind == "journal":
        content = path.read_bytes()
        return max(at for at in range(_PAGE, len(content), _PAGE) if content[at : at + 4] == b"LGRP") + 60
    if kind.endswith("segment"):
        own = [each for each in payloads if path.stem == f"{each.segment:016x}"]
        return max(each.offset + each.extent_bytes for each in own) - 10
    return min(path.stat().st_size // 2, 600) if kind.startswith("superblock") else path.stat().st_size // 2


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _live_offset(data: Path, path: Path, payloads: list[ChunkRecord]) -> int:
    """Return the offset of a byte that somebody relies on; in LMDB's file, one of a value."""
    name = str(path.relative_to(data))
    found = [
        (span.begin + span.end) // 2 + 20
        for span in spans_of(data, payloads, 0)
        if span.path == name and span.live and span.end - span.begin > 60
    ]
    return found[len(found) // 2] if found else min(100, path.stat().st_size - 1)


async def _life(data: Path, live: Life, seed: int) -> None:
    async with opened(data) as (store, _, lake):
        await live(lake, random.Random(seed))
        if live in (_change_more, _change_and_wait):
            await store.metadata.sync()
            if live is _change_and_wait:
                await wait_applied(store.metadata)
            os._exit(0)


async def _fill(lake: TrioLake, generator: random.Random) -> None:
    for bucket in BUCKETS:
        await lake.create_bucket(bucket)
    await lake.set_bucket("kept", versioning="enabled")
    for size in _SIZES:
        await lake.put(f"plain/sizes/{size}", generator.randbytes(size))
    await lake.put("plain/large", generator.randbytes(5 << 20))
    await lake.put_many([(f"plain/many/{number}", generator.randbytes(90)) for number in range(30)])
    await lake.create_access_key()
    await lake.make_folder("plain/empty folder")
    upload = await lake.create_upload("plain/in parts")
    await lake.put_part(upload, 1, generator.randbytes(90_000))


async def _change(lake: TrioLake, generator: random.Random) -> None:
    for turn in range(3):
        await lake.put("kept/again and again", generator.randbytes(3000 + turn))
    await lake.put("plain/later/one", generator.randbytes(500))


async def _change_more(lake: TrioLake, generator: random.Random) -> None:
    for number in range(5):
        await lake.put(f"plain/later/last {number}", generator.randbytes(900 * number + 1))
    await lake.remove("plain/sizes/700")


async def _change_and_wait(lake: TrioLake, generator: random.Random) -> None:
    await _change_more(lake, generator)
