"""The table of media, and that nothing beside it depends on the number of one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lakefs.wire import media
from lakefs.wire.media import BY_FABRIC, BY_REQUEST, IN_FILES, IN_FRAMES, IN_SLABS, MEDIA_OF_MACHINE, PLACES, TABLE
from tests.style.source_tree import PRODUCT_PACKAGES, ROOT, python_files

PLACE_H = ROOT / "lakefs/granules/place.h"
NONE = "MEDIUM_NONE"


def test_each_medium_is_in_the_table_once_and_read_in_one_way() -> None:
    numbers = [medium.number for medium in TABLE]
    named = {value for name, value in vars(media).items() if name.startswith("MEDIUM_") and name != NONE}
    assert sorted(numbers) == sorted(named), "a medium without a line, or with two"
    for medium in TABLE:
        ways_of = [medium.in_file, medium.in_slab, medium.by_fabric, medium.in_frame, medium.by_request]
        assert ways_of.count(True) == 1
    ways = [IN_FILES, IN_SLABS, BY_FABRIC, IN_FRAMES, BY_REQUEST]
    assert sorted(number for way in ways for number in way) == sorted(numbers)
    assert set(numbers) - IN_FRAMES == PLACES
    assert media.MEDIUM_NONE not in numbers


def test_the_numbers_and_bits_are_those_of_the_wire() -> None:
    assert {medium.number: medium.bit for medium in TABLE} == {1: 0, 2: 0, 3: 1, 4: 2, 5: 0}
    assert MEDIA_OF_MACHINE == 1


def test_native_code_has_the_same_numbers() -> None:
    found = dict(re.findall(r"^#define LAKE_TIER_(\w+) (\d+)", PLACE_H.read_text(), flags=re.M))
    assert found
    for name, number in found.items():
        assert int(number) == getattr(media, f"MEDIUM_{name}")
        assert int(number) in IN_FILES | IN_SLABS, "native code reads files and slabs"


def compared(source: str) -> list[int]:
    """Return the lines of a module that compare something with the number of a medium."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            if any(name.startswith("MEDIUM_") and name != NONE for name in names):
                lines.append(node.lineno)
    return lines


def test_nothing_compares_the_number_of_a_medium() -> None:
    found = {
        str(path): lines
        for path in python_files()
        if Path(path).parts[0] in PRODUCT_PACKAGES and (lines := compared((ROOT / path).read_text()))
    }
    assert found == {}, "ask a set of lakefs/wire/media.py"


@pytest.mark.parametrize(
    "planted",
    [
        "if grant.medium == MEDIUM_DRAM: pass",
        "x = place[0] != media.MEDIUM_SEGMENT",
        "x = grant.medium in (MEDIUM_SEGMENT, MEDIUM_DRAM)",
        "match medium:\n    case m.MEDIUM_DRAM: pass",
    ],
)
def test_a_comparison_is_noticed(planted: str) -> None:
    assert compared(planted)
