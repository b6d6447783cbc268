"""Writes the matrix of clients into `docs/s3.md`: `python -m tests.clients.matrix`."""

from __future__ import annotations

import sys
from typing import Final

from tests.clients.declared import OPERATIONS, ROOT, Row, rows, versions

PAGE: Final = ROOT / "docs" / "s3.md"
BEGIN: Final = "<!-- written by python -m tests.clients.matrix -->\n"
END: Final = "<!-- end of what is written -->\n"


def table() -> str:
    """Return the matrix as Markdown."""
    known = versions()
    lines = [
        f"| client | version | {' | '.join(OPERATIONS)} | also |",
        f"|---|---|{'---|' * len(OPERATIONS)}---|",
        *(_line(row, known) for row in rows()),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row, known: dict[str, str]) -> str:
    client = row.client
    version = "Debian" if client.package == "debian" else known[client.package.lower().replace("-", "_")]
    name = f"[{client.name}](s3-clients.md#{client.name.lower().replace(' ', '-')})"
    cells = [row.outcomes[operation] for operation in OPERATIONS]
    return f"| {' | '.join([name, version, *cells, client.also])} |"


def with_table(page: str) -> str:
    """Return the page with the current matrix between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
