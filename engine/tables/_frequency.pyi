from collections.abc import Sequence

class Sketch:
    """Four rows of `width` counters (a power of two), halved each time that `sample` reads were counted.

    A count-min sketch with conservative update: an estimate may be too high, when chunks share counters, and is never
    too low until counts are halved.  A row takes eight bytes of the digest as they are: digests are uniform.
    """

    halvings: int
    """Number of times that all counts were halved."""

    def __init__(self, width: int, sample: int, step: int = 1) -> None: ...
    def halve_after(self, sample: int) -> None: ...
    def note(self, chunk: bytes) -> int: ...
    def note_many(self, chunks: Sequence[bytes]) -> bytes: ...
    def estimate(self, chunk: bytes) -> int: ...
