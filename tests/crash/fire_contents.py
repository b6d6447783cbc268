"""Contents that follow from names: the key ends in a label, and the label stands for bytes.

Labels that begin with `p` are few, so that many names share their content.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

BUCKET: Final = "fire"
POOL: Final = tuple(f"p{number}" for number in range(24))
_SIZES: Final = (300, 2_000, 5_000, 20_000, 60_000, 65_536, 200_000, 1_500_000, 5_000_000)
_WEIGHTS: Final = (20, 20, 20, 20, 10, 30, 30, 4, 1)


@lru_cache(64)
def content_of(label: str) -> bytes:
    """Return the bytes that a label stands for."""
    chance = random.Random(label)
    (size,) = chance.choices(_SIZES, _WEIGHTS)
    return chance.randbytes(size)


def content_of_name(name: str) -> bytes:
    """Return the bytes that a name has whenever it exists."""
    return content_of(name.rpartition("-")[2])
