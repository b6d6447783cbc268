"""The kernel's repeats: of two ESTALEs within one call, the second is ENOENT; each call's first is ESTALE."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import cast

import pytest
import trio
import trio.testing
from pyfuse3 import FUSEError, RequestContext

from fuse.answering import repeatable, step_of_repeat
from fuse.names.repeats import Repeats
from fuse.state.mount import Mount

THREAD, OTHER = 7, 8


@dataclass
class Context:
    pid: int


class NothingStaged:
    """A mount in which no native thread appends."""

    def __init__(self) -> None:
        self.staging = self

    def take_over(self) -> None:
        """Do nothing."""


@dataclass
class Operations:
    """Operations that are refused with the next errno of a list; 0 is success."""

    answers: list[int] = field(default_factory=list)
    absent: bool = False
    _repeats: Repeats = field(default_factory=Repeats)
    _mount: Mount = field(default_factory=lambda: cast(Mount, NothingStaged()))

    def _answer(self) -> None:
        if code := self.answers.pop(0):
            raise FUSEError(code)

    @step_of_repeat
    async def lookup(self, folder: int, name: bytes, ctx: RequestContext) -> None:
        self._answer()
        if self.absent:
            self._repeats.note_absent(ctx.pid, folder, name)

    @repeatable
    async def mkdir(self, folder: int, name: bytes, ctx: RequestContext) -> None:
        self._answer()

    @repeatable
    async def rename(self, folder: int, name: bytes, to: int, new: bytes, ctx: RequestContext) -> None:
        self._answer()

    @repeatable
    async def setattr(self, inode: int, ctx: RequestContext) -> None:
        self._answer()

    def say(self, operation: str, *arguments: object, answer: int = 0, thread: int = THREAD) -> int:
        """Return the errno of an operation of a thread."""

        async def main() -> int:
            self.answers.append(answer)
            try:
                await getattr(self, operation)(*arguments, cast(RequestContext, Context(thread)))
            except FUSEError as error:
                return error.errno
            return 0

        return trio.run(main)

    def mkdir_is_stale(self, folder: int = 1, name: bytes = b"name", thread: int = THREAD) -> int:
        return self.say("mkdir", folder, name, answer=errno.ESTALE, thread=thread)


@pytest.mark.parametrize("looks", [False, True])
def test_what_was_refused_by_a_descriptor_is_over_when_the_thread_goes_on(*, looks: bool) -> None:
    operations = Operations()
    assert operations.say("setattr", 5, answer=errno.ESTALE) == errno.ESTALE
    assert operations.say("setattr", 5, answer=errno.ESTALE) == errno.ENOENT, "as of the folder that it works in"
    assert operations.say("setattr", 5, answer=errno.ESTALE) == errno.ESTALE
    if looks:
        assert operations.say("lookup", 1, b"folder") == 0
    assert operations.mkdir_is_stale() == (errno.ENOENT if looks else errno.ESTALE)


def test_a_repeat_rests_on_the_last_look_up_before_it() -> None:
    async def main() -> list[float | None]:
        repeats, found = Repeats(), []
        repeats.refuse(THREAD, 1.0, operation=("open", 5))
        found.append(repeats.begin(THREAD, (5,), ("open", 5)))
        for _ in range(2):
            await trio.sleep(1)
            assert repeats.begin_look_up(THREAD, 1, b"name")
        found += [repeats.begin(THREAD, (6,), ("open", 6)), trio.current_time()]
        return found

    first, last, now = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert first == 1.0
    assert last == now, "others may have looked since the refusal, and it has changed since"


async def failing(code: int) -> None:
    """A look at attributes that is refused."""
    raise FUSEError(code)


def test_the_second_of_one_call_is_no_such_file() -> None:
    operations = Operations()
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert operations.say("lookup", 1, b"folder") == 0
    assert operations.mkdir_is_stale() == errno.ENOENT
    assert operations.mkdir_is_stale() == errno.ESTALE, "another call"


def test_a_look_up_is_refused_alike() -> None:
    operations = Operations()
    assert operations.say("lookup", 1, b"a", answer=errno.ESTALE) == errno.ESTALE
    # One of the entry in the kernel's cache, one of the name.
    assert operations.say("lookup", 1, b"a", answer=errno.ESTALE) == errno.ENOENT
    assert operations.say("lookup", 1, b"a", answer=errno.ESTALE) == errno.ENOENT
    assert operations.say("lookup", 1, b"b", answer=errno.ESTALE) == errno.ESTALE, "another call"


@pytest.mark.parametrize("later_s", [0.5, 1.5])
def test_a_refused_look_speaks_for_a_second_and_only_of_names(later_s: float) -> None:
    async def main() -> tuple[bool, bool]:
        repeats = Repeats()
        for thread in (THREAD, OTHER):
            for answer, expected in (
                (errno.ESTALE, errno.ESTALE),
                (errno.EIO, errno.EIO),
                (errno.ESTALE, errno.ENOENT),
            ):
                with pytest.raises(FUSEError) as refused:
                    await repeats.reading(thread, failing(answer))
                assert refused.value.errno == expected
        await trio.sleep(later_s)
        return repeats.begin(THREAD, (1, b"name")) is not None, repeats.begin(OTHER, (1, 0)) is not None

    found = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert found == (later_s < 1, False)


def test_a_look_up_that_is_answered_ends_its_own_call() -> None:
    operations = Operations()
    assert operations.say("lookup", 1, b"a", answer=errno.ESTALE) == errno.ESTALE
    assert operations.say("lookup", 2, b"a") == 0
    assert operations.say("lookup", 1, b"a", answer=errno.ESTALE) == errno.ESTALE


def test_a_thread_repeats_until_it_is_answered() -> None:
    operations = Operations()
    repeats = operations._repeats
    assert not repeats.is_repeating(THREAD)
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert repeats.is_repeating(THREAD)
    assert not repeats.is_repeating(OTHER)
    assert operations.say("lookup", 1, b"folder") == 0
    assert repeats.is_repeating(THREAD)
    assert operations.say("mkdir", 1, b"name") == 0
    assert not repeats.is_repeating(THREAD)


def test_what_is_answered_ends_the_call() -> None:
    operations = Operations()
    for answer in (0, errno.EEXIST):
        assert operations.mkdir_is_stale() == errno.ESTALE
        assert operations.say("mkdir", 1, b"name", answer=answer) == answer
        assert operations.mkdir_is_stale() == errno.ESTALE
        assert operations.say("mkdir", 1, b"name") == 0


def test_a_look_up_that_fails_ends_the_call() -> None:
    operations = Operations()
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert operations.say("lookup", 1, b"folder", answer=errno.ENOENT) == errno.ENOENT
    assert operations.mkdir_is_stale() == errno.ESTALE


def test_behind_a_look_up_that_finds_nothing_comes_what_makes_the_name() -> None:
    for folder, name, expected in ((1, b"name", errno.ENOENT), (1, b"other", errno.ESTALE), (2, b"name", errno.ESTALE)):
        operations = Operations(absent=True)
        assert operations.mkdir_is_stale(folder, name) == errno.ESTALE
        assert operations.say("lookup", 1, b"name") == 0
        assert operations.mkdir_is_stale(folder, name) == expected


def test_another_look_up_behind_one_that_finds_nothing_is_another_calls() -> None:
    operations = Operations(absent=True)
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert operations.say("lookup", 1, b"name") == 0
    assert operations.say("lookup", 1, b"name") == 0
    assert operations.mkdir_is_stale() == errno.ENOENT
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert operations.say("lookup", 1, b"name") == 0
    assert operations.say("lookup", 1, b"other") == 0
    assert operations.mkdir_is_stale() == errno.ESTALE


def test_a_rename_makes_its_second_name() -> None:
    operations = Operations()
    renamed = (1, b"old", 2, b"new")
    assert operations.say("rename", *renamed, answer=errno.ESTALE) == errno.ESTALE
    assert operations.say("lookup", 1, b"old") == 0
    operations.absent = True
    assert operations.say("lookup", 2, b"new") == 0
    assert operations.say("rename", *renamed, answer=errno.ESTALE) == errno.ENOENT


def test_threads_are_told_apart_and_an_unknown_one_is_never_refused_before() -> None:
    operations = Operations()
    assert operations.mkdir_is_stale() == errno.ESTALE
    assert operations.mkdir_is_stale(thread=OTHER) == errno.ESTALE
    assert operations.mkdir_is_stale() == errno.ENOENT
    assert [operations.mkdir_is_stale(thread=0) for _ in range(2)] == [errno.ESTALE] * 2


def test_threads_are_forgotten_when_there_are_many() -> None:
    operations = Operations()
    for thread in range(1, 1100):
        assert operations.mkdir_is_stale(thread=thread) == errno.ESTALE
    assert operations.mkdir_is_stale(thread=1) == errno.ESTALE
    assert operations.mkdir_is_stale(thread=1099) == errno.ENOENT
