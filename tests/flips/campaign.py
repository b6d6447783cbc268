"""Single bits flipped anywhere in a small store, which is then opened and asked everything.

Each flip has a copy of the store, in memory.  It is opened as `lake serve` would open it, asked everything at once and
again when the walk after start-up has ended, scrubbed, checked by fsck, written to a little, opened again, and asked
and checked once more.  All this happens in a child, because LMDB trusts its pages: a child that a signal ends is
started again on the same copy, as a service manager would do.  A child that lives goes on with the next flip.

- Wrong bytes or metadata are never served; an error is fine.  "Not found" for something that exists is wrong.
- A flip in a live byte is reported: by a refused start, a rebuilt index, scrub or fsck.
"""

from __future__ import annotations

import bisect
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import trio

import engine.tables.index_check
from engine.metadata.metadata_store import Metadata
from engine.process.embedded import EmbeddedEngine
from engine.store.store import Store
from engine.superblock.reserve import RESERVE_PATH
from engine.superblock.superblock import SUPERBLOCK_PATH
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import LakeError
from lakefs.wire import messages as m
from tests.flips.answers import NEW, WRITTEN, Answers, ask_everything, but_for_writing, names_of, problem_of
from tests.flips.places import Span, spans_of
from tests.flips.samples import make_killed, make_stopped, opened
from tests.store_rig import records

MEMORY_FOLDER: Final = Path("/dev/shm")
STARTS_MAX: Final = 4
FLIP_S: Final = 30
"""A life that takes longer hangs."""
FLIPS_PER_CHILD: Final = 50
SAMPLES: Final = {"stopped": make_stopped, "killed": make_killed}
CODES: Final = {
    "checkpoint": {"checkpoint-damaged"},
    "journal group": {"journal-damaged"},
    "payload": {"chunk-damaged", "chunk-quarantined", "content-chunk-damaged", "content-manifest-damaged"},
}
"""The findings that a flip there may cause."""
_WALK_S: Final = 20.0
_FOLDERS_STEP: Final = 5
"""One in so many folders is written into before the walk has ended."""


@dataclass(frozen=True)
class Sample:
    """A store, what it must answer, and where its bits lie, by place."""

    name: str
    folder: Path
    names: list[str]
    expected: Answers
    places: dict[str, list[Span]]


Samples = dict[str, Sample]


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    sample: str
    place: str
    path: str
    offset: int
    bit: int
    live: bool

    @property
    def is_mended(self) -> bool:
        """True when the flip is in what is rebuilt from the rest: after the walk every answer must be right."""
        return self.path.startswith(("index/", SUPERBLOCK_PATH)) or self.place.startswith("unused")


@dataclass
class Outcome:
    """The result of one flip.  `wrong` is empty when nothing wrong was served."""

    flip: Flip
    reported: str = ""
    wrong: str = ""
    starts: int = 1

    @property
    def failed(self) -> str:
        """The broken promise; empty when none was broken."""
        if self.wrong:
            return self.wrong
        return "not reported" if self.flip.live and not self.reported else ""


