"""The share of blocks that a space still has when they are asked for, against a plain LRU of the same bytes.

Both are asked for the prompts of one trace (`bench.harness.conversations`), until it has named four times as many
blocks as the cache has room for.  Ours is a space of a real engine with that quota, used as an inference server uses
it: the keys of a prompt are matched, the present prefix is loaded, the other blocks are put with their depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.harness.content import payload
from bench.harness.conversations import LeastRecentlyUsed, Model, prompts
from bench.harness.measure import Bench, Figure, Scenario, Single, at_least
from bench.harness.process import EngineProcess
from lakefs.content.verify import Check
from lakefs.limits import KEYED_QUOTA_BYTES_MIN

MODEL: Final = Model(users=200, prefixes=200)
BLOCKS_MAX: Final = 2048
"""Blocks that the cache has room for: a quarter of those that the trace names."""
SET: Final = 4
BLOCK_BYTES: Final = KEYED_QUOTA_BYTES_MIN // BLOCKS_MAX
PROMPT_BLOCKS_MAX: Final = 1024


def trace(blocks_max: int) -> list[list[bytes]]:
    """Return prompts that together name SET times as many blocks as a cache of so many holds."""
    found: list[list[bytes]] = []
    named: set[bytes] = set()
    for prompt in prompts(MODEL):
        found.append(prompt)
        named.update(prompt)
        if len(named) >= SET * blocks_max:
            break
    return found


def measure_hits(bench: Bench) -> dict[str, float]:
    """Return our share of hits less that of LRU, in points, and both."""
    asked = trace(bench.scale.pick(BLOCKS_MAX, 100))
    total = sum(map(len, asked))
    plain = LeastRecentlyUsed(BLOCKS_MAX)
    lru = sum(plain.ask(prompt) for prompt in asked) / total
    with EngineProcess(bench.folder) as engine:
        ours = _hits(engine, asked) / total
    unbounded = 1 - len({block for prompt in asked for block in prompt}) / total
    return {
        "points over plain LRU": 100 * (ours - lru), "ours %": 100 * ours, "LRU %": 100 * lru,
        "with room for all %": 100 * unbounded, "prompts": len(asked),
    }  # fmt: skip


def _hits(engine: EngineProcess, asked: Sequence[Sequence[bytes]]) -> int:
    block, hits = payload(BLOCK_BYTES), 0
    room = PROMPT_BLOCKS_MAX * BLOCK_BYTES
    with engine.connect(check=Check.NONE) as lake, lake.pool(size_bytes=room) as pool:
        space = lake.space("bench", quota=BLOCKS_MAX * BLOCK_BYTES)
        for prompt in asked:
            prefix = space.match(prompt).prefix
            if prefix:
                space.load(
                    prompt[:prefix], pool, [place * BLOCK_BYTES for place in range(prefix)], [BLOCK_BYTES] * prefix
                )
            if prefix < len(prompt):
                new = len(prompt) - prefix
                done = space.put_many(prompt[prefix:], [block] * new, depths=range(prefix, len(prompt)))
                assert not done.failures
            hits += prefix
    return hits


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "keyed-hits",
        "blocks of conversations that a space of a quarter of their bytes has",
        (Figure("points over plain LRU", at_least(3), "points"),),
        measure_hits,
    ),
)
