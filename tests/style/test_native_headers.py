"""Headers in C: each has a guard of its own, and its numbers are those of the Python module that has them too."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from lakefs.host import page_cache
from lakefs.limits import GRANULE_BYTES, KNOWN_CONTENT_BYTES_MAX, PAGE_BYTES
from lakefs.shared_index import key_format, table_format
from lakefs.wire.media import MEDIUM_DRAM, MEDIUM_SEGMENT
from tests.style.source_tree import ROOT, native_files

_DEFINED: Final = re.compile(r"^ *#define +([A-Z][A-Z_0-9]*) +([^/\n]+?) *(?:/\*.*)?$", re.MULTILINE)
_NUMBER: Final = re.compile(r"[0-9() +*<x]+")
_GUARD: Final = re.compile(r"^#ifndef (\w+_H)\n#define \1$", re.MULTILINE)

NUMBERS: Final = {
    "LAKE_TIER_SEGMENT": MEDIUM_SEGMENT,
    "LAKE_TIER_DRAM": MEDIUM_DRAM,
    "LAKE_GENERATION_BITS": table_format.PLACE_GENERATION_BITS,
    "LAKE_GRANULE": GRANULE_BYTES,
    "LAKE_PAGE": PAGE_BYTES,
    "LAKE_CACHESTAT": page_cache._CACHESTAT,
    "LAKE_PROBE_SLOTS": table_format.PROBE_SLOTS,
    "LAKE_SHIFT_SLOTS": table_format.SHIFT_SLOTS,
    "LAKE_STRIPES": table_format.STRIPE_COUNT,
    "LAKE_STRIPES_OFFSET": table_format.STRIPES_OFFSET,
    "LAKE_VACANT": table_format.VACANT,
    "LAKE_DEAD": table_format.DEAD,
    "LAKE_KEY_ABSENT": key_format.ABSENT,
    "LAKE_KEY_DOUBTFUL": key_format.DOUBTFUL,
    "LAKE_SPACE_WHOLE": key_format.SPACE_WHOLE,
    "LAKE_SPACE_PARTIAL": key_format.SPACE_PARTIAL,
    "KNOWN_CONTENT_MAX": KNOWN_CONTENT_BYTES_MAX,
}
"""Numbers that C and Python have both, by their names in C."""


def _defined() -> list[tuple[Path, str, int]]:
    found = []
    for path in native_files():
        for name, value in _DEFINED.findall((ROOT / path).read_text()):
            plain = re.sub(r"\b([0-9]+)[uUlL]+\b", r"\1", value)
            if _NUMBER.fullmatch(plain):
                found.append((path, name, int(eval(plain))))
    return found


def test_no_two_headers_have_one_guard() -> None:
    """The second one would vanish where both are included."""
    headers = [path for path in native_files() if path.suffix == ".h"]
    guards = Counter(guard for path in headers for guard in _GUARD.findall((ROOT / path).read_text()))
    assert sum(guards.values()) == len(headers)
    assert [guard for guard, count in guards.items() if count > 1] == []


def test_numbers_of_headers_are_those_of_python() -> None:
    found = _defined()
    assert [(str(path), name, value) for path, name, value in found if NUMBERS.get(name, value) != value] == []


def test_no_number_is_defined_twice() -> None:
    counts = Counter(name for _, name, _ in _defined() if name in NUMBERS)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", ["LAKE_TIER_SEGMENT", "LAKE_GRANULE", "LAKE_PROBE_SLOTS", "LAKE_KEY_DOUBTFUL"])
def test_the_numbers_compared_are_read_from_the_sources(name: str) -> None:
    assert name in {found for _, found, _ in _defined()}
