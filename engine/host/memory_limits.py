"""The limit of this process's address space, and the return of its free heap.

- Address space, which is not memory: ConfigError if the process may map less than a store needs.
- Heap: the C library's, which holds buffers and objects of more than 512 bytes.  Its free memory is returned to the
  machine on request.
"""

from __future__ import annotations

import ctypes
import resource

from lakefs.errors import ConfigError
from lakefs.limits import ADDRESS_SPACE_BYTES, KIB


def refuse_little_address_space() -> None:
    """Raise ConfigError if the process may map less than a store needs (`ulimit -v`, LimitAS=)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= ADDRESS_SPACE_BYTES:
        return
    raise ConfigError(
        f"a store needs {ADDRESS_SPACE_BYTES // KIB} KiB of address space (which is not memory), and this process may "
        f"have {limit // KIB} KiB: lift the limit with `ulimit -v unlimited`, or take LimitAS= out of the unit",
        subject="RLIMIT_AS",
    )


def give_back_free_heap() -> None:
    """Return free memory of the heap to the machine.

    Blocks, some 2 ms for a heap of 30 MiB; other threads that allocate wait for it.  On its own glibc returns only free
    memory at the heap's end: under mixed load of millions of operations it kept 8 MiB of 28.  Does nothing with a C
    library without malloc_trim.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
