"""Looks for sequences that differ, and shortens those that it finds.

A finding prints the line that repeats it: `python -m tests.mount.shared --seed N --sequences 1 ...`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.mount.model import Difference
from tests.mount.shared.model import SharedGround, run
from tests.mount.shared.steps import RankStep, sequence

SHORTENING_S: Final = 60.0
SHORT_SETTLE_S: Final = 4.0
"""Shorter than the model's own patience, which is for slow machines; longer than a late notice."""
TRIES: Final = 3
LATE_S: Final = 2.0
_numbers: Final = itertools.count()


@dataclass(frozen=True)
class Way:
    """The mounts that sequences run on, and what happens to them."""

    over: str
    mounts: int = 2
    late: bool = False
    kills: bool = False
    holds: bool = True

    @property
    def late_s(self) -> float:
        """The longest time that a notice is late."""
        return LATE_S if self.late else 0.0

    def steps(self, seed: int) -> list[RankStep]:
        """Return the sequence of a seed."""
        return sequence(seed, ranks=self.mounts, cuts=self.late, kills=self.kills, holds=self.holds)

    def options(self) -> str:
        """Return the options that choose this."""
        flags = "".join(f" --{name}" for name, is_set in (("late", self.late), ("kills", self.kills)) if is_set)
        return f"--over {self.over} --mounts {self.mounts}{flags}"


@dataclass(frozen=True)
class SharedFinding:
    """A sequence whose results differ from those on the local folder."""

    seed: int
    way: Way
    steps: tuple[RankStep, ...]
    difference: Difference

    def __str__(self) -> str:
        lines = [f"python -m tests.mount.shared --seed {self.seed} --sequences 1 {self.way.options()}"]
        for index, step in enumerate(self.steps):
            if index == self.difference.position:
                lines.append(f"# here: {self.difference.what}")
            lines.append(str(step))
        if self.difference.position >= len(self.steps):
            lines.append(f"# at the end: {self.difference.what}")
        return "\n".join(lines)


WAYS: Final = tuple(
    Way(over, mounts, late, kills)
    for over in ("unix", "tcp")
    for mounts, late, kills in ((2, False, False), (3, True, False), (2, False, True), (3, True, True))
)


def hunt(
    seeds: Iterable[int], ground: SharedGround, way: Way, *, shortens: bool = True
) -> Iterator[SharedFinding | None]:
    """Run the sequence of each seed; yield None for a good one, and a shortened finding for a bad one."""
    for seed in seeds:
        steps = way.steps(seed)
        found = run(steps, ground, f"s{seed}-{next(_numbers)}")
        if found is None:
            yield None
            continue
        finding = SharedFinding(seed, way, tuple(steps[: found.position + 1]), found)
        yield _shortened(finding, ground) if shortens else finding


def _shortened(finding: SharedFinding, ground: SharedGround) -> SharedFinding:
    """Leave out parts, large ones first, while what is left still differs, in whatever way."""
    until = time.monotonic() + SHORTENING_S

    def fails(steps: Sequence[RankStep]) -> SharedFinding | None:
        for _ in range(TRIES):
            if time.monotonic() > until:
                return None
            found = run(steps, ground, f"s{finding.seed}-{next(_numbers)}", settle_s=SHORT_SETTLE_S)
            if found is not None:
                return SharedFinding(finding.seed, finding.way, tuple(steps[: found.position + 1]), found)
        return None

    best = finding
    size = max(1, len(best.steps) // 2)
    while size:
        start = 0
        while start < len(best.steps):
            shorter = fails((*best.steps[:start], *best.steps[start + size :]))
            if shorter is None:
                start += size
            else:
                best = shorter
        size //= 2
    return best
