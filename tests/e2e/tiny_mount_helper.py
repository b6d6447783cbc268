"""The script `mount.lake` with `tiny_fs` behind it."""

from __future__ import annotations

import tests.e2e.tiny_lake  # noqa: F401  # puts the tiny file system in place
from cli.mount_lake import main

if __name__ == "__main__":
    main()
