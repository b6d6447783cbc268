"""Gc by generations: two writers, two members, two names, and cycles of gc that may be given up at any time.

One chunk with a shard at each member; an answer counts when both have it.  Each writer has a name of its own.  A state
is (G, generation of names, walk, members, writers):

- walk: 0 not begun, 1 under way, 2 all marks sent;
- member: (touched, cycle, marked, complete): `touched` is 0 without the shard; `cycle` is the one it has begun, 0 after
  a restart or a sweep; `complete` says that all marks of that cycle have arrived;
- writer: (session's generation, members that answered, name bound, name passed by the walk).

Births are left out: a member here may free what was stored after the beginning, too, so it frees more than a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.models.pairs import put

Member = tuple[int, int, int, int]
Writer = tuple[int, int, int, int]
State = tuple[int, int, int, tuple[Member, Member], tuple[Writer, Writer]]

FIRST_CYCLE: Final = 3
"""Earlier ones free nothing, since nothing was touched below generation 1: they are left out."""
IDLE, WALKING, WALKED = 0, 1, 2
_EXCHANGED: Final = (0, 2, 1, 3)
"""Sets of members as bits, with the two exchanged."""


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    sweeps_below: int = 1
    """A cycle g frees what was touched below g minus this."""
    walk_waits_for_names: bool = True
    walk_waits_for_members: bool = True
    restart_counts_as_touched: bool = True
    names_refuse_old_sessions: bool = True
    sweep_wants_all_marks: bool = True


AS_DESIGNED: Final = Rules()


class Generations:
    """The model, up to a highest generation."""

    def __init__(self, last: int = 3, rules: Rules = AS_DESIGNED) -> None:
        self._last = last
        self._rules = rules

    def initial(self) -> State:
        member, writer = (0, 0, 0, 0), (0, 0, 0, 0)
        return 1, 1, IDLE, (member, member), (writer, writer)

    def form(self, state: State) -> State:
        now, names, walk, (first, second), (one, other) = state
        if first > second:
            first, second = second, first
            one = (one[0], _EXCHANGED[one[1]], one[2], one[3])
            other = (other[0], _EXCHANGED[other[1]], other[2], other[3])
        return now, names, walk, (first, second), ((one, other) if one <= other else (other, one))

    def broken(self, state: State) -> str | None:
        _, _, _, (first, second), (one, other) = state
        if (one[2] or other[2]) and not (first[0] and second[0]):
            return "a name refers to a chunk of which a shard was freed"
        return None

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._writers(state)
        yield from self._members(state)
        yield from self._cycle(state)
        yield from self._walk(state)

    def _writers(self, state: State) -> Iterator[tuple[str, State]]:
        now, names, walk, members, writers = state
        for w in (0, 1):
            session, answered, bound, passed = writers[w]
            for begun in range(1, now + 1):
                if begun != session or answered:
                    yield (
                        f"writer {w} begins a session of generation {begun}",
                        (now, names, walk, members, put(writers, w, (begun, 0, bound, passed))),
                    )
            if not session:
                continue
            for m in (0, 1):
                touched, cycle, marked, complete = members[m]
                if touched < session or not answered >> m & 1:
                    word = "is answered present" if touched else "stores its shard"
                    yield (
                        f"writer {w} {word} at member {m}",
                        (
                            now,
                            names,
                            walk,
                            put(members, m, (max(touched, session), cycle, marked, complete)),
                            put(writers, w, (session, answered | 1 << m, bound, passed)),
                        ),
                    )
            if answered == 3 and not bound:
                if session >= names - 1 or not self._rules.names_refuse_old_sessions:
                    yield (
                        f"writer {w} binds its name",
                        (now, names, walk, members, put(writers, w, (session, answered, 1, passed))),
                    )
                else:
                    yield (
                        f"writer {w} is refused: SessionLost",
                        (now, names, walk, members, put(writers, w, (0, 0, 0, passed))),
                    )
            if bound:
                yield (
                    f"the name of writer {w} is removed",
                    (now, names, walk, members, put(writers, w, (session, answered, 0, passed))),
                )

    def _members(self, state: State) -> Iterator[tuple[str, State]]:
        now, names, walk, members, writers = state
        rules = self._rules
        for m in (0, 1):
            touched, cycle, marked, complete = members[m]
            if cycle != now and (walk == IDLE or not rules.walk_waits_for_members) and now >= FIRST_CYCLE:
                yield (
                    f"member {m} begins cycle {now}",
                    (now, names, walk, put(members, m, (touched, now, 0, 0)), writers),
                )
            if complete:
                frees = touched and not marked and touched < cycle - rules.sweeps_below
                yield (
                    f"member {m} sweeps" + (": the shard is freed" if frees else ""),
                    (now, names, walk, put(members, m, (0 if frees else touched, 0, 0, 0)), writers),
                )
            opened = touched and (now if rules.restart_counts_as_touched else 1)
            yield f"member {m} restarts", (now, names, walk, put(members, m, (opened, 0, 0, 0)), writers)

    def _cycle(self, state: State) -> Iterator[tuple[str, State]]:
        now, names, walk, members, writers = state
        if now < self._last:
            yield f"G becomes {now + 1}", (now + 1, names, IDLE, _given_up(members), _not_passed(writers))
        if names < now:
            yield f"names join {now}", (now, now, walk, members, writers)
        if walk == WALKING:
            yield "names restart", (now, names, IDLE, members, _not_passed(writers))

    def _walk(self, state: State) -> Iterator[tuple[str, State]]:
        now, names, walk, members, writers = state
        rules = self._rules
        if walk == IDLE and now >= FIRST_CYCLE:
            joined = names == now or not rules.walk_waits_for_names
            begun = members[0][1] == now or members[1][1] == now or not rules.walk_waits_for_members
            if joined and begun:
                yield "the walk begins", (now, names, WALKING, members, writers)
        if walk != WALKING:
            return
        for w in (0, 1):
            session, answered, bound, passed = writers[w]
            if not passed:
                after = put(writers, w, (session, answered, bound, 1))
                marked = _marked(members, now, 3) if bound else members
                yield f"the walk passes the name of writer {w}", (now, names, walk, marked, after)
                if bound and not rules.sweep_wants_all_marks:
                    for m in (0, 1):
                        yield (
                            f"the mark for member {m} is lost",
                            (now, names, walk, _marked(members, now, 1 << m), after),
                        )
        if writers[0][3] and writers[1][3]:
            yield "all marks are sent", (now, names, WALKED, _complete(members, now), _not_passed(writers))


def _not_passed(writers: tuple[Writer, Writer]) -> tuple[Writer, Writer]:
    one, other = writers
    return (*one[:3], 0), (*other[:3], 0)


def _marked(members: tuple[Member, Member], cycle: int, which: int) -> tuple[Member, Member]:
    """Return the members with the chunk marked at those of this set that have begun the cycle and hold it."""
    one, other = members
    if which & 1 and one[0] and one[1] == cycle:
        one = (*one[:2], 1, one[3])
    if which & 2 and other[0] and other[1] == cycle:
        other = (*other[:2], 1, other[3])
    return one, other


def _complete(members: tuple[Member, Member], cycle: int) -> tuple[Member, Member]:
    one, other = members
    return (*one[:3], one[3] | (one[1] == cycle)), (*other[:3], other[3] | (other[1] == cycle))


def _given_up(members: tuple[Member, Member]) -> tuple[Member, Member]:
    """Return the members without a cycle of which they lack marks: they never get them.  The others may still sweep."""
    one, other = members
    return (one if one[3] else (one[0], 0, 0, 0)), (other if other[3] else (other[0], 0, 0, 0))
