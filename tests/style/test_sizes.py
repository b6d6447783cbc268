"""Length of modules and functions, as a ratchet; of native sources the length of modules.

Nothing is longer than the hard limit.  What is longer than the soft limit is in `ratchet.json` with its length, and may
only shrink; `python -m tests.style.test_sizes` writes that file again from the tree, for a commit whose message gives
the reason.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Final

from tests.style.source_tree import ROOT, definitions, native_files, python_files

MODULE_SOFT: Final = 450
MODULE_HARD: Final = 800
FUNCTION_SOFT: Final = 60
FUNCTION_HARD: Final = 80
RATCHET: Final = Path(__file__).with_name("ratchet.json")


@cache
def _lengths() -> tuple[dict[str, int], dict[str, int]]:
    modules: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in native_files():
        modules[str(path)] = len((ROOT / path).read_text().splitlines())
    for path in python_files():
        modules[str(path)] = len((ROOT / path).read_text().splitlines())
        for found in definitions(path):
            if not isinstance(found.node, ast.ClassDef):
                functions[f"{path}:{found.name}"] = found.line_count
    return modules, functions


def _long() -> dict[str, int]:
    modules, functions = _lengths()
    long_modules = {name: count for name, count in modules.items() if count > MODULE_SOFT}
    long_functions = {name: count for name, count in functions.items() if count > FUNCTION_SOFT}
    return long_modules | long_functions


def _ratchet() -> dict[str, int]:
    loaded: dict[str, int] = json.loads(RATCHET.read_text())
    return loaded


def test_no_module_and_no_function_is_longer_than_the_hard_limit() -> None:
    modules, functions = _lengths()
    assert len(modules) > 20, "the walk of the tree found next to nothing"
    assert {Path(name).suffix for name in modules} >= {".py", ".pyx", ".h"}
    assert {name: count for name, count in modules.items() if count > MODULE_HARD} == {}
    assert {name: count for name, count in functions.items() if count > FUNCTION_HARD} == {}


def test_what_is_longer_than_the_soft_limit_is_known_and_has_not_grown() -> None:
    allowed = _ratchet()
    grown = {name: (count, allowed.get(name, 0)) for name, count in _long().items() if count > allowed.get(name, 0)}
    assert grown == {}, "longer than allowed (lines now, lines allowed): look for the seam"


def test_the_ratchet_names_nothing_that_is_short_or_gone() -> None:
    assert sorted(set(_ratchet()) - set(_long())) == []


if __name__ == "__main__":
    RATCHET.write_text(json.dumps(_long(), indent=2, sort_keys=True) + "\n")
