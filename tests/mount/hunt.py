"""Looks for sequences that differ, each in a forked process, and shortens those that it finds.

A mount under test may kill a process that touches it (a mapping that answers with SIGBUS) or never answer.  So
sequences run in a forked child that is watched from outside, and a child that dies or hangs is a finding like any
other.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tests.mount.model import Difference, Ground, run
from tests.mount.steps import CHECK, SWITCH, Step, sequence

HANG_S: Final = 120.0
"""Most seconds for a sequence: it takes less than one, or a minute when it waits for two mounts to agree."""
SHORTENING_RUNS: Final = 500
SHORTENING_S: Final = 120.0
RACE_TRIES: Final = 15


@dataclass(frozen=True)
class Finding:
    """A sequence whose results differ from those on the local disk, and the first step that differs."""

    seed: int
    steps: tuple[Step, ...]
    what: str
    position: int

    def script(self) -> str:
        """Return a program that repeats it in a folder given to it, and prints the result of each step."""
        lines = [
            "import os, sys",
            "from tests.mount.place import Place, outcome",
            "place = Place(sys.argv[1])",
            "def step(call):",
            "    print(call, '->', repr(outcome(lambda: eval(call)))[:200])",
        ]
        for index, one in enumerate(self.steps):
            if index == self.position:
                lines.append(f"# here: {self.what}")
            lines.append(str(one) if one.call in (CHECK, SWITCH) else f"step({str(one)!r})")
        if self.position >= len(self.steps):
            lines.append(f"# after closing all: {self.what}")
        return "\n".join(line if line[:1] != "#" else line.replace("\n", "\n# ") for line in lines)


def hunt(seeds: Iterable[int], ground: Ground, label: str) -> Iterator[Finding | None]:
    """Run the sequence of each seed; yield None for a good one, and a shortened finding for a bad one."""
    pending = list(seeds)
    for number in itertools.count():
        if not pending:
            return
        # A child that is ended was ahead of its parent: the next one uses other names.
        child = _Child(pending, ground, f"{label}{number}")
        done = 0
        for seed in pending:
            found = child.next()
            done += 1
            if found is None:
                yield None
                continue
            steps = tuple(sequence(seed, mounts=len(ground.mounts)))
            finding = Finding(seed, steps, found.what, found.position)
            child.end()
            yield shorten(finding, ground, label)
            break
        else:
            child.end()
        pending = pending[done:]


class _Child:
    """A forked process that runs the sequences of seeds and reports each result."""

    def __init__(self, seeds: Sequence[int], ground: Ground, label: str) -> None:
        mounts = len(ground.mounts)
        self._reader = _forked((sequence(seed, mounts=mounts), ground, f"{label}-{seed}") for seed in seeds)

    def next(self) -> Difference | None:
        """Wait for the result of the next sequence."""
        return self._reader.next()

    def end(self) -> None:
        """End the child."""
        self._reader.end()


Work = tuple[Sequence[Step], Ground, str]


class _Reader:
    """The parent's end of a forked child."""

    def __init__(self, process: int, descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._ended = False

    def next(self) -> Difference | None:
        """Wait for one result; a child that is killed or hangs is one too."""
        size = self._exactly(4)
        content = self._exactly(struct.unpack("<I", size)[0]) if size else b""
        if content:
            found: Difference | None = pickle.loads(content)
            return found
        if size is None:
            self.end()
            return Difference(1 << 30, f"no answer for {HANG_S:.0f} s: the mount hangs")
        status = self.end()
        return Difference(1 << 30, f"the process was killed by {_cause(status)}")

    def _exactly(self, size: int) -> bytes | None:
        """Return that many bytes; empty when the child has ended, None when it hangs."""
        content = b""
        while len(content) < size:
            ready, _, _ = select.select([self._descriptor], [], [], HANG_S)
            if not ready:
                return None
            piece = os.read(self._descriptor, size - len(content))
            if not piece:
                return b""
            content += piece
        return content

    def end(self) -> int:
        """Kill what is left of the child; return its wait status."""
        if self._ended:
            return 0
        self._ended = True
        os.close(self._descriptor)
        waited, status = os.waitpid(self._process, os.WNOHANG)
        if not waited:
            os.kill(self._process, signal.SIGKILL)
            _, status = os.waitpid(self._process, 0)
        return status


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def _forked(work: Iterable[Work]) -> _Reader:
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return _Reader(process, reading)
    os.close(reading)
    code = 1
    try:
        for steps, ground, name in work:
            content = pickle.dumps(run(steps, ground, name))
            os.write(writing, struct.pack("<I", len(content)) + content)
        code = 0
    except BrokenPipeError:
        code = 0
    finally:
        # A fork must never return into its parent's code.
        if code:
            traceback.print_exc(file=sys.stderr)
        os._exit(code)


def shorten(finding: Finding, ground: Ground, label: str) -> Finding:
    """Return the shortest sequence found that still differs, in whatever way.

    One that does not differ every time, a race, is tried more often, and its length counts less.
    """
    attempts = 0
    tries = 1
    until = time.monotonic() + SHORTENING_S

    def fails(steps: Sequence[Step]) -> Finding | None:
        nonlocal attempts
        for _ in range(tries):
            attempts += 1
            if attempts > SHORTENING_RUNS or time.monotonic() > until:
                return None
            reader = _forked([(steps, ground, f"{label}-{finding.seed}-{attempts}")])
            found = reader.next()
            reader.end()
            if found:
                return Finding(finding.seed, tuple(steps), found.what, found.position)
        return None

    whole = finding.steps[: finding.position + 1]
    best = fails(whole)
    if best is None:
        tries = RACE_TRIES
        best = fails(whole)
    if best is None:
        return replace(finding, what=f"{finding.what}\n(did not come again)")
    return _smaller_numbers(_fewer_steps(best, fails), fails)


Fails = Callable[[Sequence[Step]], Finding | None]


def _fewer_steps(best: Finding, fails: Fails) -> Finding:
    """Leave out parts, large ones first, until none can be left out."""
    size = max(1, len(best.steps) // 2)
    while True:
        shrunk = False
        start = 0
        while start < len(best.steps):
            found = fails((*best.steps[:start], *best.steps[start + size :]))
            if found:
                best, shrunk = found, True
            else:
                start += size
        if size > 1:
            size //= 2
        elif not shrunk:
            return best


def _smaller_numbers(best: Finding, fails: Fails) -> Finding:
    """Replace large numbers by small ones where the sequence still differs."""
    for index in range(len(best.steps)):
        for place, argument in enumerate(best.steps[index].arguments):
            if isinstance(argument, bool) or not isinstance(argument, int) or _is_code(best.steps[index], place):
                continue
            for smaller in (0, 1, 100, 4096, argument // 2):
                if abs(smaller) >= abs(argument):
                    break
                step = best.steps[index]
                changed = (*step.arguments[:place], smaller, *step.arguments[place + 1 :])
                found = fails((*best.steps[:index], Step(step.call, changed), *best.steps[index + 1 :]))
                if found:
                    best = found
                    break
    return best


def _is_code(step: Step, place: int) -> bool:
    """Return whether an argument is no quantity but a slot, flags, or a mode."""
    return place == 0 or step.call in ("open", "chmod", "chown", "mkdir", "fchmod", "dup", "lseek")
