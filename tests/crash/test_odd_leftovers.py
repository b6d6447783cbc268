"""The leftovers of a kill at one exact instant, made by hand: cycles of kills meet it too rarely to test it."""

from __future__ import annotations

from pathlib import Path

from tests.crash.quiet_store import inspect


def test_a_segment_file_without_a_byte_is_removed_by_gc(tmp_path: Path) -> None:
    data = tmp_path / "store"
    inspect(data)
    empty = [data / "segments" / f"{number:016x}.{kind}" for number, kind in ((1, "small"), (2, "large"))]
    for path in empty:
        path.touch(mode=0o600)
    left = inspect(data)
    assert left.gc.removed_segments == len(empty)
    assert not any(path.exists() for path in empty)
    assert left.fsck["damage"] == 0
