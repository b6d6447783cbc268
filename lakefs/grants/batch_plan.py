"""Reads of many chunks from known places: plans that combine neighbours into few calls, and the calls.

    places of the shared index  ->  `ReadPlan`: runs of chunks that lie side by side  ->  one preadv for each run

Rules kept here:
- A plan does not check bytes: its owner checks the chunks that `read` and `copy` return.  Exception: `read_checked`
  checks by CRC32C, each piece right after its copy, and reports only chunks that are right.
- A run has only data chunks that lie in segments and fit their memory.  `copy` copies data chunks from slabs, by a
  system call if their memory may become shorter.  A plan leaves out all others, manifests too.
- Nothing waits for a disk: pages that are not cached make a read short, and the chunks in them were not read.
- Several threads may read parts of a plan at once, each part by one thread.  `read_checked` reads all of it, and lets
  a `HelperThread` take runs.

`ReadPlan` reads a call's runs without the interpreter's lock and without an object for each chunk.  It is native; where
it was not built it is None, and chunks are requested from the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lakefs.limits import KIB, MIB

RUN_BYTES_MAX: Final = 512 * KIB
"""Most bytes of adjacent chunks that one call reads: as much as is still worth sharing between threads."""
CHECKED_RUN_BYTES_MAX: Final = 128 * KIB
"""Most bytes that `read_checked` reads before it checks them: the processor's nearest caches keep them so long."""
CHECKED_BYTES_MAX: Final = 16 * MIB
"""Longest chunk of `read_checked`."""
HELPED_FROM_BYTES: Final = 512 * KIB
"""From this many bytes on `read_checked` lets its helper take runs: less than waking it may be worth."""
RUN_CHUNKS_MAX: Final = 1024
"""Most pieces of memory that one system call fills (IOV_MAX)."""
SEGMENTS_MAX: Final = 512
"""Most segments of one plan; as many as a client holds descriptors of."""
ASK_FROM_BYTES: Final = 256 * KIB
"""From this length on a chunk is read only if the page cache reports it cached: else the kernel would fetch pages."""

Arrived = tuple[int, int, int]
"""A chunk's index in the request, its length, and its CRC32C or that of its vector."""
Descriptor = tuple[int, int]
"""A segment's descriptor, and the flags to read it with."""

if TYPE_CHECKING:
    from lakefs.grants._batch_plan import HelperThread as HelperThread, ReadPlan as ReadPlan, are_bytes as are_bytes

    IS_BUILT: bool
else:
    try:
        from lakefs.grants._batch_plan import HelperThread, ReadPlan, are_bytes
    except ImportError:
        HelperThread = ReadPlan = are_bytes = None
    IS_BUILT = ReadPlan is not None
