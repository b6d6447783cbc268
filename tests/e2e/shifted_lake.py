"""`lake` with small files and a wall clock that jumps: `python -m tests.e2e.shifted_lake FILE serve ...`.

FILE holds the seconds that the clock is off; it is read anew for each time.  Only the wall clock is off, as when
somebody sets a machine's date: waits use the monotonic one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.crash import small_lake


def shift(source: Path) -> None:
    """Make `time.time` and `time.time_ns` be off by what the file says."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + int(source.read_text())
    time.time_ns = lambda: real_ns() + int(source.read_text()) * 1_000_000_000


if __name__ == "__main__":
    small_lake.make_small()
    shift(Path(sys.argv.pop(1)))
    small_lake.be_lake()
