"""Reads of many chunks from known places in segments: which of them one call reads, and the calls.

    places of the shared index  ->  `ReadPlan`: runs of chunks that lie side by side  ->  one preadv for each run

Rules kept here:
- A plan reads and checks nothing of what the bytes are: its owner does, of what `read` says has come.
- Only data chunks in segments are planned, each for memory that is long enough for it; all others are left out.
- Nothing waits for a disk: pages that are not cached make a read come short, and the chunks in them were not read.
- Parts of a plan may be read by several threads at once, each part by one.

`ReadPlan` reads a call's runs without the interpreter's lock and without an object for each chunk.  It is native, and
None where it was not built: then chunks are asked of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lakefs.limits import KIB

RUN_BYTES_MAX: Final = 512 * KIB
"""Of chunks that lie side by side, read by one call: so much is still worth to be shared between threads."""
RUN_CHUNKS_MAX: Final = 1024
"""Pieces of memory that one call of the kernel's fills (IOV_MAX)."""
SEGMENTS_MAX: Final = 512
"""Of one plan; as many as a client holds descriptors of."""
ASK_FROM_BYTES: Final = 256 * KIB
"""A chunk so long is read only when the page cache says that it has it: else the kernel begins to fetch its pages."""

Arrived = tuple[int, int, int]
"""A chunk's number among those that were asked for, its length, and its CRC32C or that of its vector."""
Descriptor = tuple[int, int]
"""Of a segment, and the flags to read it with."""

if TYPE_CHECKING:
    from lakefs.grants._batch_plan import ReadPlan as ReadPlan, are_bytes as are_bytes

    IS_BUILT: bool
else:
    try:
        from lakefs.grants._batch_plan import ReadPlan, are_bytes
    except ImportError:
        ReadPlan = are_bytes = None
    IS_BUILT = ReadPlan is not None
