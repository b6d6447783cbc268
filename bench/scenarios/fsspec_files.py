"""Programs that use fsspec: `lake://` beside `file://` on the same disk, and beside s3fs on our own gateway.

Every side is a process that does the same calls on the same content (`bench.peers.fsspec_worker`).  What is read is in
memory on all sides.  Ours checks every byte; `file://` checks none, so it is also shown with the check of ours beside
it.  What is written is durable when the call returns: files are synced.

A checkpoint is saved by torch.distributed.checkpoint, all of it new, and once more, uncounted, with 5% changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness.content import WINDOW_MAX, window
from bench.harness.contest import CouldNotRun
from bench.harness.measure import Bench, Scenario, at_least, at_most
from bench.harness.process import ROOT, EngineProcess, clean_environment
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from bench.peers.fio import Job, fio
from bench.peers.packages import S3FS, PeerUnavailable, last_line
from bench.peers.s3_sides import ours as gateway

MIB: Final = 1 << 20
BIG: Final = 256 * MIB
CHECKPOINT: Final = 2048 * MIB
CHANGED_SHARE: Final = 0.05
PLUGINS: Final = ROOT / ".venv-plugins" / "bin" / "python"
END_S: Final = 60.0

FILE: Final = "file://"
CHECKED: Final = "file://, CRC32C"
S3: Final = "s3fs, our gateway"
FIO: Final = "fio, 4 MiB, O_DIRECT"
CPU: Final = "client_cpu_us"
RATE: Final = "bytes_per_s"
NEW: Final = "new / changed bytes"
COMPARED: Final[dict[str, Sequence[str]]] = {
    "read": (FILE, CHECKED, S3),
    "ranges": (FILE, CHECKED, S3),
    "small": (FILE, S3),
    "get": (FILE, S3),
}
"""The other sides of each order of the worker."""


class FsspecWorker:
    """The process of a side.  CouldNotRun if it cannot do its work."""

    def __init__(self, folder: Path, protocol: str, root: str, *, python: str = sys.executable, **spec: Any) -> None:
        self._log = folder / f"{protocol}-{id(self):x}.log"
        packages = [str(spec.pop("packages"))] if "packages" in spec else []
        environment = clean_environment()
        environment["PYTHONPATH"] = ":".join([environment["PYTHONPATH"], *packages])
        if protocol == "lake":  # for libraries that take a URL and no options
            environment["LAKE_SERVER"] = spec["options"]["server"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "bench.peers.fsspec_worker"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        try:
            self._tell({"protocol": protocol, "root": root, "options": {}, "is_checked": False} | spec)
        except CouldNotRun:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def do(self, what: str, **arguments: Any) -> tuple[float, Any]:
        """Send an order; return the seconds that it took, and what it returned."""
        return self._tell({"do": what} | arguments)

    def _tell(self, order: dict[str, Any]) -> tuple[float, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            said = last_line(self._log.read_text(errors="replace")) or f"exit code {self._process.poll()}"
            raise CouldNotRun(f"its process ended: {said}")
        found = json.loads(answer)
        if found["failed"]:
            raise CouldNotRun(found["failed"])
        return float(found["elapsed_s"]), found["result"]

    def end(self) -> None:
        """Let it end, and wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def write_content(path: Path, size: int) -> None:
    """Write a file of bytes unlike any other's."""
    with path.open("wb") as file:
        for at in range(0, size, WINDOW_MAX):
            file.write(window(min(WINDOW_MAX, size - at)))


