"""Profiles of working processes: samples of their stacks, taken by py-spy from outside.

py-spy is installed by package name and kept beside the peers (`bench.peers.packages`).  It sees Python and compiled
frames, needs the right to trace (root, or kernel.yama.ptrace_scope of 0), and slows the process: a profile is taken
apart from the rounds that count.  Samples are folded stacks, `outermost;...;innermost count`, the input of flame
graphs (Brendan Gregg).  Threads that wait for work are left out; threads that wait for an answer are not.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.peers.packages import Package, last_line, pip_install

VERSION: Final = "0.4.1"
PY_SPY: Final = Package("py-spy", VERSION, "BENCH_PY_SPY", pip_install(f"py-spy=={VERSION}"))
RATE: Final = 200
"""Samples per second."""
PROFILE_S: Final = 4.0
WAIT_S: Final = 30.0
KEPT_SHARE: Final = 0.002
"""Share of all samples; rarer stacks are left out."""

IDLE: Final = ("PyThread_acquire_lock_timed ", "epoll_wait ", "select_epoll_poll ")
"""Tip frames of a thread that has nothing to do."""


class NoProfile(Exception):
    """No profile could be taken; the text says why."""


def profiled(roles: Mapping[str, Sequence[int]], work: Callable[[], object], fetch: bool) -> dict[str, dict[str, int]]:
    """Return folded stacks of each role's processes while the work is repeated.  NoProfile, PeerUnavailable."""
    program = PY_SPY.folder(fetch=fetch) / "bin" / "py-spy"
    with TemporaryDirectory(prefix="lake-bench-") as folder:
        spies = {
            (role, pid): _spy(program, pid, Path(folder) / str(pid)) for role, pids in roles.items() for pid in pids
        }
        end_s = time.monotonic() + PROFILE_S
        while time.monotonic() < end_s:
            work()
        found: dict[str, Counter[str]] = {role: Counter() for role in roles}
        for (role, pid), spy in spies.items():
            found[role].update(_collected(spy, Path(folder) / str(pid)))
    return {role: pruned(stacks) for role, stacks in found.items() if stacks}


def _spy(program: Path, pid: int, target: Path) -> subprocess.Popen[str]:
    command = [str(program), "record", "--native", "--format", "raw", "--rate", str(RATE)]
    command += ["--duration", str(round(PROFILE_S)), "--output", str(target), "--pid", str(pid)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "dumb"}
    )


def _collected(spy: subprocess.Popen[str], target: Path) -> Counter[str]:
    _, said = spy.communicate(timeout=WAIT_S)
    if spy.returncode or not target.exists():
        raise NoProfile(f"py-spy: {last_line(said)}")
    return folded(target.read_text().splitlines())


def folded(lines: Iterable[str]) -> Counter[str]:
    """Return samples by stack, frames without line numbers and addresses, and without idle threads."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = [named for frame in stack.split(";") if (named := _named(frame))]
        if frames and not frames[-1].startswith(IDLE):
            found[";".join(frames)] += int(count)
    return found


def _named(frame: str) -> str:
    """Return `Reads.open (engine/requests/open.py:107)` without the line number; empty for an address."""
    if frame.startswith("0x"):
        return ""
    name, place, rest = frame.partition(" (")
    return f"{name} ({rest.rstrip(')').partition(':')[0]})" if place else name


def pruned(stacks: Mapping[str, int]) -> dict[str, int]:
    """Return the stacks without those too rare to be seen."""
    least = KEPT_SHARE * sum(stacks.values())
    return {stack: count for stack, count in sorted(stacks.items()) if count >= least}


def shares(stacks: Mapping[str, int], most: int) -> list[tuple[str, float, float]]:
    """Return (function, share of samples with it, share of samples in it itself), ranked by the latter, the first
    `most`."""
    total = sum(stacks.values())
    inside: Counter[str] = Counter()
    itself: Counter[str] = Counter()
    for stack, count in stacks.items():
        frames = stack.split(";")
        itself[frames[-1]] += count
        inside.update(dict.fromkeys(frames, count))
    ranked = sorted(itself, key=lambda frame: -itself[frame])[:most]
    return [(frame, inside[frame] / total, itself[frame] / total) for frame in ranked]


def below_all(stacks: Mapping[str, int]) -> dict[str, int]:
    """Return the stacks without the frames that all begin with: they only show how the process was started."""
    levels = zip(*(stack.split(";") for stack in stacks), strict=False)
    common = sum(1 for _ in takewhile(lambda frames: len(set(frames)) == 1, levels))
    return {";".join(stack.split(";")[common:]) or stack: count for stack, count in stacks.items()}


Box = tuple[int, float, float, str]
"""(depth, begin, width, frame); begin and width are shares of all samples."""


def boxes(stacks: Mapping[str, int]) -> Iterator[Box]:
    """Yield the boxes of a flame graph: a frame is as wide as the samples that have it there; callers lie below."""
    total = sum(stacks.values())
    split = sorted((stack.split(";"), count) for stack, count in stacks.items())
    depth = max((len(frames) for frames, _ in split), default=0)
    for level in range(depth):
        begin = position = 0
        current: list[str] = []
        for frames, count in [*split, ([], 0)]:
            here = frames[: level + 1] if len(frames) > level else []
            if here != current:
                if current:
                    yield level, begin / total, (position - begin) / total, current[-1]
                current, begin = here, position
            position += count
