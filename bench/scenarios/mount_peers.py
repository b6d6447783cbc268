"""The mount against s3fs and `rclone mount`, which mount a bucket of an S3 store on the same machine.

Every side does the same work at the same size, in turn, in one run.  Sizes are smaller than those of
`bench.scenarios.mount`, so that a side that needs a request for each file ends in time.  A figure counts stored bytes
and files: for a side that stores after `close`, the clock runs until its store lists everything.  In the warm-up
everything read or written is compared with its source, byte by byte; written content as the store has it.

Reads `with pages dropped` are served from the side's own cache beside the kernel's: ours has none, the peers have a
copy on local disk.  `First` reads are of an object that this mount has never seen, with the store's files cold.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.content import renew_file, write_file
from bench.harness.contest import Contender, Contest, CouldNotRun, Run
from bench.harness.measure import Bench, Scale, timed
from bench.harness.mounts import forget_pages
from bench.peers.s3_mounts import OURS, TOOLS, Side, check_same, command, lake_side, peer_side
from bench.peers.s3_stores import STORES
from bench.scenarios.mount import (
    READ_BYTES,
    keep_freed_memory,
    make_archive,
    make_files,
    make_repository,
    read_whole,
    unpack_synced,
    write_model,
)
from bench.scenarios.mount_ways import random_rate

HOT_REPEATS: Final = 2


@dataclass(frozen=True)
class Place:
    """A side's surroundings: the mount, the source prepared for all sides, a scratch folder, the sizes."""

    side: Side
    source: Path
    scratch: Path
    scale: Scale


Work = Callable[[Place], AbstractContextManager[Run]]


def contest_sides(
    make: Callable[[Path, Scale], None], work: Work, *, stored: bool
) -> Callable[[Bench], AbstractContextManager[tuple[Contender, Sequence[Contender]]]]:
    """Return all sides for one kind of work.  `make` fills a folder; `stored`: it is in the bucket before the
    mount."""

    @contextmanager
    def sides(bench: Bench) -> Iterator[tuple[Contender, Sequence[Contender]]]:
        source = bench.folder / "source"
        source.mkdir()
        make(source, bench.scale)
        content = source if stored else None

        @contextmanager
        def at_work(name: str, entered: AbstractContextManager[Side]) -> Iterator[Run]:
            scratch = bench.folder / f"scratch-{name.replace(' ', '-')}"
            scratch.mkdir()
            with entered as side, ExitStack() as stack:
                with side.working():
                    run = stack.enter_context(work(Place(side, source, scratch, bench.scale)))

                def limited() -> float:
                    with side.working():
                        return run()

                yield limited

        def contender(name: str, tool: str, enter: Callable[[], AbstractContextManager[Side]]) -> Contender:
            return Contender(name, tool, lambda: at_work(name, enter()))

        peers = [
            contender(
                f"{tool.name} on {kind.name}",
                tool.name,
                lambda tool=tool, kind=kind: peer_side(  # type: ignore[misc]
                    tool, kind, bench.folder / f"{tool.name}-{kind.name}", content, fetch=not bench.scale.quick
                ),
            )
            for tool in TOOLS
            for kind in STORES
        ]
        yield contender(OURS, OURS, lambda: lake_side(bench.folder, content)), peers

    return sides


def one_file(full: int, quick: int) -> Callable[[Path, Scale], None]:
    """Return the maker of a file `x` of that many bytes."""
    return lambda folder, scale: write_file(folder / "x", scale.pick(full, quick))


def cold_files(make: Callable[[Path, int], None], full: int, quick: int) -> Callable[[Path, Scale], None]:
    """Return the maker of a file for each round, and one for the warm-up."""

    def fill(folder: Path, scale: Scale) -> None:
        for number in range(scale.rounds + 1):
            make(folder / f"x{number}", scale.pick(full, quick))

    return fill


def reading(*, hot: bool) -> Work:
    """Return sequential reads of a file that was read before; `hot`: the mount's pages are kept."""

    @contextmanager
    def work(place: Place) -> Iterator[Run]:
        path = place.side.folder / "x"
        check_same(place.source / "x", path)
        size = path.stat().st_size
        buffer = bytearray(READ_BYTES)
        repeats = HOT_REPEATS if hot else 1

        def run() -> float:
            if not hot:
                forget_pages(path)
            return repeats * size / timed(lambda: [read_whole(path, buffer) for _ in range(repeats)])

        yield run

    return work


@contextmanager
def reading_first(place: Place) -> Iterator[Run]:
    """Context manager: a sequential read of a file that this mount has never read."""
    numbers = itertools.count()
    buffer = bytearray(READ_BYTES)

    def run() -> float:
        number = next(numbers)
        path = place.side.folder / f"x{number}"
        place.side.cool()
        size = path.stat().st_size
        rate = size / timed(lambda: read_whole(path, buffer))
        if number == 0:
            check_same(place.source / path.name, path)
        return rate

    yield run


