"""`python -m bench.peers.lake_without_appends ...`: the `lake` command, whose mounts answer every write in Python.

For `bench.scenarios.gains`, which measures what native appends bring; all else is as it is in the product.
"""

from __future__ import annotations

from cli.main import main
from fuse.native import layer


def _never() -> bool:
    return False


if __name__ == "__main__":
    layer.answers_writes = _never
    main()