@dataclass
class Tally:
    """Outcomes by place."""

    flips: Counter[str] = field(default_factory=Counter)
    reported: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    live: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one flip."""
        place = outcome.flip.place
        self.flips[place] += 1
        self.reported[place] += bool(outcome.reported)
        self.wrong[place] += bool(outcome.wrong)
        if outcome.flip.live:
            self.live.add(place)
            self.silent[place] += not outcome.reported
        if outcome.failed:
            self.failures.append(f"FAILED {outcome.flip}: {outcome.failed}")

    def lines(self) -> Iterator[str]:
        """Yield the tally, a line for each place."""
        yield f"{'place':<34}{'flips':>8}{'reported':>10}{'wrong':>7}{'live, not reported':>20}"
        for place in [*sorted(self.flips), "all"]:
            columns = [
                sum(counts.values()) if place == "all" else counts[place]
                for counts in (self.flips, self.reported, self.wrong, self.silent)
            ]
            silent = str(columns[3]) if place in self.live or place == "all" else "-"
            yield f"{place:<34}{columns[0]:>8}{columns[1]:>10}{columns[2]:>7}{silent:>20}"

    def figures(self, seed: int) -> str:
        """Return all figures in one line."""
        live = sum(self.flips[place] for place in self.live)
        return (
            f"{self.flips.total()} flips, seed {seed}: {self.wrong.total()} made the store serve something wrong; "
            f"{self.reported.total()} were reported, of {live} in live bytes all but {self.silent.total()}"
        )


def run_campaign(count: int, seed: int, jobs: int, only: str = "") -> Tally:
    """Flip `count` bits, in `jobs` processes; places are chosen evenly, so that small ones are hit as often.

    `only`: flip only in places whose name begins so.
    """
    tally = Tally()
    with samples_made() as (samples, folder), multiprocessing.get_context("fork").Pool(jobs) as pool:
        chosen = [choose(samples, random.Random(f"{seed}/{number}"), only) for number in range(count)]
        batch = max(1, min(FLIPS_PER_CHILD, count // jobs))
        tasks = [(samples, chosen[begin : begin + batch], folder) for begin in range(0, count, batch)]
        for outcomes in pool.imap_unordered(_try_batch, tasks):
            for outcome in outcomes:
                tally.add(outcome)
    return tally


@contextmanager
def samples_made() -> Iterator[tuple[Samples, Path]]:
    """Make the stores, and a folder for copies of them; in memory where there is such a folder."""
    memory = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="lake-flips-") as name:
        folder = Path(name)
        with multiprocessing.get_context("fork").Pool(1) as pool:  # a process of its own, which may be made quiet
            yield {sample: pool.apply(_make_sample, (sample, folder)) for sample in SAMPLES}, folder


def choose(samples: Samples, rng: random.Random, only: str = "") -> Flip:
    """Choose a sample, a place in it, and any bit of that place."""
    sample = samples[rng.choice(sorted(samples))]
    place = rng.choice(sorted(place for place in sample.places if place.startswith(only)))
    spans = sample.places[place]
    ends = list(accumulate(span.end - span.begin for span in spans))
    at = rng.randrange(ends[-1])
    number = bisect.bisect_right(ends, at)
    span = spans[number]
    offset = span.end - (ends[number] - at)
    return Flip(sample.name, place, span.path, offset, rng.randrange(8), span.live)


# --- in a job -------------------------------------------------------------------------------------------


def _make_sample(name: str, folder: Path) -> Sample:
    _be_quiet([])
    data = folder / name
    SAMPLES[name](data)
    template = folder / f"{name}.template"
    _copy(data, template)
    found: dict[str, Any] = {}

    async def look() -> None:
        async with opened(data) as (store, client, lake):
            stats = store.metadata.stats()
            found["names"] = await names_of(lake)
            found["expected"] = await ask_everything(client, lake, found["names"])
            found["records"] = list(records(store).values())
            report = await store.check(full=True)
            assert not report["damage"], report["findings"]
            found["checkpoint"] = stats["checkpoint_sequence"]

    trio.run(look)
    places: dict[str, list[Span]] = {}
    for span in spans_of(template, found["records"], found["checkpoint"]):
        places.setdefault(span.place, []).append(span)
    return Sample(name, template, found["names"], found["expected"], places)


def _copy(source: Path, target: Path) -> None:
    """Copy all files; the reserve, which holds nothing, is shared."""
    for folder, _, names in os.walk(source):
        there = target / os.path.relpath(folder, source)
        there.mkdir()
        for name in names:
            (os.link if name == RESERVE_PATH else shutil.copyfile)(f"{folder}/{name}", there / name)


def _try_batch(task: tuple[Samples, list[Flip], Path]) -> list[Outcome]:
    return try_flips(*task)


def try_flips(samples: Samples, flips: list[Flip], folder: Path) -> list[Outcome]:
    """Try flips, as many in a child as it survives; one that fails after others is tried again alone."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(flips):
        rest = [Outcome(flip) for flip in flips[len(outcomes) :]]
        folders = [folder / f"flipped-{os.getpid()}-{len(outcomes) + number}" for number in range(len(rest))]
        done = _in_child(samples, rest, folders)
        outcomes += [rest[0], *[_again_alone(samples, outcome, folder) for outcome in rest[1:done]]][:done]
        if done < len(rest):
            outcomes.append(_begun_again(samples, rest[done], folders[done]))
    return outcomes


