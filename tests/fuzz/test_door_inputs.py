"""The door's C under the sanitizers, with requests that are changed at random; a million of them in `make torture`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz.door_inputs import build, feed


def test_no_request_reaches_beyond_its_bytes(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(6), "little")
    wrong = feed(build(tmp_path), tmp_path, 30_000, seed)
    assert not wrong, f"seed {seed}: {wrong}"
