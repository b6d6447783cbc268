"""The good copies of an open mirrored disk: a change is made on all of them, and one that fails is thrown out.

    change     call it on all good copies  --  when one failed: a list without it, durable on the others  --  answer
    read       call it on one good copy; on an error on the next

Rules kept here:
- A change is answered when each copy that is good has it.  A copy is thrown out before the answer, by a list that is
  durable on all copies that it names.
- A list leaves out at most half of the copies of each list that any device may have as its newest: more of them could
  open by themselves, older than what was answered since.  When more fail at once, two of three or both of two, nothing
  is written any more, and no list is: the next opening finds all copies that are there again.
- The last copy is never thrown out: its error is the answer, as of a single disk.
- One full copy makes the mirror full, for what a caller may repeat (room, bytes, new files): the caller has a reserve
  to release, and `free_bytes` is that of the fullest copy.  Copies of a lake that fills up get full at about the same
  time: one by one they would be thrown out until a single one is left.  A sync, a rename or a removal that finds no
  room cannot be repeated, and throws its copy out.
- EngineBusy and SourceChanged are the process's and the client's fault, not the copy's: they are the answer.
- A failed read throws nothing out: two copies may have a bad sector each, and together all bytes.  The copy is suspect
  from then on (`state`), and read last.
- A copy that is being made takes part in all changes.  Its failure ends its making, nothing else.  If a list that
  names it is being written, the change is answered behind that list and the one that leaves the copy out again.

Methods block, and are called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

import structlog

from engine.mirror.copy import Copy
from engine.mirror.copy_calls import CopyCalls, Outcome
from engine.mirror.copy_list import CopyList, Member, write_list
from engine.mirror.mirror_bounds import COPIES_MAX
from lakefs.errors import DiskFailed, EngineBusy, LakeError, SourceChanged, StoreFull, StoreUnusable
from lakefs.ids import CopyId

T = TypeVar("T")
_log: Final = structlog.get_logger(__name__)
_NOT_THE_COPYS: Final = (EngineBusy, SourceChanged)
_ANSWERS: Final = (FileNotFoundError, FileExistsError)


class CopyState(NamedTuple):
    """One copy, for people: `state` is good, suspect, new or out."""

    copy_id: CopyId
    name: str
    state: str
    reason: str


class GoodCopies:
    """The copies of one mirrored disk, while it is open."""

    def __init__(self, copies: Sequence[Copy], listed: CopyList, calls: CopyCalls, eligible: frozenset[CopyId]) -> None:
        """`listed` is the list that was found; `eligible` those of its copies that could open it.  Call `install`."""
        self.good = tuple(copies)
        self.joining: Copy | None = None
        self.listed = listed
        self.calls = calls
        self.names = threading.RLock()
        """Held by changes of names, and of the list."""
        self._before = [eligible]
        """Copies of each list that may be the newest one on some device."""
        self._opened = set(copies)
        """All whose folders are locked: those thrown out, too, until the mirror is closed."""
        self._out: list[CopyState] = []
        self._failed: LakeError | None = None
        self._gate = _Gate()

    # --- changes and reads -------------------------------------------------------------------------------

    def change(self, call: Callable[[Copy], T], *, slow: bool = False, repeatable: bool = False) -> T:
        """Make a change on all good copies, and return the answer of the first.

        `slow` calls wait for the device.  A `repeatable` one that finds no room on some copy raises StoreFull, and may
        have been made on others.
        """
        if self._failed is not None:
            raise DiskFailed(f"an earlier change failed: {self._failed.message}") from self._failed
        joining = self.joining
        good = self.good  # read behind `joining`: it may become good just now
        copies = good if joining is None or joining in good else (*good, joining)
        outcomes = self.calls.each(copies, call, slow=slow)
        if all(outcome.error is None for outcome in outcomes):
            return outcomes[0].values[0]
        return self._settled([outcome for outcome in outcomes if not self._is_joining_failed(outcome)], repeatable)

    def read(self, call: Callable[[Copy], T], path: str = "", among: Container[Copy] | None = None) -> T:
        """Ask a good copy, and the next when it fails; the first error when all fail."""
        failed: list[tuple[Copy, LakeError]] = []
        for copy in self.in_reading_order(path):
            if among is not None and copy not in among:
                continue
            try:
                answer = call(copy)
            except _NOT_THE_COPYS:
                raise
            except LakeError as error:
                failed.append((copy, error))
                continue
            for other, reason in failed:
                self.suspect(other, reason.message)
            return answer
        raise failed[0][1] if failed else self._failed or DiskFailed(f"no copy can be read: {path}", subject=path)

    def read_all(self, call: Callable[[Copy], T], among: Container[Copy] | None = None) -> list[T]:
        """Ask all good copies; return the answers of those that answer, the first error when none does."""
        asked = [copy for copy in self.good if among is None or copy in among]
        outcomes = self.calls.each(asked, call, slow=False)
        answers = [answer for outcome in outcomes for answer in outcome.values]
        if not answers:
            raise next((o.error for o in outcomes if o.error is not None), DiskFailed("the mirrored disk is closed"))
        return answers

    def in_reading_order(self, path: str) -> list[Copy]:
        """Return the good copies, those last that a reader should not trust for this path."""
        return sorted(self.good, key=lambda copy: (path in copy.distrusted, bool(copy.suspect)))

    def suspect(self, copy: Copy, reason: str) -> None:
        """Note that a read of this copy failed and another one answered."""
        if not copy.suspect:
            _log.warning(
                "a copy cannot be read, another one was; make a new one in its place", copy=str(copy), reason=reason
            )
            copy.suspect = reason

    def state(self) -> list[CopyState]:
        """Return all copies that were good since the opening, and the one being made."""
        states = [CopyState(c.id, c.name, "suspect" if c.suspect else "good", c.suspect) for c in self.good]
        if self.joining is not None:
            states.append(CopyState(self.joining.id, self.joining.name, "new", ""))
        return [*states, *self._out]

    # --- the list ----------------------------------------------------------------------------------------

    def throw_out(self, reasons: dict[Copy, str]) -> None:
        """Take copies out of the list; it is durable on the others on return.

        DiskFailed when no copy or too few would be left; then nothing is changed any more.
        """
        with self.names:
            gone = {copy: reason for copy, reason in reasons.items() if copy.is_good}
            left = [copy for copy in self.good if copy not in gone]
            if gone and not left:
                raise DiskFailed(f"the last copy has failed: {'; '.join(gone.values())}")
            if gone:
                self.install(left, gone)

    def settle(self, behind: Sequence[Copy]) -> dict[Copy, str]:
        """Make the list that an opening found durable on copies that lack it; returns those that failed at that.

        StoreUnusable when it is not on more than half of its copies then.
        """
        outcomes = self.calls.each(behind, partial(_write_list, self.listed), slow=True) if behind else []
        failed = {outcome.copy: str(outcome.error) for outcome in outcomes if outcome.error is not None}
        (eligible,) = self._before
        if 2 * (len(self.good) - len(failed)) <= len(eligible):
            told = "; ".join(f"{copy}: {reason}" for copy, reason in failed.items())
            options = " ".join(f"--without {copy.id.hex()}" for copy in failed)
            raise StoreUnusable(
                f"the list of good copies cannot be written ({told}); mend the devices and start again, or, if they "
                f"are lost for ever, start with: {options}; changes that only they hold are given up then",
                subject=", ".join(copy.name for copy in failed),
            )
        return failed

    def install(
        self, wanted: Sequence[Copy], gone: dict[Copy, str], *, is_equal: bool = False, by_operator: bool = False
    ) -> None:
        """Make a list of the wanted copies durable on all of them; those that fail at that are gone too."""
        with self.names:
            if self._failed is not None:
                raise DiskFailed(f"an earlier change failed: {self._failed.message}") from self._failed
            gone = dict(gone)
            while True:
                self._refuse_unsafe(wanted, gone)
                listed = self.listed = self.listed.next(
                    {copy.id: Member(copy.inode, copy.name) for copy in wanted},
                    is_equal=is_equal,
                    by_operator=by_operator,
                )
                self._before.append(frozenset(listed.members))
                outcomes = self.calls.each(wanted, partial(_write_list, listed), slow=True)
                failed = {outcome.copy: str(outcome.error) for outcome in outcomes if outcome.error is not None}
                if not failed:
                    break
                gone |= failed
                wanted = [copy for copy in wanted if copy not in failed]
            self._before = self._before[-1:]
            for copy in wanted:
                copy.is_good = True
            self.good = tuple(wanted)
            self._opened.update(wanted)
            if self.joining in self.good:
                self.joining = None
            for copy, reason in gone.items():
                self._note_out(copy, reason)

    def _refuse_unsafe(self, wanted: Sequence[Copy], gone: dict[Copy, str]) -> None:
        """Raise DiskFailed, for ever, when copies that do not get the list could open without those that do."""
        ids = frozenset(copy.id for copy in wanted)
        if ids and all(2 * len(before - ids) <= len(before) for before in self._before):
            return
        told = "; ".join(f"{copy}: {reason}" for copy, reason in gone.items())
        error = DiskFailed(
            f"too many copies failed at once, so nothing more is written ({told}); start again: nothing acknowledged "
            "is lost, and the copies that answer then are used",
            subject=", ".join(copy.name for copy in gone),
        )
        self._failed = error
        raise error

    def _note_out(self, copy: Copy, reason: str) -> None:
        _log.error("a copy failed and is not used any more; make a new one", copy=str(copy), reason=reason)
        copy.is_good = False
        self._out = [*self._out, CopyState(copy.id, copy.name, "out", reason)][-COPIES_MAX:]

    # --- outcomes ----------------------------------------------------------------------------------------

    def _is_joining_failed(self, outcome: Outcome[T]) -> bool:
        """Return True for the failure of a copy that is being made, which ends there."""
        if outcome.error is None or outcome.copy.is_good:
            return False
        with self.names:  # a list that names it may be under way, and another one if that fails
            if outcome.copy is self.joining:
                self.end_joining(str(outcome.error))
            return not outcome.copy.is_good

    def _settled(self, outcomes: list[Outcome[T]], repeatable: bool) -> T:
        """Return or raise the answer of a change that some copies failed at, when these are thrown out."""
        failed = {outcome.copy: outcome.error for outcome in outcomes if outcome.error is not None}
        for error in failed.values():
            if isinstance(error, _NOT_THE_COPYS) or (repeatable and isinstance(error, StoreFull)):
                raise error
        done = [outcome for outcome in outcomes if outcome.error is None and outcome.copy.is_good]
        if not done:  # it does not exist, or exists already, on those that answer; else the error of the first
            answers = [outcome for outcome in outcomes if isinstance(outcome.error, _ANSWERS)]
            first = next((outcome.error for outcome in answers or outcomes if outcome.error is not None), None)
            if first is None:
                raise DiskFailed("the copies that did it are not used any more")
            if answers:
                self._throw_out_failed({copy: e for copy, e in failed.items() if not isinstance(e, _ANSWERS)})
            raise first
        self._throw_out_failed(failed)
        return done[0].values[0]

    def _throw_out_failed(self, failed: dict[Copy, LakeError | FileNotFoundError | FileExistsError]) -> None:
        if failed:
            self.throw_out({copy: _reason(error) for copy, error in failed.items()})

    # --- a copy that is being made -----------------------------------------------------------------------

    def wait_for_earlier(self) -> None:
        """Wait until all changes of content have ended that began before `joining` was set.  Not under `names`."""
        self._gate.wait_for_earlier()

    def end_joining(self, reason: str) -> None:
        """Make no more changes with the copy that is being made."""
        copy, self.joining = self.joining, None
        if copy is not None:
            _log.warning("a new copy was given up; make it again", copy=str(copy), reason=reason)
            copy.suspect = reason

    def changing_content(self) -> AbstractContextManager[None]:
        """Return a context for a change of a file's content: a new copy sees it, or begins behind it."""
        return self._gate.passed(lambda: self.joining is not None)

    def copying_content(self) -> AbstractContextManager[object]:
        """Return a context in which no content changes while a copy is being made."""
        return self._gate.one_at_a_time

    # --- the end -----------------------------------------------------------------------------------------

    def release_out(self, name: str) -> None:
        """Release the folder of that name, if its copy was thrown out; one that hangs stays locked."""
        with self.names:
            for copy in [copy for copy in self._opened if copy.name == name]:
                if not copy.is_good and not copy.is_silent:
                    self._opened.discard(copy)
                    copy.close()

    def note_absent(self, copy_id: CopyId, name: str, reason: str) -> None:
        """Show a copy that the opening did without."""
        self._out.append(CopyState(copy_id, name, "out", reason))

    def close(self) -> None:
        """Note in the list that all copies are equal, and release them.  Never raises."""
        with self.names:
            self.end_joining("the mirror was closed")
            with suppress(DiskFailed):
                if self._failed is None:
                    self.install(self.good, {}, is_equal=True)
            self._failed = self._failed or DiskFailed("the mirrored disk is closed")
            self.good = ()
            for copy in self._opened:
                copy.close()


class _Gate:
    """Changes of content: any number at once, but one at a time while a copy is being made."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self.one_at_a_time = threading.RLock()

    @contextmanager
    def passed(self, is_narrow: Callable[[], bool]) -> Iterator[None]:
        with self._condition:
            narrow = is_narrow()
            self._inside += not narrow
        try:
            if narrow:
                with self.one_at_a_time:
                    yield
            else:
                yield
        finally:
            if not narrow:
                with self._condition:
                    self._inside -= 1
                    self._condition.notify_all()

    def wait_for_earlier(self) -> None:
        with self._condition:
            while self._inside:
                self._condition.wait()


def _write_list(listed: CopyList, copy: Copy) -> None:
    write_list(copy.disk, listed)


def _reason(error: Exception) -> str:
    if isinstance(error, LakeError):
        return error.message
    return f"its files differ from those of the other copies ({error!r})"
