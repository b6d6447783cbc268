"""The guided search for fuzz inputs: it follows what they reach, and keeps what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import inputs as inputs_module
from tests.fuzz.coverage import Coverage
from tests.fuzz.inputs import Inputs, keep_inputs, kept_inputs

READER = """
def read(data):
    if data[:1] == b"l":
        if data[1:2] == b"a":
            if data[2:3] == b"k":
                if data[3:4] == b"e":
                    raise AssertionError("found")
"""
INPUTS = 30_000


def reader() -> dict[str, object]:
    """A reader that is traced like one of the product's."""
    scope: dict[str, object] = {}
    product = Path(inputs_module.__file__).resolve().parents[2] / "lakefs" / "planted.py"
    exec(compile(READER, str(product), "exec"), scope)
    return scope


def inputs_until_found(*, guided: bool) -> int | None:
    read = reader()["read"]
    assert callable(read)
    inputs, coverage = Inputs([b"...."], [b"l", b"a", b"k", b"e"], seed=3), Coverage()
    for number in range(INPUTS):
        data = inputs.next()
        try:
            if coverage.is_new(read, data) and guided:
                inputs.keep(data)
        except AssertionError:
            return number
    return None


def test_what_a_blind_search_misses_is_found_by_following_what_inputs_reach() -> None:
    assert inputs_until_found(guided=True) is not None
    assert inputs_until_found(guided=False) is None


def test_only_the_products_own_code_counts() -> None:
    coverage = Coverage()
    assert coverage.is_new(len, b"an outcome of a new kind")
    assert not coverage.is_new(len, b"the same outcome")
    assert coverage.steps == set()


def test_kept_inputs_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "CORPUS", tmp_path)
    keep_inputs("some", [b"\x00\xff", b""])
    keep_inputs("some", [b"more"])
    assert kept_inputs("some") == [b"\x00\xff", b"", b"more"]