def _again_alone(samples: Samples, outcome: Outcome, folder: Path) -> Outcome:
    """Try a failed flip again in a process of its own, and return that outcome."""
    if not outcome.failed:
        return outcome
    [alone] = try_flips(samples, [outcome.flip], folder)
    alone.wrong = alone.failed or f"behind other flips in one process, and not alone: {outcome.failed}"
    return alone


def _begun_again(samples: Samples, outcome: Outcome, data: Path) -> Outcome:
    """Start again on a flip whose first start was ended by a signal."""
    outcome.reported = outcome.reported or "the process was ended by a signal"
    for outcome.starts in range(2, STARTS_MAX + 1):
        if _in_child(samples, [outcome], [data]):
            return outcome
    outcome.wrong = outcome.wrong or f"does not get over it in {STARTS_MAX} starts"
    shutil.rmtree(data)
    return outcome


def _in_child(samples: Samples, outcomes: list[Outcome], folders: list[Path]) -> int:
    """Fill in the outcomes, in order, until a signal ends the child; return how many were filled in."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _child(samples, outcomes, folders, writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        told = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    for outcome, (reported, wrong) in zip(outcomes, told, strict=False):
        outcome.reported, outcome.wrong = outcome.reported or reported, outcome.wrong or wrong
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        outcomes[len(told)].wrong = f"hangs for {FLIP_S} s"
        shutil.rmtree(folders[len(told)])
        return len(told) + 1
    assert os.WIFSIGNALED(status) or len(told) == len(outcomes), "the child was left by its own bug"
    return len(told)


def _child(samples: Samples, outcomes: list[Outcome], folders: list[Path], writing: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    gc.freeze()
    for outcome, data in zip(outcomes, folders, strict=True):
        signal.alarm(FLIP_S)
        sample = samples[outcome.flip.sample]
        if not data.exists():
            _flipped_copy(sample, outcome.flip, data)
        try:
            _live(sample, data, outcome)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
            outcome.wrong = outcome.wrong or f"a bug: {type(error).__name__}: {error}"
        shutil.rmtree(data)
        os.write(writing, json.dumps([outcome.reported, outcome.wrong]).encode() + b"\n")
    os._exit(0)


def _flipped_copy(sample: Sample, flip: Flip, data: Path) -> None:
    _copy(sample.folder, data)
    with (data / flip.path).open("r+b") as file:
        file.seek(flip.offset)
        byte = file.read(1)[0]
        file.seek(flip.offset)
        file.write(bytes([byte ^ 1 << flip.bit]))


def _live(sample: Sample, data: Path, outcome: Outcome) -> None:
    """Run two lives of the store in this process."""
    said: list[str] = []
    _be_quiet(said)
    try:
        trio.run(_first_life, sample, data, outcome)
        if not outcome.wrong:
            trio.run(_second_life, sample, data, outcome)
    except LakeError as error:
        outcome.reported = outcome.reported or f"refused: {error.message}"
        if outcome.flip.path == SUPERBLOCK_PATH:
            outcome.wrong = outcome.wrong or f"the copy is good: {outcome.reported}"
    outcome.reported = outcome.reported or "; ".join(said)


async def _first_life(sample: Sample, data: Path, outcome: Outcome) -> None:
    with _walk_held() as may_walk:
        async with opened(data) as (store, client, lake):
            await _compare(sample, client, lake, outcome, walk_ended=False)
            if outcome.flip.is_mended:
                await _write_among(sample, store, lake, outcome)  # they must not take existing names for absent
            may_walk.set()
            if outcome.flip.is_mended:
                await lake.gc()  # gc must not trust an index before the walk has checked it
            await _wait_walked(store)
            await _compare(sample, client, lake, outcome, walk_ended=True)
            await store.scrubber.advance(_WALK_S, rate_bytes_per_s=0, restart=True)
            damaged = await store.damaged()
            await _check(store, outcome, f"scrub: {damaged[0]}" if damaged else "")
            with _reported(outcome):
                await _use_free_pages(store, client, lake)


@contextmanager
def _walk_held() -> Iterator[trio.Event]:
    """Hold the walk through the index until the event is set: in a small store it would end before anybody asks."""
    may_walk = trio.Event()
    walk = Metadata.verify_index

    async def held(metadata: Metadata) -> int:
        await may_walk.wait()
        return await walk(metadata)

    Metadata.verify_index = held  # type: ignore[method-assign,assignment]
    try:
        yield may_walk
    finally:
        Metadata.verify_index = walk  # type: ignore[method-assign]


async def _use_free_pages(store: Store, client: EmbeddedEngine, lake: TrioLake) -> None:
    """Make the index take pages from its free list."""
    for turn in range(2):
        names = [f"plain/{NEW}/{turn}/{number}" for number in range(40)]
        await lake.put_many([(name, name.encode()) for name in names])
        await client.call(m.DeleteNames([("plain", name.partition("/")[2]) for name in names]))
        await store.metadata.sync()


async def _write_among(sample: Sample, store: Store, lake: TrioLake, outcome: Outcome) -> None:
    """Write names into folders that exist, and remove them again."""
    folders = sorted({name.rpartition("/")[0] for name in sample.names if name.startswith("plain/")})
    for folder in folders[outcome.flip.offset % _FOLDERS_STEP :: _FOLDERS_STEP]:
        with _reported(outcome):
            await lake.put(f"{folder}/{WRITTEN}", b"content")
            await lake.remove(f"{folder}/{WRITTEN}")
    with _reported(outcome):
        await store.metadata.sync()


@contextmanager
def _reported(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except LakeError as error:
        outcome.reported = outcome.reported or f"refused: {error.message}"


async def _second_life(sample: Sample, data: Path, outcome: Outcome) -> None:
    """Open the store again, and check that what was written over the flip has harmed nothing."""
    async with opened(data) as (store, client, lake):
        await _wait_walked(store)
        await _compare(sample, client, lake, outcome, walk_ended=True)
        await _check(store, outcome, "")


async def _wait_walked(store: Store) -> None:
    with trio.move_on_after(_WALK_S):
        await store.index_looked_at.wait()


async def _check(store: Store, outcome: Outcome, found: str) -> None:
    report = await store.check(full=True)
    told = [finding for finding in report["findings"] if "gc frees" not in finding["message"]]
    codes = {finding["code"] for finding in told}
    if not codes <= CODES.get(outcome.flip.place, codes):
        outcome.wrong = outcome.wrong or f"fsck calls it {sorted(codes)}"
    outcome.reported = outcome.reported or found or (f"fsck: {told[0]}" if told else "")


async def _compare(
    sample: Sample, client: EmbeddedEngine, lake: TrioLake, outcome: Outcome, *, walk_ended: bool
) -> None:
    answers = await ask_everything(client, lake, sample.names)
    for question, expected in sample.expected.items():
        answer = answers[question]
        if outcome.flip.is_mended:
            expected, answer = but_for_writing(expected), but_for_writing(answer)
        mended = walk_ended and outcome.flip.is_mended
        problem = problem_of(expected, answer, mended=mended)
        if problem:
            outcome.wrong = outcome.wrong or f"{question}: {problem} (walk ended: {walk_ended})"
            return


def _be_quiet(said: list[str]) -> None:
    """Keep what the engine logs as a warning or worse, and let the walk run without pauses."""
    engine.tables.index_check._WALK_PAUSE_S = 0.0  # type: ignore[misc]

    def keep(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if method in ("warning", "error", "critical", "exception") and "was copied" not in str(event):
            said.append(f"log: {event}"[:300])
        raise structlog.DropEvent

    structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
