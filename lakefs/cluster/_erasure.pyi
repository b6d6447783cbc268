from collections.abc import Mapping, Sequence

from lakefs.host.writable_memory import WritableBuffer
from lakefs.ids import Buffer

class Code:
    """The arithmetic of one code; at most `tables_max` tables are kept.  InvalidArgument for all that does not fit."""

    def __init__(self, data: int, parity: int, granule_bytes: int, chunk_bytes_max: int, tables_max: int) -> None: ...
    @property
    def data(self) -> int: ...
    @property
    def parity(self) -> int: ...
    @property
    def tables_kept(self) -> int: ...
    def shard_bytes(self, length: int) -> int: ...
    def encode(self, chunk: Buffer, parity: Sequence[WritableBuffer]) -> None: ...
    def rebuild(
        self,
        length: int,
        present: Mapping[int, Buffer],
        wanted: Mapping[int, WritableBuffer],
        begin: int,
        last: int | None,
    ) -> None: ...
