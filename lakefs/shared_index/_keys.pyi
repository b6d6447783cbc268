from collections.abc import Sequence

from lakefs.shared_index.table import SharedTable

class Finder:
    """Look-ups of keys.  Many keys are passed as a list; ValueError for a key of no keyed blob."""

    def plan(
        self, space: int, keys: Sequence[bytes], rooms: Sequence[int]
    ) -> tuple[list[int], list[int], bytearray]: ...
    def match(self, space: int, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[bool | None]: ...

class KeyFinder(Finder):
    """Look-ups of keys in one table."""

    def __init__(self, table: SharedTable) -> None: ...

class HomesFinder(Finder):
    """Look-ups of keys in the tables of their homes; ValueError for memory that is shorter than the ring."""

    def __init__(
        self, memory: memoryview, vnodes: int, finders: Sequence[KeyFinder], numbers: Sequence[int]
    ) -> None: ...
    def homes(self, space: int, keys: Sequence[bytes]) -> list[int | None]: ...

def key_id(space: int, key: bytes) -> bytes: ...
