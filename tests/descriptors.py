"""What this process has open: for tests that nothing is left so.

Descriptors of strangers are closed by a thread of their own (`lakefs.host.descriptors.close_later`), so both wait until
those of before have ended: neither counts what is about to be closed.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Final

from lakefs.host.descriptors import CLOSER

_CLOSE_SECONDS: Final = 10.0


def open_descriptors() -> set[str]:
    """By number and what it is."""
    for thread in threading.enumerate():
        if thread.name == CLOSER:
            thread.join(_CLOSE_SECONDS)
    found: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number}:{os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return found


def descriptor_count() -> int:
    """How many, those apart that only cycles of garbage still hold."""
    gc.collect()
    return len(open_descriptors())
