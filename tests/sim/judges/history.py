"""What a simulated store was told and has told: states of its names in the order of decisions, and what must survive.

A *point* is the state after one decision, with the sequence of its journal group.  The *floor* is the highest
sequence that somebody was told of: by an acknowledgement, by a value read, or by a refusal.  After a crash the store
must be as at the end of some group that is not below the floor: a crash loses a suffix, never a hole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lakefs.ids import Sequence
from lakefs.limits import UPLOAD_EXPIRY_S
from tests.sim.judges.model import EMPTY, Bound, State
from tests.sim.judges.upload_model import find_upload, without_upload


class SimFailure(Exception):
    """The engine broke a promise."""


@dataclass(frozen=True)
class Point:
    """The names after a decision, and the group that it joined."""

    sequence: Sequence
    state: State


class History:
    """The decisions of one store, from the last state that is certain on."""

    def __init__(self) -> None:
        self.points: list[Point] = [Point(Sequence(0), EMPTY)]
        self.floor = Sequence(0)
        self.broken: Exception | None = None
        """The first failure inside of the service."""
        self.begun_ns: dict[bytes, int] = {}
        """When each upload was begun, by the wall clock of that moment."""

    @property
    def here(self) -> int:
        """Where the history is now; the start or end of a window."""
        return len(self.points) - 1

    @property
    def state(self) -> State:
        """The names now."""
        return self.points[-1].state

    def decided(self, sequence: Sequence, state: State) -> None:
        """A decision gave this state and joined group `sequence`."""
        if sequence < self.points[-1].sequence:
            raise SimFailure(f"a decision joined group {sequence} after {self.points[-1].sequence}")
        self.points.append(Point(sequence, state))

    def expired(self, upload: bytes, sequence: Sequence, now_ns: int) -> None:
        """gc removed an upload that nobody had ended."""
        name = find_upload(self.state, upload)
        if name is None:
            return  # its bucket was removed before
        if not self.is_over(upload, now_ns):
            age_s = (now_ns - self.begun_ns[upload]) / 1e9
            raise SimFailure(f"upload {upload.hex()} was removed at an age of {age_s} s")
        self.decided(sequence, without_upload(self.state, name))

    def is_over(self, upload: bytes, now_ns: int) -> bool:
        """Whether an upload is so old that gc has to remove it."""
        return now_ns - self.begun_ns[upload] >= UPLOAD_EXPIRY_S * 1e9

    def acknowledged(self, sequence: Sequence) -> None:
        """Somebody was told that this group is durable."""
        self.floor = max(self.floor, sequence)

    def observed(self, since: int, fits: Callable[[State], bool], what: str, *, durable: bool = True) -> Sequence:
        """Somebody was told something that `fits` says of a state; it must be one since the asking.

        What was told must survive: the oldest group that could have brought it about, which is returned, is durable.
        Not so for who asked for no more than what is visible, or is told later.
        """
        for index in range(since, len(self.points)):
            if fits(self.points[index].state):
                while index > 0 and fits(self.points[index - 1].state):
                    index -= 1
                if durable:
                    self.acknowledged(self.points[index].sequence)
                return self.points[index].sequence
        raise SimFailure(
            f"{what}: that was true at no moment of the request; "
            f"state {describe(self.points[since].state)} to {describe(self.state)}"
        )

    def was(self, since: int, fits: Callable[[State], bool]) -> bool:
        """Whether `fits` holds for a state since then."""
        return any(fits(point.state) for point in self.points[since:])

    def reopened(self, found: State) -> None:
        """After a restart the store has these names."""
        last = len(self.points) - 1
        for index, point in enumerate(self.points):
            ends_group = index == last or self.points[index + 1].sequence > point.sequence
            survives = index == last or self.points[index + 1].sequence > self.floor
            if ends_group and survives and point.state == found:
                self.points = [Point(point.sequence, found)]
                self.floor = point.sequence
                return
        raise SimFailure(
            f"after the restart the names are those of no group from {self.floor} on: {_difference(self.state, found)}"
        )


def describe(state: State) -> str:
    """A state in a line."""
    return (
        "{"
        + ", ".join(f"{bucket}/{key[:20]}={_short(bound)}" for bucket in state for key, bound in state[bucket].items())
        + "}"
    )


def _difference(expected: State, found: State) -> str:
    """How a state differs from the newest one."""
    lines: list[str] = []
    for bucket in sorted({*expected, *found}):
        before, after = expected.get(bucket), found.get(bucket)
        if before is None or after is None:
            lines.append(f"bucket {bucket} is {'new' if before is None else 'missing'}")
            continue
        lines += [
            f"{bucket}/{key}: {_short(before.get(key))} became {_short(after.get(key))}"
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
    return "; ".join(lines) or "nothing differs from the newest state"


def _short(bound: Bound | None) -> str:
    if bound is None:
        return "nothing"
    text = f"link to {bound.target!r}" if bound.target else bound.blob[1:5].hex()
    return f"{text} marked {bound.mark!r}" if bound.mark else text
