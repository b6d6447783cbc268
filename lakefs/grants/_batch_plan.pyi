from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lakefs.grants.batch_plan import Arrived, Descriptor

class ReadPlan:
    """The reads of `chunks` into `targets` that `places` allow; `places` has a `PLACE` for each chunk, in order.

    Chunks longer than `longest` are left out.  With `is_checked` the plan is for `read_checked`: chunks in segments are
    taken up to `CHECKED_BYTES_MAX`, whatever `longest` is.  With `asks` nothing is read of which the page cache lacks a
    page; without it only long chunks are asked about.  The targets stay locked until the plan is freed.  ValueError:
    the lengths do not match.  BufferError: a target is no writable memory.
    """

    def __init__(
        self,
        chunks: list[bytes],
        targets: list[memoryview],
        places: bytes | bytearray,
        longest: int,
        is_checked: bool = False,
        asks: bool = False,
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
        by_call: bool = False,
    ) -> list[Arrived]: ...
    def parts(self, part_bytes: int) -> list[tuple[int, int]]: ...
    def read(self, first: int, stop: int, descriptors: Sequence[Descriptor | None]) -> list[Arrived]: ...
    def read_lengths(
        self, first: int, stop: int, descriptors: Sequence[Descriptor | None], lengths: list[int]
    ) -> None: ...
    def read_checked(
        self, descriptors: Sequence[Descriptor | None], lengths: list[int], helper: HelperThread | None = None
    ) -> None: ...

class HelperThread:
    """A native thread that takes a part of large reads, for one call at a time; others do theirs alone.

    In a child that was forked there is no such thread, and nothing waits for it.  OSError: it cannot be started.
    """

    def close(self) -> None:
        """End the thread, after the read that it takes part in; on return it uses no memory.  Idempotent."""

def are_bytes(targets: list[Any]) -> TypeGuard[list[memoryview]]: ...
