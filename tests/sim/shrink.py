"""Cut a failing seed down: the fewest operations of its customers with which it still fails.

Operations are left out whole, lives and customers stay, so the shortest run is one of the same kind.  What is left
shifts the operations of the disk, and with them the moment of a crash; so it is looked for in halves, quarters and so
on, round after round, until nothing more can go or the tries are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.sim.world import World, causes_of

TRIES_MAX = 400


@dataclass(frozen=True)
class Shrunk:
    """What is left of a failing seed."""

    rounds: int
    operations: list[str]
    of: int
    """How many operations the whole run came to."""
    failure: str


def shrink(seed: int, rounds: int, say: Callable[[str], None], *, tries: int = TRIES_MAX) -> Shrunk | None:
    """The smallest failing part of a run that was found; None when the seed does not fail.

    Any failure counts, not only the first one: the cause that is left is one that is easier to see.
    """
    failure, done, lives = fails(seed, rounds, None)
    if failure is None:
        return None
    kept, whole = list(done), len(done)
    if lives < rounds and fails(seed, lives, kept)[0] is not None:
        rounds = lives
    step = max(1, len(kept) // 2)
    while tries > 0:
        before = len(kept)
        for start in range(len(kept) - step, -step, -step):
            left = kept[: max(0, start)] + kept[max(0, start) + step :]
            if len(left) == len(kept) or tries <= 0:
                continue
            tries -= 1
            found, done, _ = fails(seed, rounds, left)
            if found is not None:
                reached = set(done)
                kept, failure = [one for one in left if one in reached], found
                say(f"{len(kept)} of {whole} operations: {failure[:160]}")
        if step == 1 and len(kept) == before:
            break
        step = max(1, min(step, len(kept)) // 2)
    return Shrunk(rounds, kept, whole, failure)


def fails(seed: int, rounds: int, only: Collection[str] | None) -> tuple[str | None, list[str], int]:
    """What a part of a run fails with, the operations it came to, and the number of the life in which it ended."""
    world = World(seed, rounds, None if only is None else frozenset(only))
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the seed's finding
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes_of(error))
        return causes, world.done, world.result.lives + 1
    return None, world.done, world.result.lives
