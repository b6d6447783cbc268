"""Lists the descriptors that this process has open: for tests that check that none is left open.

Descriptors of strangers are closed in a thread of their own (`lakefs.host.descriptors.close_later`).  Both functions
first wait for such threads to end, so neither counts a descriptor that is about to be closed.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Final

from lakefs.host.descriptors import CLOSER

_CLOSE_SECONDS: Final = 10.0


def open_descriptors() -> set[str]:
    """Return the open descriptors, each as its number and what it is."""
    for thread in threading.enumerate():
        if thread.name == CLOSER:
            thread.join(_CLOSE_SECONDS)
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number}:{os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the descriptor of this listing
    return found


def descriptor_count() -> int:
    """Return the number of open descriptors, without those that only cycles of garbage still hold."""
    gc.collect()
    return len(open_descriptors())
