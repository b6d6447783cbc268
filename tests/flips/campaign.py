"""Single bits turned over anywhere in a small store, which is then opened and asked everything.

Each flip has a copy of the store.  A child process opens it as `lake serve` would, asks everything at once and again
when the walk behind start-up has ended, scrubs, runs fsck, writes a little, and asks and checks once more.  A child
that a signal ends (LMDB trusts its pages) is started again, as a service manager would.

- Wrong bytes or metadata are never served; an error is fine.  "Not found" counts once the walk has ended.
- A flip in a live byte is reported: by a refused start, a rebuilt index, scrub or fsck.
"""

from __future__ import annotations

import bisect
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
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import structlog
import trio

import engine.metadata
from engine.embedded import EmbeddedEngine
from engine.store import Store
from lakefs.client.trio_lake import TrioLake
from lakefs.errors import LakeError
from lakefs.wire import messages as m
from tests.flips.answers import Answers, ask_everything, names_of, problem_of
from tests.flips.places import Span, spans_of
from tests.flips.samples import make_killed, make_stopped, opened
from tests.store_rig import records

MEMORY_FOLDER: Final = Path("/dev/shm")
STARTS_MAX: Final = 4
CHILD_S: Final = 30
SAMPLES: Final = {"stopped": make_stopped, "killed": make_killed}
_WALK_S: Final = 20.0


@dataclass(frozen=True)
class Sample:
    """A store, what it must answer, and where its bits lie, by place."""

    name: str
    folder: Path
    names: list[str]
    expected: Answers
    places: dict[str, list[Span]]


@dataclass(frozen=True)
class Flip:
    """One bit of one file."""

    sample: str
    place: str
    path: str
    offset: int
    bit: int
    live: bool


@dataclass
class Outcome:
    """What came of one flip.  `wrong` is empty when nothing wrong was served."""

    flip: Flip
    reported: str = ""
    wrong: str = ""
    starts: int = 1

    @property
    def failed(self) -> str:
        """Which promise was broken; empty: none."""
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
        """The tally, a line for each place."""
        yield f"{'place':<34}{'flips':>8}{'reported':>10}{'wrong':>7}{'live, not reported':>20}"
        for place in [*sorted(self.flips), "all"]:
            columns = [
                sum(counts.values()) if place == "all" else counts[place]
                for counts in (self.flips, self.reported, self.wrong, self.silent)
            ]
            silent = str(columns[3]) if place in self.live or place == "all" else "-"
            yield f"{place:<34}{columns[0]:>8}{columns[1]:>10}{columns[2]:>7}{silent:>20}"


def run_campaign(count: int, seed: int, jobs: int, only: str = "") -> Tally:
    """Flip `count` bits, in `jobs` processes; places are chosen evenly, so that small ones are met as often.

    `only`: in places whose name begins so.
    """
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as name,
        multiprocessing.get_context("fork").Pool(jobs) as pool,
    ):
        samples = {sample: pool.apply(_make_sample, (sample, Path(name))) for sample in SAMPLES}
        chosen = [choose(samples, random.Random(f"{seed}/{number}"), only) for number in range(count)]
        tasks = [(samples[flip.sample], flip, Path(name)) for flip in chosen]
        for outcome in pool.imap_unordered(_try, tasks, chunksize=4):
            tally.add(outcome)
    return tally


def choose(samples: dict[str, Sample], rng: random.Random, only: str = "") -> Flip:
    """A sample, a place in it, and any bit of that place."""
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
    shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)


def _try(task: tuple[Sample, Flip, Path]) -> Outcome:
    sample, flip, folder = task
    data = folder / f"flipped-{os.getpid()}"
    _copy(sample.folder, data)
    with (data / flip.path).open("r+b") as file:
        file.seek(flip.offset)
        byte = file.read(1)[0]
        file.seek(flip.offset)
        file.write(bytes([byte ^ 1 << flip.bit]))
    outcome = Outcome(flip)
    try:
        for outcome.starts in range(1, STARTS_MAX + 1):
            if _start(sample, data, outcome):
                return outcome
            outcome.reported = outcome.reported or "the process was ended by a signal"
        outcome.wrong = outcome.wrong or f"does not get over it in {STARTS_MAX} starts"
        return outcome
    finally:
        shutil.rmtree(data)


