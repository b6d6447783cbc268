"""The kind of server that the tests start: an engine, or with SERVED_DEVICES=6 a lake over six folders.

`make lake-suites` and a part of `make torture` run suites of clients at such a lake.  A test that is about one engine
has the mark `one_engine` with the reason, and is skipped there.  Reasons that several files have are here.
"""

from __future__ import annotations

import os
from typing import Final

DEVICES: Final = int(os.environ.get("SERVED_DEVICES", "0"))
"""Members of each lake that the tests start; 0: each is one engine."""
CYCLES: Final = 3 if DEVICES else 1
"""Cycles of gc after which content of a removed name is gone."""

HEALS: Final = "a lake reads what is damaged at one member from the others"
SEGMENTS: Final = "a head has no segments that clients could read"
PUT_STAMPS: Final = "a head's answers to puts have no stamps"
SHORT: Final = "a head has no content of less than 4 KiB at hand, so that is asked for"
MAPPED: Final = "objects are mapped over the socket of one engine only"
