from collections.abc import Sequence

from lakefs.shared_index.table import SharedTable

class KeyFinder:
    """Look-ups of keys in one table.  Many keys are passed as a list; ValueError for a key of no keyed blob."""

    def __init__(self, table: SharedTable) -> None: ...
    def plan(
        self, space: int, keys: Sequence[bytes], rooms: Sequence[int]
    ) -> tuple[list[int], list[int], bytearray]: ...
    def match(self, space: int, keys: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[bool | None]: ...

def key_id(space: int, key: bytes) -> bytes: ...
