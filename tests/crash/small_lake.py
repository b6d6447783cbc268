"""`lake` with small files: `python -m tests.crash.small_lake serve ...`.

The same program, with bounds at which a few seconds of load begin segments, journal files and checkpoints by the
dozen, and without gc's grace.  Nothing else differs.
"""

from __future__ import annotations

import sys
from typing import Final

from lakefs import limits
from lakefs.limits import MIB

SMALL: Final = {
    "JOURNAL_FILE_BYTES": MIB // 4,
    "JOURNAL_FILL_BYTES": MIB // 16,
    "CHECKPOINT_JOURNAL_BYTES": MIB // 2,
    "LARGE_SEGMENT_BYTES": 16 * MIB,
    "LARGE_EXTEND_BYTES": 8 * MIB,
    "SMALL_SEGMENT_BYTES": MIB,
    "SMALL_FILL_BYTES": MIB // 8,
    "GC_GRACE_S": 0.0,
    "OVERLAY_APPLY_INTERVAL_S": 0.1,
    "PART_BYTES_MIN": 64 * 1024,
}


def make_small() -> None:
    """Change the bounds before anything has read them."""
    assert not any(name.startswith("engine") for name in sys.modules), "the engine has the large bounds already"
    for name, value in SMALL.items():
        assert hasattr(limits, name), f"there is no bound {name} any more"
        setattr(limits, name, value)


def be_lake() -> None:
    """Run the command line, with the process's arguments."""
    from cli.main import main as lake

    lake()


if __name__ == "__main__":
    make_small()
    be_lake()
