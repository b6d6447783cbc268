"""Gc by generations while a shard moves: an old home, a new home, a walker that moves what is at the wrong place.

One chunk of one shard.  Epoch 1 has it at the old home.  Epoch 2 has it at the new home; the old one is its substitute,
or no longer in the row.  A state is (G, generation of names, walk, stage, members, given, writers):

- walk: (0 not begun, 1 under way, 2 all marks sent; the epochs that were not retired when G advanced, as bits);
- stage: of the change of epochs, see the constants;
- member: (touched, cycle, born before the cycle, marked, complete), as in the model without moves;
- given: the generation that the walker has given to its copy at the new home, 0 when it has none under way;
- writer: (session's generation, its answer, name bound, name passed by the walk).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypedDict

from tests.models.generations import FIRST_CYCLE, IDLE, WALKED, WALKING
from tests.models.pairs import put

Member = tuple[int, int, int, int, int]
Members = tuple[Member, Member]
Writer = tuple[int, int, int, int]
Writers = tuple[Writer, Writer]
State = tuple[int, int, tuple[int, int], int, Members, int, Writers]
Step = tuple[str, State]

ONE, MADE, SAID, THROUGH, RETIRED = range(5)
"""Only epoch 1; epoch 2 is made; the old home has said it; the walker has been through since; epoch 1 is retired."""
OLD, NEW = 0, 1
_HOMES: Final = ("the old home", "the new home")
NONE, OLD_BY_1, OLD_BY_2, NEW_BY_2 = range(4)
"""A session's answer: from which home, under which epoch."""
_MEMBER_OF: Final = {OLD_BY_1: OLD, OLD_BY_2: OLD, NEW_BY_2: NEW}
_EPOCH_OF: Final = {OLD_BY_1: 1, OLD_BY_2: 2, NEW_BY_2: 2}


CYCLE, NOW, NOTHING = "the cycle's table", "the table of now", "nothing"


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    drop_compares: bool = True
    lost_copy_is_stored_again: bool = True
    copy_keeps_its_generation: bool = True
    sweep_compares: str = CYCLE
    """A member sweeps where it is a home: in every epoch of the cycle's table, or of now, or it does not compare."""
    sweep_spares_new_births: bool = True
    members_refuse_old_epochs: bool = True
    retirement_waits_for_the_walker: bool = True


AS_DESIGNED: Final = Rules()


class Change(TypedDict):
    """Bounds of a model with a change of epochs."""

    substitute: bool
    stage: int


CHANGING: Final = Change(substitute=False, stage=ONE)
"""A change of epochs from its beginning, by which the old home leaves the row."""


