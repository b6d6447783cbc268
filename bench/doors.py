"""`python -m bench.doors`: the number of product files that one operation enters, and its calls from file to file.

Three operations: a put of 1 KB by the blocking client, a signed S3 GET of 1 KB, a read of 1 KB through the mount;
each on a warm store, in every process that takes part, by `sys.setprofile`.  A call counts if caller and callee are
in two files of the product; so does the resumption of a coroutine or generator.  Of several runs, the one with the
fewest calls is printed: the others include background work.

The first two operations have two rows each: for a stranger, who comes after a pause of 1.5 s, and for somebody who
comes back after 0.25 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import boto3
from botocore.config import Config

import lakefs
from bench.harness.process import ROOT, clean_environment

PACKAGES: Final = ("lakefs", "engine", "gateway", "fuse", "cli")
RUNS: Final = 5
WARM_UP: Final = 3
STRANGER_S: Final = 1.5
"""A pause after which what the engine keeps for a second is old: keys, its view of the index."""
COMES_BACK_S: Final = 0.25
"""A pause in which an operation's work after its answer ends."""
_TRACED: Final = "from bench.doors import traced; traced()"

_PAUSES: Final = (("a stranger", STRANGER_S), ("back after 0.25 s", COMES_BACK_S))

Pair = tuple[str, str]


class Doors:
    """Counts calls between files of the product in this process, while `is_open`."""

    def __init__(self) -> None:
        self.is_open = False
        self.calls: Counter[Pair] = Counter()
        self._names: dict[str, str | None] = {}

    def install(self) -> None:
        """Watch the calls of this thread and of threads that start later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_open or event != "call":
            return
        called = self._name(frame.f_code.co_filename)
        if called is None:
            return
        caller = frame.f_back
        while caller is not None and (name := self._name(caller.f_code.co_filename)) is None:
            caller = caller.f_back
        self.calls[("" if caller is None else name or "", called)] += 1

    def _name(self, path: str) -> str | None:
        if path not in self._names:
            inside = os.path.relpath(path, ROOT) if path.startswith(str(ROOT)) else ""
            self._names[path] = inside if inside.split(os.sep)[0] in PACKAGES else None
        return self._names[path]


def traced() -> None:
    """Run `lake` with calls counted: SIGUSR1 starts counting, SIGUSR2 writes the counts to the first argument."""
    target = Path(sys.argv.pop(1))
    doors = Doors()

    def begin(*_: Any) -> None:
        doors.calls.clear()
        doors.is_open = True

    def end(*_: Any) -> None:
        doors.is_open = False
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps([[*pair, count] for pair, count in doors.calls.items()]))
        partial.rename(target)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    doors.install()
    from cli.main import main

    main()


class Traced:
    """A process of `lake` whose calls are counted."""

    def __init__(self, folder: Path, ready: str, *arguments: str) -> None:
        self._target = folder / f"{arguments[0]}.json"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRACED, str(self._target), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment(),
        )
        assert self._process.stdout is not None
        self.printed: list[str] = []
        for line in self._process.stdout:
            self.printed.append(line.rstrip("\n"))
            if ready in line:
                return
        raise RuntimeError(f"{arguments[0]} ended with {self._process.wait()}")

    def begin(self) -> None:
        """Start counting."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)

    def end(self) -> Counter[Pair]:
        """Stop counting; return the counts."""
        self._process.send_signal(signal.SIGUSR2)
        while not self._target.exists():
            time.sleep(0.01)
        seen = json.loads(self._target.read_text())
        self._target.unlink()
        return Counter({(caller, called): count for caller, called, count in seen})

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.read()
        self._process.wait()


@contextmanager
def running(folder: Path, ready: str, *arguments: str) -> Iterator[Traced]:
    """Context manager: a traced process for the block."""
    process = Traced(folder, ready, *arguments)
    try:
        yield process
    finally:
        process.stop()


def counted(
    operation: Callable[[], object], processes: Sequence[Traced], own: Doors | None, pause_s: float = STRANGER_S
) -> Counter[Pair]:
    """Return the calls between files that one operation makes after a pause, in the run that makes the fewest."""
    for _ in range(WARM_UP):
        operation()
    found: list[Counter[Pair]] = []
    for _ in range(RUNS):
        time.sleep(pause_s)
        for process in processes:
            process.begin()
        if own is not None:
            own.calls.clear()
            own.is_open = True
        operation()
        if own is not None:
            own.is_open = False
        time.sleep(0.1)
        seen = sum((process.end() for process in processes), Counter())
        found.append(seen + own.calls if own is not None else seen)
    return min(found, key=lambda calls: calls.total())


def row(what: str, calls: Counter[Pair], *, shows_files: bool) -> str:
    """Return one line of the table."""
    between = sum(count for (caller, called), count in calls.items() if caller and caller != called)
    files = {name for pair in calls for name in pair if name}
    entered = Counter[str]()
    for (_, called), count in calls.items():
        entered[called] += count
    listed = "".join(f"\n    {entered[name]:>4} {name}" for name in sorted(files)) if shows_files else ""
    return f"{what:<34} {len(files):>6} {between:>18}{listed}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors", description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="list the files, too, each with the calls that enter it")
    shows_files = parser.parse_args().files
    own = Doors()
    own.install()
    content = os.urandom(1000)
    print(f"{'operation':<34} {'files':>6} {'calls file to file':>18}")
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".doors-") as name, ExitStack() as stack:
        folder = Path(name)
        socket = f"/tmp/lake-doors-{os.getpid()}.sock"
        flags = ("--data", str(folder / "store"), "--socket", socket, "--admin", "off", "--log-level", "error")
        engine = stack.enter_context(running(folder, "ready", "serve", *flags, "--s3", "127.0.0.1:0"))
        server = f"unix:{socket}"
        with lakefs.connect(server) as lake:
            lake.create_bucket("doors")
            numbers = iter(range(1 << 20))
            for what, pause_s in _PAUSES:
                puts = counted(lambda: lake.put(f"doors/{next(numbers)}", content), [engine], own, pause_s)
                print(row(f"put of 1 KB, {what}", puts, shows_files=shows_files))
            key = lake.create_access_key()
        address = next(line.split()[1] for line in engine.printed if line.startswith("s3 "))
        s3 = boto3.client(
            "s3",
            endpoint_url=address,
            region_name="us-east-1",
            aws_access_key_id=key.access_key,
            aws_secret_access_key=key.secret_key,
            config=Config(retries={"max_attempts": 1}),
        )
        for what, pause_s in _PAUSES:
            gets = counted(lambda: s3.get_object(Bucket="doors", Key="0")["Body"].read(), [engine], None, pause_s)
            print(row(f"S3 GET of 1 KB, {what}", gets, shows_files=shows_files))
        point = folder / "lake"
        point.mkdir()
        mount_flags = ("--server", server, "mount", "--foreground", str(point))
        mount = stack.enter_context(running(folder, str(point), *mount_flags))
        reads = counted((point / "doors" / "0").read_bytes, [engine, mount], None)
        print(row("read of 1 KB, mounted", reads, shows_files=shows_files))


if __name__ == "__main__":
    main()
