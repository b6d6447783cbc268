"""Numbers of repetitions in tests: as many as `make test-all` has time for, and all of them in `make torture`.

    python -m tests.lengths     the files whose tests have a longer form, in that form

A file belongs to them when it asks `repeated` for a number, a range, or parameters.  `LAKE_TORTURE` in the environment
asks for the longer form.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
TORTURE: Final = bool(os.environ.get("LAKE_TORTURE"))
_TESTS: Final = Path(__file__).parent


def repeated(few: T, many: T) -> T:
    """Return what a test uses in `make test-all`, or what it uses in `make torture`."""
    return many if TORTURE else few


def longer() -> list[Path]:
    """Return the files of tests that have a longer form."""
    return [path for path in sorted(_TESTS.rglob("test_*.py")) if "import repeated\n" in path.read_text()]


def main() -> int:
    """Run these files in their longer form; exit code 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lengths")
    parser.add_argument("--seed", type=int, default=1, help="of the tests that make up their own seeds")
    asked = parser.parse_args()
    environment = os.environ | {"LAKE_TORTURE": "1", "LAKE_CRASH_SEED": str(asked.seed)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not plugins", *map(str, longer())]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