@contextmanager
def reading_directly(place: Place) -> Iterator[Run]:
    """Context manager: random reads of 4 KiB with O_DIRECT by the threads of fio, each on its own descriptor.

    A program in Python would be the limit: its threads make 70,000 reads a second, whoever answers.
    """
    path = place.side.folder / "x"
    check_same(place.source / "x", path)
    count = place.scale.pick(40_000, 400)
    yield lambda: random_rate(path, count)


def loading(*, hot: bool) -> Work:
    """Return `safe_open` of a model, every tensor copied; `hot`: the same model each time, else a new one."""

    @contextmanager
    def work(place: Place) -> Iterator[Run]:
        from safetensors import safe_open

        numbers = itertools.count()

        def load(path: Path) -> None:
            with safe_open(path, framework="np") as model:
                for name in model.keys():  # noqa: SIM118 - it is no mapping
                    model.get_tensor(name).copy()

        def run() -> float:
            number = next(numbers)
            path = place.side.folder / f"x{0 if hot else number}"
            keep_freed_memory()
            if not hot:
                place.side.cool()
            seconds = timed(lambda: load(path))
            if number == 0:
                check_same(place.source / path.name, path)
            return seconds

        yield run

    return work


@contextmanager
def writing(place: Place) -> Iterator[Run]:
    """Context manager: dd of a file that is new to the store, with fsync."""
    source = place.scratch / "x"
    write_file(source, place.scale.pick(256 << 20, 8 << 20))
    numbers = itertools.count()

    def run() -> float:
        number = next(numbers)
        target = place.side.folder / f"t{number}"
        renew_file(source)

        dd = ("dd", f"if={source}", f"of={target}", "bs=1M", "conv=fsync", "status=none")
        seconds = timed(lambda: command(*dd))
        rate = source.stat().st_size / (seconds + place.side.wait_stored(target))
        if number == 0:
            check_stored(place, target, source)
        target.unlink()
        return rate

    yield run


def making(work: Callable[[Path, Path], object]) -> Work:
    """Return work that makes a folder of many files from a source, in the mount."""

    @contextmanager
    def entered(place: Place) -> Iterator[Run]:
        numbers = itertools.count()
        source = next(place.source.iterdir())

        def run() -> float:
            number = next(numbers)
            target = place.side.folder / f"t{number}"
            os.sync()
            seconds = timed(lambda: work(source, target))
            seconds += place.side.wait_stored(target)
            if number == 0:
                check_made(place, source, target)
            return seconds

        yield run

    return entered


def check_made(place: Place, source: Path, target: Path) -> None:
    """Check that the mount lists all files made, and that the store has their bytes."""
    if (source / ".git").exists():
        command("git", "-C", target, "fsck", "--no-progress")
    if source.is_file():
        wanted = place.scratch / "wanted"
        unpack_synced(source, wanted)
    else:
        wanted = source
    names = {path.relative_to(wanted) for path in wanted.rglob("*") if ".git" not in path.parts}
    listed = {path.relative_to(target) for path in target.rglob("*")}
    if missing := names - listed:
        raise CouldNotRun(f"{len(missing)} of {len(names)} names that were made are not listed")
    check_stored(place, target, wanted, without=".git")


def check_stored(place: Place, target: Path, source: Path, *, without: str = "") -> None:
    """Check that a file or folder of the mount is stored as in the source."""
    copy = place.scratch / "copy"
    place.side.fetch(target.name, copy)
    for path in source.iterdir() if source.is_dir() else ():
        if path.name != without:
            check_same(path, copy / path.name)
    if source.is_file():
        check_same(source, copy)


def copy_all(source: Path, target: Path) -> None:
    """Run `cp -a`: with modes, owners and times."""
    command("cp", "-a", source, target)


def copy_bytes(source: Path, target: Path) -> None:
    """Run `cp -r`: names and bytes."""
    command("cp", "-r", source, target)


def clone(source: Path, target: Path) -> None:
    """Run `git clone` from a folder, without hard links."""
    command("git", "clone", "-q", "--no-hardlinks", source, target)


def walking(program: str, *options: str) -> Work:
    """Return a command that walks many files; the files are listed once before it is timed."""

    @contextmanager
    def work(place: Place) -> Iterator[Run]:
        folder = place.side.folder / "w"
        wanted = sum(path.is_file() for path in (place.source / "w").rglob("*"))
        listed = subprocess.run(["find", folder, "-type", "f"], check=True, capture_output=True, timeout=60)
        if len(listed.stdout.splitlines()) != wanted:
            raise CouldNotRun(f"{len(listed.stdout.splitlines())} of {wanted} files are listed")
        yield lambda: timed(lambda: command(program, folder, *options))

    return work


