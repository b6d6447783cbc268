"""Every way to put an object, read in every way: the bytes are the same."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

import lakefs
from lakefs.client.blocking.lake import Lake
from lakefs.limits import CHUNK_BYTES, KIB, MIB
from tests.e2e.served import Served
from tests.served_devices import DEVICES

SIZES: Final = (
    0, 1, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 70_000, MIB, MIB + 4097, CHUNK_BYTES,
    CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 100_000,
)  # fmt: skip
Contents = dict[str, bytes]


def put_plainly(lake: Lake, contents: Contents) -> None:
    for name, content in contents.items():
        lake.put(name, content, create_bucket=True)


def put_from_memory(lake: Lake, contents: Contents) -> None:
    with lake.shared_memory(sum(map(len, contents.values())) + len(contents) * 4096) as memory:
        for name, content in contents.items():
            slot = memory.allocate(len(content))
            slot.buffer[:] = content
            lake.put(name, slot, create_bucket=True)


def put_together(lake: Lake, contents: Contents) -> None:
    short = {name: content for name, content in contents.items() if len(content) <= CHUNK_BYTES}
    lake.put_many(list(short.items()), create_bucket=True)
    put_plainly(lake, {name: content for name, content in contents.items() if name not in short})


def by_name(lake: Lake, contents: Contents) -> Contents:
    return {name: lake.get(name) for name in contents}


def together(lake: Lake, contents: Contents) -> Contents:
    return dict(zip(contents, lake.get_many(list(contents)), strict=True))


def into_buffers(lake: Lake, contents: Contents) -> Contents:
    buffers = [bytearray(len(content)) for content in contents.values()]
    assert lake.get_many_into(list(contents), buffers) == list(map(len, contents.values()))
    return dict(zip(contents, map(bytes, buffers), strict=True))


def by_id(lake: Lake, contents: Contents) -> Contents:
    found: Contents = {}
    for name in contents:
        stat = lake.stat(name)
        single = stat.chunk_count <= 1 and stat.size_bytes
        found[name] = lake.chunks.get(stat.blob) if single else lake.get(name)
    return found


def into_a_pool(lake: Lake, contents: Contents) -> Contents:
    offsets = [0]
    for number, content in enumerate(contents.values()):
        offsets.append(offsets[-1] + len(content) + (0, 1, 4096)[number % 3])
    with lake.pool(size_bytes=offsets[-1] + 1) as pool:
        lengths = lake.load_many(list(contents), pool, offsets[:-1])
        return {
            name: bytes(pool.buffer[offset : offset + length])
            for name, offset, length in zip(contents, offsets, lengths, strict=False)
        }


def mapped(lake: Lake, contents: Contents) -> Contents:
    found: Contents = {}
    for name in contents:
        with lake.map(name) as mapping:
            found[name] = b"".join(mapping.pieces)
    return found


def as_files(lake: Lake, contents: Contents) -> Contents:
    found: Contents = {}
    for name in contents:
        with lake.open(name) as file:
            found[name] = file.read()
    return found


PUTS: Final = (put_plainly, put_from_memory, put_together)
READS: Final = (by_name, together, into_buffers, by_id, into_a_pool, *(() if DEVICES else (mapped,)), as_files)
"""MAPPED of `tests.served_devices` says why not at a lake."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("ways"), "--dram-tier-bytes", "64M")
    yield served
    served.stop()


def contents_of(bucket: str, seed: int) -> Contents:
    chance = random.Random(seed)
    return {f"{bucket}/{number}-{size}": chance.randbytes(size) for number, size in enumerate(SIZES)}


def drop_pages(segments: Iterable[Path]) -> None:
    """Make the page cache forget all segments: the next reads are from the disk."""
    for path in segments:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("check", list(lakefs.Check), ids=lambda check: check.value)
@pytest.mark.parametrize("put", PUTS, ids=lambda put: put.__name__)
def test_what_was_put_in_one_way_is_read_in_every_way(
    served: Served, put: Callable[[Lake, Contents], None], check: lakefs.Check
) -> None:
    contents = contents_of(f"{put.__name__}-{check.value}".replace("_", "-"), PUTS.index(put))
    with lakefs.connect(served.server, check=check) as lake:
        put(lake, contents)
        for turn in range(3):
            for read in READS:
                if turn == 0:
                    drop_pages(served.segments())
                found = read(lake, contents)
                wrong = [name for name in contents if found[name] != contents[name]]
                assert not wrong, f"{read.__name__} in turn {turn}"
