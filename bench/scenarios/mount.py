"""The mount, against pyfuse3 file systems with the same options and almost no cost of their own, and the local disk.

The file systems of `bench.peers.fuse_file_systems` show what FUSE and Python cost in any case: one answers every read
from one buffer, one passes every operation to the local disk.  Between rounds the mount's pages are dropped where the
row says so, with posix_fadvise(DONTNEED) on the file: those of the mount alone, so the store stays hot.  For `cold in
both caches` the pages of the store's segments, and of the local file, are dropped the same way.
/proc/sys/vm/drop_caches is not used: it would make the whole machine cold.

Hot content is read once more, uncounted, right before each measurement, on both sides: a machine may reclaim cached
pages after a minute without use.  Hot reads from the kernel's cache start with a freshly filled cache each time: a
mount's pages are single ones on today's kernels, and their order in memory decides how fast they are copied.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import mmap
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

import lakefs
from bench.harness.content import BLOCK, block, payload, renew_file, write_file
from bench.harness.measure import Bench, Figure, Paired, Scenario, Sides, Single, at_least, at_most, timed
from bench.harness.memory import warm_memory
from bench.harness.mounts import (
    MountProcess,
    constant_mounted,
    forget_pages,
    forget_pages_below,
    lake_mounted,
    passthrough_mounted,
)
from bench.harness.process import EngineProcess

READ_BYTES: Final = 1 << 20
DIRECT_BYTES: Final = 4096
THREADS: Final = 8
HOT_REPEATS: Final = 4
MEMORY_LIMIT: Final = float(200 << 20)
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""
MMAP_THRESHOLD_MAX: Final = 32 << 20
"""The most that glibc accepts; the largest tensor has 8 MiB."""


@contextmanager
def stored(bench: Bench) -> Iterator[tuple[EngineProcess, lakefs.Lake, MountProcess]]:
    """Context manager: an engine, a client of it, and its mount with the bucket `bench`."""
    with EngineProcess(bench.folder) as engine, engine.connect() as lake:
        lake.put("bench/.first", b"")
        with lake_mounted(engine, bench.folder) as mount:
            yield engine, lake, mount


def read_whole(path: Path, buffer: bytearray) -> int:
    """Read a file from its beginning in pieces as large as the buffer; return its length."""
    total = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def reading_sides(*, hot: bool) -> Callable[[Bench], AbstractContextManager[Sides]]:
    """Return sequential reads of a file that is hot in the store; `hot`: also in the mount's page cache."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sides]:
        size = bench.scale.pick(2 << 30, 16 << 20)
        source = bench.folder / "source"
        write_file(source, size)
        with stored(bench) as (_, lake, mount), constant_mounted(bench.folder, size) as peer:
            lake.put("bench/x", source)
            source.unlink()
            ours = mount.folder / "bench" / "x"
            buffer = bytearray(READ_BYTES)
            repeats = HOT_REPEATS if hot else 1

            def rate(path: Path) -> float:
                if hot:
                    forget_pages(path)
                read_whole(path, buffer)
                if not hot:
                    forget_pages(path)
                seconds = timed(lambda: [read_whole(path, buffer) for _ in range(repeats)])
                return repeats * size / seconds

            assert read_whole(ours, buffer) == size
            yield Sides(lambda: rate(ours), lambda: rate(peer))

    return sides


@contextmanager
def direct_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: random reads of 4 KiB with O_DIRECT from several threads, each on its own descriptor."""
    size = bench.scale.pick(1 << 30, 16 << 20)
    count = bench.scale.pick(4000, 200)
    source = bench.folder / "source"
    write_file(source, size)
    with (
        stored(bench) as (_, lake, mount),
        constant_mounted(bench.folder, size) as peer,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        lake.put("bench/x", source)
        source.unlink()

        def read(path: Path, seed: int) -> None:
            chooser = random.Random(seed)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, DIRECT_BYTES) as page:
                    for _ in range(count):
                        os.preadv(descriptor, [page], chooser.randrange(size // DIRECT_BYTES) * DIRECT_BYTES)
            finally:
                os.close(descriptor)

        def rate(path: Path) -> float:
            forget_pages(path)
            read_whole(path, buffer)
            seconds = timed(lambda: list(threads.map(lambda seed: read(path, seed), range(THREADS))))
            return THREADS * count / seconds

        buffer = bytearray(READ_BYTES)
        yield Sides(lambda: rate(mount.folder / "bench" / "x"), lambda: rate(peer))


def safetensors_sides(*, hot: bool) -> Callable[[Bench], AbstractContextManager[Sides]]:
    """Return `safe_open` of a model, every tensor copied; `hot`: in all caches of both sides, else in none."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sides]:
        from safetensors import safe_open

        def load(path: Path) -> None:
            with safe_open(path, framework="np") as model:
                for name in model.keys():  # noqa: SIM118 - it is no mapping
                    model.get_tensor(name).copy()

        local = bench.folder / "model.safetensors"
        write_model(local, bench.scale.pick(500_000_000, 8_000_000))
        with stored(bench) as (engine, lake, mount):
            lake.put("bench/model.safetensors", local)
            ours = mount.folder / "bench" / "model.safetensors"

            def prepare() -> None:
                if hot:
                    write_anew(local)
                else:
                    os.sync()
                    forget_pages(ours)
                    forget_pages(local)
                    forget_pages_below(engine.data)

            def spend(path: Path) -> float:
                keep_freed_memory()
                if hot:
                    load(path)
                return timed(lambda: load(path))

            yield Sides(lambda: spend(ours), lambda: spend(local), prepare)

    return sides


