from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lakefs.grants.batch_plan import Arrived, Descriptor

class ReadPlan:
    """The reads of `chunks` into `targets` that `places` allow; `places` has a `PLACE` for each chunk, in order.

    Chunks longer than `longest` are left out.  The targets stay locked until the plan is freed.  ValueError: the
    lengths do not match.  BufferError: a target is no writable memory.
    """

    def __init__(
        self, chunks: list[bytes], targets: list[memoryview], places: bytes | bytearray, longest: int
    ) -> None: ...
    @property
    def segments(self) -> list[int]: ...
    @property
    def runs(self) -> int: ...
    @property
    def others(self) -> list[int]: ...
    @property
    def slots(self) -> int: ...
    def copy(
        self,
        first: int,
        stop: int,
        generations: memoryview,
        slabs: Mapping[int, memoryview],
        slab_bytes: int,
    ) -> list[Arrived]: ...
    def parts(self, part_bytes: int) -> list[tuple[int, int]]: ...
    def read(self, first: int, stop: int, descriptors: Sequence[Descriptor | None]) -> list[Arrived]: ...
    def read_lengths(
        self, first: int, stop: int, descriptors: Sequence[Descriptor | None], lengths: list[int]
    ) -> None: ...

def are_bytes(targets: list[Any]) -> TypeGuard[list[memoryview]]: ...
