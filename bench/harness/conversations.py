"""A trace of prompts as an inference server sees them, in blocks of a KV cache; and caches that it is played to.

The model.  `users` people talk at once.  A conversation begins with one of `prefixes` shared beginnings (a system
prompt, a document), of 4 to 64 blocks; the n-th most popular is chosen 1/n as often as the first (Zipf, exponent 1).
Each turn appends 1 to 16 blocks, for the question and the answer to the one before, and asks for all blocks so far: a
prompt.  59 of 100 conversations end with their first turn; the others have 4.75 turns in the mean (geometric), so all
together 2.5: as people talk to a public assistant (WildChat, 1,000,000 conversations).  Then the user begins another.
The next turn is that of any user, all alike.  So blocks of three kinds compete: shared ones, used again and again;
those of open conversations, used again soon; and those of ended ones, never used again.

A block is named by all blocks before it, so a cache is of use for the leading blocks of a prompt that it has without a
gap: those are the hits.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

SINGLE_TURNS: Final = 0.59
"""Share of conversations of one turn."""
LATER_TURNS_MEAN: Final = 3.75
"""Turns behind the first of a conversation that has more than one."""
PREFIX_BLOCKS: Final = (4, 64)
TURN_BLOCKS: Final = (1, 16)


@dataclass(frozen=True)
class Model:
    """The numbers of a trace; `seed` decides all else."""

    users: int
    prefixes: int
    seed: int = 1


@dataclass
class _Conversation:
    blocks: list[bytes]
    turns_left: int


@dataclass
class _State:
    chance: random.Random
    model: Model
    weights: list[float]
    lengths: list[int]
    begun: int = 0
    open: list[_Conversation] = field(default_factory=list)


def prompts(model: Model) -> Iterator[list[bytes]]:
    """Iterate for ever over prompts: names of their blocks, 32 bytes each, in order."""
    chance = random.Random(model.seed)
    lengths = [chance.randint(*PREFIX_BLOCKS) for _ in range(model.prefixes)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(model.prefixes)))
    state = _State(chance, model, weights, lengths)
    state.open = [_begun(state) for _ in range(model.users)]
    while True:
        user = chance.randrange(model.users)
        talk = state.open[user]
        _append(talk.blocks, f"{user} {state.begun}", chance.randint(*TURN_BLOCKS))
        yield list(talk.blocks)
        talk.turns_left -= 1
        if not talk.turns_left:
            state.open[user] = _begun(state)


def _begun(state: _State) -> _Conversation:
    state.begun += 1
    [prefix] = state.chance.choices(range(state.model.prefixes), cum_weights=state.weights)
    blocks: list[bytes] = []
    _append(blocks, f"prefix {prefix}", state.lengths[prefix])
    turns = 1
    if state.chance.random() >= SINGLE_TURNS:
        turns = 2
        while state.chance.random() > 1 / LATER_TURNS_MEAN:
            turns += 1
    return _Conversation(blocks, turns)


def _append(blocks: list[bytes], said: str, count: int) -> None:
    """Append blocks, each named by the one before it and by what was said in it."""
    for number in range(count):
        before = blocks[-1] if blocks else b""
        blocks.append(hashlib.sha256(before + f"{said} {number}".encode()).digest())


class LeastRecentlyUsed:
    """A cache of so many blocks that evicts the block used longest ago.

    Of one prompt the last block counts as used first, so a prompt is evicted from its end on: the better order, since
    a block without those before it is of no use.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._blocks_max = blocks_max

    def ask(self, prompt: Sequence[bytes]) -> int:
        """Return the hits of a prompt, and keep all its blocks."""
        hits = next((place for place, block in enumerate(prompt) if block not in self._blocks), len(prompt))
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return hits