@contextmanager
def file_sides(what: str, bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: one order, done by each side; `what` is a method of the worker."""
    size = bench.scale.pick(BIG, 2 * MIB)
    source = bench.folder / "source"
    write_content(source, size)
    with ExitStack() as stack:
        engine = stack.enter_context(EngineProcess(bench.folder))
        with engine.connect():
            pass  # makes the bucket

        @contextmanager
        def entered(protocol: str, root: str, servers: Callable[[], Sequence[int]], **spec: Any) -> Iterator[Side]:
            worker = FsspecWorker(bench.folder, protocol, root, **spec)
            try:
                worker.do("fill", source=str(source))
                order = {"target": str(bench.folder / f"got-{protocol}")} if what == "get" else {}

                def run() -> Run:
                    elapsed_s, moved = worker.do(what, **order)
                    return Run(1, moved, elapsed_s=elapsed_s)

                yield Side(run, servers=servers, clients=lambda: [worker.pid])
            finally:
                worker.end()

        @contextmanager
        def s3() -> Iterator[Side]:
            try:
                packages = S3FS.folder(fetch=not bench.scale.quick)
            except PeerUnavailable as reason:
                raise CouldNotRun(str(reason)) from reason
            with gateway(bench.folder / "gateway") as server:
                options = {
                    "endpoint_url": f"http://{server.endpoint.host}",
                    "key": server.endpoint.access_key,
                    "secret": server.endpoint.secret_key,
                }
                with entered("s3", "bench", server.pids, options=options, packages=packages) as side:
                    yield side

        (bench.folder / "files").mkdir()
        (bench.folder / "checked").mkdir()
        sides: dict[str, Callable[[], AbstractContextManager[Side]]] = {
            FILE: partial(entered, "file", str(bench.folder / "files"), list),
            CHECKED: partial(entered, "file", str(bench.folder / "checked"), list, is_checked=True),
            S3: s3,
        }
        lake = partial(entered, "lake", "bench", lambda: [engine.pid], options={"server": engine.address})
        yield [Entrant(OURS, lake), *(Entrant(name, sides[name]) for name in COMPARED[what])]


@contextmanager
def checkpoint_sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: a checkpoint saved into the lake, and into a local folder; and fio, which writes as many
    bytes."""
    if not PLUGINS.exists():
        raise CouldNotRun("there is no torch: make plugins")
    size = bench.scale.pick(CHECKPOINT, 64 * MIB)
    (bench.folder / "files").mkdir()

    @contextmanager
    def saving(
        protocol: str, root: str, servers: Callable[[], Sequence[int]], options: dict[str, Any]
    ) -> Iterator[Side]:
        worker = FsspecWorker(bench.folder, protocol, root, python=str(PLUGINS), options=options)
        noted: dict[str, float] = {}
        try:
            worker.do("tensors", size_bytes=size)
            worker.do("save")

            def prepare() -> None:
                if protocol == "lake":
                    _, changed = worker.do("change", share=CHANGED_SHARE)
                    _, new_bytes = worker.do("save")
                    noted[NEW] = new_bytes / changed
                worker.do("change", share=1.0)
                worker.do("collect")

            def run() -> Run:
                elapsed_s, new_bytes = worker.do("save")
                if protocol == "lake" and new_bytes < size:
                    raise CouldNotRun(f"{new_bytes} bytes were new, of {size} that were changed")
                return Run(1, size, elapsed_s=elapsed_s, stored_bytes=size, more=noted)

            yield Side(run, prepare, servers, lambda: [worker.pid])
            if worker.do("loads")[1] is not True:
                raise CouldNotRun("what was loaded is not what was saved")
        finally:
            worker.end()

    @contextmanager
    def plain_writes() -> Iterator[Side]:
        path = bench.folder / "fio"
        job = Job("write", 4 * MIB, size, sync_each=size // (4 * MIB))
        yield Side(fio(path, job), lambda: path.unlink(missing_ok=True))

    with EngineProcess(bench.folder) as engine:
        with engine.connect():
            pass  # makes the bucket
        yield [
            Entrant(OURS, partial(saving, "lake", "bench", lambda: [engine.pid], {"server": engine.address})),
            Entrant(FIO, plain_writes),
            Entrant(FILE, partial(saving, "file", str(bench.folder / "files"), list, {})),
        ]


def _scenario(what: str, title: str, expected_s: float, *targets: Target) -> Sampled:
    return Sampled(
        f"fsspec-{what}", title, RATE, partial(file_sides, what), ALONE, expected_s, targets, disk_bytes=8 * BIG
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _scenario(
        "read",
        "fsspec: open, read 256 MiB by 1 MiB",
        15,
        Target(CPU, at_most(4, "x"), FILE),
        Target(CPU, at_most(2, "x"), CHECKED),
        Target(RATE, at_least(2, "x"), S3),
    ),
    _scenario(
        "ranges",
        "fsspec: cat_ranges of 64 x 64 KiB",
        12,
        Target(CPU, at_most(3, "x"), FILE),
        Target(RATE, at_least(2, "x"), S3),
    ),
    _scenario(
        "small",
        "fsspec: cat of 200 x 4 KiB",
        12,
        Target(RATE, at_least(1, "x"), FILE),
        Target(RATE, at_least(5, "x"), S3),
    ),
    _scenario(
        "get",
        "fsspec: get of 256 MiB into a file",
        20,
        Target(CPU, at_most(2.5, "x"), FILE),
        Target(RATE, at_least(1.5, "x"), S3),
    ),
    Sampled(
        "fsspec-dcp",
        "torch.distributed.checkpoint: save of 2 GiB, all of it new",
        RATE,
        checkpoint_sides,
        "the same program saves into a local folder in turn",
        45,
        (Target(RATE, at_least(0.6, "x"), FIO), Target(NEW, at_most(1.3, "x"))),
        disk_bytes=8 * CHECKPOINT,
    ),
)
