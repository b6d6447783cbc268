"""The kind of server that the tests start: an engine, or with SERVED_DEVICES=6 a lake over six folders.

`make lake-suites` runs the suites of S3, the mount, clients and KV caches at such a lake.
"""

from __future__ import annotations

import os
from typing import Final

DEVICES: Final = int(os.environ.get("SERVED_DEVICES", "0"))
"""Members of each lake that the tests start; 0: each is one engine."""
