"""The suites that are too long for `make lake-suites`, at a running lake of six members; a part of `make torture`.

    python -m tests.lake_suites

What is about one engine is skipped, and says why (the marker `one_engine`).  `mount/test_posix.py` is not among them:
where a look at a folder is a request, its change time moves by a nanosecond when a new file in it is closed for the
first time, and about 30 of its cases see that (docs/mount.md).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

DEVICES: Final = 6
LONG: Final = (
    "mount/test_tools.py",
    "mount/test_close_to_open.py",
    "mount/test_appends_elsewhere.py",
    "mount/test_small_opens.py",
    "mount/test_loaders.py",
    "e2e/test_cli_files.py",
    "e2e/test_cli_names.py",
    "e2e/test_cli_kv.py",
    "e2e/test_reconnecting.py",
    "e2e/test_shared_memory.py",
)
_TESTS: Final = Path(__file__).parent


def main() -> int:
    """Run these files; exit code 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lake_suites")
    parser.add_argument("--seed", type=int, default=1, help="not used: these tests make up nothing")
    parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not thorough and not plugins"]
    environment = os.environ | {"SERVED_DEVICES": str(DEVICES)}
    return subprocess.run([*command, *(str(_TESTS / name) for name in LONG)], env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