@contextmanager
def remembering(place: Place) -> Iterator[Run]:
    """Context manager: the memory of the process that serves the mount when it knows many files, some open and
    read."""

    def run() -> float:
        with ExitStack() as stack:
            command("find", place.side.folder / "w", "-size", "+1G")
            paths = sorted(path for path in (place.source / "w").rglob("*") if path.is_file())
            for path in paths[:: place.scale.pick(20, 10)]:
                opened = stack.enter_context((place.side.folder / path.relative_to(place.source)).open("rb"))
                if opened.read() != path.read_bytes():
                    raise CouldNotRun(f"what was read for {path.name} is not what was stored")
            return float(place.side.memory_bytes())

    yield run


def below(name: str, make: Callable[[Path, int], None], full: int, quick: int) -> Callable[[Path, Scale], None]:
    """Return the maker of something with that many files, under a name."""
    return lambda folder, scale: make(folder / name, scale.pick(full, quick))


MANY_FILES: Final = below("w", make_files, 2000, 60)

SCENARIOS: Final[tuple[Contest, ...]] = (
    Contest(
        "peers-read",
        "mount: sequential read of 256 MiB, its pages dropped",
        "B/s",
        higher_is_better=True,
        set_up=contest_sides(one_file(256 << 20, 8 << 20), reading(hot=False), stored=True),
    ),
    Contest(
        "peers-read-first",
        "mount: first sequential read of 64 MiB, store cold",
        "B/s",
        higher_is_better=True,
        set_up=contest_sides(cold_files(write_file, 64 << 20, 4 << 20), reading_first, stored=True),
    ),
    Contest(
        "peers-reread",
        "mount: hot re-read of 256 MiB",
        "B/s",
        higher_is_better=True,
        set_up=contest_sides(one_file(256 << 20, 8 << 20), reading(hot=True), stored=True),
    ),
    Contest(
        "peers-random",
        "mount: random 4 KiB reads, O_DIRECT, 8 threads",
        "op/s",
        higher_is_better=True,
        set_up=contest_sides(one_file(128 << 20, 8 << 20), reading_directly, stored=True),
    ),
    Contest(
        "peers-tensors",
        "mount: safe_open of 50 MB, every tensor copied, hot",
        "s",
        higher_is_better=False,
        set_up=contest_sides(cold_files(write_model, 50_000_000, 4_000_000), loading(hot=True), stored=True),
    ),
    Contest(
        "peers-tensors-first",
        "mount: safe_open of 50 MB, every tensor copied, first time, store cold",
        "s",
        higher_is_better=False,
        set_up=contest_sides(cold_files(write_model, 50_000_000, 4_000_000), loading(hot=False), stored=True),
    ),
    Contest(
        "peers-write",
        "mount: sequential write of 256 MiB, fsync, close, until stored",
        "B/s",
        higher_is_better=True,
        set_up=contest_sides(lambda folder, scale: None, writing, stored=False),
    ),
    Contest(
        "peers-cp",
        "mount: cp -a of 200 files of 4 KiB",
        "s",
        higher_is_better=False,
        set_up=contest_sides(below("w", make_files, 200, 20), making(copy_all), stored=False),
    ),
    Contest(
        "peers-copy",
        "mount: cp -r of 200 files of 4 KiB",
        "s",
        higher_is_better=False,
        set_up=contest_sides(below("w", make_files, 200, 20), making(copy_bytes), stored=False),
    ),
    Contest(
        "peers-git",
        "mount: git clone with 200 files",
        "s",
        higher_is_better=False,
        set_up=contest_sides(below("w", make_repository, 200, 20), making(clone), stored=False),
    ),
    Contest(
        "peers-tar",
        "mount: 100 small files unpacked with fsync each",
        "s",
        higher_is_better=False,
        set_up=contest_sides(below("w", make_archive, 100, 20), making(unpack_synced), stored=False),
    ),
    Contest(
        "peers-find",
        "mount: find over 2,000 files, second time",
        "s",
        higher_is_better=False,
        set_up=contest_sides(MANY_FILES, walking("find", "-size", "+1G"), stored=True),
    ),
    Contest(
        "peers-du",
        "mount: du over 2,000 files, second time",
        "s",
        higher_is_better=False,
        set_up=contest_sides(MANY_FILES, walking("du", "-s"), stored=True),
    ),
    Contest(
        "peers-memory",
        "memory of the mount, 2,000 known files and 100 open",
        "B",
        higher_is_better=False,
        set_up=contest_sides(MANY_FILES, remembering, stored=True),
        once=True,
    ),
)