class Moves:
    """The model, up to a highest generation, with one or two writers."""

    def __init__(
        self,
        last: int = 3,
        rules: Rules = AS_DESIGNED,
        *,
        writers: int = 1,
        substitute: bool = True,
        stage: int = RETIRED,
    ) -> None:
        self._last, self._rules, self._stage = last, rules, stage
        self._writing = range(writers)
        self._substitute = substitute

    def initial(self) -> State:
        member, writer = (0, 0, 0, 0, 0), (0, 0, 0, 0)
        return 1, 1, (IDLE, _table(self._stage)), self._stage, (member, member), 0, (writer, writer)

    def form(self, state: State) -> State:
        one, other = state[6]
        return state if one <= other or len(self._writing) == 1 else (*state[:6], (other, one))

    def broken(self, state: State) -> str | None:
        _, _, _, stage, (old, new), _, (one, other) = state
        readable = new[0] or (old[0] and (stage != RETIRED or self._substitute))
        if (one[2] or other[2]) and not readable:
            return "a name refers to a chunk whose shard is nowhere where readers look"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        for w in self._writing:
            yield from self._writer(state, w)
        yield from self._epochs(state)
        yield from self._walker(state)
        for m in (OLD, NEW):
            yield from self._member(state, m)
        yield from self._cycle(state)
        yield from self._walk(state)

    def _writer(self, state: State, w: int) -> Iterator[Step]:
        now, names, walk, stage, members, given, writers = state
        session, answer, bound, passed = writers[w]

        def behind(writer: Writer, members: Members = members) -> State:
            return now, names, walk, stage, members, given, put(writers, w, writer)

        for begun in range(1, now + 1):
            if begun != session or answer:
                yield f"writer {w} begins a session of generation {begun}", behind((begun, NONE, bound, passed))
        if not session:
            return
        for found in self._answers(stage):
            m = _MEMBER_OF[found]
            touched = members[m][0]
            if answer != found or touched < session:
                word = "is answered present by" if touched else "stores at"
                yield (
                    f"writer {w} {word} {_HOMES[m]} under epoch {_EPOCH_OF[found]}",
                    behind((session, found, bound, passed), put(members, m, _touched(members[m], session))),
                )
        if answer and not bound:
            retired = answer == OLD_BY_1 and stage == RETIRED
            if session >= names - 1 and not retired:
                yield f"writer {w} binds its name", behind((session, answer, 1, passed))
            else:
                yield f"writer {w} is refused", behind((0, NONE, 0, passed))
        if bound:
            yield f"the name of writer {w} is removed", behind((session, answer, 0, passed))

    def _answers(self, stage: int) -> Iterator[int]:
        if stage < SAID or not self._rules.members_refuse_old_epochs:
            yield OLD_BY_1
        if stage >= MADE:
            yield NEW_BY_2
            if self._substitute:
                yield OLD_BY_2

    def _epochs(self, state: State) -> Iterator[Step]:
        now, names, walk, stage, members, given, writers = state

        def behind(stage: int) -> State:
            return now, names, walk, stage, members, given, writers

        if stage == ONE:
            yield "epoch 2 is made", behind(MADE)
        elif stage == MADE:
            yield "the old home says epoch 2", behind(SAID)
        elif stage == SAID and ((not members[OLD][0] and not given) or not self._rules.retirement_waits_for_the_walker):
            yield "the walker has been through the slot", behind(THROUGH)
        elif stage == THROUGH:
            yield "epoch 1 is retired", behind(RETIRED)

    def _walker(self, state: State) -> Iterator[Step]:
        now, names, walk, stage, members, given, writers = state
        rules = self._rules
        old, new = members
        if given:
            yield "the walker dies", (now, names, walk, stage, members, 0, writers)
        if stage == ONE or not old[0]:
            return
        if not given:
            for session in range(1, now + 1):
                copied = (old, _touched(new, session if rules.copy_keeps_its_generation else 1))
                yield (
                    f"the walker copies the shard to the new home, touched in {session}",
                    (now, names, walk, stage, copied, session, writers),
                )
        elif old[0] <= given or not rules.drop_compares:
            dropped = (_without(old), new)
            yield "the walker drops the shard at the old home", (now, names, walk, stage, dropped, 0, writers)
        else:
            again = _touched(new, old[0]) if new[0] or rules.lost_copy_is_stored_again else new
            yield (
                f"the drop is refused: the walker touches the copy in {old[0]}",
                (now, names, walk, stage, (old, again), old[0], writers),
            )

    def _member(self, state: State, m: int) -> Iterator[Step]:
        now, names, walk, stage, members, given, writers = state
        touched, cycle, before, marked, complete = members[m]

        def behind(member: Member) -> State:
            return now, names, walk, stage, put(members, m, member), given, writers

        if cycle != now and walk[0] == IDLE and now >= FIRST_CYCLE:
            yield f"{_HOMES[m]} begins cycle {now}", behind((touched, now, int(touched > 0), 0, 0))
        if complete:
            frees = 0 < touched < cycle - 1 and not marked
            if self._rules.sweep_spares_new_births:
                frees = frees and bool(before)
            if self._rules.sweep_compares == NOW:
                frees = frees and (stage < SAID if m == OLD else stage == RETIRED)
            yield (
                f"{_HOMES[m]} sweeps" + (": the shard is freed" if frees else ""),
                behind((0 if frees else touched, 0, 0, 0, 0)),
            )
        yield f"{_HOMES[m]} restarts", behind((touched and now, 0, 0, 0, 0))

    def _cycle(self, state: State) -> Iterator[Step]:
        now, names, walk, stage, members, given, writers = state
        if now < self._last:
            yield (
                f"G becomes {now + 1}",
                (now + 1, names, (IDLE, _table(stage)), stage, _given_up(members), given, _not_passed(writers)),
            )
        if names < now:
            yield f"names join {now}", (now, now, walk, stage, members, given, writers)
        if walk[0] == WALKING:
            yield "names restart", (now, names, (IDLE, walk[1]), stage, members, given, _not_passed(writers))

    def _reached(self, table: int) -> int:
        """Return the members in rows of these epochs, as bits."""
        return table | 1 if self._substitute else table

    def _walk(self, state: State) -> Iterator[Step]:
        now, names, (walk, table), stage, members, given, writers = state
        if walk == IDLE and now >= FIRST_CYCLE and names == now and now in (members[OLD][1], members[NEW][1]):
            yield "the walk begins", (now, names, (WALKING, table), stage, members, given, writers)
        if walk != WALKING:
            return
        for w in self._writing:
            session, answer, bound, passed = writers[w]
            if not passed:
                after = put(writers, w, (session, answer, bound, 1))
                marked = _marked(members, now, self._reached(table)) if bound else members
                yield (
                    f"the walk passes the name of writer {w}",
                    (now, names, (walk, table), stage, marked, given, after),
                )
        if all(writers[w][3] for w in self._writing):
            homes = _homes(table) if self._rules.sweep_compares == CYCLE else 3
            complete = _complete(members, now, homes)
            yield "all marks are sent", (now, names, (WALKED, 0), stage, complete, given, _not_passed(writers))


