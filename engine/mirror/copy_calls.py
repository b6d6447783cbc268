"""The same call on several copies of a mirrored disk: one after the other, or at once in threads.

Rules kept here:
- A call is an answer or an error for each copy; which of them counts is not decided here.
- The errors of the port `Disk` are outcomes.  Anything else, such as a bug or the end of a simulation, is raised.
- `AtOnce` runs what waits for a device (`slow`) on all copies at once: all but one in threads, one in the caller's.
  What only changes the page cache or a folder's names runs in the caller's thread: a thread costs more than it.
- With a `patience_s`, every change runs in threads.  A copy that has not answered so long after another one has is
  silent: its outcome is DiskFailed, and nobody waits for it again.  When no copy answers, the call waits: then the
  machine stands still, not a copy.
- A thread that hangs in the kernel cannot be ended.  It keeps its descriptor, and the process from ending, until the
  device answers.  What it writes late goes to a copy that is not read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import trio

from engine.mirror.copy import Copy
from lakefs.errors import DiskFailed, LakeError

T = TypeVar("T")
CopyError = LakeError | FileNotFoundError | FileExistsError
_ERRORS: Final = (LakeError, FileNotFoundError, FileExistsError)
_SLICES: Final = 10
"""Parts of the patience, each waited for by itself: a process that was stopped for a while loses one of them."""


class Outcome(NamedTuple, Generic[T]):
    """The end of a call on one copy: `values` has the answer if there is no error."""

    copy: Copy
    values: tuple[T, ...]
    error: CopyError | None = None


class CopyCalls(Protocol):
    """A way to make a call on several copies."""

    def each(self, copies: Sequence[Copy], call: Callable[[Copy], T], *, slow: bool) -> list[Outcome[T]]:
        """Call it with each copy; return the outcomes in that order.  Blocks."""
        ...


class InTurn:
    """One copy after the other, in the caller's thread: for the simulator."""

    def each(self, copies: Sequence[Copy], call: Callable[[Copy], T], *, slow: bool) -> list[Outcome[T]]:
        """See `CopyCalls.each`."""
        return [_outcome(copy, call) for copy in copies]


class AtOnce:
    """All copies at once where the device is waited for."""

    def __init__(self, patience_s: float | None = None) -> None:
        """`patience_s`: how long a copy may answer later than another one; None: for ever."""
        self._patience_s = patience_s

    def each(self, copies: Sequence[Copy], call: Callable[[Copy], T], *, slow: bool) -> list[Outcome[T]]:
        """See `CopyCalls.each`."""
        if len(copies) == 1 or (not slow and self._patience_s is None):
            return [_outcome(copy, call) for copy in copies]
        answers: SimpleQueue[Outcome[T] | BaseException] = SimpleQueue()
        own = copies[0] if self._patience_s is None else None
        for copy in copies:
            if copy is not own:
                trio.lowlevel.start_thread_soon(partial(_answer, answers, copy, call), bool)
        if own is not None:
            _answer(answers, own, call)
        found = self._gathered(answers, copies)
        return [found.get(copy) or self._silence(copy) for copy in copies]

    def _gathered(
        self, answers: SimpleQueue[Outcome[T] | BaseException], copies: Sequence[Copy]
    ) -> dict[Copy, Outcome[T]]:
        """Wait for the outcomes, once one is good for no longer than the patience."""
        found: dict[Copy, Outcome[T]] = {}
        slices_left = _SLICES
        while len(found) < len(copies):
            is_answered = any(outcome.error is None for outcome in found.values())
            try:
                answer = answers.get(timeout=self._patience_s / _SLICES if self._patience_s and is_answered else None)
            except Empty:
                slices_left -= 1
                if not slices_left:
                    break
                continue
            if isinstance(answer, BaseException):
                raise answer
            found[answer.copy] = answer
        return found

    def _silence(self, copy: Copy) -> Outcome[T]:
        copy.is_silent = True
        message = f"{copy.name} has not answered {self._patience_s:g} s after another copy"
        return Outcome(copy, (), DiskFailed(message, subject=copy.name))


def _answer(answers: SimpleQueue[Outcome[T] | BaseException], copy: Copy, call: Callable[[Copy], T]) -> None:
    try:
        answers.put(_outcome(copy, call))
    except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
        answers.put(error)


def _outcome(copy: Copy, call: Callable[[Copy], T]) -> Outcome[T]:
    try:
        return Outcome(copy, (call(copy),))
    except _ERRORS as error:
        return Outcome(copy, (), error)