def write_anew(path: Path) -> None:
    """Replace a file by a copy just written: once its pages were dropped a disk's file is cached in smaller folios."""
    copy = path.with_suffix(".copy")
    with path.open("rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK)
    copy.replace(path)


def keep_freed_memory() -> None:
    """Have malloc keep what is freed: else the pages of a loader's own copies are new each time, on all sides.

    The same as MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ in the environment of a loader.
    """
    libc = ctypes.CDLL(None)
    for parameter, threshold in ((M_TRIM_THRESHOLD, 1 << 30), (M_MMAP_THRESHOLD, MMAP_THRESHOLD_MAX)):
        if libc.mallopt(parameter, threshold) != 1:
            raise RuntimeError("this C library does not keep freed memory")


def write_model(path: Path, size: int) -> None:
    """Write a safetensors file with the layers of a language model of that size."""
    import json

    shapes = itertools.cycle(((1024, 1024), (4096, 1024), (1024, 4096), (1024,)))
    members: dict[str, object] = {}
    begin = 0
    while begin < size:
        shape = next(shapes)
        length = 2 * (shape[0] * shape[1] if len(shape) > 1 else shape[0])
        members[f"layers.{len(members)}.weight"] = {
            "dtype": "F16", "shape": shape, "data_offsets": [begin, begin + length],
        }  # fmt: skip
        begin += length
    header = json.dumps(members).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, begin, BLOCK):
            file.write(block(min(BLOCK, begin - start)))


@contextmanager
def writing_sides(bench: Bench) -> Iterator[Sides]:
    """Context manager: dd of a file that is new to the store, in the page cache, with fsync; to the mount and to the
    disk."""
    size = bench.scale.pick(4 << 30, 24 << 20)
    source, copy = bench.folder / "source", bench.folder / "copy"
    write_file(source, size)
    with stored(bench) as (_, lake, mount):
        target = mount.folder / "bench" / "x"

        def prepare() -> None:
            for path in (copy, target):
                path.unlink(missing_ok=True)
            lake.gc()
            renew_file(source)

        def rate(path: Path) -> float:
            warm_memory(size + size // 4)
            command = ["dd", f"if={source}", f"of={path}", "bs=1M", "conv=fsync", "status=none"]
            return size / timed(lambda: subprocess.run(command, check=True))

        yield Sides(lambda: rate(target), lambda: rate(copy), prepare)


Work = Callable[[Path, Path], object]
"""Makes a new folder from a source."""


def small_files_sides(
    make: Callable[[Path, int], None], work: Work, full: int, quick: int, *, against_disk: bool = False
) -> Callable[[Bench], AbstractContextManager[Sides]]:
    """Return work that makes many files: in the mount, and on the passthrough file system or the disk itself."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sides]:
        source = bench.folder / "small"
        make(source, bench.scale.pick(full, quick))
        with stored(bench) as (_, _, mount), passthrough_mounted(bench.folder) as (peer, _):
            disk = bench.folder / "disk"
            disk.mkdir()
            numbers = itertools.count()
            on_disk: list[float] = []

            def spend(folder: Path) -> float:
                target = folder / f"t{next(numbers)}"
                seconds = timed(lambda: work(source, target))
                shutil.rmtree(target)
                return seconds

            def theirs() -> float:
                on_disk.append(spend(disk))
                return on_disk[-1] if against_disk else spend(peer)

            def figures() -> dict[str, float]:
                return {} if against_disk else {"on the disk s": sorted(on_disk)[len(on_disk) // 2]}

            yield Sides(lambda: spend(mount.folder / "bench"), theirs, os.sync, figures)

    return sides


def make_files(folder: Path, count: int) -> None:
    """Write files of 4 KiB, a hundred in each folder."""
    for number in range(count):
        path = folder / f"d{number // 100:03}" / f"f{number:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload(4096))


def make_repository(folder: Path, count: int) -> None:
    """Make a git repository with so many files, packed."""
    make_files(folder, count)
    who = ("-c", "user.name=bench", "-c", "user.email=bench@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "all"), ("gc", "-q")):
        subprocess.run(["git", *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def make_archive(path: Path, count: int) -> None:
    """Write a tar archive of small files."""
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            member = tarfile.TarInfo(f"f{number:05}")
            member.size = 2000
            archive.addfile(member, io.BytesIO(payload(2000)))


def copy_files(source: Path, target: Path) -> None:
    """Run `cp -a`."""
    subprocess.run(["cp", "-a", source, target], check=True)


def clone(source: Path, target: Path) -> None:
    """Run `git clone` from a folder, without hard links."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", source, target], check=True)


