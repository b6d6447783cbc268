from collections.abc import Mapping, Sequence

from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer

class Code:
    """The arithmetic of one code; at most `tables_max` tables are kept.  InvalidArgument for all that does not fit."""

    def __init__(self, data: int, parity: int, tables_max: int) -> None: ...
    def encode(self, chunk: Buffer, shard_bytes: int, parity: Sequence[WritableBuffer]) -> None: ...
    def rebuild(
        self,
        length: int,
        shard_bytes: int,
        begin: int,
        end: int,
        present: Mapping[int, Buffer],
        wanted: Mapping[int, WritableBuffer],
    ) -> None: ...
    @property
    def tables_kept(self) -> int: ...
