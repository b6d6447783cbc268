"""The script `mount.lake`, which mount(8) runs: turns its arguments into those of a `lake mount`."""

from __future__ import annotations

import sys

from cli.main import EXIT_USAGE, run
from cli.mount.fstab import from_mount
from cli.terminal.streams import prepare
from lakefs.errors import InvalidArgument


def main() -> None:
    """Run the `lake mount` that mount(8) means; exits with its code, or with that of a usage error."""
    prepare()
    try:
        arguments = from_mount(sys.argv[1:])
    except InvalidArgument as error:
        sys.stderr.write(f"mount.lake: {error.message}\n")
        sys.exit(EXIT_USAGE)
    sys.exit(run(arguments) if arguments else 0)
