"""Answers and dirty slots: one chunk of j + m shards, whose homes go away, come back and are lost, and a walker.

A state is (members, slot, writer, walker, promise, goings left):

- member: (up, its shards as bits, it will come back empty, since the promise it has gone: 1 away, 2 lost);
- slot: (dirty, noted since the walker began);
- writer: (0 before its first store, 1 storing, 2 answered; the shards that each member told it that it has; the slot
  was noted behind the last store);
- walker: 0 when it is elsewhere, else 1 + the number of members, from the first, whose lists it has; and the lists;
- promise: (shards that each member is counted for; shards that may go; members that may go);
- goings left: members go away, or are lost, this many times more.

Shard i has its home at member i.  When a home is gone, another takes a second shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")
Member = tuple[int, int, int, int]
Members = tuple[Member, ...]
Writer = tuple[int, tuple[int, ...], int]
Walker = tuple[int, tuple[int, ...]]
Promise = tuple[tuple[int, ...], int, int] | tuple[()]
State = tuple[Members, tuple[int, int], Writer, Walker, Promise, int]
Step = tuple[str, State]

NONE, STORING, ANSWERED = 0, 1, 2
ELSEWHERE: Final = 0
AWAY, LOST = 1, 2


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    notes_before_the_answer: bool = True
    notes_behind_the_stores: bool = True
    notes_strays: bool = True
    short_answer_leaves_one: bool = True
    short_answer_counts_members: bool = True
    answer_counts_members_that_are_up: bool = True
    returning_members_are_noted: bool = True
    clear_compares: bool = True
    clear_wants_all_homes: bool = True


AS_DESIGNED: Final = Rules()


class Stripes:
    """The model of chunks with j data and m parity shards."""

    def __init__(self, j: int, m: int, rules: Rules = AS_DESIGNED, *, goings: int = 2) -> None:
        self._j, self._m, self._n, self._rules, self._goings = j, m, j + m, rules, goings

    def initial(self) -> State:
        nothing = (0,) * self._n
        return ((1, 0, 0, 0),) * self._n, (0, 0), (NONE, nothing, 0), (ELSEWHERE, nothing), (), self._goings

    def form(self, state: State) -> State:
        return state

    def broken(self, state: State) -> str | None:
        members, (dirty, _), _, _, promise, _ = state
        if not promise:
            return None
        readable = _all(member[1] for member in members if member[0]).bit_count() >= self._j
        if not readable and _outlived(members, promise, AWAY):
            return "an acknowledged chunk is not readable, and no more is gone than it outlives"
        whole = all(member[1] >> i & 1 for i, member in enumerate(members))
        if not whole and not dirty and all(member[0] for member in members):
            return "no slot is dirty, all members are up, and a shard is not at its home"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._members(state)
        yield from self._writer(state)
        yield from self._walker(state)

    def _members(self, state: State) -> Iterator[Step]:
        members, slot, (phase, told, noted), walker, promise, goings = state
        for i, (up, shards, lost, gone) in enumerate(members):
            if up and goings:
                for is_lost, word in ((0, "goes away"), (1, "is lost")):
                    # an empty disk in its place is another member, which told the writer nothing
                    is_forgotten = is_lost and self._rules.answer_counts_members_that_are_up
                    writer = (phase, _put(told, i, 0) if is_forgotten else told, noted)
                    went = max(gone, LOST if is_lost else AWAY) if promise else 0
                    after = (0, 0 if is_lost else shards, is_lost, went)
                    if is_lost and promise and not _outlived(_put(members, i, after), promise, LOST):
                        continue
                    yield f"member {i} {word}", (_put(members, i, after), slot, writer, walker, promise, goings - 1)
            elif not up:
                word = "is replaced by an empty one" if lost else "comes back"
                back = _put(members, i, (1, shards, 0, gone if gone == LOST else 0))
                noticed = (1, 1) if self._rules.returning_members_are_noted else slot
                yield f"member {i} {word}", (back, noticed, (phase, told, noted), walker, promise, goings)

    def _writer(self, state: State) -> Iterator[Step]:
        members, slot, (phase, told, noted), walker, promise, goings = state
        if phase == ANSWERED:
            return
        told = self._counted(members, told)
        if phase == STORING:
            yield from self._answers((members, slot, (phase, told, noted), walker, promise, goings))
        for s in range(self._n):
            for i, (up, shards, lost, gone) in enumerate(members):
                if not up or _all(told) >> s & 1:
                    continue
                if i != s and (members[s][0] or told[i].bit_count() == self._m):
                    continue
                stored = _put(members, i, (up, shards | 1 << s, lost, gone))
                keeps = noted if not self._rules.notes_behind_the_stores else 0
                writer = (STORING, _put(told, i, told[i] | 1 << s), keeps)
                yield f"shard {s} is stored at member {i}", (stored, slot, writer, walker, promise, goings)
        if phase == STORING and not noted:
            yield "the writer notes the slot as dirty", (members, (1, 1), (phase, told, 1), walker, promise, goings)

    def _counted(self, members: Members, told: tuple[int, ...]) -> tuple[int, ...]:
        """Return what the writer counts: answers of members that it does not find away now."""
        if not self._rules.answer_counts_members_that_are_up:
            return told
        return tuple(shards if member[0] else 0 for member, shards in zip(members, told, strict=True))

    def _answers(self, state: State) -> Iterator[Step]:
        members, slot, (_, told, noted), walker, _, goings = state
        rules = self._rules
        at_home = all(shards == 1 << i for i, shards in enumerate(told))
        all_stored = _all(told).bit_count() == self._n
        distinct = min(sum(1 for shards in told if shards), _all(told).bit_count())
        if not rules.short_answer_counts_members:
            distinct = _all(told).bit_count()
        fewest = self._j + (1 if rules.short_answer_leaves_one else 0)
        is_noted = noted or not rules.notes_before_the_answer
        if at_home or (all_stored and (is_noted or not rules.notes_strays)):
            allowed = self._m, 0
        elif distinct >= fewest and is_noted:
            allowed = 0, 1
        else:
            return
        word = "the writer answers: " + ("all shards" if allowed[0] else "fewer shards, and the slot is dirty")
        yield word, (_promised(members), slot, (ANSWERED, (0,) * self._n, 0), walker, (told, *allowed), goings)

    def _walker(self, state: State) -> Iterator[Step]:
        members, (dirty, anew), writer, (phase, found), promise, goings = state
        if phase == ELSEWHERE:
            if dirty:
                yield "the walker comes to the slot", (members, (dirty, 0), writer, (1, found), promise, goings)
            return
        for i, (up, shards, _, _) in enumerate(members):
            if up and phase == 1 + i:
                seen = (phase + 1, _put(found, i, shards))
                yield f"the walker has the list of member {i}", (members, (dirty, anew), writer, seen, promise, goings)
        yield from self._clears(state)

    def _clears(self, state: State) -> Iterator[Step]:
        members, (dirty, anew), writer, (phase, found), promise, goings = state
        nothing = (ELSEWHERE, (0,) * self._n)
        if phase <= self._n and self._rules.clear_wants_all_homes:
            if not members[phase - 1][0]:
                yield "the walker goes on: a home is away", (members, (dirty, 0), writer, nothing, promise, goings)
            return
        missing = [i for i in range(min(phase - 1, self._n)) if not found[i] >> i & 1]
        if missing and _all(found):
            i = missing[0]
            up, shards, lost, gone = members[i]
            if up and _all(member[1] for member in members if member[0]).bit_count() >= self._j:
                healed = _put(members, i, (up, shards | 1 << i, lost, gone))
                known = (phase, _put(found, i, found[i] | 1 << i))
                yield f"the walker rebuilds shard {i}", (healed, (dirty, anew), writer, known, promise, goings)
            yield "the walker goes on: a shard is missing", (members, (dirty, 0), writer, nothing, promise, goings)
        elif anew and self._rules.clear_compares:
            yield "the walker goes on: the slot was noted anew", (members, (dirty, 0), writer, nothing, promise, goings)
        else:
            yield "the walker clears the slot", self._cleared(members, writer, promise, goings)

    def _cleared(self, members: Members, writer: Writer, promise: Promise, goings: int) -> State:
        """Return the state with a clean slot: from now on all homes count, and m of them may go."""
        nothing = (ELSEWHERE, (0,) * self._n)
        if promise:
            promise = (tuple(1 << i for i in range(self._n)), self._m, 0)
            members = _promised(members)
        return members, (0, 0), writer, nothing, promise, goings


def _outlived(members: Members, promise: tuple[tuple[int, ...], int, int], least: int) -> bool:
    """Return whether no more is away, or lost, than the promise outlives."""
    counted, shards, holders = promise
    gone = [counted[i] for i, member in enumerate(members) if member[3] >= least and counted[i]]
    return sum(map(int.bit_count, gone)) <= shards or len(gone) <= holders


def _promised(members: Members) -> Members:
    """Return the members at the time of a promise: only those that are down have gone."""
    return tuple((*member[:3], 0 if member[0] else LOST if member[2] else AWAY) for member in members)


def _put(values: tuple[T, ...], i: int, value: T) -> tuple[T, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _all(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)
