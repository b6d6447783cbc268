"""Memory of the machine as a measured side meets it."""

from __future__ import annotations

import mmap


def warm_memory(size: int) -> None:
    """Use so many bytes of memory, and give them back to the kernel: what is allocated next was in use just before.

    A virtual machine's free memory goes back to its host; writing to what comes from there takes 1.0 ms a MiB, to
    what was in use 0.2 ms.  So the side that follows one that has freed much memory would be the faster one.
    """
    with mmap.mmap(-1, size) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, size, mmap.PAGESIZE)))
