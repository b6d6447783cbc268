"""Gc by generations while names copy, rename and remove content: one chunk, one member, three nodes of the name space.

Content gets to a node by a session's commit, or from another node, without any answer of a member.  A state is
(G, generation of names, walk, member, writer, nodes):

- walk: 0 not begun, 1 under way, 2 all marks sent;
- member: (touched, cycle, marked, complete), as in `generations`;
- writer: (session's generation, member has answered);
- node: (bound, 0 not passed by the walk, 1 passed, 2 passed and noted to be looked at again).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.models.generations import FIRST_CYCLE, IDLE, WALKED, WALKING

Member = tuple[int, int, int, int]
Node = tuple[int, int]
Nodes = tuple[Node, ...]
State = tuple[int, int, int, Member, tuple[int, int], Nodes]
Step = tuple[str, State]

AHEAD, PASSED, NOTED = 0, 1, 2


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    notes_copies: bool = True
    notes_commits: bool = True
    walk_ends_when_nothing_is_noted: bool = True
    new_names_walk_anew: bool = True


AS_DESIGNED: Final = Rules()


class Copies:
    """The model, up to a highest generation, with some nodes."""

    def __init__(self, last: int = 3, rules: Rules = AS_DESIGNED, *, nodes: int = 3) -> None:
        self._last, self._rules, self._nodes = last, rules, nodes

    def initial(self) -> State:
        return 1, 1, IDLE, (0, 0, 0, 0), (0, 0), ((0, AHEAD),) * self._nodes

    def form(self, state: State) -> State:
        return (*state[:5], tuple(sorted(state[5])))

    def broken(self, state: State) -> str | None:
        if not state[3][0] and any(bound for bound, _ in state[5]):
            return "a name refers to a chunk whose shard was freed"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._writer(state)
        yield from self._names(state)
        yield from self._member(state)
        yield from self._cycle(state)

    def _writer(self, state: State) -> Iterator[Step]:
        now, names, walk, member, (session, answered), nodes = state
        for begun in range(1, now + 1):
            if begun != session or answered:
                yield (
                    f"the writer begins a session of generation {begun}",
                    (now, names, walk, member, (begun, 0), nodes),
                )
        if not session:
            return
        touched, cycle, marked, complete = member
        if touched < session or not answered:
            word = "is answered present" if touched else "stores the shard"
            told = max(touched, session), cycle, marked, complete
            yield f"the writer {word}", (now, names, walk, told, (session, 1), nodes)
        if answered and session < names - 1:
            yield "the writer is refused: SessionLost", (now, names, walk, member, (0, 0), nodes)
        elif answered:
            for n, (bound, _) in enumerate(nodes):
                if not bound:
                    after = _bound(nodes, n, self._rules.notes_commits)
                    yield f"the writer binds node {n}", (now, names, walk, member, (session, 1), after)

    def _names(self, state: State) -> Iterator[Step]:
        now, names, walk, member, writer, nodes = state

        def behind(nodes: Nodes) -> State:
            return now, names, walk, member, writer, nodes

        for source, (bound, passed) in enumerate(nodes):
            if not bound:
                continue
            removed = _put(nodes, source, (0, passed))
            yield f"node {source} is removed", behind(removed)
            for n, (taken, _) in enumerate(nodes):
                if not taken:
                    yield f"node {source} is copied to {n}", behind(_bound(nodes, n, self._rules.notes_copies))
                    yield f"node {source} is renamed to {n}", behind(_bound(removed, n, self._rules.notes_copies))

    def _member(self, state: State) -> Iterator[Step]:
        now, names, walk, (touched, cycle, marked, complete), writer, nodes = state
        if cycle != now and walk == IDLE and now >= FIRST_CYCLE:
            yield f"the member begins cycle {now}", (now, names, walk, (touched, now, 0, 0), writer, nodes)
        if complete:
            frees = touched and not marked and touched < cycle - 1
            word = ": the shard is freed" if frees else ""
            left = 0 if frees else touched
            yield f"the member sweeps{word}", (now, names, walk, (left, 0, 0, 0), writer, nodes)
        yield "the member restarts", (now, names, walk, (touched and now, 0, 0, 0), writer, nodes)

    def _cycle(self, state: State) -> Iterator[Step]:
        now, names, walk, member, writer, nodes = state
        touched, cycle, marked, complete = member
        if now < self._last:
            left = member if complete else (touched, 0, 0, 0)
            yield f"G becomes {now + 1}", (now + 1, names, IDLE, left, writer, _ahead(nodes))
        if names < now:
            yield f"names join {now}", (now, now, walk, member, writer, nodes)
        if walk == IDLE and now == names == cycle and not complete:
            yield "the walk begins", (now, names, WALKING, member, writer, nodes)
        if walk != WALKING:
            return
        for n, (bound, passed) in enumerate(nodes):
            if passed != PASSED:
                met = (touched, cycle, int(touched > 0), complete) if bound and cycle == now else member
                again = " again" if passed else ""
                after = _put(nodes, n, (bound, PASSED))
                yield f"the walk looks at node {n}{again}", (now, names, walk, met, writer, after)
        ended = {PASSED} if self._rules.walk_ends_when_nothing_is_noted else {PASSED, NOTED}
        if all(passed in ended for _, passed in nodes):
            done = (touched, cycle, marked, complete | (cycle == now))
            yield "all marks are sent", (now, names, WALKED, done, writer, _ahead(nodes))
        if self._rules.new_names_walk_anew:
            yield "names restart", (now, names, IDLE, member, writer, _ahead(nodes))
        else:
            known = tuple((bound, min(passed, PASSED)) for bound, passed in nodes)
            yield "names restart", (now, names, WALKING, member, writer, known)


def _put(nodes: Nodes, n: int, node: Node) -> Nodes:
    return (*nodes[:n], node, *nodes[n + 1 :])


def _bound(nodes: Nodes, n: int, notes: bool) -> Nodes:
    """Return the nodes with one bound: the walk looks at it again if it has passed it, and notes it."""
    passed = nodes[n][1]
    return _put(nodes, n, (1, NOTED if passed and notes else passed))


def _ahead(nodes: Nodes) -> Nodes:
    return tuple((bound, AHEAD) for bound, _ in nodes)
