"""The set-up of each client, as `docs/s3-clients.md` gives it to people: the tests run these very lines.

A section is a heading of the second level with the client's name; its fenced blocks of one language make one snippet.
What differs from test to test is put in its place: the address, and the bucket `models`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "s3-clients.md"
ADDRESS: Final = "127.0.0.1:9000"
BUCKET: Final = "models"
_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def sections() -> dict[str, str]:
    """Return the sections' texts by heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def snippet(client: str, language: str, address: str, bucket: str) -> str:
    """Return the client's blocks in this language, for this address and bucket.  It must have one."""
    blocks = [body for tongue, body in _BLOCK.findall(sections()[client]) if tongue == language]
    assert blocks, f"docs/s3-clients.md has no {language} block for {client}"
    return re.sub(rf"\b{BUCKET}\b", bucket, "\n".join(blocks).replace(ADDRESS, address))
