"""The trials of `lake bench`, and their timing: each runs for a bounded time on content of its own.

A trial prepares itself, uncounted, and returns one call.  The call is made once to warm up, then repeated until the
time is over or `BYTES_MAX` have been stored.  Contents are incompressible and all different, so nothing is stored
twice.  All objects are in one bucket of this bench; `Ground.clean` removes it.  A LakeError is the trial's result and
does not end the other trials; a trial that needs a feature this machine lacks is left out.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from cli.bench.temporary_mount import temporary_mount, what_mounting_lacks
from lakefs.client.facade import driver_of
from lakefs.errors import LakeError, LocalFileError
from lakefs.histogram import Histogram
from lakefs.names import parse_object_name
from lakefs.steps.steps import send
from lakefs.wire.messages import Locate

if TYPE_CHECKING:
    from cli.terminal.target import Target
    from lakefs.client.blocking.lake import Lake

T = TypeVar("T")
KIB: Final = 1 << 10
MIB: Final = 1 << 20
SMALL: Final = 4 * KIB
BLOCK: Final = 64 * KIB
LARGE: Final = 64 * MIB
BATCH: Final = 256
"""Objects of one `put_many`."""
BLOCKS: Final = 16
"""Objects of one `get_many_into`."""
CHUNKS: Final = 64
"""Chunks of one Locate."""
HOT: Final = 256
"""Objects that reads take in turn."""
BYTES_MAX: Final = 1 << 30
"""Most bytes that one trial stores."""
REMOVED_TOGETHER: Final = 1000

Call = Callable[[], int]
"""One call; returns the bytes of content that it moved."""


class Content:
    """Bytes unlike any others: a random block, with a stamp in each MiB that is never repeated."""

    def __init__(self) -> None:
        self._random = os.urandom(MIB)
        self._run = os.urandom(8)
        self._numbers = itertools.count()

    def make(self, size: int) -> bytearray:
        """Return `size` bytes, at least 16."""
        content = bytearray(self._random * -(-size // MIB))[:size]
        self.renew(content)
        return content

    def renew(self, content: bytearray) -> None:
        """Make every MiB of it a new one."""
        for offset in range(0, len(content), MIB):
            content[offset : offset + 16] = self._run + next(self._numbers).to_bytes(8, "little")


@dataclass
class Ground:
    """The place where trials work: a lake, and a bucket of their own."""

    lake: Lake
    target: Target | None = None
    """Address of the engine for another process; None if no other process can reach it."""
    bucket: str = field(default_factory=lambda: f"lake-bench-{os.urandom(6).hex()}")
    content: Content = field(default_factory=Content)
    held: ExitStack = field(default_factory=ExitStack)
    """Resources that a trial holds until it is over."""
    _keys: set[str] = field(default_factory=set)

    def name(self, key: str) -> str:
        """Return the name of an object, which `clean` will remove."""
        self._keys.add(key)
        return f"{self.bucket}/{key}"

    def clean(self) -> None:
        """Remove the objects and the bucket; the engine's next gc frees their room."""
        names = [parse_object_name(f"{self.bucket}/{key}") for key in sorted(self._keys)]
        driver = driver_of(self.lake)
        for start in range(0, len(names), REMOVED_TOGETHER):
            driver.run(driver.steps.remove_many(names[start : start + REMOVED_TOGETHER]))
        self._keys.clear()
        if self.bucket in [str(found.name) for found in self.lake.buckets()]:
            self.lake.remove_bucket(self.bucket)


