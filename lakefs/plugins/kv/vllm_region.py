"""The descriptor of the memory in which vLLM keeps its blocks, so that the engine can be lent it.

vLLM maps a file of /dev/shm (several for a large region) and keeps its descriptor in private attributes of the
offloading spec.  They may be gone in another release, so nothing here relies on them: what they name is taken only when
the kernel says that the blocks are a mapping of that very file, from its first byte on, and that the file is memory,
as the engine wants it.  Without that, blocks are copied, which needs no descriptor.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

from lakefs.host.descriptors import is_memory
from lakefs.host.mapped_files import maps_file


def lendable_descriptor(offloading_spec: Any, blocks: memoryview) -> int | None:
    """Return vLLM's own descriptor of its region; None if there is none of which all blocks are one mapping."""
    region = getattr(offloading_spec, "_scheduler_mmap", None)
    descriptor = getattr(region, "fd", None)
    segments = getattr(region, "_segments", [descriptor])  # releases before 0.33 have one file, and no list
    if not isinstance(descriptor, int) or not isinstance(segments, list) or len(segments) != 1:
        return None
    if blocks.readonly or not blocks.c_contiguous or not blocks.nbytes:
        return None
    try:
        is_open_for_both = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    except (OSError, ValueError):
        return None
    is_lendable = is_open_for_both and is_memory(descriptor)  # /dev/shm may be a folder on a disk
    return descriptor if is_lendable and maps_file(blocks.cast("B"), descriptor) else None
