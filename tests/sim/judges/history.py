"""The history of a simulated store: the states of its names in the order of decisions, and which must survive.

A *point* is the state after one decision, with the sequence of its journal group.  The *floor* is the highest sequence
that any client knows of: from an acknowledgement, from a value that it read, or from a refusal.  After a crash the
store must be as at the end of some group that is not below the floor: a crash loses the last groups, never one in
between.
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
    """The decisions of one store, since the last state that is certain."""

    def __init__(self) -> None:
        self.points: list[Point] = [Point(Sequence(0), EMPTY)]
        self.floor = Sequence(0)
        self.broken: Exception | None = None
        """The first failure inside the service."""
        self.begun_ns: dict[bytes, int] = {}
        """The time at which each upload was begun, by the wall clock of that moment."""

    @property
    def here(self) -> int:
        """The history's newest point; the start or end of a window."""
        return len(self.points) - 1

    @property
    def state(self) -> State:
        """The names as they are now."""
        return self.points[-1].state

    def decided(self, sequence: Sequence, state: State) -> None:
        """Note that a decision gave this state and joined group `sequence`."""
        if sequence < self.points[-1].sequence:
            raise SimFailure(f"a decision joined group {sequence} after {self.points[-1].sequence}")
        self.points.append(Point(sequence, state))

    def expired(self, upload: bytes, sequence: Sequence, now_ns: int) -> None:
        """Note that gc removed an upload that no client had ended."""
        name = find_upload(self.state, upload)
        if name is None:
            return  # its bucket was removed before
        if not self.is_over(upload, now_ns):
            age_s = (now_ns - self.begun_ns[upload]) / 1e9
            raise SimFailure(f"upload {upload.hex()} was removed at an age of {age_s} s")
        self.decided(sequence, without_upload(self.state, name))

    def is_over(self, upload: bytes, now_ns: int) -> bool:
        """Return whether an upload is so old that gc has to remove it."""
        return now_ns - self.begun_ns[upload] >= UPLOAD_EXPIRY_S * 1e9

    def acknowledged(self, sequence: Sequence) -> None:
        """Note that a client knows this group to be durable."""
        self.floor = max(self.floor, sequence)

    def observed(self, since: int, fits: Callable[[State], bool], what: str, *, durable: bool = True) -> Sequence:
        """Note that a client got an answer that `fits` a state; it must fit one since the request.

        The answer must survive: the oldest group that could have caused it, which is returned, is durable.  Exception:
        clients that ask only for what is visible, or get their answer later.
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
        """Return whether `fits` holds for a state since then."""
        return any(fits(point.state) for point in self.points[since:])

    def reopened(self, found: State) -> None:
        """Note that the store has these names after a restart."""
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
    """Return a state in one line."""
    return (
        "{"
        + ", ".join(f"{bucket}/{key[:20]}={_short(bound)}" for bucket in state for key, bound in state[bucket].items())
        + "}"
    )


def _difference(expected: State, found: State) -> str:
    """Say how a state differs from the newest one."""
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