def unpack_synced(source: Path, target: Path) -> None:
    """Unpack an archive; each file is synced before the next."""
    target.mkdir()
    with tarfile.open(source) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            with (target / member.name).open("wb") as file:
                shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())


def walking_sides(*command: str) -> Callable[[Bench], AbstractContextManager[Sides]]:
    """Return a command that walks 50,000 files; each side has run it once before the timed rounds."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[Sides]:
        names = [f"w/d{n // 500:03}/f{n:05}" for n in range(bench.scale.pick(50_000, 300))]
        with stored(bench) as (_, lake, mount), passthrough_mounted(bench.folder) as (peer, behind):
            fill(lake, names)
            for name in names:
                (behind / name).parent.mkdir(parents=True, exist_ok=True)
                (behind / name).write_bytes(payload(64))

            def walk(folder: Path) -> float:
                return timed(
                    lambda: subprocess.run([command[0], folder, *command[1:]], check=True, stdout=subprocess.DEVNULL)
                )

            yield Sides(lambda: walk(mount.folder / "bench" / "w"), lambda: walk(peer / "w"))

    return sides


def fill(lake: lakefs.Lake, names: list[str]) -> None:
    """Put small objects under these keys."""
    for start in range(0, len(names), 5000):
        lake.put_many([(f"bench/{name}", payload(64)) for name in names[start : start + 5000]])


def measure_memory(bench: Bench) -> dict[str, float]:
    """Return the mount's own memory when it knows 100,000 files and 1,000 of them are open and read."""
    names = [f"d{n // 500:03}/f{n:06}" for n in range(bench.scale.pick(100_000, 500))]
    count = bench.scale.pick(1000, 20)
    with stored(bench) as (_, lake, mount), ExitStack() as stack:
        fill(lake, names)
        folder = mount.folder / "bench"
        subprocess.run(["find", folder, "-size", "+1G"], check=True)
        for name in names[:: len(names) // count]:
            stack.enter_context((folder / name).open("rb")).read()
        return {"RssAnon": float(mount.memory_bytes())}


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Paired(
        "mount-read",
        "mount: sequential read, its pages dropped, store hot / constant buffer",
        "B/s",
        at_least(0.92, "x"),
        reading_sides(hot=False),
    ),
    Paired(
        "mount-reread",
        "mount: hot re-read / constant buffer's hot re-read",
        "B/s",
        at_least(0.97, "x"),
        reading_sides(hot=True),
    ),
    Paired(
        "mount-tensors",
        "mount: safe_open of 500 MB, every tensor copied, hot / local disk",
        "s",
        at_most(1.3, "x"),
        safetensors_sides(hot=True),
    ),
    Paired(
        "mount-tensors-cold",
        "mount: safe_open of 500 MB, every tensor copied, cold in both caches / local disk",
        "s",
        at_most(1.4, "x"),
        safetensors_sides(hot=False),
    ),
    Paired(
        "mount-write", "mount: sequential write of 4 GiB + fsync / local disk", "B/s", at_least(0.6, "x"), writing_sides
    ),
    Paired(
        "mount-random",
        "mount: random 4 KiB reads, O_DIRECT, 8 threads / constant buffer",
        "op/s",
        at_least(0.7, "x"),
        direct_sides,
    ),
    Paired(
        "mount-cp",
        "mount: cp -a of 5,000 files of 4 KiB / pass-through",
        "s",
        at_most(1.5, "x"),
        small_files_sides(make_files, copy_files, 5000, 60),
    ),
    Paired(
        "mount-git",
        "mount: git clone with 5,000 files / pass-through",
        "s",
        at_most(1.5, "x"),
        small_files_sides(make_repository, clone, 5000, 60),
    ),
    Paired(
        "mount-tar",
        "mount: 2,000 small files unpacked with fsync each / local disk",
        "s",
        at_most(3, "x"),
        small_files_sides(make_archive, unpack_synced, 2000, 30, against_disk=True),
    ),
    Paired(
        "mount-find",
        "mount: find over 50,000 files, second time / pass-through",
        "s",
        at_most(1.2, "x"),
        walking_sides("find", "-size", "+1G"),
    ),
    Paired(
        "mount-du",
        "mount: du over 50,000 files, second time / pass-through",
        "s",
        at_most(1.2, "x"),
        walking_sides("du", "-s"),
    ),
    Single(
        "mount-memory",
        "memory of the mount, 100,000 known files and 1,000 open",
        (Figure("RssAnon", at_most(MEMORY_LIMIT), "B"),),
        measure_memory,
    ),
)