@dataclass(frozen=True)
class Trial:
    """`prepare` returns the call.  `operations`: operations in one call.  `stores`: each call stores new content."""

    name: str
    what: str
    prepare: Callable[[Ground], Call]
    operations: int = 1
    stores: bool = False
    lacks: Callable[[Ground], str] = lambda ground: ""
    """Returns the feature that this machine lacks for the trial, in words; empty if there is none."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.  `engine_cpu_s`: None if the engine is not a process of ours.

    `left_out`: the missing feature, if it was not tried; `could_not_run`: the error it failed with.
    """

    trial: Trial
    calls: int = 0
    moved_bytes: int = 0
    elapsed_s: float = 0.0
    latencies: Histogram = field(default_factory=Histogram)
    engine_cpu_s: float | None = None
    could_not_run: str = ""
    left_out: str = ""

    @property
    def operations_per_s(self) -> float:
        """Objects, or requests, per second."""
        return self.calls * self.trial.operations / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of content per second."""
        return self.moved_bytes / self.elapsed_s if self.elapsed_s else 0.0

    def percentile_us(self, share: float) -> float:
        """Return a percentile of the calls' latency; 0 without calls."""
        return self.latencies.percentile_ns(share) / 1e3 if self.calls else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the figures by name."""
        told = {"name": self.trial.name, "what": self.trial.what}
        if self.could_not_run:
            return {**told, "could_not_run": self.could_not_run}
        if self.left_out:
            return {**told, "left_out": self.left_out}
        cpu = {}
        if self.engine_cpu_s is not None:
            cpu["engine_cpu_us"] = self.engine_cpu_s * 1e6 / max(1, self.calls * self.trial.operations)
        return {
            **told,
            "calls": self.calls,
            "operations_per_s": self.operations_per_s,
            "bytes_per_s": self.bytes_per_s,
            "p50_us": self.percentile_us(0.5),
            "p99_us": self.percentile_us(0.99),
            "p999_us": self.percentile_us(0.999),
            **cpu,
        }


def run_trials(
    ground: Ground, trials: Sequence[Trial], seconds: float, engine_pid: int | None = None
) -> Iterator[Outcome]:
    """Run each trial in turn, for `seconds` each."""
    for trial in trials:
        if lacking := trial.lacks(ground):
            yield Outcome(trial, left_out=lacking)
            continue
        try:
            with ground.held:
                outcome = _run(ground, trial, seconds, engine_pid)
        except LakeError as error:
            outcome = Outcome(trial, could_not_run=error.message)
        yield outcome


def _run(ground: Ground, trial: Trial, seconds: float, engine_pid: int | None) -> Outcome:
    call = trial.prepare(ground)
    call()
    latencies, calls, moved_bytes = Histogram(), 0, 0
    clock = time.perf_counter_ns
    cpu_s = process_cpu_s(engine_pid)
    begin = last = clock()
    end = begin + int(seconds * 1e9)
    while last < end and not (trial.stores and moved_bytes >= BYTES_MAX):
        moved_bytes += call()
        now = clock()
        latencies.record(now - last)
        calls, last = calls + 1, now
    spent_s = process_cpu_s(engine_pid) - cpu_s
    return Outcome(trial, calls, moved_bytes, (last - begin) / 1e9, latencies, None if engine_pid is None else spent_s)


def process_cpu_s(pid: int | None) -> float:
    """Return a process's user and system time so far, by Linux's clock of the process (clock_getcpuclockid(3))."""
    return 0.0 if pid is None else time.clock_gettime(~pid << 3 | 2)


def _put_many(ground: Ground) -> Call:
    numbers = itertools.count()
    template = ground.content.make(SMALL)

    def call() -> int:
        objects = []
        for _ in range(BATCH):
            ground.content.renew(template)
            objects.append((ground.name(f"put-many/{next(numbers):07}"), bytes(template)))
        ground.lake.put_many(objects, create_bucket=True)
        return BATCH * SMALL

    return call


def _putting(size: int) -> Callable[[Ground], Call]:
    """Put new content under a few names in turn."""

    def prepare(ground: Ground) -> Call:
        numbers = itertools.cycle(range(4))
        content = ground.content.make(size)

        def call() -> int:
            ground.content.renew(content)
            ground.lake.put(ground.name(f"put/{size}/{next(numbers)}"), memoryview(content), create_bucket=True)
            return size

        return call

    return prepare


def _filled(ground: Ground, size: int, count: int) -> list[str]:
    """Store objects to read; returns their names."""
    names = [ground.name(f"get/{size}/{number:04}") for number in range(count)]
    ground.lake.put_many([(name, bytes(ground.content.make(size))) for name in names], create_bucket=True)
    return names


def _get_small(ground: Ground) -> Call:
    names = itertools.cycle(_filled(ground, SMALL, HOT))
    return lambda: len(ground.lake.get(next(names)))


def _get_blocks(ground: Ground) -> Call:
    groups, buffers = _groups(_filled(ground, BLOCK, HOT))
    return lambda: sum(ground.lake.get_many_into(next(groups), buffers))


def _groups(items: Sequence[T]) -> tuple[Iterator[Sequence[T]], list[bytearray]]:
    """Return an endless cycle of groups, one per call, and the buffers for the blocks of one group."""
    groups = [items[start : start + BLOCKS] for start in range(0, len(items), BLOCKS)]
    return itertools.cycle(groups), [bytearray(BLOCK) for _ in range(BLOCKS)]


def _put_shared(ground: Ground) -> Call:
    """Put from memory that the engine copies itself."""
    memory = ground.held.enter_context(ground.lake.shared_memory(BLOCKS * MIB))
    slots = [memory.slot(number * MIB, MIB) for number in range(BLOCKS)]
    content = ground.content.make(MIB)
    objects = [(ground.name(f"shared/{number}"), slot) for number, slot in enumerate(slots)]

    def call() -> int:
        for slot in slots:
            ground.content.renew(content)
            slot.buffer[:] = content
        ground.lake.put_many(objects, create_bucket=True)
        return BLOCKS * MIB

    return call


def _get_id(ground: Ground) -> Call:
    chunks = itertools.cycle(_chunks(ground, HOT))
    buffer = bytearray(BLOCK)
    return lambda: ground.lake.chunks.get_into(next(chunks), buffer)


def _get_ids(ground: Ground) -> Call:
    groups, buffers = _groups(_chunks(ground, HOT))
    return lambda: sum(ground.lake.chunks.get_many_into(next(groups), buffers))


def _chunks(ground: Ground, count: int) -> list[bytes]:
    """Return ids of chunks of 64 KiB, each the whole content of an object."""
    return [bytes(ground.lake.stat(name).blob) for name in _filled(ground, BLOCK, count)]


def _get_large(ground: Ground) -> Call:
    name = ground.name("get/large")
    ground.lake.put(name, memoryview(ground.content.make(LARGE)), create_bucket=True)
    buffer = bytearray(LARGE)
    return lambda: ground.lake.get_into(name, buffer)


def _read_mounted(ground: Ground) -> Call:
    """Read from beginning to end, and again; the kernel's cached pages are dropped in between."""
    assert ground.target is not None, "nothing was lacking"
    ground.lake.put(ground.name("mounted"), memoryview(ground.content.make(LARGE)), create_bucket=True)
    folder = ground.held.enter_context(temporary_mount(ground.target, ground.bucket))
    file = ground.held.enter_context((folder / "mounted").open("rb", buffering=0))
    buffer = bytearray(MIB)

    def call() -> int:
        try:
            if not (count := file.readinto(buffer)):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                count = file.readinto(buffer)
        except OSError as error:
            raise LocalFileError(f"{folder}: {error.strerror}", subject=str(folder)) from error
        return count

    return call