def _table(stage: int) -> int:
    """Return the epochs that are not retired, as bits."""
    return (1, 3, 3, 3, 2)[stage]


def _homes(table: int) -> int:
    """Return the members that are a home in each of these epochs, as bits."""
    return (0, 1 << OLD, 1 << NEW, 0)[table]


def _touched(member: Member, generation: int) -> Member:
    """Return the member with the shard, touched; one that it lacked is born now."""
    touched, cycle, before, marked, complete = member
    if not touched:
        return generation, cycle, 0, 0, complete
    return max(touched, generation), cycle, before, marked, complete


def _without(member: Member) -> Member:
    return 0, member[1], 0, 0, member[4]


def _marked(members: Members, cycle: int, which: int) -> Members:
    """Return the members with the shard marked at those of this set that have begun the cycle and hold it."""
    old, new = members
    if which & 1 and old[0] and old[1] == cycle:
        old = (*old[:3], 1, old[4])
    if which & 2 and new[0] and new[1] == cycle:
        new = (*new[:3], 1, new[4])
    return old, new


def _complete(members: Members, cycle: int, homes: int) -> Members:
    """Return the members when all marks are sent: of those that have begun the cycle these homes may sweep."""

    def complete(member: Member, is_home: int) -> Member:
        if member[1] != cycle:
            return member
        return (*member[:4], 1) if is_home else (member[0], 0, 0, 0, 0)

    return complete(members[OLD], homes & 1), complete(members[NEW], homes >> 1)


def _given_up(members: Members) -> Members:
    """Return the members without a cycle of which they lack marks: they never get them.  The others may still sweep."""
    old, new = members
    return (old if old[4] else (old[0], 0, 0, 0, 0)), (new if new[4] else (new[0], 0, 0, 0, 0))


def _not_passed(writers: Writers) -> Writers:
    one, other = writers
    return (*one[:3], 0), (*other[:3], 0)
