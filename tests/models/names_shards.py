"""Gc by generations over two names shards: cycles that join and walk both, leaders that change, a shard that is added.

One chunk, one member, one writer, and a name in each shard; the second shard is added at any time.  What happens within
the walk of one shard is in `copies`, restarts of members in `generations`.  A state is
(G, driver, member, writer, shards):

- driver: (phase, number of shards that it counted);
- member: (touched, marked), in the cycle of G; `touched` is 0 without the chunk;
- writer: (session's generation, member has answered);
- shard: (life, joined, name, walked, deposed): `joined` is what its log says; `name` and `walked` see below; `deposed`:
  0, or 1 + the name as a former leader has it, to which the driver is still connected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.models.generations import FIRST_CYCLE
from tests.models.pairs import put

Shard = tuple[int, int, int, int, int]
Shards = tuple[Shard, Shard]
State = tuple[int, tuple[int, int], tuple[int, int], tuple[int, int], Shards]
Step = tuple[str, State]

IDLE, COUNTING, JOINING, WALKING = range(4)
ABSENT, ADDED, BEGINNING, SERVING = range(4)
FREE, BOUND, REMOVING = range(3)
"""A name that is being removed is gone for readers, and not yet in the log: another leader has it again."""
AHEAD, LOOKED, SAW_REMOVING, WHOLE = range(4)


class Rules(NamedTuple):
    """The rules; each can be weakened by itself."""

    all_shards_join: bool = True
    all_shards_are_walked: bool = True
    shards_are_counted_behind_the_generation: bool = True
    new_shards_begin_joined: bool = True
    copies_across_are_offered: bool = True
    reads_check_the_leader: bool = True
    walks_end_with_the_term: bool = True
    walks_are_whole_when_durable: bool = True


AS_DESIGNED: Final = Rules()


class NamesShards:
    """The model, up to a highest generation."""

    def __init__(self, last: int = 3, rules: Rules = AS_DESIGNED) -> None:
        self._last, self._rules = last, rules

    def initial(self) -> State:
        first, second = (SERVING, 1, FREE, AHEAD, 0), (ABSENT, 0, FREE, AHEAD, 0)
        return 1, (IDLE, 0), (0, 0), (0, 0), (first, second)

    def form(self, state: State) -> State:
        return state

    def broken(self, state: State) -> str | None:
        if not state[2][0] and any(name != FREE for _, _, name, _, _ in state[4]):
            return "a name of a shard refers to a chunk that was freed"
        return None

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._writer(state)
        for number in (0, 1):
            yield from self._names(state, number)
            yield from self._leaders(state, number)
        yield from self._cycle(state)
        for number in (0, 1):
            yield from self._walk(state, number)

    # --- clients -----------------------------------------------------------------------------------

    def _writer(self, state: State) -> Iterator[Step]:
        now, driver, (touched, marked), (session, answered), shards = state
        for begun in range(1, now + 1):
            if begun != session or answered:
                yield f"the writer begins a session of generation {begun}", (*state[:3], (begun, 0), shards)
        if not session:
            return
        if touched < session or not answered:
            word = "is answered present" if touched else "stores the chunk"
            yield f"the writer {word}", (now, driver, (max(touched, session), marked), (session, 1), shards)
        if not answered:
            return
        for number, (life, joined, name, walked, deposed) in enumerate(shards):
            if life == SERVING and name == FREE:
                if session < joined - 1:
                    yield f"shard {number} refuses: SessionLost", (*state[:3], (0, 0), shards)
                else:
                    bound = put(shards, number, (life, joined, BOUND, walked, deposed))
                    yield f"the writer binds in shard {number}", (*state[:4], bound)

    def _names(self, state: State, number: int) -> Iterator[Step]:
        shards = state[4]
        life, joined, name, walked, deposed = shards[number]

        def named(name: int) -> Shards:
            return put(shards, number, (life, joined, name, walked, deposed))

        if name == BOUND:
            yield f"the name in shard {number} is removed for readers", (*state[:4], named(REMOVING))
            other = shards[1 - number]
            if not self._rules.copies_across_are_offered and other[0] == SERVING and other[2] == FREE:
                copied = put(shards, 1 - number, (*other[:2], BOUND, *other[3:]))
                yield f"the name in shard {number} is copied across as it is", (*state[:4], copied)
        if name == REMOVING:
            yield f"the removal in shard {number} is in the log", (*state[:4], named(FREE))

    # --- leaders -----------------------------------------------------------------------------------

    def _leaders(self, state: State, number: int) -> Iterator[Step]:
        now, _, _, _, shards = state
        life, joined, name, walked, deposed = shards[number]
        if life == ABSENT:
            yield f"shard {number} is added", (*state[:4], put(shards, number, (ADDED, 0, FREE, AHEAD, 0)))
        elif life == ADDED:
            read = now if self._rules.new_shards_begin_joined else 0
            begun = put(shards, number, (BEGINNING, read, FREE, AHEAD, 0))
            yield f"the first term of shard {number} reads the generation", (*state[:4], begun)
        elif life == BEGINNING:
            yield f"shard {number} is served", (*state[:4], put(shards, number, (SERVING, joined, FREE, AHEAD, 0)))
        elif not deposed:
            kept = BOUND if name == REMOVING else name
            is_amid = walked in (LOOKED, SAW_REMOVING)
            if is_amid and self._rules.walks_end_with_the_term:
                ended = put(shards, number, (life, joined, kept, AHEAD, 0))
                yield f"another leads shard {number}: the walk ends", _given_up((*state[:4], ended))
                return
            stays = 0 if self._rules.reads_check_the_leader or walked != AHEAD else 1 + name
            later = walked if is_amid or walked == WHOLE else AHEAD
            yield f"another leads shard {number}", (*state[:4], put(shards, number, (life, joined, kept, later, stays)))

    # --- the cycle ---------------------------------------------------------------------------------

    def _cycle(self, state: State) -> Iterator[Step]:
        now, (phase, count), (touched, marked), writer, shards = state
        present = sum(life != ABSENT for life, *_ in shards)
        counts_before = not self._rules.shards_are_counted_behind_the_generation
        if phase == IDLE:
            if counts_before and count != present:
                yield f"{present} shards are counted", (now, (IDLE, present), *state[2:])
            if now < self._last and (count or not counts_before):
                begun = (JOINING, count) if counts_before else (COUNTING, 0)
                yield f"G becomes {now + 1}", (now + 1, begun, (touched, 0), writer, _ahead(shards))
            return
        yield "the cycle is given up", _given_up(state)
        if phase == COUNTING:
            yield f"{present} shards are counted", (now, (JOINING, present), *state[2:])
        if phase == JOINING:
            for number in range(count):
                life, joined, name, walked, deposed = shards[number]
                if life == SERVING and joined < now:
                    after = put(shards, number, (life, now, name, walked, deposed))
                    yield f"shard {number} joins {now}", (*state[:4], after)
            joining = range(count if self._rules.all_shards_join else 1)
            if now >= FIRST_CYCLE and all(shards[n][0] == SERVING and shards[n][1] == now for n in joining):
                yield "the member begins", (now, (WALKING, count), (touched, 0), writer, shards)
        walking = range(count if self._rules.all_shards_are_walked else 1)
        if phase == WALKING and all(shards[number][3] == WHOLE for number in walking):
            frees = touched and not marked and touched < now - 1
            word = "the member sweeps" + (": the chunk is freed" if frees else "")
            yield word, _given_up((now, (phase, count), (0 if frees else touched, 0), writer, shards))

    def _walk(self, state: State, number: int) -> Iterator[Step]:
        now, (phase, count), (touched, marked), writer, shards = state
        life, joined, name, walked, deposed = shards[number]
        if phase != WALKING or number >= count or life != SERVING:
            return
        seen = deposed - 1 if deposed else name
        if walked == AHEAD:
            looked = put(shards, number, (life, joined, name, SAW_REMOVING if seen == REMOVING else LOOKED, deposed))
            met = touched, int(marked or (seen == BOUND and touched > 0))
            yield f"the walk looks at shard {number}", (now, (phase, count), met, writer, looked)
        is_durable = seen != REMOVING or not self._rules.walks_are_whole_when_durable
        if walked == LOOKED or (walked == SAW_REMOVING and is_durable):
            whole = put(shards, number, (life, joined, name, WHOLE, 0))
            yield f"the walk of shard {number} is whole", (*state[:4], whole)


def _ahead(shards: Shards) -> Shards:
    first, second = shards
    return (*first[:3], AHEAD, 0), (*second[:3], AHEAD, 0)


def _given_up(state: State) -> State:
    now, _, (touched, _), writer, shards = state
    return now, (IDLE, 0), (touched, 0), writer, _ahead(shards)