def _mounting_lacks(ground: Ground) -> str:
    if ground.target is None:
        return "a mount needs an engine that serves (--server)"
    return what_mounting_lacks()


def _stat(ground: Ground) -> Call:
    [name] = _filled(ground, SMALL, 1)

    def call() -> int:
        ground.lake.stat(name)
        return 0

    return call


def _locate(ground: Ground) -> Call:
    chunks, driver = _chunks(ground, CHUNKS), driver_of(ground.lake)

    def call() -> int:
        driver.run(send(Locate(chunks)))
        return 0

    return call


TRIALS: Final[tuple[Trial, ...]] = (
    Trial("put-small", f"put of 4 KiB, durable, {BATCH} in a call", _put_many, BATCH, stores=True),
    Trial("put-one", "put of 4 KiB, durable, one by one", _putting(SMALL), stores=True),
    Trial("put-large", "put of 64 MiB, durable", _putting(LARGE), stores=True),
    Trial("put-shared", f"put of {BLOCKS} x 1 MiB, durable, from shared memory", _put_shared, BLOCKS, stores=True),
    Trial("get-small", "get of 4 KiB by name, one by one", _get_small),
    Trial("get-many", f"get of {BLOCKS} x 64 KiB in a call, into buffers", _get_blocks, BLOCKS),
    Trial("get-large", "get of 64 MiB into a buffer", _get_large),
    Trial("get-id", "get of 64 KiB by chunk id, one by one", _get_id),
    Trial("get-ids", f"get of {BLOCKS} x 64 KiB by chunk id in a call", _get_ids, BLOCKS),
    Trial("stat", "stat of one name: a round trip", _stat),
    Trial("locate", f"locate of {CHUNKS} chunks in a call", _locate, CHUNKS),
    Trial(
        "mount-read", "sequential read of 64 MiB through a mount, 1 MiB in a call", _read_mounted, lacks=_mounting_lacks
    ),
)
"""In the order in which they run."""