def _start(sample: Sample, data: Path, outcome: Outcome) -> bool:
    """One start in a child; False when a signal ended it."""
    told = data.with_name(data.name + ".told")
    told.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        signal.alarm(CHILD_S)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        found = Outcome(outcome.flip)
        try:
            _live(sample, data, found)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
            found.wrong = found.wrong or f"a bug: {type(error).__name__}: {error}"
        told.write_text(json.dumps([found.reported, found.wrong]))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGALRM:
            outcome.wrong = f"hangs for {CHILD_S} s"
            return True
        return False
    reported, wrong = json.loads(told.read_text())
    told.unlink()
    outcome.reported, outcome.wrong = outcome.reported or reported, outcome.wrong or wrong
    return True


def _live(sample: Sample, data: Path, outcome: Outcome) -> None:
    """Two lives of the store in this process."""
    said: list[str] = []
    _be_quiet(said)
    try:
        trio.run(_first_life, sample, data, outcome)
        if not outcome.wrong:
            trio.run(_second_life, sample, data, outcome)
    except LakeError as error:
        outcome.reported = outcome.reported or f"refused: {error.message}"
    outcome.reported = outcome.reported or "; ".join(said)


async def _first_life(sample: Sample, data: Path, outcome: Outcome) -> None:
    async with opened(data) as (store, client, lake):
        await _compare(sample, client, lake, outcome, walk_ended=False)
        await _wait_walked(store)
        await _compare(sample, client, lake, outcome, walk_ended=True)
        await store.scrubber.advance(_WALK_S, rate_bytes_per_s=0, restart=True)
        damaged = await store.damaged()
        await _check(store, outcome, f"scrub: {damaged[0]}" if damaged else "")
        try:
            for turn in range(2):  # the index takes pages from its free list
                names = [f"plain/new/{turn}/{number}" for number in range(40)]
                await lake.put_many([(name, name.encode()) for name in names])
                await client.call(m.DeleteNames([("plain", name.partition("/")[2]) for name in names]))
                await store.metadata.sync()
        except LakeError as error:
            outcome.reported = outcome.reported or f"refused: {error.message}"


async def _second_life(sample: Sample, data: Path, outcome: Outcome) -> None:
    """What was written over the flip has harmed nothing."""
    async with opened(data) as (store, client, lake):
        await _wait_walked(store)
        await _compare(sample, client, lake, outcome, walk_ended=True)
        await _check(store, outcome, "")


async def _wait_walked(store: Store) -> None:
    with trio.move_on_after(_WALK_S):
        while not store.index_verified:  # noqa: ASYNC110 - the engine has no event for it
            await trio.sleep(0.001)


async def _check(store: Store, outcome: Outcome, found: str) -> None:
    report = await store.check(full=True)
    told = [finding for finding in report["findings"] if "gc frees" not in finding["message"]]
    outcome.reported = outcome.reported or found or (f"fsck: {told[0]}" if told else "")


async def _compare(
    sample: Sample,
    client: EmbeddedEngine,
    lake: TrioLake,
    outcome: Outcome,
    *,
    walk_ended: bool,
) -> None:
    answers = await ask_everything(client, lake, sample.names)
    for question, expected in sample.expected.items():
        problem = problem_of(expected, answers[question], walk_ended=walk_ended)
        if problem:
            outcome.wrong = outcome.wrong or f"{question}: {problem} (walk ended: {walk_ended})"
            return


def _be_quiet(said: list[str]) -> None:
    """Keep what the engine logs as a warning or worse; and walk without pauses."""
    engine.metadata._VERIFY_PAUSE_S = 0.0  # type: ignore[misc]

    def keep(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if method in ("warning", "error", "critical", "exception") and "was copied" not in str(event):
            said.append(f"log: {event}"[:300])
        raise structlog.DropEvent

    structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG))
